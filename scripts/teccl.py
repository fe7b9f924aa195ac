"""TE-CCL's machines, as links. Source: microsoft/TE-CCL, ``teccl/topologies``."""

from __future__ import annotations

from typing import NamedTuple

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


def dgx2() -> Machine:
    """Return two DGX-2: a switch of 125 GB/s and 0.35 us, and 12.5 GB/s and 2.6 us from each odd GPU to an even GPU."""
    links = {}
    for switch in (0, 17):
        for gpu in range(switch + 1, switch + 17):
            links[switch, gpu] = links[gpu, switch] = Link(125.0, 0.35e-6)
    for gpu in range(1, 17, 2):
        links[gpu + 1, 17 + gpu] = links[17 + gpu + 1, gpu] = Link(12.5, 2.6e-6)
    return Machine(links, frozenset((0, 17)))


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
    return Machine(links, frozenset((0,)))
