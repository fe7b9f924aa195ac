"""Operations on several streams of the emulated device: each follows the one before, whatever the streams do."""

import functools

import pytest

from gpucoll.communicator.gpu import DeviceSpace, Gpu
from gpucoll.device.emulated import EmulatedDevice

pytestmark = pytest.mark.emulated


class Nothing:
    """A transport of a lone rank."""

    capturable = True

    def check(self):
        """Nothing fails."""


def two_streams(seed, order=True, lead=True):
    """The order in which actions on two streams were done: of two operations, and of work that the second follows."""
    device, done = EmulatedDevice(seed), []
    gpu = Gpu(device, Nothing(), Nothing())
    first, second = DeviceSpace(gpu, device.new_stream()), device.new_stream()
    first.stream.enqueue(lambda: done.append("operation"))
    gpu.order.passed(first.stream, None)
    if order:
        gpu.order.follow(second)
    second.enqueue(lambda: done.append("next operation"))
    first.stream.enqueue(lambda: done.append("input"))
    third = device.new_stream()
    if lead:
        first.lead(third)
    third.enqueue(lambda: done.append("beside"))
    for stream in (third, second, first.stream):
        for _ in device.settle(stream):
            raise AssertionError("nothing here waits for another rank")
    return done


def in_order(done):
    return done.index("operation") < done.index("next operation") and done.index("input") < done.index("beside")


def test_operations_follow_each_other():
    assert all(in_order(two_streams(seed)) for seed in range(40))


@pytest.mark.mutant
@pytest.mark.parametrize("lost", ["order", "lead"])
def test_without_an_event_they_do_not(lost):
    assert not all(in_order(two_streams(seed, **{lost: False})) for seed in range(40))


def test_asynchronous_calls_follow_each_other():
    for seed in range(40):
        device, done = EmulatedDevice(seed), []
        gpu = Gpu(device, Nothing(), Nothing())
        streams = [device.new_stream() for _ in range(3)]
        for number, stream in enumerate(streams):
            gpu.order.follow(stream)
            stream.enqueue(functools.partial(done.append, number))
            gpu.order.mark(stream, None)
        for stream in streams:
            list(device.settle(stream))
        assert done == [0, 1, 2], seed
