"""Operations on several streams of the emulated device run in order, whatever the interleaving of the streams."""

import pytest

from gpucoll.communicator.gpu import DeviceSpace, Gpu
from gpucoll.device.emulated import EmulatedDevice

pytestmark = pytest.mark.emulated
SEEDS = range(40)


class Nothing:
    """The transport of a lone rank."""

    capturable = True

    def check(self):
        """Report no failure."""


def in_order(seed, lost=""):
    """Return whether three operations, and the work of a stream beside the first, are done in order.

    `lost` leaves out one ordering call: "follow" of the second operation, "lead" of the stream beside.
    """
    device, done = EmulatedDevice(seed), []
    gpu = Gpu(device, Nothing(), Nothing())
    first, second, third = DeviceSpace(gpu, device.new_stream()), device.new_stream(), device.new_stream()
    first.stream.enqueue(lambda: done.append(1))
    gpu.order.passed(first.stream, None)
    if lost != "follow":
        gpu.order.follow(second)
    second.enqueue(lambda: done.append(2))
    gpu.order.mark(second, None)
    gpu.order.follow(third)
    third.enqueue(lambda: done.append(3))
    first.stream.enqueue(lambda: done.append("input"))
    beside = device.new_stream()
    if lost != "lead":
        first.lead(beside)
    beside.enqueue(lambda: done.append("beside"))
    for stream in (beside, third, second, first.stream):
        assert not list(device.settle(stream)), "nothing here waits for another rank"
    return [one for one in done if one in (1, 2, 3)] == [1, 2, 3] and done.index("input") < done.index("beside")


def test_operations_follow_each_other():
    assert all(in_order(seed) for seed in SEEDS)


@pytest.mark.mutant
@pytest.mark.parametrize("lost", ["follow", "lead"])
def test_without_an_event_they_do_not(lost):
    assert not all(in_order(seed, lost) for seed in SEEDS)
