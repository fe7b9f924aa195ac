"""Operations on several streams of the emulated device: each follows the one before, whatever the streams do."""

import pytest

from gpucoll.communicator.gpu import DeviceSpace, Gpu
from gpucoll.device.emulated import EmulatedDevice

pytestmark = pytest.mark.emulated
SEEDS = range(40)


class Nothing:
    """A transport of a lone rank."""

    capturable = True

    def check(self):
        """Nothing fails."""


def in_order(seed, lost=""):
    """Whether actions are done in order: of three operations, and of work that a stream beside the first goes on from.

    What is `lost` is not asked for: "follow" by the second, "lead" by the stream beside.
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
