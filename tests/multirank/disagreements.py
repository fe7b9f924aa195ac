"""Calls in which rank 1 differs from the other ranks, or only seems to: the call of rank 1, and the errors of all."""

import contextlib
import functools
import math
from typing import NamedTuple

import numpy

import gpucoll as gc
from gpucoll.core.collectives import COLLECTIVES

LENGTHS = {"short": 12, "long": 1 << 17}
CULPRIT = 1
VECTOR = tuple(name for name in COLLECTIVES if name.endswith("_v"))
# The root announces dtype and shape to the other ranks. A rank with another dtype or shape refuses the call.
TELLING = ("scatter", "scatter_v")
REFUSALS = (gc.ArgumentError, gc.DtypeError)


class Case(NamedTuple):
    """How rank 1 differs (`way`) and the error of all ranks (`code`): "GC-PEER" for a refusal, "" for the same call."""

    collective: str
    algorithm: str
    way: str
    code: str


def call(comm, name, algorithm, count, *, shape=None, dtype="f8", op="sum", root=0, **more):
    """Make a collective call and return the result; after an error, check that inputs (and `out`) are unchanged."""
    row = COLLECTIVES[name]
    shape = (count,) if shape is None else shape
    options = {"algorithm": algorithm} | ({"op": op} if row.reduces else {}) | ({"root": root} if row.rooted else {})
    x = (numpy.arange(math.prod(shape)) % 5 + comm.rank).reshape(shape).astype(dtype)
    if name == "barrier":
        return comm.barrier(**options, **more)
    if name in ("scatter_v", "all_to_all_v"):
        given = [x + other for other in range(comm.size)] if name == "all_to_all_v" or comm.rank == root else None
    elif name == "reduce_scatter_v":
        given = numpy.concatenate([x] * comm.size)
        options["counts"] = [len(x)] * comm.size
    else:
        given = numpy.stack([x + other for other in range(comm.size)]) if row.input.blocks else x
        given = given if name != "scatter" or comm.rank == root else None
    if name == "scatter" and "out" not in more:
        more["out"] = numpy.zeros(shape, dtype)
    arrays = given if isinstance(given, list) else [] if given is None else [given]
    before = [one.copy() for one in arrays]
    try:
        return getattr(comm, name)(given, **options, **more)
    except gc.GpucollError:
        may_write = comm.check == "deferred"  # data have moved, so that a failed call may have written results
        kept = [] if may_write and name == "broadcast" else zip(arrays, before, strict=True)
        assert all((one == other).all() for one, other in kept)
        assert may_write or "out" not in more or not numpy.any(more["out"])
        raise


def cases(collective, algorithms):
    """Yield every way in which rank 1 can differ in `collective`."""
    row, vector = COLLECTIVES[collective], collective in VECTOR
    telling = collective in TELLING
    for index, algorithm in enumerate(algorithms):
        if row.input.where != "nowhere":
            yield from [] if collective == "scatter_v" else [
                Case(collective, algorithm, "dtype", "GC-PEER" if telling else "GC-DTYPE"),
                Case(collective, algorithm, "shape", "GC-PEER" if telling else "GC-SHAPE")]
            yield from [] if vector else [Case(collective, algorithm, "length", "GC-PEER" if telling else "GC-SHAPE")]
            yield Case(collective, algorithm, "plan", "")
        yield from [Case(collective, algorithm, "op", "GC-OP")] if row.reduces else []
        yield from [Case(collective, algorithm, "root", "GC-ROOT")] if row.rooted else []
        if 0 < index < len(algorithms) - 1:
            yield Case(collective, algorithm, "algorithm", "GC-ALGO")
        yield from [Case(collective, algorithm, way, code) for way, code in (
            ("collective", "GC-COLLECTIVE"), ("refusal", "GC-PEER"), ("order", "GC-COLLECTIVE"), ("async", ""),
            ("group", ""))]
        yield from [Case(collective, algorithm, "in place", "")] if collective in ("all_reduce", "scan") else []


def made(comm, case, count, other):
    """Make this rank's call of a case; `other` is another algorithm, for the culprit."""
    name, algorithm, way, _ = case
    same = functools.partial(call, comm, name, algorithm, count)
    elsewhere = "barrier" if name != "barrier" else "all_reduce"
    if way == "order":
        return _both(comm, [same, functools.partial(call, comm, elsewhere, "auto", count)])
    if comm.rank != CULPRIT:
        return same()
    match way:
        case "dtype":
            return same(dtype="f4")
        case "shape":
            return same(shape=(count // 2, 2))
        case "length":
            return same(shape=(count - 1,))
        case "op":
            return same(op="max")
        case "root":
            return same(root=1)
        case "algorithm":
            return call(comm, name, other, count)
        case "collective":
            return call(comm, elsewhere, "auto", count)
        case "refusal":
            return call(comm, name, "nonsense", count)
        case "async":
            return same(async_op=True).wait()
        case "group":
            with comm.group():
                result = same()
            return result
        case "plan":
            return _planned(comm, name, algorithm, count)
        case "in place":
            return getattr(comm, name)(x := numpy.arange(count) % 5 + comm.rank + 0.0, x, algorithm=algorithm)
    raise AssertionError(way)


def _both(comm, calls):
    """Make two calls, on the culprit in the opposite order; raise the last error, if any."""
    told = None
    for one in calls[::-1] if comm.rank == CULPRIT else calls:
        with contextlib.suppress(*REFUSALS):
            try:
                one()
            except gc.GpucollError as error:
                told = error
    if told is not None:
        raise told
    return None


def _planned(comm, name, algorithm, count):
    """Make the same call by a plan."""
    kept = []

    class Planner:
        rank, size = comm.rank, comm.size

        def __getattr__(self, name):
            def planned(x, **options):
                kept.append(comm.plan(name, x, options.pop("out", None), **options))
                return kept[0]()

            return planned

    return call(Planner(), name, algorithm, count)
