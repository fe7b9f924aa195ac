"""TE-CCL's published schedules, replayed: are all flows possible, and do they end at the printed time?

Source: microsoft/TE-CCL, ``teccl/examples/experiments/output_provided``: 154 files of flows by epoch. A flow takes a
chunk over a link, or over two links through a switch. Its links and its epochs are those of ``teccl/topologies`` and
``teccl/solvers``: latency in whole epochs if above a tenth of an epoch, and chunks longer than an epoch in more epochs
(all-gather), or any share of a chunk in each epoch (all-to-all). The link from a switch takes latency only.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path("teccl", "examples", "experiments", "output_provided")
FLOW = re.compile(r"Chunk (\d+) from (\d+) traveled over (\d+)->(\d+)(?: with volume ([\d.e-]+))? in epoch (\d+)"
                  r"(?: via switches (.+))?")
SIZES = {"KB": 1e-6, "MB": 1e-3, "GB": 1.0}  # in GB, as in the names of the files
MARGIN = 1e-6  # of volumes and epochs, sums of floats
# The NVLinks of an NDv2 box as multiples of 25 GB/s, in TE-CCL's numbering.
NDV2 = {0: {1: 2, 2: 1, 3: 1, 4: 2}, 1: {2: 1, 3: 2, 5: 1}, 2: {3: 2, 6: 2}, 3: {7: 1}, 4: {5: 2, 6: 1, 7: 1},
        5: {6: 1, 7: 2}, 6: {7: 2}}


class Link(NamedTuple):
    """A link: bandwidth in GB/s, latency in seconds."""

    speed: float
    alpha: float


class Machine(NamedTuple):
    """TE-CCL's links of a machine, and the nodes that it takes for switches."""

    links: dict[tuple[int, int], Link]
    switches: frozenset[int]
    chunks: int  # an array is cut into, which differs from the number of GPUs where a GPU is taken for a switch

    @property
    def gpus(self) -> list[int]:
        """The nodes that send and receive."""
        return sorted({node for pair in self.links for node in pair} - self.switches)


def dgx2() -> Machine:
    """Return two DGX-2: a switch of 125 GB/s and 0.35 us, and 12.5 GB/s and 2.6 us from each odd GPU to an even GPU."""
    links = {}
    for switch in (0, 17):
        for gpu in range(switch + 1, switch + 17):
            links[switch, gpu] = links[gpu, switch] = Link(125.0, 0.35e-6)
    for gpu in range(1, 17, 2):
        links[gpu + 1, 17 + gpu] = links[17 + gpu + 1, gpu] = Link(12.5, 2.6e-6)
    return Machine(links, frozenset((0, 17)), 32)


def ndv2(boxes: int) -> Machine:
    """Return boxes of NVLinks (25 and 50 GB/s, 0.7 us), with 12.5 GB/s and 1.3 us between boxes.

    Two boxes have direct links 0 -> 9 and 8 -> 1 between them, and node 0, a GPU, is taken for a switch.
    """
    first, links = (0 if boxes == 2 else 1), {}
    for box in range(boxes):
        for one, others in NDV2.items():
            for other, lanes in others.items():
                ends = first + 8 * box + one, first + 8 * box + other
                links[ends] = links[ends[::-1]] = Link(25.0 * lanes, 0.7e-6)
    if boxes == 2:
        links[0, 9] = links[8, 1] = Link(12.5, 1.3e-6)
    for box in range(boxes if boxes > 2 else 0):
        links[8 * box + 1, 0] = links[0, 8 * box + 2] = Link(12.5, 1.3e-6)
    return Machine(links, frozenset((0,)), 8 * boxes)


class Flow(NamedTuple):
    """A chunk, or a share of a chunk, on its way along `nodes` from an epoch on."""

    chunk: tuple[int, int]  # source, number
    nodes: tuple[int, ...]
    epoch: int
    volume: float


class Replay(NamedTuple):
    """The outcome: epochs until all chunks have arrived, the same time without epochs, and the faults found."""

    epochs: int
    seconds: float
    faults: tuple[str, ...]


class File:
    """A published schedule: its machine, its flows, and the printed numbers."""

    def __init__(self, machine: Machine, content: dict[str, Any]) -> None:
        found = {key.partition("-")[2]: value for key, value in content.items() if "-" in key}
        self.machine, self.epoch = machine, float(found["Epoch_Duration"])
        self.epochs, self.seconds = int(found["Epochs_Required"]), float(found["Collective_Finish_Time"])
        self.algbw = float(found["Algo_Bandwidth"])
        self.is_whole = "Demand_Met" in found  # an all-gather, of whole chunks
        self.array = self.algbw * self.seconds  # in GB, as counted by the file
        self.chunk = self.array / machine.chunks
        self.flows = sorted((self._flow(text) for text in found["Flows"]), key=lambda flow: flow.epoch)

    def _flow(self, text: str) -> Flow:
        match = FLOW.fullmatch(text)
        if match is None:
            raise ValueError(f"no flow is read from {text!r}")
        number, source, src, dst, volume, epoch, through = match.groups()
        switches = tuple(map(int, re.findall(r"\d+", through or "")))
        return Flow((int(source), int(number)), (int(src), *switches, int(dst)), int(epoch), float(volume or 1))

    def matter(self, chunk: tuple[int, int]) -> tuple[int, int]:
        """Return what is followed: the chunk of an all-gather, or all chunks of a source.

        TE-CCL's all-to-all has one variable for all chunks of a source. The numbers of chunks were given afterwards.
        """
        return chunk if self.is_whole else (chunk[0], 0)

    def latency(self, link: tuple[int, int]) -> int:
        """Return the epochs of a link's latency: none if the latency is at most a tenth of an epoch."""
        epochs = self.machine.links[link].alpha / self.epoch
        return math.ceil(epochs) if epochs > 0.1 else 0

    def length(self, link: tuple[int, int]) -> int:
        """Return the epochs that a whole chunk takes on a link, latency left out; 1 for shares of a chunk."""
        share = self.machine.links[link].speed * self.epoch / self.chunk
        return max(1, math.ceil(1 / share - MARGIN)) if self.is_whole else 1

    def hops(self, flow: Flow) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Yield each link of a flow with the epoch in which the flow enters the link, and the first epoch after it.

        Whole chunks leave a switch at once.
        """
        epoch = flow.epoch
        for link in zip(flow.nodes, flow.nodes[1:], strict=False):
            after = epoch + self.latency(link) + self.length(link)
            if self.is_whole and link[0] in self.machine.switches:
                after = epoch + self.latency(link)
            yield link, epoch, after
            epoch = after

    def replay(self) -> Replay:
        """Return when the flows end, by epochs and without, and the faults found."""
        come: dict[tuple[int, tuple[int, int]], list[tuple[int, float]]] = collections.defaultdict(list)
        sent: dict[tuple[int, tuple[int, int]], float] = collections.defaultdict(float)
        for flow in self.flows:
            *_, (_, _, after) = self.hops(flow)
            come[flow.nodes[-1], self.matter(flow.chunk)].append((after, flow.volume))
        faults, last = [], 0
        for flow in self.flows:
            here = flow.nodes[0], self.matter(flow.chunk)
            if flow.nodes[0] != flow.chunk[0]:
                sent[here] = flow.volume if self.is_whole else sent[here] + flow.volume  # a whole chunk stays here
                if sum(volume for epoch, volume in come[here] if epoch <= flow.epoch) < sent[here] - MARGIN:
                    faults.append(f"{here[0]} sends data of {here[1]} in epoch {flow.epoch} before they have come")
        for source, number in {self.matter(flow.chunk) for flow in self.flows}:
            for target in self.machine.gpus:
                needed = 1 - MARGIN + (0 if self.is_whole else sent[target, (source, number)])
                for epoch, volume in sorted(come[target, (source, number)]):
                    needed -= volume
                    if needed <= 0:
                        last = max(last, epoch)
                        break
                else:
                    if target != source:
                        faults.append(f"{needed:.3g} of the data of {source} do not come to {target}")
        return Replay(last, self._without_epochs(), (*faults, *self._overloads()))

    def _overloads(self) -> Iterator[str]:
        """Yield the links that carry more than their bandwidth in as many epochs as a chunk takes."""
        loads: dict[tuple[int, int], dict[int, float]] = collections.defaultdict(collections.Counter)  # type: ignore
        entered = set()
        for flow in self.flows:
            for link, epoch, _ in self.hops(flow):
                if not (self.is_whole and (flow.chunk, link, epoch) in entered):  # a switch copies
                    entered.add((flow.chunk, link, epoch))
                    loads[link][epoch] += flow.volume
        for link, by_epoch in loads.items():
            window = self.length(link)
            most = window * self.machine.links[link].speed * self.epoch / self.chunk
            for epoch in by_epoch:
                load = sum(by_epoch.get(other, 0) for other in range(epoch, epoch + window))
                if load > most * (1 + MARGIN) + MARGIN:
                    yield f"link {link} carries {load:.6g} chunks from epoch {epoch}, {most:.6g} fit"
                    break

    def _without_epochs(self) -> float:
        """Return the finish time in seconds of whole chunks whose links take them in the same order, without epochs."""
        if not self.is_whole:
            return math.nan
        ready = {(source, (source, number)): 0.0 for source, number in {flow.chunk for flow in self.flows}}
        free: dict[tuple[int, int], float] = collections.defaultdict(float)
        through: dict[tuple[tuple[int, int], tuple[int, int], int], float] = {}
        for flow in self.flows:
            time = ready.get((flow.nodes[0], flow.chunk), math.inf)
            for link, epoch, _ in self.hops(flow):
                key = flow.chunk, link, epoch
                if key not in through:
                    speed, alpha = self.machine.links[link]
                    begun = max(time, free[link])
                    moved = self.chunk / speed
                    free[link] = begun + moved
                    from_switch = link[0] in self.machine.switches
                    through[key] = begun + alpha + (0 if from_switch else moved)
                time = through[key]
            place = flow.nodes[-1], flow.chunk
            ready[place] = min(ready.get(place, math.inf), time)
        return max(ready.values())


def files(checkout: Path) -> Iterator[tuple[str, File]]:
    """Yield the name and the content of each published file."""
    machines = {("DGX2", "2"): dgx2(), ("NDv2", "2"): ndv2(2), ("NDv2", "4"): ndv2(4)}
    for path in sorted((checkout / FOLDER).glob("*/*/*/*/*.json")):
        machine, boxes = (path.relative_to(checkout / FOLDER).parts[part].partition("_")[0] for part in (0, 1))
        name = "/".join(path.relative_to(checkout / FOLDER).with_suffix("").parts)
        yield name, File(machines[machine, boxes], json.loads(path.read_text()))


def size_of(name: str) -> float:
    """Return the size in GB that the name of a file says.

    >>> size_of("DGX2_output/2_chassis/AllGather/Fast/16MB")
    0.016
    """
    text = name.rpartition("/")[2]
    return float(text[:-2]) * SIZES[text[-2:]]
