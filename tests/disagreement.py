"""Programs with one rank (the culprit) making another call than the others: a typed error must name the culprit.

A case fails with a missing, late or untyped error, or with the wrong rank named.
"""

import functools
import time
from typing import NamedTuple

import hypothesis
import numpy
from hypothesis import strategies

import mixture
import oracle
import programs
from gpucoll.core.collectives import COLLECTIVES
from grids import SEED
from pace import seconds
from programs import MOVEMENTS, REDUCTIONS, program

KINDS = ("dtype", "op", "length", "root", "collective", "algorithm", "order", "refusal", "skipped")
WAYS = ("now", "later", "plan", "group")
UNEVEN = ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v")  # collectives with lengths that may differ
ALL = (*REDUCTIONS, *MOVEMENTS)
BLOCKS = ("reduce_scatter", "scatter", "all_to_all", "reduce_scatter_v")
DTYPES = ("int32", "float32", "int64", "float64", "uint8", "float16", "complex64")
SOON, DEADLINE = 1.0, 3.0  # seconds of the reference: for the error on all ranks, and for any wait
TAIL = 3  # all-reduces after the case, on all ranks


class Spec(NamedTuple):
    """The parameters of a call."""

    collective: str
    algorithm: str
    dtype: str
    count: int
    op: str
    root: int
    wrong: tuple = ()  # empty, or the number of an entry of `mixture.wrongs`


class Case(NamedTuple):
    """The calls of all ranks: `before`, then `calls`; the culprit makes `others` instead of `calls`."""

    kind: str
    way: str
    size: int
    culprit: int
    before: tuple
    calls: tuple
    others: tuple


def names(collective):
    return [name for name in programs.algorithms(collective) if name != "native"]


def spec(chances, size, collective=None, auto=True):
    collective = collective or chances.choice(ALL)
    op = chances.choice(("sum", "max", "min", "prod")) if collective in REDUCTIONS else ""
    root = chances.randrange(size) if COLLECTIVES[collective].rooted else 0
    return Spec(collective, chances.choice(names(collective)[:None if auto else -1]), chances.choice(DTYPES[:-1]),
                chances.choice((1, 3, 40, 5000)), op, root)


def drawn(chances, size, kinds=KINDS):
    """Return a random case; every kind has the same probability."""
    kind = chances.choice(kinds)
    able = {"op": REDUCTIONS, "root": [one for one in MOVEMENTS if COLLECTIVES[one].rooted] + ["reduce"],
            "length": [one for one in ALL if one not in UNEVEN and one != "scatter"],
            "dtype": [one for one in ALL if not one.startswith("scatter")],  # scatter: only the root's dtype counts
            "algorithm": [one for one in ALL if len(names(one)) > 2]}.get(kind)
    one = spec(chances, size, able and chances.choice(able), kind != "algorithm")
    calls, others = (one,), (other(chances, size, one, kind),)
    if kind == "order":
        calls, others = (one, *others), (*others, one)
    before = tuple(mixture.step(chances.getrandbits(32), size) for _ in range(chances.choice((0, 1, 3))))
    return Case(kind, chances.choice(WAYS), size, chances.randrange(size), before, calls,
                () if kind == "skipped" else others)


def other(chances, size, one, kind):
    while True:
        match kind:
            case "dtype":
                found = one._replace(dtype=chances.choice(DTYPES[:-1]))
            case "op":
                found = one._replace(op=chances.choice(("sum", "max", "min", "prod")))
            case "length":
                found = one._replace(count=one.count + chances.choice((1, 7, 5000)))
            case "root":
                found = one._replace(root=chances.randrange(size))
            case "algorithm":
                found = one._replace(algorithm=spec(chances, size, one.collective).algorithm)
            case "refusal":
                found = one._replace(wrong=(chances.getrandbits(16),))
            case _:
                found = spec(chances, size)
        apart = found.collective != one.collective if kind in ("collective", "order", "skipped") else found != one
        if apart and (kind != "algorithm" or found.algorithm != "auto"):
            return found


def arguments(comm, one):
    """Return the arrays and options of a call, on this rank."""
    size, root = comm.size, one.root
    row = oracle.values(one.op or "sum", one.dtype, comm.rank, one.count * (size if one.collective in BLOCKS else 1))
    x = row.reshape(size, -1) if one.collective in BLOCKS else row
    options = {"algorithm": one.algorithm} | ({"op": one.op} if one.op else {})
    options |= {"root": root} if COLLECTIVES[one.collective].rooted else {}
    if one.collective == "reduce_scatter_v":
        options["counts"] = [1] * size
    if one.collective in ("scatter_v", "all_to_all_v"):
        x = [x[:len(x) // (target + 1)] for target in range(size)]
    if one.collective.startswith("scatter") and comm.rank != root:
        x = None
    if one.wrong:
        here = mixture.wrongs(COLLECTIVES[one.collective], size, row if x is None else x, options)
        here = [wrong for _, wrong in here if x is not None or "x" not in wrong]
        options |= here[one.wrong[0] % len(here)]
        x = options.pop("x", x)
    return x, options


def call(comm, one, way):
    x, options = arguments(comm, one)
    if way == "plan":
        comm.plan(one.collective, x, **options)()
    elif way == "later":
        getattr(comm, one.collective)(x, **options, async_op=True).wait()
    else:
        getattr(comm, one.collective)(x, **options)


class Told(NamedTuple):
    """The outcome on one rank: the first error, its call (counted from the end of the case), and the later outcomes."""

    error: str
    code: str
    ranks: tuple
    at: int
    after: float  # seconds
    then: tuple  # the outcomes of the calls after the case
    words: str


@program
def run(comm, case):
    """Return the outcome of the case on this rank."""
    mixture.run(comm, case.before)
    mine = case.others if comm.rank == case.culprit else case.calls
    steps = [functools.partial(together, comm, mine) if case.way == "group" else None]
    steps = steps if case.way == "group" else [functools.partial(call, comm, one, case.way) for one in mine]
    steps = steps if mine else [functools.partial(tail, comm)]  # goes on to the next call, and is one call ahead
    began, found, then = time.monotonic(), None, []
    for number, step in enumerate([*steps, *[functools.partial(tail, comm)] * TAIL]):
        try:
            came = step()
        except Exception as error:
            kind = type(error).__name__
            if found is None:
                found = Told(kind, getattr(error, "code", ""), getattr(error, "ranks", ()), number - len(steps),
                             time.monotonic() - began, (), str(error)[:600])
            came = kind
        if number >= len(steps):
            then.append(came)
    lasted = time.monotonic() - began
    return (found or Told("nothing", "", (), TAIL, lasted, (), ""))._replace(then=tuple(then))


def together(comm, calls):
    with comm.group():
        for one in calls:
            call(comm, one, "now")


def tail(comm):
    """Make an all-reduce on all ranks; return "right" or "wrong"."""
    found = comm.all_reduce(numpy.full(3, comm.rank + 1), algorithm="one_shot")
    return "right" if (found == sum(range(comm.size + 1))).all() else "wrong"


def faults(case, told, *, goes_on):
    """Yield the deviations from the promise; `goes_on` is true if ranks compare before any data move."""
    for rank, one in enumerate(told):
        mine = case.kind == "refusal" and rank == case.culprit
        if one.error == "nothing":
            yield f"silent on {'the culprit' if rank == case.culprit else 'a rank'}"
            continue
        wanted = ("ArgumentError", "DtypeError") if mine else ("MismatchError", "PeerError")
        if one.error == "RankFailedError" and one.ranks == (case.culprit,) and not goes_on:
            continue  # the culprit found the error, and closed, before this rank looked
        if one.error not in wanted:
            yield one.error
        elif not mine and case.size > 2 and one.ranks != (case.culprit,):
            yield f"names {'nobody' if not one.ranks else 'others'}"
        if one.after > seconds(SOON):
            yield "late"
        if "wrong" in one.then:
            yield "wrong data afterwards"
        if goes_on and one.then != ("right",) * TAIL:
            yield f"does not go on: {'/'.join(one.then)}"
    if len({one.then[-1] == "right" for one in told}) > 1:
        yield "some ranks go on"


def given(count, test, *, goes_on, kinds=KINDS):
    """Run `test(case)`, returning the outcomes of all ranks, on `count` cases drawn by hypothesis."""
    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=count, deadline=None, database=None, suppress_health_check=hypothesis.HealthCheck)
    @hypothesis.given(strategies.randoms(use_true_random=True), strategies.integers(3, 4))
    def every(chances, size):
        case = drawn(chances, size, kinds)
        told = test(case)
        assert not [*faults(case, told, goes_on=goes_on)], (case, told)

    every()
