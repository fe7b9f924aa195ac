"""A rank of a job on pretended hosts, joined without MPI: `python ucx_job.py PROGRAM [ARGUMENT]`.

The hosts are the launchers' nodes. Ranks of different hosts see neither each other's processes nor memory, and send
their messages by UCX.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
import mixture
from gpucoll.communicator import links
from gpucoll.health import processes
from gpucoll.transport import ucx
from gpucoll.transport.tags import ENGINE_CALLS
from harness import extension
from harness.grids import generator
from harness.numbers import stand_at
from harness.pace import seconds
from programs import points as point_to_point
from programs import wildcards

EACH = int(os.environ["LOCAL_WORLD_SIZE"])
NODE, NODES = int(os.environ["RANK"]) // EACH, int(os.environ["WORLD_SIZE"]) // EACH
links.process_namespace = processes.process_namespace = lambda: f"host {NODE}"


def calls(executor=None):
    """Random calls of all kinds, against the oracle; with the executor `ucx`, ranks of a host send messages, too."""
    if executor == "ucx":
        importlib.import_module("mpi4py.MPI")  # may load a UCX of its own, to be shared then
    with gc.init(timeout=seconds(60), executor=executor) as comm:
        assert (comm.nodes, comm.node, comm.mpi) == (NODES, NODE, None)
        assert comm.explain("all_reduce", 4 << 20)["executor"] == (executor or "hybrid")
        mixture.run(comm, mixture.draw(generator("ucx"), comm.size))
        if executor is None and not os.fork():
            sys.exit(0)  # the connections belong to the parent, also at the end of this child
        if executor is None:
            os.wait()
        stand_at(comm, ENGINE_CALLS - 2)  # the tags of the engine's messages come again
        for count in (1, 1 << 16, (1 << 20) + 3):  # eager messages, and by rendezvous
            x = numpy.arange(count) % 1009 + comm.rank
            expected = comm.size * (numpy.arange(count) % 1009) + sum(range(comm.size))
            assert (comm.all_reduce(x) == expected).all()


def refuses(kind, ranks, call, *given):
    """Make a call, and check that an error of this kind names these ranks."""
    with pytest.raises(kind) as error:
        call(*given)
    assert error.value.ranks == ranks


def unlike(executor=None):
    """Unlike calls, refused calls and other lengths of blocks, inside a host and between: no array is written."""
    with gc.init(timeout=seconds(60), executor=executor) as comm:
        for count in (3, 1 << 11, 1 << 16):  # the data go with the greeting, or after
            for odd in (comm.size - 1, 0, EACH - 1):  # of the last host, and the first and last of the first host
                all_unlike(comm, count, odd)
            for lengths in ([1] * comm.size, [1] * comm.size, [*range(comm.size)], [2] * comm.size):
                found = comm.all_gather_v(numpy.full(lengths[comm.rank], comm.rank))
                assert [one.tolist() for one in found] == [[rank] * length for rank, length in enumerate(lengths)]
        calls_under_way(comm)


def all_unlike(comm, count, odd):
    """Between like calls, rank `odd` makes another call, then refuses its arguments."""
    x, out = numpy.full(count, comm.rank), numpy.full(count, -1)
    is_odd, blamed = comm.rank == odd, (odd if comm.size > 2 else 1,)
    for _ in range(2):  # the second time the engine knows the calls
        comm.all_reduce(x, out)
        assert (out == sum(range(comm.size))).all()
        out[:] = -1
        refuses(gc.MismatchError, blamed, comm.all_reduce, x, out, "max" if is_odd else "sum")
        assert (out == -1).all()
    if is_odd:
        refuses(gc.ArgumentError, (), comm.all_reduce, [1])
    else:
        refuses(gc.PeerError, (odd,), comm.all_reduce, x, out)
    assert (out == -1).all()


def calls_under_way(comm):
    """Many asynchronous calls of two communicators, and blocking calls in between."""
    with comm.split(0, -comm.rank) as other:
        ranks = numpy.arange(comm.size)
        for count in (1, 1 << 12, 1 << 18):
            works = [one.all_reduce(numpy.full(count, one.rank + turn), async_op=True)
                     for turn in range(4) for one in (comm, other)]
            assert (comm.all_gather(numpy.full(count, comm.rank)) == ranks[:, None]).all()
            for turn, work in enumerate(works):
                assert (work.wait() == ranks.sum() + comm.size * (turn // 2)).all()


def points():
    """Messages between two ranks, also of other lengths and dtypes than awaited, and from any rank."""
    with gc.init(timeout=seconds(60)) as comm:
        point_to_point.all_programs(comm)
        for program in wildcards.PROGRAMS[:-1]:  # the last one needs an emulated device
            program(comm)


def lost(how):
    """Rank 1 of the last host ends or stays away; the others print the error's name and the culprits."""
    comm, x = gc.init(timeout=seconds(60)), numpy.ones(1000)
    comm.all_reduce(x)
    comm.barrier()
    comm._core.waits.timeout = seconds(2) if how == "idle" else seconds(60)  # from here on: ranks may start late
    if comm.rank == comm.size - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds(4))
        os._exit(0)
    try:
        while True:
            comm.all_reduce(x)
    except gc.GpucollError as error:
        sys.stdout.write(f"{type(error).__name__} {error.ranks}\n")
    comm.close()


def open_ports():
    """Return address and port of every socket at which this process listens."""
    links = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if
             os.path.islink(f"/proc/self/fd/{one}")]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in own]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in listening]


def attacked(folder):
    """Call after call, right each time, until the file FOLDER/done is there."""
    with gc.init(timeout=seconds(30)) as comm:
        x = numpy.arange(1000) + comm.rank
        expected = comm.size * numpy.arange(1000) + sum(range(comm.size))
        comm.all_reduce(x)
        draft = Path(folder, f"draft {comm.rank}")
        draft.write_text(json.dumps(open_ports()))
        draft.rename(Path(folder, str(comm.rank)))
        is_done = numpy.zeros(1)
        while not is_done[0]:
            assert (comm.all_reduce(x) == expected).all()
            is_done[0] = Path(folder, "done").exists()
            comm.all_reduce(is_done, is_done, op="max")


def meets():
    gc.init(timeout=seconds(60)).close()


def without_ucx():
    """A rank without UCX: every rank names it."""
    if os.environ["RANK"] == "1":
        ucx._path = lambda: "/dev/null"
    try:
        gc.init(timeout=seconds(60))
    except gc.UsageError as error:
        sys.stdout.write(f"{error.code} {error.ranks}\n")


if __name__ == "__main__":
    if "UCX_BINDING" in os.environ:  # the path of a build with sanitizers
        sys.modules["gpucoll._ucx"] = extension.loaded("gpucoll._ucx", os.environ["UCX_BINDING"])
    name, *arguments = sys.argv[1:]
    programs = (attacked, calls, lost, meets, points, unlike, without_ucx)
    {program.__name__: program for program in programs}[name](*arguments)
