"""TE-CCL's machines, as links. Source: microsoft/TE-CCL, ``teccl/topologies``."""

from __future__ import annotations

from gpucoll.lab.graphs.link_graph import LinkGraph, graph_of

# The NVLinks of an NDv2 box as multiples of 25 GB/s, in TE-CCL's numbering.
NDV2 = {0: {1: 2, 2: 1, 3: 1, 4: 2}, 1: {2: 1, 3: 2, 5: 1}, 2: {3: 2, 6: 2}, 3: {7: 1}, 4: {5: 2, 6: 1, 7: 1},
        5: {6: 1, 7: 2}, 6: {7: 2}}


def dgx2() -> LinkGraph:
    """Return two DGX-2: a switch of 125 GB/s and 0.35 us, and 12.5 GB/s and 2.6 us from each odd GPU to an even GPU."""
    links = {}
    for switch in (0, 17):
        for gpu in range(switch + 1, switch + 17):
            links[switch, gpu] = links[gpu, switch] = 125.0, 0.35
    for gpu in range(1, 17, 2):
        links[gpu + 1, 17 + gpu] = links[17 + gpu + 1, gpu] = 12.5, 2.6
    return _graph(links, (0, 17))


def ndv2() -> LinkGraph:
    """Return two boxes of NVLinks (25 and 50 GB/s, 0.7 us), with links 0 -> 9 and 8 -> 1 of 12.5 GB/s and 1.3 us."""
    links = {(0, 9): (12.5, 1.3), (8, 1): (12.5, 1.3)}
    for box in (0, 8):
        for one, others in NDV2.items():
            for other, lanes in others.items():
                links[box + one, box + other] = links[box + other, box + one] = 25.0 * lanes, 0.7
    return _graph(links)


def _graph(links: dict[tuple[int, int], tuple[float, float]], switches: tuple[int, ...] = ()) -> LinkGraph:
    """Return links of GB/s and microseconds between nodes as a graph."""
    ranks = sorted({node for pair in links for node in pair} - {*switches})
    return graph_of("te-ccl", {"kind": "graph", "ranks": [f"n{node}" for node in ranks],
                               "switches": [f"n{node}" for node in switches],
                               "links": [{"from": f"n{src}", "to": f"n{dst}", "GBps": speed, "us": us}
                                         for (src, dst), (speed, us) in links.items()]})
