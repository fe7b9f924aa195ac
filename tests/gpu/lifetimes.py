"""Programs on CuPy arrays without other references: a call keeps its arrays until the device has finished."""

import contextlib
import functools
import gc as collector
import threading

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, held, ramp, ranges, refused, same
from programs import collectives

BLOCK = 600  # elements of a block; the arrays of a call have a block for each rank
CALLS = 80
GARBAGE = numpy.float32(-1e9)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "gather_v", "scatter_v")


def values(comm, rank):
    return numpy.arange(comm.size * BLOCK, dtype=numpy.float32).reshape(comm.size, BLOCK) + numpy.float32(7 * rank)


def wanted(comm, collective):
    """Return this rank's expected result, by NumPy: the root is the last rank."""
    xs, rank, root = [values(comm, rank) for rank in range(comm.size)], comm.rank, comm.size - 1
    none = numpy.zeros_like(xs[0])
    return {
        "all_reduce": lambda: sum(xs), "reduce": lambda: sum(xs) if rank == root else None,
        "broadcast": lambda: xs[root], "all_gather": lambda: numpy.stack(xs),
        "gather": lambda: numpy.stack(xs) if rank == root else None, "scatter": lambda: xs[root][rank],
        "reduce_scatter": lambda: sum(xs)[rank], "all_to_all": lambda: numpy.stack([x[rank] for x in xs]),
        "scan": lambda: sum(xs[:rank + 1]), "exscan": lambda: sum(xs[:rank], start=none),
        "all_gather_v": lambda: xs, "gather_v": lambda: xs if rank == root else None,
        "scatter_v": lambda: xs[root][rank:rank + 1], "reduce_scatter_v": lambda: sum(xs)[rank:rank + 1],
        "all_to_all_v": lambda: [x[rank:rank + 1] for x in xs],
    }[collective]()


def arguments(comm, collective, *, in_place=False):
    """Return new arrays for a call, referenced only by the caller, and the options."""
    root = comm.size - 1
    x = cupy.asarray(values(comm, comm.rank))
    if collective in ("scatter_v", "all_to_all_v"):
        x = [x[k:k + 1] + numpy.float32(0) for k in range(comm.size)]
    rooted = {"root": root} if collective in ROOTED else {}
    if collective in ("scatter", "scatter_v") and comm.rank != root:
        x = None
    if collective == "reduce_scatter_v":
        return [x, [1] * comm.size], rooted
    return [x, x] if in_place else [x], rooted


def noise(comm):
    """Fill memory as large as the call's with garbage: overwrites memory freed too early."""
    collector.collect()
    sizes = (BLOCK, comm.size * BLOCK, comm.size * comm.size * BLOCK) * 3
    return [cupy.full(size, GARBAGE) for size in sizes]


def dropped(comm, collective, algorithm, *, in_place):
    """Drop every reference to the arrays before the device begins, and overwrite their memory if free."""
    expected = wanted(comm, collective)
    stream = cupy.cuda.Stream(non_blocking=True)

    def call(**more):
        given, options = arguments(comm, collective, in_place=in_place)
        return getattr(comm, collective)(*given, **options, algorithm=algorithm, **more)

    with stream:
        check(call(), expected)  # loading, connecting and one-time allocations come before
        with held(stream):
            found, garbage = call(), noise(comm)
        check(found, expected)
        with held(stream):
            work, more = call(async_op=True), noise(comm)
            found = work.wait()
        check(found, expected)
        garbage += more
        if not collective.endswith("_v") and collective != "scatter":  # these meet on the host in every call
            given, options = arguments(comm, collective, in_place=in_place)
            plan = comm.plan(collective, *given, **options, algorithm=algorithm)
            del given
            garbage += noise(comm)
            check(plan(), expected)
            given, options = arguments(comm, collective, in_place=in_place)
            stream.begin_capture()
            found = getattr(comm, collective)(*given, **options, algorithm=algorithm)
            graph = stream.end_capture()
            del given
            garbage += noise(comm)
            graph.launch()
            check(found, expected)
            graph.launch()  # in place: on the current contents
    stream.synchronize()
    assert all((one.get() == GARBAGE).all() for one in garbage), "somebody else's memory was written"


def check(found, expected):
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif expected is not None:
        same(found, expected)


def lifetimes(comm, *algorithms):
    """Every collective by each of its algorithms, out of place, and in place if possible."""
    for collective in [*collectives.REDUCTIONS, *collectives.MOVEMENTS]:
        for algorithm in algorithms:
            given, options = arguments(comm, collective)
            if algorithm == "native" and refused("GC-ALGO", getattr(comm, collective), *given, **options,
                                                 algorithm="native"):
                continue
            if algorithm in ("native", "auto", *gc.algorithms(collective, size=comm.size)):
                for in_place in {False, collective in ("all_reduce", "all_to_all", "scan")}:
                    dropped(comm, collective, algorithm, in_place=in_place)


def many_calls(comm, algorithm):
    """More different calls than are remembered, each on its own stream, while the first stream is held.

    A graph captured before them still works.
    """
    comm._core.calls.most = CALLS // 4
    stream = cupy.cuda.Stream(non_blocking=True)
    later = [cupy.cuda.Stream(non_blocking=True) for _ in range(1, CALLS)]
    with stream:
        x = cupy.asarray(values(comm, comm.rank)).reshape(-1)
        expected = wanted(comm, "all_reduce").reshape(-1)
        same(comm.all_reduce(x, algorithm=algorithm), expected)
        graph = None
        if comm.mpi is not None:  # threads meet on the host in every call
            stream.begin_capture()
            captured = comm.all_reduce(x, algorithm=algorithm)
            graph = stream.end_capture()
        with held(stream):
            comm.all_reduce(x, algorithm=algorithm)
            outs = [comm.all_reduce(x[:-k], stream=one, algorithm=algorithm) for k, one in enumerate(later, 1)]
            garbage = noise(comm)
        for k, (one, out) in enumerate(zip(later, outs, strict=True), 1):
            with one:
                same(out, expected[:-k])
        if graph is not None:
            graph.launch()
            same(captured, expected)
        assert all((one.get() == GARBAGE).all() for one in garbage)


def elsewhere(comm, *algorithms):
    """Arrays of the current stream are passed with ``stream=``, and dropped before that stream begins.

    CuPy's pool hands the memory out again on the current stream, which waits for nothing.
    """
    ours, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def call(collective, options, *given):
        other.wait_event(ours.record())
        return getattr(comm, collective)(*given, **options, stream=other)

    def made(how, collective, algorithm):
        """Return the result of a call, with no other reference to its arrays."""
        given, options = arguments(comm, collective)
        options["algorithm"] = algorithm
        if how == "plan":
            plan = comm.plan(collective, *given, **options, stream=other)
            del given
            other.wait_event(ours.record())
            return plan()
        with comm.group() if how == "group" else contextlib.nullcontext():
            return call(collective, options, *given)

    for collective in [*collectives.REDUCTIONS, *collectives.MOVEMENTS]:
        meets = collective.endswith("_v") or collective == "scatter"  # on the host in every call
        for algorithm in algorithms:
            if algorithm not in ("auto", *gc.algorithms(collective, size=comm.size)):
                continue
            for how in ("call", "call", *(() if meets else ("plan", "group"))):
                with ours:
                    made(how, collective, algorithm)  # loads and allocates
                    other.synchronize()
                    with held(other):
                        found = made(how, collective, algorithm)
                        garbage = noise(comm)
                ours.synchronize()  # the stream of `noise`
                with other:
                    check(found, wanted(comm, collective))
                    assert all((one.get() == GARBAGE).all() for one in garbage), "somebody else's memory was written"


def repeated_elsewhere(comm, algorithm):
    """The same for calls known by the place of their arrays, and for messages."""
    ours, other, places = *(cupy.cuda.Stream(non_blocking=True) for _ in range(2)), set()
    with ours:
        out = cupy.empty(BLOCK, numpy.float32)
        comm.all_reduce(ramp(comm, BLOCK), out, stream=other, algorithm=algorithm)  # loads and allocates
        other.synchronize()
        for turn in range(16):
            x = ramp(comm, BLOCK, turn)
            places.add(x.data.ptr)
            with held(other):
                other.wait_event(ours.record())
                comm.all_reduce(x, out, stream=other, algorithm=algorithm)
                del x
                garbage = [cupy.full(BLOCK, GARBAGE) for _ in range(3)]
            other.synchronize()
            same(out, sum(ranges(comm, BLOCK, turn)))
            del garbage
        assert len(places) < 8  # so most calls were known
    messages_elsewhere(comm)


def same_objects(comm, algorithm):
    """Calls known by the identity of their arrays, where arrays end, streams change, and a graph is captured."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[1]:
        kept, result, total = ramp(comm, BLOCK), cupy.empty(BLOCK, numpy.float32), sum(ranges(comm, BLOCK))
    streams[1].synchronize()
    known = comm._core.calls.same
    for turn, stream in enumerate([stream for stream in streams for _ in range(2)]):
        with stream:
            x, out = ramp(comm, BLOCK, turn), cupy.empty(BLOCK, numpy.float32)
            for one in list(known):  # new arrays may have the numbers of arrays that have ended
                known[*one[:4], id(x), id(out)] = known[one]
            for _ in range(4):
                same(comm.all_reduce(x, out, algorithm=algorithm), sum(ranges(comm, BLOCK, turn)))
                same(comm.all_reduce(kept, result, algorithm=algorithm), total)
    assert known, "no call was known by its arrays"
    with streams[1]:
        for change in (1, 2):
            with held(streams[1]):
                kept += change  # work that a call on another stream would overtake
                comm.all_reduce(kept, result, algorithm=algorithm)
            total += change * comm.size
            same(result, total)
    if algorithm == "native":
        streams[1].begin_capture()
        with streams[1]:
            comm.all_reduce(kept, result, algorithm=algorithm)
            graph, kept = streams[1].end_capture(), None  # the graph needs the memory of `kept`
            garbage = [cupy.full(BLOCK, GARBAGE) for _ in range(8)]
            result[...] = 0
            graph.launch(streams[1])
            same(result, total)
            del garbage


def messages_elsewhere(comm):
    """Messages on a stream of their own hold their arrays."""
    ours, right, left = cupy.cuda.Stream(non_blocking=True), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with ours:
        for turn in range(5):
            out = cupy.zeros(BLOCK, numpy.float32)
            with held(ours):
                work = comm.sendrecv(ramp(comm, BLOCK, turn), out, right, left, async_op=True)
                garbage = [cupy.full(BLOCK, GARBAGE) for _ in range(3)]
            work.wait()
            same(out, ranges(comm, BLOCK, turn)[left])
            assert all((one.get() == GARBAGE).all() for one in garbage)


def reused(comm, *algorithms):
    """A block of `comm.empty` goes to a new array on another stream while work on the old array is under way.

    The work, held up on all ranks or on one rank alone: a call that reads or writes the old array; a kernel of the
    program; an asynchronous call and a message, which hold the array until their end.
    """
    right, left, xs = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, ranges(comm, BLOCK)

    for algorithm in algorithms:
        call = functools.partial(comm.all_reduce, algorithm=algorithm)
        works = {
            "reads": (call, sum(xs)),
            "reads on a third stream": (call, sum(xs)),
            "writes": (functools.partial(added_in_place, call), sum(xs) + 1),
            "program": (lambda x, out: x + numpy.float32(1), xs[comm.rank] + 1),
            "holds, asynchronous": (functools.partial(waited, call), sum(xs)),
            "holds, message": (lambda x, out: comm.sendrecv(x, out, right, left), xs[left])}
        for turn in range(comm.size + 1):
            behind = range(comm.size) if turn == comm.size else (turn,)
            for name, (work, expected) in works.items():
                reuse(comm, behind, work, expected, holds=name.startswith("holds"), is_apart=name.endswith("stream"))


def added_in_place(call, x, out):
    return call(x, x) + numpy.float32(1)


def waited(call, x, out):
    return call(x, out, async_op=True).wait()


def reuse(comm, behind, work, expected, *, holds, is_apart):
    """Drop the array of `work`, and overwrite a new array in its block on another stream, before `work` has begun.

    The streams of `work` on the ranks `behind` are held up. With `is_apart` the array is made and dropped while another
    stream is current.
    """
    one, two, three = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    where = three if is_apart else one
    with one:
        old, out = comm.empty(BLOCK, "float32", device="cuda"), cupy.zeros(BLOCK, numpy.float32)
        old[...] = ramp(comm, BLOCK)
        where.wait_event(one.record())
        with held(where) if comm.rank in behind else contextlib.nullcontext():
            with where:
                found = work(old, out)
            place = old.data.ptr
            del old
            collector.collect()
            with two:
                new = comm.empty(BLOCK, "float32", device="cuda")
                new[...] = GARBAGE
        assert holds or new.data.ptr == place
    with where:
        same(found, expected)
    with two:
        same(new, numpy.full(BLOCK, GARBAGE))


def let_go(comm):
    """A plan, and a call known by its arrays, forgotten by the table of calls, are let go of before they have begun.

    A new call may then use the memory of their tables.
    """
    xs, most = ranges(comm, BLOCK), comm._core.calls.most
    comm._core.calls.most = 8
    ours, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with ours:
        x, out, places = ramp(comm, BLOCK), cupy.empty(BLOCK, numpy.float32), cupy.empty((9, BLOCK), numpy.float32)
        for length, name in enumerate(("plan", "known"), BLOCK - 60):
            call = comm.plan("all_reduce", x[:length], out[:length], algorithm="ring") if name == "plan" else \
                functools.partial(comm.all_reduce, x[:length], out[:length], algorithm="ring")
            call()
            for less in range(1, 17):  # their plans fill the table of compiled calls, and not that of known calls
                comm.plan("all_reduce", x[:length // 2 - less], out[:length // 2 - less], algorithm="tree")()
            ours.synchronize()
            out[:] = 0
            comm.all_reduce(x[:4], algorithm="ring")  # lets go of the events that have come
            with held(ours):
                call()
                del call
                for place in places if name == "known" else ():
                    comm.all_reduce(x[:length // 2 - 16], place[:length // 2 - 16], algorithm="tree")
                collector.collect()
                for less in (20, 21, 22):
                    comm.all_reduce(x[:length - less], algorithm="ring", stream=other)
            same(out[:length], sum(one[:length] for one in xs))
    comm._core.calls.most = most


def freed_windows(comm):
    """A program's kernel reads an array in a window after the communicator's end, and a new window takes its memory."""
    other, last = (gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, nccl={"windows": True}) for _ in range(2))
    with other:
        x = other.empty(BLOCK, "float32", device="cuda")
        x[...] = ramp(comm, BLOCK)
        other.all_reduce(x, x, algorithm="native")
    stream, gate = cupy.cuda.Stream(non_blocking=True), threading.Event()
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.launch_host_func(lambda _: gate.wait(1), None)
        found = x + numpy.float32(1)
        del x, other
        collector.collect()
        last.empty(BLOCK, "float32", device="cuda")
        gate.set()
        same(found, sum(ranges(comm, BLOCK)) + 1)
    last.close()


def dropped_in_capture(comm):
    """Memory of a communicator at its end is dropped during the capture of a graph, which keeps its results."""
    for settings in ({}, {"nccl": {"windows": True}}):
        with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, **settings) as other:
            x = other.zeros(BLOCK, "float32", device="cuda")
        out, stream = ramp(comm, BLOCK), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            out += 1
            del x, other
            collector.collect()
            stream.end_capture().launch()
            same(out, ranges(comm, BLOCK)[comm.rank] + 1)


def reused_windows(comm):
    """The same for memory in NCCL's windows."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, nccl={"windows": True}) as other:
        reused(other, "native")
