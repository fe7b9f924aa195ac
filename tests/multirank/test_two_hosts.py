"""Two hosts, joined by a network: right results, what crosses the network counted by the hosts' own links, tables."""

import json
import sys
from pathlib import Path

import pytest

import hosts
from gpucoll.tuner.table import parse

MEBIBYTE = 1 << 20
TESTS = Path(__file__).parents[1]
MOST = 1.1  # of the array's bytes, each way: headers, and what MPI says to itself
COUNTED = """
import json, pathlib, sys
import numpy
import gpucoll as gc

names, sizes = json.loads(sys.argv[1])
counters = [pathlib.Path("/sys/class/net/e0/statistics", f"{way}_bytes") for way in ("tx", "rx")]
rows = []
with gc.init(timeout=60) as comm:
    each = comm.size // 2
    assert (comm.nodes, comm.node, comm.local_size) == (2, comm.rank // each, each), "these are not two hosts"
    for name in names:
        for nbytes in sizes:
            index = numpy.arange(nbytes // 4) % 1009
            x, expected = index + comm.rank, comm.size * index + sum(range(comm.size))
            for turn in range(2):  # the first one makes MPI's connections
                comm.barrier()
                before = [int(counter.read_text()) for counter in counters]
                comm.barrier()
                found = comm.all_reduce(x.astype(numpy.float32), algorithm=name)
                comm.barrier()
                after = [int(counter.read_text()) for counter in counters]
                assert found.tobytes() == expected.astype(numpy.float32).tobytes(), (name, nbytes)
                comm.barrier()
            moved = comm.mpi.allgather([(last - first) / nbytes for first, last in zip(before, after)])
            rows.append((name, nbytes, moved[0] + moved[each]))
    if comm.rank == 0:
        print(json.dumps(rows))
"""
EVERY = """
import json, sys
sys.path.insert(0, sys.argv[1])
import gpucoll as gc
from programs import MOVED, counts, reduction

with gc.init(timeout=60) as comm:
    assert comm.nodes == 2
    for collective, algorithms in json.loads(sys.argv[2]).items():
        for algorithm in algorithms:
            for count in counts(comm.size):
                if collective in MOVED:
                    MOVED[collective](comm, algorithm, "int32", count, comm.size - 1)
                else:
                    reduction(comm, collective, algorithm, "sum", "int32", count)
sys.stdout.write("right\\n")
"""
BOTH = ["hierarchical", "hierarchical(ring,ring)", "auto"]
ALGORITHMS = {"all_reduce": BOTH, "reduce_scatter": BOTH, "all_gather": BOTH, "scan": ["auto"], "reduce": ["auto"],
              "all_to_all": ["hierarchical", "hierarchical(pairwise,bruck)", "auto"], "broadcast": ["auto"]}


@pytest.fixture(scope="module")
def two(launcher):
    """Two hosts; skipped with the reason where there can be none."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.hosts(2) as made:
        yield made


def counted(two, ranks, names, sizes):
    """For each name and size what left and entered the first host, then the second, in multiples of the array."""
    job = two.launch(ranks, sys.executable, "-c", COUNTED, json.dumps([names, sizes]))
    assert job.returncode == 0, job.stdout + job.stderr
    return json.loads(job.stdout)


@pytest.mark.parametrize("ranks", [2, 4])
def test_hierarchical_moves_each_byte_once_each_way(two, ranks):
    names = [*BOTH[:2], "hierarchical(halving_doubling,tree)", "hierarchical(tree,ring)"]
    sizes = [MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE]
    rows = counted(two, ranks, names, sizes)
    assert [(name, nbytes) for name, nbytes, _ in rows] == [(name, nbytes) for name in names for nbytes in sizes]
    for name, nbytes, shares in rows:
        assert all(1 <= share <= MOST for share in shares), (name, nbytes, shares)


def test_the_links_would_show_who_moves_more(two):
    """A ring through both hosts sends every chunk, and then every sum, over the network: 2 (P-1)/P of the bytes."""
    (_, _, of_ring), (_, _, of_tree) = counted(two, 2, ["ring", "tree"], [4 * MEBIBYTE])
    assert all(1.5 <= share <= 1.5 * MOST for share in of_ring), of_ring
    assert all(share > MOST for share in of_tree), of_tree


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_through_both_hosts_are_right(two, ranks):
    job = two.launch(ranks, sys.executable, "-c", EVERY, TESTS, json.dumps(ALGORITHMS))
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["right"] * 2 * ranks


def test_tune_measures_both_classes_of_links_and_explain_goes_by_them(two, tmp_path):
    env = {"GPUCOLL_CACHE": str(tmp_path)}
    job = two.launch(2, sys.executable, "-m", "gpucoll", "tune", "--collective", "all_reduce", env=env)
    assert job.returncode == 0, job.stderr
    path, = tmp_path.glob("tune-*")
    shape, = parse(str(path), path.read_bytes()).shapes
    assert (shape.ranks, shape.nodes) == (4, 2)
    assert {link.name for link in shape.links if link.executor == "mpi"} == {"node", "network"}
    assert [words.split()[:2] for words in job.stderr.splitlines() if words.startswith("mpi ")] == \
        [["mpi", "node"], ["mpi", "network"]]
    job = two.launch(2, sys.executable, "-m", "gpucoll", "explain", "all_reduce", "4M", "--json", env=env)
    found, = map(json.loads, job.stdout.splitlines())
    assert found["basis"] == f"the table {path}: 4 ranks on 2 nodes, measured {shape.measured}"
    assert "hierarchical" in {row["algorithm"] for row in found["candidates"]}


def test_nothing_of_the_hosts_is_left(launcher):
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.hosts(2) as made:
        assert hosts.ip("netns", "list").count(made.name) == 3
    assert made.name not in hosts.ip("netns", "list")
