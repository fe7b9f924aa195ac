"""The `peer` executor between processes: slabs that all of them map, kernels that give way to each other."""

import numpy
import pytest

import peer_schedules
from peer_schedules import Case

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]

ALGORITHMS = [("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("all_reduce", "ring"), ("all_reduce", "tree"),
              ("broadcast", "chain"), ("all_gather", "bruck"), ("all_to_all", "direct"), ("reduce_scatter", "ring"),
              ("barrier", "dissemination"), ("scan", "recursive_doubling")]


def schedules(comm, counts):
    """Every algorithm between the ranks of an mpi4py communicator; what is left of the slabs in /dev/shm."""
    import os

    from gpucoll.device.emulated import EmulatedDevice
    from gpucoll.executors.peer import PeerExecutor
    from gpucoll.links import MpiLink
    from gpucoll.waits import Waits

    class Order:
        def follow(self, stream):
            pass

    device = EmulatedDevice()
    link = MpiLink.of(comm, 60.0)
    executor, stream = PeerExecutor(device, Order(), link, 60.0), device.stream(None)
    for count in counts:
        for collective, algorithm in ALGORITHMS:
            case = Case(collective, algorithm, comm.size, count, root=comm.size - 1)
            task = case.task(comm.rank, stream)
            assert executor.serves(task) is None
            executor.run(task)
            Waits(60.0).run(device.settle(stream), collective)
            expected = case.output(comm.rank)
            assert expected is None or peer_schedules.same(task.output, expected, case), (collective, algorithm)
    executor.close()
    link.free()
    return [name for name in os.listdir("/dev/shm") if "gpucoll" in name]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_schedules(ranks, size):
    assert ranks(schedules, size, (1, 700, 30_000), timeout=120) == [[]] * size


def test_the_data_are_not_alike():
    """What the test compares differs from rank to rank."""
    first, second = Case("all_reduce", "ring", 2, 100).inputs
    assert not numpy.array_equal(first, second)
