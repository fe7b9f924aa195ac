"""NCCL's tuning model: latency and bandwidth of every algorithm and protocol, the predicted time, and the choice.

NCCL computes a table when a communicator starts (`ncclTopoTuneModel` in src/graph/tuning.cc), and for each call takes
the algorithm and the protocol with the least time (`ncclTopoGetAlgoTime`; src/enqueue.cc). The table follows from the
channels that NCCL's search has found on the machine. The search itself is not modelled: `Graph` has its result, as
NCCL logs it. Latencies and times are in us, bandwidths in GB/s.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gpucoll.analysis.nccl_tuning.releases import ALGORITHMS, LL128_2_8, PROTOCOLS, Latencies, Release, Rows

COLLECTIVES = {"broadcast": "Broadcast", "reduce": "Reduce", "all_gather": "AllGather",
               "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}  # our names and NCCL's
PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")  # NCCL's names, from near to far
ROOTED = ("broadcast", "reduce")
GATHERS = ("all_gather", "reduce_scatter")


class Graph(NamedTuple):
    """The channels that NCCL's search has found for an algorithm, with the bandwidths of a channel.

    NCCL logs a graph as ``Pattern 4, crossNic 0, nChannels 12, bw 20.0/24.0, type NVL/PIX, sameChannels 1``: `intra`
    and `inter` inside a node and between nodes. Pattern 3 is a tree with a single GPU at the network.
    """

    channels: int
    intra: float
    inter: float
    paths: tuple[str, str] = ("NVL", "PIX")
    pattern: int = 4
    same_channels: bool = True
    latency: float = 0.0  # of the network, as NCCL's plugin of the network states


NO_GRAPH = Graph(0, 0.0, 0.0, ("LOC", "LOC"))


class Machine(NamedTuple):
    """GPUs on nodes, and the graphs of NCCL's algorithms."""

    name: str
    about: str
    sm: int  # compute capability, 90 for 9.0
    nodes: int
    gpus: int  # of a node
    ring: Graph
    tree: Graph
    nvls: Graph | None = None
    chain: Graph | None = None  # CollNet by a chain in the node
    direct: Graph | None = None  # CollNet by all GPUs of the node; needs NVSwitch
    cpu: str = "intel"  # or amd, arm, power
    links: str = ""  # the name of a graph of links, for the bound

    @property
    def channels(self) -> int:
        """The number of channels that run: NCCL doubles those of the search."""
        return 2 * min(self.ring.channels, self.tree.channels)

    @property
    def ranks(self) -> int:
        """The number of ranks, one for each GPU."""
        return self.nodes * self.gpus

    def graph(self, algorithm: str) -> Graph:
        """Return the graph of an algorithm, without channels where the machine cannot run the algorithm."""
        return {"Tree": self.tree, "Ring": self.ring, "CollNetDirect": self.direct, "CollNetChain": self.chain,
                "NVLS": self.nvls, "NVLSTree": self.nvls, "PAT": self.tree}[algorithm] or NO_GRAPH


class Cell(NamedTuple):
    """A cell of NCCL's table: latency in us and algbw in GB/s; an algbw of 0 stands for a disabled pair."""

    latency: float
    algbw: float


class Estimate(NamedTuple):
    """An algorithm with a protocol, and the predicted time in us."""

    algorithm: str
    protocol: str
    us: float


Table: TypeAlias = dict[tuple[str, str], Cell]


def table(machine: Machine, release: Release, collective: str) -> Table:
    """Return NCCL's table of a collective, as NCCL_DEBUG_SUBSYS=TUNING logs it."""
    cells = {}
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            model = _Model(machine, release, collective, algorithm, protocol, machine.graph(algorithm))
            cells[algorithm, protocol] = Cell(model.latency() if model.is_computed() else 0.0,
                                              model.algbw() if model.is_enabled() else 0.0)
    return cells


def choices(machine: Machine, release: Release, collective: str, nbytes: int) -> list[Estimate]:
    """Return all pairs that NCCL may choose with their predicted times, NCCL's choice first.

    `nbytes` is the larger of input and output, as for nccl-tests. Equal times stand in NCCL's order.

    >>> from gpucoll.analysis.nccl_tuning.machines import named_machine
    >>> from gpucoll.analysis.nccl_tuning.releases import release
    >>> first, *_ = choices(named_machine("dgx_a100"), release("2.19"), "all_reduce", 1 << 30)
    >>> first.algorithm, first.protocol, round(first.us)
    ('Ring', 'Simple', 7885)
    """
    found = [Estimate(*pair, _time(machine, release, collective, nbytes, pair, cell))
             for pair, cell in table(machine, release, collective).items() if cell.algbw > 0
             # Of NVLS over several nodes, older releases know the time, but not the kernel.
             and not (pair[0] == "NVLS" and machine.nodes > 1 and collective in GATHERS and release.since < (2, 27))]
    return sorted(found, key=lambda choice: choice.us)


class _Model(NamedTuple):
    """A cell of the table in the making."""

    machine: Machine
    release: Release
    collective: str
    algorithm: str
    protocol: str
    graph: Graph

    @property
    def _generation(self) -> int:
        """The row of the GPUs in tables of limits."""
        sm = self.machine.sm
        return int(sm == 80) if self.release.since < (2, 19) else min(len(self.release.tree) - 1,
                                                                      (sm >= 80) + (sm >= 90) + (sm >= 100))

    def _limit(self, rows: Rows) -> float:
        """Return the limit of a channel for these GPUs and this number of nodes."""
        return rows[self._generation][min(self.machine.nodes, 3) - 1]

    def is_computed(self) -> bool:
        """Return whether NCCL fills the cell, enabled or not."""
        simple, since = self.protocol == "Simple", self.release.since
        if self.algorithm == "Ring":
            return True
        if self.algorithm in ("Tree", "CollNetChain"):
            return self.collective == "all_reduce" and (self.algorithm == "Tree" or since >= (2, 19))
        if self.algorithm == "PAT":
            return (simple and self.collective in GATHERS and since >= (2, 23) and self.machine.gpus == 1
                    and self.machine.sm >= 60)
        if self.algorithm == "CollNetDirect":
            return since >= ((2, 20) if self.collective in GATHERS else (2, 19)) and self.collective not in ROOTED
        kinds = (*GATHERS, "all_reduce") if self.algorithm == "NVLS" else ("all_reduce",)
        return (simple and self.collective in kinds and since >= (2, 19)
                and (since < (2, 28) or self.graph.channels > 1))

    def is_enabled(self) -> bool:
        """Return whether the table has a bandwidth for the pair."""
        machine, since = self.machine, self.release.since
        if self.graph.channels == 0 or not self.is_computed():
            return False
        if self.algorithm == "NVLSTree":
            return machine.nodes > 1
        if self.algorithm == "NVLS" and machine.nodes > 1:
            has_heads = self.collective == "all_reduce" or since < (2, 27) or self._has_heads()
            return machine.chain is not None and has_heads
        if self.algorithm == "CollNetDirect" and self.collective in GATHERS:
            return self.protocol == "Simple" and machine.nodes > 1 and self._has_heads()
        if self.algorithm.startswith("CollNet"):
            return self.protocol == "Simple" and machine.nodes > 1
        return self.protocol != "LL128" or self._has_ll128()

    def _has_heads(self) -> bool:
        """Return whether every GPU of a node has a NIC of its own for CollNet."""
        return self.machine.direct is not None and self.machine.direct.channels >= self.machine.gpus

    def _has_ll128(self) -> bool:
        """Return whether stores of 128 bytes arrive whole on all paths of the graph, as LL128 needs."""
        sm, since = self.machine.sm, self.release.since
        intra, inter = (PATHS.index(path) for path in self.graph.paths)
        if since < (2, 19):
            return sm in (70, 80) and intra <= PATHS.index("NVL") and inter <= PATHS.index("PXB")
        far = "PXB" if sm < 90 else "P2C" if since == (2, 27, 3) else "PXN"
        known = sm >= 70 if since >= (2, 27) else sm in ((70, 80, 90) if since < (2, 25) else (70, 80, 90, 100, 120))
        return known and intra <= PATHS.index("NVB") and inter <= PATHS.index(far)

    def algbw(self) -> float:
        """Return the bandwidth in the table, in GB/s."""
        machine, graph, since = self.machine, self.graph, self.release.since
        busbw = graph.channels * (graph.intra if machine.nodes <= 2 else graph.inter)
        if since < (2, 19) and self._generation:
            busbw = min(busbw, 235.0)
        if self.algorithm == "Ring":
            return self._ring(busbw) * machine.ranks / self._steps()
        if self.algorithm == "Tree":
            return self._tree(busbw) / 2
        if self.algorithm == "PAT":
            return busbw * self.release.pat_share
        if self.algorithm.startswith("NVLS"):
            return self._nvls()
        busbw = graph.channels * graph.intra
        if self.algorithm == "CollNetChain":
            return busbw / 2
        if self.collective == "all_reduce":
            factor = (machine.gpus / graph.channels + 1) / 2  # GPUs without a NIC of their own slow the node down
            return busbw / factor * (.85 if machine.sm >= 90 else 1.0) / 2
        if since >= (2, 27):
            return machine.gpus * min(graph.intra, .9 * graph.inter)
        return machine.gpus * graph.intra * (.95 - .1 * (machine.gpus - 1) / 7)

    def _steps(self) -> int:
        ranks = self.machine.ranks
        return 2 * (ranks - 1) if self.collective == "all_reduce" else ranks - (self.collective in GATHERS)

    def _most_of_ll(self) -> float:
        """Return the limit of LL: of the GPUs on a node, of the processors on several nodes."""
        nodes = self.machine.nodes
        if nodes == 1:
            return self._limit(self.release.ll)
        return self.release.ll[self.machine.cpu == "amd"][min(nodes, 3) - 1]

    def _ring(self, busbw: float) -> float:
        machine, since = self.machine, self.release.since
        if self.protocol == "LL":
            is_reduced = machine.nodes > 1 or self.collective in ("all_reduce", "reduce")
            return min(self._most_of_ll(), busbw / (2 if since >= (2, 21) else 4 if is_reduced else 3))
        if self.protocol == "LL128":
            share = .7 if machine.gpus == 1 and since < (2, 23) else .92
            return min(busbw * share, self.graph.channels * self._channel_ll128(self.release.ring_ll128))
        return busbw

    def _tree(self, busbw: float) -> float:
        busbw = min(.92 * busbw, self.graph.channels * self._limit(self.release.tree))
        if self.protocol == "LL":
            busbw = min(busbw / 3.8, self._most_of_ll())
        elif self.protocol == "LL128":
            share = 7 / 9 if self.machine.nodes == 1 else .915 if self.release.since < (2, 10) else 120 / 128
            busbw = min(busbw * share, self.graph.channels * self._channel_ll128(self.release.tree_ll128))
        return busbw * (.85 if self.graph.pattern == 3 and self.release.since >= (2, 19) else 1.0)

    def _channel_ll128(self, rows: Rows) -> float:
        return self._limit(rows) if rows else LL128_2_8[self.collective]

    def _nvls(self) -> float:
        machine, graph, since = self.machine, self.graph, self.release.since
        is_tree, gathers = self.algorithm == "NVLSTree", self.collective in GATHERS
        others = (machine.gpus - 1) / machine.gpus
        if since >= (2, 28):
            intra = graph.intra * self.release.nvls_share[self._generation] * (graph.channels - 1) / graph.channels
            intra *= others if gathers else 2
            inter = graph.inter * (2 if is_tree and machine.nodes == 2 else 1)
            busbw = graph.channels * min(intra, inter, self._limit(self.release.nvls_tree) if is_tree else inter)
            return busbw if gathers else busbw * machine.ranks / self._steps()
        if gathers and since >= (2, 27):
            return graph.channels * min(graph.intra * others, .9 * graph.inter)
        inter = graph.inter / (2 if is_tree and machine.nodes > 2 else 1)
        return graph.channels * min(graph.intra, inter) * (1.0 if gathers and since >= (2, 23) else 5 / 6)

    def latency(self) -> float:
        """Return the latency in the table, in us."""
        machine, since, nodes = self.machine, self.release.since, self.machine.nodes
        base, peers = self._of(self.release.base), machine.gpus - 1
        intra, inter = self._step("NVL" if self.graph.paths[0] == "NVL" else "PCI"), self._network()
        if self.algorithm == "Ring":
            return base + self._ring_steps(intra, inter)
        if self.algorithm == "Tree":
            if since < (2, 19) and nodes > 1 and self.protocol == "LL":
                intra *= 1.8
            return base + 2 * (peers * intra + (nodes.bit_length() - 1) * inter)
        if self.algorithm == "CollNetDirect":
            return base + 2 * (min(1, peers) * intra + peers * .4) + inter
        if self.algorithm == "CollNetChain":
            return base + 2 * peers * intra + inter
        if self.algorithm == "NVLS":
            return intra + (inter if nodes > 1 else 0.0)
        if self.algorithm == "NVLSTree":
            return base + intra + 2 * (nodes.bit_length() - 1) * inter
        return base + (nodes.bit_length() - 1) * inter / 3.5 + 2.8 * machine.ranks

    def _of(self, rows: Latencies, algorithm: str = "") -> float:
        return rows.get(algorithm or self.algorithm, (0.0, 0.0, 0.0))[PROTOCOLS.index(self.protocol)]

    def _step(self, link: str, algorithm: str = "") -> float:
        links = self.release.links
        if self.machine.cpu == "power" and link == "PCI" and (algorithm or self.algorithm) == "Tree" \
                and self.protocol == "Simple" and self.release.since >= (2, 10):
            return self._of(links[link], "Ring")
        return self._of(links[link], algorithm)

    def _network(self) -> float:
        """Return the latency of a step between nodes."""
        alone = self.machine.gpus == 1 and self.release.since >= (2, 23)  # no steps in the node hide the latency
        own = 0.0 if self.release.since < (2, 19) else self.graph.latency * (2 if self.protocol == "Simple" else 1)
        return self._step("NET", "Tree" if alone else "") + own

    def _ring_steps(self, intra: float, inter: float) -> float:
        """Return the latency of a ring's steps."""
        nodes, since, simple = self.machine.nodes, self.release.since, self.protocol == "Simple"
        if self.collective in ROOTED:
            link = "NET" if nodes > 1 else "NVL" if self.graph.paths[0] == "NVL" else "PCI"
            if self.graph.same_channels:
                return self._step(link)
            return self._steps() * self._step(link, "Tree" if simple else "")
        if nodes > 1 and since < (2, 19):
            intra *= 1.8 if self.protocol == "LL" else 1.0
        elif nodes > 1:  # every step posts to the network
            intra = max(intra, (2.0 if self.machine.cpu == "amd" else 1.0) * (3 if simple else 1))
        crossings = nodes - 1
        if self.collective == "all_reduce":
            crossings = 2 * (nodes if nodes > 1 and (2, 19) <= since < (2, 23) else nodes - 1)
        return (self._steps() - crossings) * intra + crossings * inter


def _time(machine: Machine, release: Release, collective: str, nbytes: int, pair: tuple[str, str],
          cell: Cell) -> float:
    """Return the predicted time in us."""
    (algorithm, protocol), (latency, algbw), since = pair, cell, release.since
    power = max(nbytes >> 6, 1).bit_length() - 1
    is_corrected = algorithm == "Tree" or (algorithm == "NVLSTree" and since >= (2, 29) and machine.sm >= 100
                                           and machine.cpu in ("intel", "amd"))
    if is_corrected and (nbytes >= 64 or since < (2, 22)):
        column = release.corrections[PROTOCOLS.index(protocol)]
        if power < len(column):
            algbw *= column[power]
        elif algorithm == "NVLSTree" and power == len(column):  # the column of NVLSTree is one longer
            algbw *= column[-1]
    if (algorithm, protocol, collective) == ("Ring", "Simple", "all_reduce") and machine.nodes > 1:
        if since < (2, 19):
            is_plateau = nbytes >= machine.ranks / 16 * 65536
        else:
            is_plateau = nbytes // (machine.channels * machine.ranks) >= 64
        latency *= (1.9 if machine.sm < 80 or since < (2, 19) else 1.4) if is_plateau else 1.0
    return latency + nbytes / (1000 * algbw)
