"""The doctor's tests: the links between all pairs of ranks, and every collective on small exact data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll.calibration import measure
from gpucoll.calibration.measure import Figures, Pair
from gpucoll.core.collectives import COLLECTIVES, Collective, Side
from gpucoll.doctor.facts import reason
from gpucoll.errors import ArgumentError, UsageError

FACTOR = 3.0  # a link worse than the better links of the same kind by this factor is slow
SLACK = 50.0  # microseconds of latency tolerated in addition, since the scheduler of the host may cause this delay


def links(mpi: Any, hosts: Sequence[str], timeout: float) -> dict[str, Any]:
    """Measure the links between all pairs of ranks; return the `verdict`, the same on all ranks. A collective call."""
    def slow(known: Mapping[Pair, Figures]) -> list[Pair]:
        return [(link["ranks"][0], link["ranks"][1]) for link in verdict(known, hosts)["pairs"] if link["slow"]]

    return verdict(measure.links(mpi, hosts, timeout, slow), hosts)


def verdict(figures: Mapping[Pair, Figures], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the report's part on links: the figures of the better links of each kind, and a judgement of each pair.

    The best quarter of the links is the reference. The median would be no reference, because one bad host among three
    slows down two of three links.
    """
    judged: dict[str, Any] = {"kinds": {}, "pairs": []}
    for kind, inside in (("same node", True), ("across nodes", False)):
        same = {pair: own for pair, own in figures.items() if (hosts[pair[0]] == hosts[pair[1]]) == inside}
        if same:
            latency = _quarter(own[0] for own in same.values())
            bandwidth = -_quarter(-own[1] for own in same.values())
            slow = {pair for pair, own in same.items()
                    if own[0] > FACTOR * latency + SLACK or own[1] * FACTOR < bandwidth}
            judged["kinds"][kind] = {"pairs": len(same), "slow": len(slow), "latency_us": latency,
                                     "bandwidth_mb_s": bandwidth}
            judged["pairs"] += [{"ranks": list(pair), "hosts": [hosts[rank] for rank in pair], "kind": kind,
                                 "latency_us": own[0], "bandwidth_mb_s": own[1], "slow": pair in slow}
                                for pair, own in sorted(same.items())]
    return judged


def _quarter(values: Iterable[float]) -> float:
    """Return the largest value in the smallest quarter of `values`; the smallest of fewer than five values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


# ---------------------------------------------------------------- the self-test

TEST_LENGTHS = (1000, 1, 4099)  # elements, divided among the blocks of the ranks in collectives with blocks
TEST_DTYPES = ("float32", "int64", "float64", "int32")  # all exact, since the sums are small integers


class Trial(NamedTuple):
    """One test call: collective, algorithm, number of elements, dtype."""

    collective: str
    algorithm: str
    length: int
    dtype: str

    def chunk(self, ranks: Collection[int], index: int, size: int) -> Any:
        """Return the sum of block `index` of the inputs of `ranks`, or of the whole inputs without blocks."""
        row, source = COLLECTIVES[self.collective], max(ranks, default=0)
        more = {None: 0, "source": source, "target": index, "pair": source + 2 * index}[row.ragged] % 3
        length = max(1, self.length // size) + more if row.blocks else self.length
        numbers = ((7 * numpy.arange(length) + 13 * rank + 5 * index) % 11 for rank in ranks)
        return sum(numbers, numpy.zeros(length, int)).astype(self.dtype)


def cases(size: int, device: str) -> Iterator[Trial]:
    """Yield test cases for ever: each collective once, then again with other algorithms, lengths and dtypes."""
    algorithms = {name: ("auto", *gpucoll.algorithms(name, size=size, device=device)) for name in COLLECTIVES}
    for number in itertools.count():
        for name, choices in algorithms.items():
            yield Trial(name, choices[number % len(choices)], TEST_LENGTHS[number % len(TEST_LENGTHS)],
                       TEST_DTYPES[number // 2 % len(TEST_DTYPES)])


def fault(comm: Any, case: Trial, xp: Any) -> str | None:
    """Run one case on arrays of the module `xp`; return the error in this rank's result, None for a correct result."""
    row, rank, size, root = COLLECTIVES[case.collective], comm.rank, comm.size, case.length % comm.size
    parts = [case.chunk({rank}, index, size) for index in range(size if row.input.blocks else 1)]
    options: dict[str, Any] = {"algorithm": case.algorithm, **({"root": root} if row.rooted else {})}
    given = _joined(row, row.input, parts)
    if case.collective == "reduce_scatter_v":
        given, options["counts"] = numpy.concatenate(parts), [len(part) for part in parts]
    given = [xp.asarray(part) for part in given] if isinstance(given, list) else xp.asarray(given)
    if row.input.blocks and not row.input.exists(rank, root):
        given = None
    result = getattr(comm, case.collective)(*(() if row.input.where == "nowhere" else (given,)), **options)
    pieces = [row.result(rank, size, root, 1, index) for index in range(size if row.output.blocks else 1)]
    promised = _joined(row, row.output, [case.chunk(piece.ranks, piece.chunk, size) for piece in pieces])
    return _difference(result, promised if row.output.exists(rank, root) else None, xp)


def _joined(row: Collective, side: Side, parts: list[Any]) -> Any:
    """Return the input or output made of `parts`: one array, stacked blocks, or a list of ragged blocks."""
    return parts[0] if not side.blocks else parts if row.ragged else numpy.stack(parts)


def _difference(result: Any, promised: Any, xp: Any) -> str | None:
    if promised is None or result is None:
        return None if result is promised else f"the result is {result!r:.40}, expected {promised!r:.40}"
    wrong, take = 0, getattr(xp, "asnumpy", numpy.asarray)
    for one, right in zip(result, promised, strict=True) if isinstance(promised, list) else [(result, promised)]:
        own = take(one)
        if (own.shape, own.dtype) != (right.shape, right.dtype):
            return f"the result is {own.dtype} of shape {own.shape}, expected {right.dtype} of shape {right.shape}"
        wrong += int(numpy.count_nonzero(own != right))
    return f"{wrong} elements are wrong" if wrong else None


def self_test(comm: Any, allgather: Callable[[Any], Any], device: str, xp: Any, seconds: float) -> dict[str, Any]:
    """Run cases on arrays of `xp` for `seconds`, each collective at least once; return the same result on every rank.

    A collective call; the ranks compare outcomes by `allgather`. An exception ends the test, because the ranks may now
    be in different calls. If every rank refuses the arrays of the first call, no data have moved, and `refused` is the
    reason.
    """
    started, faults, refused = time.monotonic(), [], None
    for calls, case in enumerate(cases(comm.size, device), 1):
        what, ended = None, None
        try:
            what = fault(comm, case, xp)
        # Any exception, of gpucoll, CuPy or MPI, is a finding.
        except Exception as error:
            what, ended = reason(error), "refused" if isinstance(error, ArgumentError | UsageError) else "failed"
        everyone = allgather((what, ended, time.monotonic() - started))
        wrong = {rank: what for rank, (what, _, _) in enumerate(everyone) if what}
        if wrong:
            call = f"{case.collective}, algorithm {case.algorithm}, {case.length} elements of {case.dtype}"
            faults.append({"call": call, "ranks": list(wrong), "what": next(iter(wrong.values()))})
        if any(ended for _, ended, _ in everyone):
            refused = wrong[0] if calls == 1 and all(ended == "refused" for _, ended, _ in everyone) else None
            break
        if calls >= len(COLLECTIVES) and max(spent for _, _, spent in everyone) >= seconds:
            break
    return {"calls": calls, "collectives": min(calls, len(COLLECTIVES)), "faults": faults, "refused": refused,
            "seconds": round(time.monotonic() - started, 3)}
