"""Named graphs of links: machines, by the rows of `machines.toml`, and regular networks with parameters.

Bandwidths are in GB/s for one direction, latencies in us. NVLink 2 has 25 GB/s per link (DGX-1, DGX-2, NDv2). NVLink 3,
4 and 5 have 300, 450 and 900 GB/s per GPU through NVSwitch (DGX A100, DGX H100, GB200). Between boxes there is a NIC of
25 GB/s (A100) or 50 GB/s (H100, GB200) for each GPU, of 12.5 GB/s for two GPUs (DGX-2), or of 12.5 GB/s for a whole box
(NDv2). An MI250 box has 50 GB/s per lane of xGMI, and 16 GB/s to other boxes for each of its 16 GPUs (dies). MI250 and
A100 agree with topologies.py of ForestColl (github.com/liangyuRain/ForestColl). The NVLinks of DGX-1 and NDv2 agree
with the topologies of TE-CCL (github.com/microsoft/TE-CCL); but there a single GPU of an NDv2 sends to other boxes, and
a GPU of a DGX-2 has 125 GB/s. Latencies follow TACCL and TE-CCL: 0.7 us for an NVLink, and 1.3 us for a port of a NIC.
No public latency of xGMI was found, so an MI250 has the latency of NVLink.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, nearest

CODE = "GC-TOPOLOGY"
NVLINK, NIC = 0.7, 1.3  # us
MOST_BOXES = 128


class _Made:
    """A graph under construction, in the form of a TOML file."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.ranks: list[str] = []
        self.switches: list[str] = []
        self.links: list[dict[str, Any]] = []
        self.multicast = False

    def join(self, one: str, other: str, speed: float, latency: float) -> None:
        """Add a link in both directions."""
        self.links.append({"from": one, "to": other, "GBps": speed, "us": latency, "both": True})

    def star(self, switch: str, ends: list[str], speed: float, latency: float) -> None:
        """Add a switch with links to `ends`; the latency of a path through it is twice `latency`."""
        self.switches.append(switch)
        for end in ends:
            self.join(end, switch, speed, latency)


@functools.cache
def machines() -> dict[str, dict[str, Any]]:
    """Return the rows of `machines.toml` by the names of the machines."""
    return tomllib.loads(Path(__file__).with_name("machines.toml").read_text())


def _grid(sides: list[int], speed: float, latency: float, *, wraps: bool) -> _Made:
    made = _Made(f"a {'torus' if wraps else 'mesh'} of {'x'.join(map(str, sides))} ranks")
    places = [*itertools.product(*map(range, sides))]
    made.ranks = ["r" + "_".join(map(str, place)) for place in places]
    named = dict(zip(places, made.ranks, strict=True))
    for place in places:
        for axis, side in enumerate(sides):
            if place[axis] + 1 < side or (wraps and side > 2):  # a side of two has one link, not two
                there = (*place[:axis], (place[axis] + 1) % side, *place[axis + 1:])
                made.join(named[place], named[there], speed, latency)
    return made


def _switch(sides: list[int], speed: float, latency: float) -> _Made:
    made = _Made(f"{sides[0]} ranks on a switch")
    made.ranks = [f"r{rank}" for rank in range(sides[0])]
    made.star("switch", made.ranks, speed, latency / 2)
    return made


def _fat_tree(sides: list[int], speed: float, latency: float) -> _Made:
    leaves, ranks = sides[0], sides[1]
    thick = sides[2] if len(sides) > 2 else ranks
    made = _Made(f"{leaves} leaf switches of {ranks} ranks, each with uplinks of {thick} ranks' bandwidth")
    for leaf in range(leaves):
        here = [f"l{leaf}r{rank}" for rank in range(ranks)]
        made.ranks += here
        made.star(f"leaf{leaf}", here, speed, latency / 2)
    made.star("spine", [f"leaf{leaf}" for leaf in range(leaves)], speed * thick, latency / 2)
    return made


def _dragonfly(sides: list[int], speed: float, latency: float) -> _Made:
    groups, routers, ranks = sides
    made = _Made(f"a dragonfly: {groups} groups of {routers} routers with {ranks} ranks each")
    for group, router in itertools.product(range(groups), range(routers)):
        here = [f"g{group}s{router}r{rank}" for rank in range(ranks)]
        made.ranks += here
        made.star(f"g{group}s{router}", here, speed, latency / 2)
    for group in range(groups):
        for one, other in itertools.combinations(range(routers), 2):
            made.join(f"g{group}s{one}", f"g{group}s{other}", speed, latency / 2)
    for number, (one, other) in enumerate(itertools.combinations(range(groups), 2)):
        made.join(f"g{one}s{number % routers}", f"g{other}s{number % routers}", speed, latency)
    return made


# Regular networks: the function, and the least and the most number of sides.
NETWORKS: dict[str, tuple[Callable[[list[int], float, float], _Made], int, int]] = {
    "ring": (lambda sides, *link: _grid(sides, *link, wraps=True), 1, 1),
    "torus": (lambda sides, *link: _grid(sides, *link, wraps=True), 1, 3),
    "grid": (lambda sides, *link: _grid(sides, *link, wraps=False), 1, 3),
    "crossbar": (_switch, 1, 1),
    "fat_tree": (_fat_tree, 2, 3),
    "dragonfly": (_dragonfly, 3, 3),
}
SIDES = re.compile(r"(\w+)(?:\((\d{1,5}(?:x\d{1,5})*)((?:, *(?:GBps|us)=[\d.]{1,12})*)\))?")
MOST_NAMED_RANKS = 1024


def is_named(name: str) -> bool:
    """Return whether a text names a graph: a machine, or a network with parameters."""
    found = SIDES.fullmatch(name)
    return found is not None and (found[1] in machines() or (found[1] in NETWORKS and found[2] is not None))


def graph_table(name: str) -> dict[str, Any]:
    """Return the graph called `name` as the content of a file; raise ArgumentError naming the nearest known name.

    ``dgx_a100(2)`` is two boxes, ``torus(4x4, GBps=50, us=0.5)`` a network with links of 50 GB/s and 0.5 us, its
    defaults.

    >>> len(graph_table("torus(3x3)")["links"]), graph_table("crossbar(4)")["switches"]
    (18, ['switch'])
    """
    found = SIDES.fullmatch(name)
    if found is None or found[1] not in {*machines(), *NETWORKS}:
        raise ArgumentError(f"no graph is named {name!r}{nearest(name.partition('(')[0], [*machines(), *NETWORKS])}; "
                            "a machine takes a number of boxes, as in dgx_a100(2), and a network takes sides, as in "
                            "torus(4x4)",
                            code=CODE)
    sides = [int(side) for side in found[2].split("x")] if found[2] else []
    make = _machine if found[1] in machines() else _network
    made = make(found[1], sides, found[3] or "")
    return {"kind": "graph", "name": name, "about": made.about, "ranks": made.ranks, "switches": made.switches,
            "multicast": made.multicast, "links": made.links}


def _machine(name: str, sides: list[int], options: str) -> _Made:
    row = machines()[name]
    row = machines().get(row.get("like", ""), {}) | row
    boxes = sides[0] if sides else row.get("boxes", 1)
    if len(sides) > 1 or options or not 1 <= boxes <= MOST_BOXES:
        raise ArgumentError(f"{name} takes a number of boxes from 1 to {MOST_BOXES}, as in {name}(2)", code=CODE)
    made = _Made(f"{boxes} x {row['about']}" + (row.get("between", "") if boxes > 1 else ""))
    made.multicast, gpus, shared = row.get("multicast", False), row["gpus"], row.get("nic_gpus", 1)
    ports = []
    for box in range(boxes):
        here = [f"b{box}g{gpu}" for gpu in range(gpus)]
        made.ranks += here
        for one, other, count in row.get("lanes", ()):
            made.join(here[one], here[other], row["lane"] * count, NVLINK)
        if "nvswitch" in row:
            made.star(f"b{box}nvswitch", here, row["nvswitch"], NVLINK / 2)
        for first in range(0, gpus if boxes > 1 and shared > 1 else 0, shared):
            ports.append(f"b{box}nic{first // shared if shared < gpus else ''}")
            made.star(ports[-1], here[first:first + shared], row["nic"], row["nic_us"])
        ports += here if shared == 1 else []
    if boxes > 1:
        made.star("ib", ports, row["nic"], NIC / 2)
    return made


def _network(name: str, sides: list[int], options: str) -> _Made:
    make, least, most = NETWORKS[name]
    link = {"GBps": 50.0, "us": 0.5}
    try:
        link |= {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", options)}
    except ValueError:
        raise ArgumentError(f"{name}: a number in {options.strip(', ')!r} is malformed", code=CODE) from None
    if not least <= len(sides) <= most or min(sides) < 1 or not 2 <= math.prod(sides[:3]) <= MOST_NAMED_RANKS:
        number = f"{least}" if least == most else f"{least} to {most}"
        raise ArgumentError(f"{name} takes {number} sides, and {MOST_NAMED_RANKS} ranks at most, as in "
                            f"{name}({'x'.join(['4'] * least)})", code=CODE)
    return make(sides, link["GBps"], link["us"])
