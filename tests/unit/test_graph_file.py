"""`gpucoll doctor --topology F.toml`: graphs of given reports, read again as any graph."""

import json
from fractions import Fraction

import pytest

import gpucoll as gc
from gpucoll.cli import main
from gpucoll.doctor.graph_file import write
from gpucoll.lab.graphs.bounds import bound
from gpucoll.lab.graphs.link_graph import load_graph

pytestmark = pytest.mark.usefixtures("own_algorithms")

PCI = [f"00000000:{number:02X}:00.0" for number in range(8)]


def gpu(index, links=None, pcie=25.0):
    return {"pci": PCI[index], "links": links, "pcie": pcie}


def report(hosts, figures):
    """Return a report on hosts, each a list of ranks and a list of GPUs; `figures(one, other)` is us and MB/s."""
    place = {rank: number for number, (ranks, _) in enumerate(hosts) for rank in ranks}
    pairs = [{"ranks": [one, other], "kind": "same node" if place[one] == place[other] else "across nodes",
              "latency_us": figures(one, other)[0], "bandwidth_mb_s": figures(one, other)[1]}
             for one in place for other in place if one < other]
    return {"ranks": len(place), "links": {"pairs": pairs} if pairs else None,
            "hosts": [{"name": f"h{number}", "ranks": ranks, "gpus": gpus} for number, (ranks, gpus) in
                      enumerate(hosts)]}


def edges(path):
    """Return GB/s and us of each link of a file, by the names of both ends."""
    graph = load_graph(str(path))
    return {(graph.names[src], graph.names[dst]): (float(edge.GBps), float(edge.us))
            for (src, dst), edge in graph.edges.items()}


def both(found):
    return found | {(other, one): figures for (one, other), figures in found.items()}


def test_ranks_of_one_host_share_its_memory(tmp_path):
    path = tmp_path / "here.toml"
    write(path, report([([0, 1, 2], None)], lambda one, other: (2.0 + other, 1000.0 * (one + other))), [None] * 3)
    # Rank 0 has its best figures with ranks 1 (us) and 2 (MB/s), rank 1 with 0 and 2, rank 2 with 0 and 1.
    assert edges(path) == both({("r0", "memory0"): (2.0, 1.5), ("r1", "memory0"): (3.0, 1.5),
                                ("r2", "memory0"): (3.0, 2.0)})
    assert load_graph(str(path)).name == "1 x h0"


def test_hosts_are_joined_by_a_network(tmp_path):
    path = tmp_path / "here.toml"
    figures = {(0, 1): (2.0, 8000.0), (0, 2): (32.0, 1000.0), (1, 2): (32.0, 1000.0)}
    write(path, report([([0, 1], None), ([2], None)], lambda *pair: figures[pair]), [None] * 3)
    assert edges(path) == both({("r0", "memory0"): (8.0, 1.0), ("r1", "memory0"): (8.0, 1.0),
                                ("memory0", "network"): (1.0, 15.0), ("r2", "memory1"): (1.0, 0.0),
                                ("memory1", "network"): (1.0, 16.0)})


def test_nvlinks_are_direct_or_by_a_switch(tmp_path):
    """The GPUs of a process alone: 0 and 1 joined by two links, 1 and 2 by one; 3 and 4 on a switch and PCI Express."""
    path = tmp_path / "here.toml"
    gpus = [gpu(0, {PCI[1]: 50.0}), gpu(1, {PCI[0]: 50.0, PCI[2]: 25.0}), gpu(2, {PCI[1]: 25.0})]
    write(path, report([([0], gpus)], None), [])
    assert edges(path) == both({("g0", "g1"): (50.0, 0.7), ("g1", "g2"): (25.0, 0.7)})
    # Each rank receives the data of two others: the link into rank 2 limits.
    assert bound(load_graph(str(path)), "all_gather").algbw == Fraction(75, 2)
    write(path, report([([0], [gpu(0, {"switch": 300.0}), gpu(1, {"switch": 300.0})])], None), [])
    assert edges(path) == both({("g0", "nvswitch0"): (300.0, 0.35), ("g1", "nvswitch0"): (300.0, 0.35)})
    write(path, report([([0], [gpu(0), gpu(1, {PCI[5]: 25.0})])], None), [])  # GPU 5 belongs to another job
    assert edges(path) == both({("g0", "pcie0"): (25.0, 0.65), ("g1", "pcie0"): (25.0, 0.65)})


def test_ranks_on_gpus_of_two_hosts(tmp_path):
    """The ranks of a host use its GPUs in any order; data between hosts pass PCI Express and the measured network."""
    path = tmp_path / "here.toml"
    gpus = [gpu(0, {PCI[1]: 50.0}), gpu(1, {PCI[0]: 50.0, PCI[2]: 75.0}), gpu(2, {PCI[1]: 75.0})]
    figures = {(0, 2): (1.0, 9000.0), (0, 1): (21.0, 3000.0), (1, 2): (21.0, 3000.0)}
    write(path, report([([0, 2], gpus), ([1], gpus)], lambda *pair: figures[pair]), [1, 0, 2])
    assert edges(path) == both({("r0", "r2"): (75.0, 0.7), ("r0", "nic0"): (25.0, 0.0), ("r2", "nic0"): (25.0, 0.0),
                                ("r1", "pcie1"): (25.0, 0.65), ("r1", "nic1"): (25.0, 0.0),
                                ("nic0", "network"): (3.0, 10.0), ("nic1", "network"): (3.0, 10.5)})


def test_an_algorithm_of_this_machine_has_a_name_of_python(tmp_path, capsys):
    """The name of the graph begins with a digit."""
    path = tmp_path / "here.toml"
    write(path, report([([0, 1], None)], lambda *_: (2.0, 8000.0)), [None, None])
    assert main(["synthesize", str(path), "all_gather", "--json", "-o", str(tmp_path / "made.py")]) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"].endswith("made.py:graph_1_x_h0_all_gather")


@pytest.mark.parametrize("gpus", [None, [], [gpu(0)]])
def test_a_graph_needs_two_ranks(tmp_path, gpus):
    with pytest.raises(gc.ArgumentError, match=r"GC-TOPOLOGY.*two ranks or two GPUs"):
        write(tmp_path / "here.toml", report([([0], gpus)], None), [])
    assert not [*tmp_path.iterdir()]
