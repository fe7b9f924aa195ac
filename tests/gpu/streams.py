"""Programs on streams: the order of calls, and the freedom of the host from waiting."""

import time
import types
from unittest.mock import patch

import cupy
import numpy

from gpu.helpers import held, ramp, ranges, same
from harness.node_ranks import on_two_nodes
from harness.paths import passed


def streams(comm, algorithm):
    """A call follows its stream and nothing else; the host does not wait."""
    total = sum(ranges(comm, 3000, 4))
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for stream in (first, second, cupy.cuda.Stream.null):
        with stream:
            same(comm.all_reduce(ramp(comm, 3000, 4), algorithm=algorithm), total)  # loads the kernels
    with held(first):
        with first:
            x = ramp(comm, 3000, 4)
        y = comm.all_reduce(x, stream=first, algorithm=algorithm)
        assert not first.done
    with first:
        y += 1  # continues after the call
        same(y, total + 1)
    ready = first.record()
    second.wait_event(ready)
    with second:
        z = comm.all_reduce(y, algorithm=algorithm)  # another stream: follows the call before
        same(z, (total + 1) * comm.size)
    third = cupy.cuda.Stream(non_blocking=True)
    foreign = types.SimpleNamespace(__cuda_stream__=lambda: (0, third.ptr))  # another library's stream
    with third:
        same(comm.all_reduce(ramp(comm, 3000, 4), stream=foreign, algorithm=algorithm), total)
        same(comm.all_reduce(ramp(comm, 3000, 4), stream=third.ptr, algorithm=algorithm), total)
    comm.barrier()


def shares(comm, algorithm, carrier):
    """`stats` has the delay of a rank's GPU and the waits of the others, though the host enqueues without waiting.

    The ranks' stamps go by the engine's memory, or between hosts by messages.
    """
    delay, kind = 0.2, ("all_reduce", 1 << 20)
    stream, late = cupy.cuda.Stream(non_blocking=True), comm.size - 1

    def figures():
        """Return the seconds after four more calls, since later calls carry the stamp of an earlier call."""
        for _ in range(4):
            comm.all_reduce(x, out, stream=stream, algorithm=algorithm)
            comm.all_reduce(out[:3], stream=stream, algorithm=algorithm)  # too short to be timed, or to carry stamps
            stream.synchronize()
        comm.barrier()
        found = comm.stats()[kind]
        return [found[f"{name}_seconds"] for name in ("own", "waiting", "moving")]

    if carrier == "messages":
        with on_two_nodes(comm.mpi, None) as apart:
            return shares(apart, algorithm, "memory")
    with stream:
        x, out = ramp(comm, 1 << 18), cupy.empty(1 << 18, numpy.float32)
        for _ in range(20):  # on a busy machine another rank may come late, or a GPU answers no question
            before = figures()
            if comm.rank == late:
                stream.launch_host_func(lambda _: time.sleep(delay), None)
            comm.all_reduce(x, out, stream=stream, algorithm=algorithm)
            assert comm.rank != late or not stream.done
            own, waiting, moving = (now - then for now, then in zip(figures(), before, strict=True))
            # A delay is measured against the other ranks: a lone rank has none.
            seen = comm.size == 1 or (own if comm.rank == late else waiting) > delay / 2
            if all(comm.mpi.allgather(seen)):
                break
        else:
            raise AssertionError((comm.rank, own, waiting, moving))
    assert moving >= 0
    same(out, sum(ranges(comm, 1 << 18)))


def on_both_sides(comm):
    """Equal calls on the host stay eager between calls on a GPU, and every result is right."""
    engine, x = comm._core.host._shared.engine, cupy.full(5, comm.rank, numpy.float32)
    for number in range(8):
        assert (comm.broadcast(numpy.full(3, number * (comm.rank == 0))) == number).all()
        assert engine.is_eager(comm.rank, engine.call_count) == (number >= 4)
        same(comm.all_reduce(x), numpy.full(5, comm.size * (comm.size - 1) // 2, numpy.float32))


def asynchronous(comm, algorithm):
    """`wait` orders the current stream, `synchronize` blocks, `is_completed` does neither."""
    total = sum(ranges(comm, 5000, 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        same(comm.all_reduce(ramp(comm, 5000, 2), async_op=True, algorithm=algorithm).wait(), total)
        with held(stream):
            work = comm.all_reduce(ramp(comm, 5000, 2), async_op=True, algorithm=algorithm)
            later = comm.all_reduce(ramp(comm, 5000, 2), async_op=True, algorithm=algorithm)
            assert not work.is_completed()
            y = work.wait() + numpy.float32(1)  # enqueued while nothing has begun
            assert not later.is_completed()
        same(y, total + 1)
        later.synchronize()
        assert later.is_completed()
        same(later.wait(), total)
        works = [comm.all_gather(ramp(comm, 70, k), async_op=True) for k in range(6)]
        for k, one in reversed(list(enumerate(works))):
            same(one.wait(), numpy.stack(ranges(comm, 70, k)))
    comm.barrier(async_op=True).wait()


def captured(comm, algorithm):
    """A call inside the user's capture becomes part of the graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = ramp(comm, 2000)
        out = cupy.empty_like(x)
        comm.all_reduce(x, out, algorithm=algorithm)  # loading and allocating come before
        stream.begin_capture()
        x += 1
        comm.all_reduce(x, out, algorithm=algorithm)
        out *= 2
        graph = stream.end_capture()
        expected = ranges(comm, 2000)
        for turn in range(1, 4):
            graph.launch()
            same(out, 2 * sum(one + turn for one in expected).astype(numpy.float32))
    same(comm.all_reduce(ramp(comm, 10)), sum(ranges(comm, 10)))


def launched(comm, algorithm):
    """Repeated calls on the same arrays take one launch; on any streams, the calls still follow each other."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        x, out = ramp(comm, 500), cupy.zeros(500, numpy.float32)
    with second:
        again = cupy.zeros(500, numpy.float32)
    first.synchronize()
    second.synchronize()
    for _ in range(7):
        comm.all_reduce(x, out, algorithm=algorithm, stream=first)
        comm.all_reduce(out, again, algorithm=algorithm, stream=second)
    total = sum(ranges(comm, 500))
    with second:
        same(again, total * comm.size)
    comm.barrier()  # the host waits, and nothing is left to load
    with held(first):
        with first:
            x += 1
        comm.all_reduce(x, out, algorithm=algorithm, stream=first)
        comm.all_reduce(out, again, algorithm=algorithm, stream=second)
        assert not second.done
    with second:
        same(again, (total + comm.size) * comm.size)
    for repeat in range(5):  # new results, in the memory of the result before
        with first:
            x = ramp(comm, 500, repeat)
            made = comm.all_reduce(x, op="avg", algorithm=algorithm, stream=first)
            same(made, sum(ranges(comm, 500, repeat)) / numpy.float32(comm.size))
            del made
            with held(first):
                made = comm.all_reduce(x, algorithm=algorithm, stream=first)
                assert not first.done
            same(made, sum(ranges(comm, 500, repeat)))
            del made
    return [bool(one.launches) for one in comm._core.calls._known.values() if not one.is_new]


def kept_by_address(comm):
    """Return the number of graphs kept by the addresses of arrays."""
    launched(comm, "ring")
    return len(comm._core.gpus["cuda"].made_executors[0]._graphs.direct)


def enqueued(comm, *algorithms):
    """Return what each algorithm enqueues on this rank: NCCL's groups, kernels, and the share of the array sent.

    The arrays are too long for graphs.
    """
    from cupy._machine import MACHINE  # of the emulation

    x, found, submit = cupy.ones(3 << 17, numpy.float32), [], MACHINE.submit

    def counting(queue, begin, after=(), kernel=False):
        if hasattr(begin, "calls"):
            groups.append(sum(one.source.nbytes for one in begin.calls if one.sends))
        kernels.append(kernel)
        submit(queue, begin, after, kernel)

    total = numpy.full(3 << 17, comm.size, numpy.float32)
    for algorithm in algorithms:
        same(comm.all_reduce(x, cupy.empty_like(x), algorithm=algorithm), total)
        groups, kernels, out = [], [], cupy.empty_like(x)
        with patch.object(MACHINE, "submit", counting):
            comm.all_reduce(x, out, algorithm=algorithm)
        same(out, total)
        found.append([len(groups), sum(kernels) - len(groups), sum(groups) / x.nbytes])
    return found


def passes(comm, algorithm):
    """Return the files and the lines of Python that a repeated call passes in the current stream.

    First with a given result, then with a new one, and both with the stream named.
    """
    stream, found = cupy.cuda.Stream(non_blocking=True), []
    with stream:
        x, out = ramp(comm, 500), cupy.zeros(500, numpy.float32)
    for given, named in ((out, None), (None, None), (out, stream), (None, stream)):
        counts = []
        for _ in range(9):
            comm.barrier()  # the comparison of the call before has ended
            with stream:
                counts.append(passed(lambda y=given, on=named: comm.all_reduce(x, y, algorithm=algorithm, stream=on)))
        found.append(min(counts))
    return found


def replayed(comm, algorithm):
    """From the second call on, small calls are replayed as graphs: on different arrays and streams every time."""
    pool = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for repeat in range(9):
        with pool[repeat % 2]:
            x = ramp(comm, 257, repeat)
            in_place = (repeat + comm.rank) % 3 == 0
            same(comm.all_reduce(x, x if in_place else None, algorithm=algorithm), sum(ranges(comm, 257, repeat)))
            same(comm.all_reduce(cupy.ones(8), op="max", algorithm=algorithm), numpy.ones(8))
            root = repeat % comm.size
            same(comm.broadcast(cupy.full(31, comm.rank), root), numpy.full(31, root))
            comm.barrier()
        if repeat == 1:
            found = len(comm._core.gpus["cuda"].made_executors[0]._graphs.buffered)
    return found
