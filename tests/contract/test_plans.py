"""Repeated calls, comm.plan and comm.explain: arguments are resolved once, and the decisions are reported."""

import json

import numpy
import pytest

import gpucoll as gc
from oracles import oracle


def calls_again(comm):
    """Repeated calls on the same arrays are right, and a call on changed views of the arrays notices the change."""
    for algorithm in ("ring", "auto"):
        x, out = numpy.arange(12.0).reshape(4, 3) + comm.rank, numpy.empty((4, 3))
        total = comm.size * numpy.arange(12.0).reshape(4, 3) + sum(range(comm.size))
        for _ in range(3):
            assert (comm.all_reduce(x, out=out, algorithm=algorithm) == total).all()
        sealed = out.view()
        sealed.flags.writeable = False
        for wrong, code in ((sealed, "GC-READONLY"), (out.reshape(12), "GC-SHAPE")):
            with pytest.raises(gc.ArgumentError, match=code + "]"):
                comm.all_reduce(x, out=wrong, algorithm=algorithm)
        whole, other = numpy.arange(4, dtype=numpy.int32), numpy.empty(4, numpy.int32)
        comm.all_reduce(whole.view(numpy.float32), out=other.view(numpy.float32), algorithm=algorithm)
        assert (comm.all_reduce(whole, out=other, algorithm=algorithm) == comm.size * whole).all()
    fixed = numpy.arange(5.0)
    fixed.flags.writeable = comm.rank != 0
    for _ in range(7):  # replayed in the end; the root's array is read-only
        assert (comm.broadcast(fixed, root=0) == numpy.arange(5.0)).all()
    carrier = numpy.full((2 * comm.size, 2), 0x38, numpy.uint8)  # the bits of 1.0
    found = comm.reduce_scatter_v(carrier, [2] * comm.size, dtype="float8_e4m3fn")
    assert (found.view(oracle.kind("float8_e4m3fn")) == comm.size).all()


def content(comm, turn, shape):
    count = int(numpy.prod(shape))
    return (numpy.arange(count, dtype=numpy.int64) * (comm.rank + 3) + 1000 * turn + comm.rank).reshape(shape)


def plans(comm):
    """A plan describes itself; random programs compare the results of plans with the oracle."""
    for collective, algorithm in (("reduce", "auto"), ("all_gather", "ring"), ("all_to_all", "auto")):
        x = content(comm, 0, (comm.size, 5))
        plan = comm.plan(collective, x, algorithm=algorithm)
        assert numpy.array_equal(x, content(comm, 0, x.shape))  # no data move before the first call
        assert plan() is plan() is plan.result
        assert plan.executor is not None
        assert algorithm in ("auto", plan.algorithm)
    x, out = content(comm, 1, (7,)), numpy.zeros(7, numpy.int64)
    plan, in_place, total = comm.plan("all_reduce", x, out), comm.plan("all_reduce", x, x), comm.all_reduce(x)
    assert plan() is out
    assert in_place() is x
    assert oracle.same_bits(out, total)
    assert oracle.same_bits(in_place(), total * comm.size)


def plans_refused(comm):
    """A plan refuses wrong arguments with the errors of the call."""
    x = content(comm, 0, (4,))
    for code, name, options in (("GC-COLLECTIVE", "all_reduc", {}), ("GC-OP", "all_reduce", {"op": "foo"}),
                                ("GC-ALGO", "all_reduce", {"algorithm": "rng"}), ("GC-ROOT", "reduce", {"root": 99})):
        with pytest.raises(gc.ArgumentError, match=code + "]"):
            comm.plan(name, x, **options)
    with pytest.raises(TypeError):
        comm.plan("all_reduce", x, root=0)
    plan = comm.plan("all_reduce", x)
    comm.close()
    with pytest.raises(gc.ClosedError):
        plan()


def explained(comm):
    """On the host, calls are counted and timed; on a device, calls return before their ends."""
    x, device = content(comm, 0, (512,)), "emulated" if comm.options.emulated else "cpu"
    before = comm.explain("all_reduce", x.nbytes, "int64")
    for _ in range(3):
        comm.all_reduce(x)
    after = comm.explain("all_reduce", x.nbytes, "int64", device)
    assert before.choice == after.choice == after.candidates[0]["algorithm"]
    calls = [row["calls"] for row in after.candidates]
    assert calls == [3 * (device == "cpu")] + [0] * (len(calls) - 1)
    assert all((row["measured"] is None) == (row["calls"] == 0) for row in after.candidates)
    assert json.loads(json.dumps(after)) == after
    assert str(after).splitlines()[-1].startswith(f"choice: {after.choice}: {after.reason}")
    for wrong in (("all_reduc", 8), ("all_reduce", -1), ("all_reduce", True), ("all_reduce", 8, "int8", "tpu")):
        with pytest.raises(gc.ArgumentError):
            comm.explain(*wrong)


def planned_messages(comm):
    """Planned messages around a ring have new content every time; a single send and receive work; errors come early."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, out, back, status = numpy.zeros(5, int), numpy.zeros(5, int), numpy.zeros(5, int), gc.Status()
    around = comm.plan("sendrecv", x, out, dst=right, src=left, tag=3)
    there, here = comm.plan("send", x, dst=right, tag=6), comm.plan("recv", out=back, src=left, tag=6, status=status)
    for turn in range(5):
        x[:] = numpy.arange(5) * comm.rank + turn
        assert around() is out
        assert (out == numpy.arange(5) * left + turn).all()
        x += 100
        with comm.group():
            there()
            here()
        assert (back == out + 100).all()
        assert (status.source, status.tag, status.count) == (left, 6, 40)
    assert comm.plan("sendrecv", x, out, dst=gc.PROC_NULL, src=gc.PROC_NULL)() is out
    for name, arguments in (("send", {"dst": comm.size}), ("recv", {"out": out, "src": -5}), ("send", {}),
                            ("sendrecv", {"out": x[:3], "dst": 0, "src": 0}), ("send", {"dst": 0, "tag": -1})):
        given = {"x": x} if name != "recv" else {}
        with pytest.raises(gc.ArgumentError):
            comm.plan(name, **given, **arguments)
    for name, arguments in (("send", {"dst": 0, "src": 0}), ("recv", {"src": 0, "dst": 0, "out": x}),
                            ("sendrecv", {"dst": 0, "src": 0, "out": out, "op": "sum"})):
        with pytest.raises(TypeError):
            comm.plan(name, **({"x": x} if name != "recv" else {}), **arguments)


PROGRAMS = (planned_messages, calls_again, plans, plans_refused, explained)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_calls_that_come_again(executor, program):
    executor.run(3, program)
