"""Every collective on small exact data, for about two seconds, each result compared with what NumPy says it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll.collectives import COLLECTIVES
from gpucoll.doctor.findings import reason
from gpucoll.errors import ArgumentError, UsageError

SECONDS = 2.0
COUNTS = (1000, 1, 4099)  # elements; of what has a block for every rank, shared between the blocks
DTYPES = ("float32", "int64", "float64", "int32")  # exact: the sums are small whole numbers
MODULUS = 11


class Case(NamedTuple):
    """One call: the collective, its algorithm, the number of elements and their dtype."""

    collective: str
    algorithm: str
    length: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.collective}, algorithm {self.algorithm}, {self.length} elements of {self.dtype}"


class Memory(NamedTuple):
    """Where the arrays lie: `give` makes one of NumPy's, `take` NumPy's of one."""

    name: str
    give: Callable[[Any], Any]
    take: Callable[[Any], Any]


HOST = Memory("cpu", numpy.array, numpy.asarray)


def gpu() -> Memory:
    """Return CuPy's memory; raises ImportError without CuPy."""
    import cupy

    return Memory("cuda", cupy.asarray, cupy.asnumpy)


def cases(size: int, device: str) -> Iterator[Case]:
    """Yield cases without end: first every collective once, then again with every algorithm, count and dtype."""
    algorithms = {name: ("auto", *gpucoll.algorithms(name, size=size, device=device)) if name in COLLECTIVES
                  else ("auto",) for name in CALLS}
    for number in itertools.count():
        for name, choices in algorithms.items():
            yield Case(name, choices[number % len(choices)], COUNTS[number % len(COUNTS)],
                       DTYPES[number // 2 % len(DTYPES)])


# ---------------------------------------------------------------- the calls, and what they should give


class Call:
    """One rank's view of one case: its inputs, which every other rank can make too, and who is the root."""

    def __init__(self, case: Case, rank: int, size: int, memory: Memory) -> None:
        self.case, self.rank, self.size, self.give = case, rank, size, memory.give
        self.root = case.length % size
        self.others = range(size)

    def array(self, source: int) -> Any:
        """Return the array of rank `source`."""
        return self._numbers(source, self.case.length)

    def block(self, source: int, target: int) -> Any:
        """Return the block that rank `source` has for rank `target`."""
        return self._numbers(source * self.size + target, max(1, self.case.length // self.size))

    def ragged(self, source: int, target: int) -> Any:
        """Return such a block of a length that depends on both."""
        return self._numbers(source + target, self.case.length // self.size + (source + 2 * target) % 3)

    def _numbers(self, number: int, count: int) -> Any:
        return ((7 * numpy.arange(count) + 13 * number) % MODULUS).astype(self.case.dtype)

    def blocks(self, source: int) -> Any:
        return numpy.stack([self.block(source, target) for target in self.others])

    def arrays(self) -> Any:
        return numpy.stack([self.array(source) for source in self.others])

    def sum(self, ranks: Iterable[int]) -> Any:
        """Return the sum of the arrays of `ranks`; zeros for none."""
        return sum(map(self.array, ranks), numpy.zeros(self.case.length, self.case.dtype))

    def at_root(self, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, on the root; None elsewhere."""
        return make() if self.rank == self.root else None


def _sent(comm: Any, c: Call, **how: Any) -> Any:
    out = c.give(numpy.zeros(c.case.length, c.case.dtype))
    return comm.sendrecv(c.give(c.array(c.rank)), out, (c.rank + 1) % c.size, (c.rank - 1) % c.size)


def _reduced_ragged(comm: Any, c: Call, **how: Any) -> Any:
    counts = [c.ragged(0, target).size for target in c.others]
    return comm.reduce_scatter_v(c.give(numpy.concatenate([c.ragged(0, target) for target in c.others])), counts, **how)


# What a rank calls, and what NumPy says of its result.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[Call], Any]]] = {
    "all_reduce": (lambda comm, c, **how: comm.all_reduce(c.give(c.array(c.rank)), **how), lambda c: c.sum(c.others)),
    "reduce": (lambda comm, c, **how: comm.reduce(c.give(c.array(c.rank)), root=c.root, **how),
               lambda c: c.at_root(lambda: c.sum(c.others))),
    "broadcast": (lambda comm, c, **how: comm.broadcast(c.give(c.array(c.rank)), root=c.root, **how),
                  lambda c: c.array(c.root)),
    "all_gather": (lambda comm, c, **how: comm.all_gather(c.give(c.array(c.rank)), **how), lambda c: c.arrays()),
    "gather": (lambda comm, c, **how: comm.gather(c.give(c.array(c.rank)), root=c.root, **how),
               lambda c: c.at_root(c.arrays)),
    "scatter": (lambda comm, c, **how: comm.scatter(c.at_root(lambda: c.give(c.blocks(c.root))), root=c.root, **how),
                lambda c: c.block(c.root, c.rank)),
    "reduce_scatter": (lambda comm, c, **how: comm.reduce_scatter(c.give(c.blocks(c.rank)), **how),
                       lambda c: sum(c.block(source, c.rank) for source in c.others)),
    "all_to_all": (lambda comm, c, **how: comm.all_to_all(c.give(c.blocks(c.rank)), **how),
                   lambda c: numpy.stack([c.block(source, c.rank) for source in c.others])),
    "scan": (lambda comm, c, **how: comm.scan(c.give(c.array(c.rank)), **how), lambda c: c.sum(range(c.rank + 1))),
    "exscan": (lambda comm, c, **how: comm.exscan(c.give(c.array(c.rank)), **how), lambda c: c.sum(range(c.rank))),
    "all_gather_v": (lambda comm, c, **how: comm.all_gather_v(c.give(c.ragged(c.rank, 0)), **how),
                     lambda c: [c.ragged(source, 0) for source in c.others]),
    "gather_v": (lambda comm, c, **how: comm.gather_v(c.give(c.ragged(c.rank, 0)), root=c.root, **how),
                 lambda c: c.at_root(lambda: [c.ragged(source, 0) for source in c.others])),
    "scatter_v": (lambda comm, c, **how: comm.scatter_v(
                      c.at_root(lambda: [c.give(c.ragged(c.root, target)) for target in c.others]), root=c.root, **how),
                  lambda c: c.ragged(c.root, c.rank)),
    "reduce_scatter_v": (_reduced_ragged, lambda c: c.size * c.ragged(0, c.rank)),
    "all_to_all_v": (lambda comm, c, **how: comm.all_to_all_v(
                         [c.give(c.ragged(c.rank, target)) for target in c.others], **how),
                     lambda c: [c.ragged(source, c.rank) for source in c.others]),
    "sendrecv": (_sent, lambda c: c.array((c.rank - 1) % c.size)),
    "barrier": (lambda comm, c, **how: comm.barrier(**how), lambda c: None),
}


def fault(comm: Any, case: Case, memory: Memory) -> str | None:
    """Run one case; return what is wrong with this rank's result, None where nothing is."""
    call, (run, expected) = Call(case, comm.rank, comm.size, memory), CALLS[case.collective]
    return _difference(run(comm, call, algorithm=case.algorithm), expected(call), memory)


def _difference(found: Any, expected: Any, memory: Memory) -> str | None:
    if expected is None or found is None:
        return None if found is expected else f"the result is {found!r:.40}, expected {expected!r:.40}"
    pairs = [(found, expected)] if not isinstance(expected, list) else list(zip(found, expected, strict=True))
    wrong = 0
    for one, right in pairs:
        one = memory.take(one)
        if (one.shape, one.dtype) != (right.shape, right.dtype):
            return f"the result is {one.dtype} of shape {one.shape}, expected {right.dtype} of shape {right.shape}"
        wrong += int(numpy.count_nonzero(one != right))
    return f"{wrong} elements are wrong" if wrong else None


# ---------------------------------------------------------------- the test


def self_test(comm: Any, mpi: Any, memory: Memory, seconds: float) -> dict[str, Any]:
    """Run cases for `seconds`, each collective at least once; return the same account on every rank.

    A collective call; `mpi` tells the ranks of each other. An exception ends the test: the ranks may have parted.
    Where every rank refuses the first call's arrays, nothing has moved: `refused` is the reason.
    """
    started, faults, calls = time.monotonic(), [], 0
    for case in cases(comm.size, memory.name):
        told = mpi.allgather((*_guarded(comm, case, memory), time.monotonic() - started))
        calls += 1
        wrong = {rank: what for rank, (what, _, _) in enumerate(told) if what}
        if calls == 1 and all(ended == "refused" for _, ended, _ in told):
            return {"refused": wrong[0]}
        if wrong:
            faults.append({"call": str(case), "ranks": list(wrong), "what": next(iter(wrong.values()))})
        late = max(spent for _, _, spent in told) >= seconds
        if any(ended for _, ended, _ in told) or (late and calls >= len(CALLS)):
            break
    return {"calls": calls, "collectives": min(calls, len(CALLS)), "seconds": round(time.monotonic() - started, 3),
            "faults": faults}


def _guarded(comm: Any, case: Case, memory: Memory) -> tuple[str | None, str | None]:
    """Return what is wrong, and how an exception ended the call: one of gpucoll's, CuPy's, whoever's."""
    try:
        return fault(comm, case, memory), None
    except (ArgumentError, UsageError) as error:
        return reason(error), "refused"
    except Exception as error:
        return reason(error), "failed"
