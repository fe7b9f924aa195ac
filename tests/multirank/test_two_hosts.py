"""Two hosts joined by a network: results, tables, and the network traffic counted by the hosts' links.

The hosts are network namespaces (scripts/hosts.py). The tests need MPICH, because MPICH can be configured not to use
the memory shared by these hosts.
"""

import json
import sys

import pytest

import hosts
from gpucoll.tuner.table import parse
from harness.pace import seconds
from harness.ranks import run_job

# A replacement of ssh for MPICH's mpiexec, called with options, an address, and a shell command for this host.
LOGIN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "MARK-${host##*.}" sh -c "$*"
"""
MOST = 1.1  # times the array's bytes, each way: allows headers and MPI's own messages
COUNTED = """
import json, pathlib, sys
import numpy
import gpucoll as gc

counters = [pathlib.Path("/sys/class/net/e0/statistics", f"{way}_bytes") for way in ("tx", "rx")]
rows = []
with gc.init(timeout=600) as comm:
    each = comm.size // 2
    assert (comm.nodes, comm.node, comm.local_size) == (2, comm.rank // each, each), "these are not two hosts"
    assert comm.explain("all_reduce", 4 << 20)["executor"] == "hybrid"
    with gc.Communicator.from_mpi(comm.mpi, executor="mpi") as messages:
        assert messages.explain("all_reduce", 4 << 20)["executor"] == "mpi"
    for name in sys.argv[1:]:
        index = numpy.arange(1 << 20) % 1009
        x, expected = numpy.float32(index + comm.rank), numpy.float32(comm.size * index + sum(range(comm.size)))
        for turn in range(2):  # the first one makes MPI's connections
            comm.barrier()
            before = [int(counter.read_text()) for counter in counters]
            comm.barrier()
            assert (comm.all_reduce(x, algorithm=name) == expected).all(), name
            comm.barrier()
            after = [int(counter.read_text()) for counter in counters]
            comm.barrier()
        moved = comm.mpi.allgather([(last - first) / x.nbytes for first, last in zip(before, after)])
        rows.append(moved[0] + moved[each])
if comm.rank == 0:
    print(json.dumps(rows))
"""


@pytest.fixture
def on_hosts(launcher, tmp_path):
    """Yield `on_hosts(ranks, *argv)`: run `argv` on `ranks` ranks per host, return the output; skip without hosts."""
    reason = "MPICH's mpiexec is missing" if launcher.vendor.mark != "HYDRA" else hosts.lacking()
    if reason:
        pytest.skip(reason)
    login = tmp_path / "login"

    def run(ranks, *argv):
        mpiexec = [launcher.path, "-launcher", "ssh", "-launcher-exec", str(login), "-iface", hosts.LINK,
                   "-hosts", ",".join(host.address for host in nodes), "-ppn", str(ranks), "-n", str(2 * ranks)]
        job = run_job(nodes[0].within(*mpiexec, sys.executable, *argv), seconds(120),
                      {**hosts.SOCKETS, "GPUCOLL_CACHE": str(tmp_path / "cache")})
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    with hosts.made(2) as (_, *nodes):
        login.write_text(LOGIN.replace("MARK", nodes[0].namespace.rpartition("-")[0]))
        login.chmod(0o700)
        yield run
    assert nodes[0].namespace not in hosts.ip("netns", "list")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hierarchical_moves_each_byte_once_each_way(on_hosts, ranks):
    """Hierarchical sends each byte once each way; a ring sends every chunk and every sum: 2 (P-1)/P of the bytes."""
    once = ["hierarchical", "hierarchical(ring,ring)", "hierarchical(halving_doubling,tree)", "auto"]
    *rows, of_ring = json.loads(on_hosts(ranks, "-c", COUNTED, *once, "ring"))
    for name, shares in zip(once, rows, strict=True):
        assert all(1 <= share <= MOST for share in shares), (name, shares)
    most = 2 * (2 * ranks - 1) / (2 * ranks)
    assert all(most <= share <= most * MOST for share in of_ring), of_ring


@pytest.mark.slow
def test_tune_measures_both_classes_of_links_and_explain_goes_by_them(on_hosts, tmp_path):
    on_hosts(2, "-m", "gpucoll", "tune", "--collective", "all_reduce")
    path, = (tmp_path / "cache").glob("tune-*")
    shape, = parse(str(path), path.read_bytes()).shapes
    assert (shape.ranks, shape.nodes) == (4, 2)
    assert {link.name for link in shape.links if link.executor == "mpi"} == {"node", "network"}
    found = json.loads(on_hosts(2, "-m", "gpucoll", "explain", "all_reduce", "4M", "--json"))
    assert found["basis"] == f"the table {path}: 4 ranks on 2 nodes, measured {shape.measured}"
    assert {(row["algorithm"], row["executor"]) for row in found["candidates"]} >= {
        ("hierarchical", "hybrid"), ("native", "native")}
