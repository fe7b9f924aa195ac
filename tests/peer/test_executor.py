"""The `peer` executor on the emulated device, with ranks as threads: behaviour beyond the contract of all executors.

Shared memory, programs without an end, and absent ranks.
"""

import threading
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.device import sources
from harness import thread_ranks
from harness.node_ranks import staged
from harness.pace import seconds

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]


@pytest.fixture(autouse=True)
def emulated(monkeypatch, emulated_kernels):
    monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")


def on_threads(size, program):
    """Run `program(comm)` on a thread for each rank, with the executor `peer`."""
    return thread_ranks.on_threads(size, program, timeout=seconds(60), executor="peer")


def executor(comm):
    return comm._core.gpus["emulated"].made_executors[0]


def values(comm, count):
    """Return the inputs of all ranks, with exact sums."""
    return [numpy.arange(count, dtype=numpy.float32) % 1000 + rank for rank in range(comm.size)]


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_rank_that_never_comes_is_a_timeout(algorithm):
    over = threading.Event()

    def program(comm):
        x, out, other = (numpy.ones(30_000, numpy.float32) for _ in range(3))
        assert (comm.all_reduce(x, out, algorithm=algorithm) == 2).all()
        if comm.rank == 1:
            over.wait()
            return
        try:
            executor(comm)._handshake.heap._heap["patience"] = 200_000_000  # nanoseconds
            with pytest.raises(gc.CollectiveTimeout, match="from rank 1") as late:
                comm.all_reduce(x, other, algorithm=algorithm)
            assert late.value.ranks == (1,)
            with pytest.raises(gc.RevokedError):
                comm.all_reduce(x, algorithm=algorithm)
        finally:
            over.set()

    on_threads(2, program)


def test_a_slab_that_one_rank_cannot_reach_is_read_by_none():
    def program(comm):
        comm.barrier()
        comm.all_reduce(numpy.ones(3, numpy.float32))
        if comm.rank == 1:
            executor(comm)._handshake.memory.reach = mock.Mock(side_effect=OSError("not permitted"))
        x, out = (comm.empty(50_000, "float32") for _ in range(2))
        x[:] = values(comm, x.size)[comm.rank]
        assert (comm.all_reduce(x, out, algorithm="two_shot") == sum(values(comm, x.size))).all()
        assert staged(comm).any()

    on_threads(2, program)


@pytest.mark.parametrize("able", [(True, True), (True, False)])
def test_the_length_of_a_message_chooses_the_packets(able):
    """Packets of 16 bytes, of 128 bytes if all ranks can use these, and none for long messages; the same bits."""
    def program(comm):
        device = comm._core.gpu("emulated").device
        with mock.patch.object(device, "moves_rows", return_value=able[comm.rank]):
            for count, kernel in ((4096, "packets"), (4097, "ll128" if all(able) else "packets"),
                                  (16385, "ll128" if all(able) else "fold_all"), (32768, "ll128"), (32769, "fold_all")):
                everyone = values(comm, count)
                result = comm.all_reduce(everyone[comm.rank], algorithm="one_shot")
                assert (result == everyone[0] + everyone[1]).all()
                if all(able) or kernel != "ll128":
                    assert f"{kernel}_float32_sum" in {one.entry for one in device.kernels._loaded
                                                       if isinstance(one, sources.Instance)}
            loaded = {one.entry for one in device.kernels._loaded if isinstance(one, sources.Instance)}
            assert ("ll128_float32_sum" in loaded) == all(able)

    on_threads(2, program)


def explained_alone(comm):
    """Rank 0 asks alone: making the peer executor would wait for the other rank."""
    comm._core.gpu("emulated")
    if comm.rank == 0:
        assert comm.explain("all_reduce", 1024, device="emulated")
    return comm._core.gpus["emulated"].make_peer is not None


def test_an_explanation_waits_for_no_rank():
    assert on_threads(2, explained_alone) == [True, True]


def test_a_groups_messages_come_before_the_collectives_on_every_rank():
    """A kernel that waits for the other rank must not precede, on one rank only, a message that the other waits for."""
    began = threading.Event()

    def program(comm):
        other, waits = 1 - comm.rank, comm._core.waits
        x, sent, took = (numpy.full(9, comm.rank + number, numpy.float32) for number in range(3))
        comm.all_reduce(x)  # the ranks meet
        comm.barrier()

        def start(work, begin=waits.start):
            started = begin(work)
            began.set() if comm.rank == 1 else waits.until(started.is_enqueued, "recv", float("inf"))
            return started  # on rank 0 after rank 1's answer, so before rank 0's collective

        assert comm.rank == 1 or began.wait(seconds(20))
        with mock.patch.object(waits, "start", start), comm.group():
            comm.recv(took, other)
            total = comm.all_reduce(x)
            comm.send(sent, other)
        assert (total == 1).all()
        assert (took == other + 1).all()

    thread_ranks.on_threads(2, program, timeout=seconds(20), executor="peer")
