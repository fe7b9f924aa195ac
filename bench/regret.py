"""`gpucoll bench regret`: by how much `auto` misses the quickest way to do a collective, size by size.

At every size what `auto` chooses takes turns with every other executor and algorithm that can do it. The least of many
noisy medians is too small, since luck chose it: so the best few and the choice are measured again, longer, and by that
second pass alone they are judged. Every way's result is checked first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import gpucoll
from gpucoll import ArgumentError, BackendError, Communicator, UsageError
from gpucoll.analysis.sizes import byte_size
from gpucoll.arguments import Parser, refuse
from gpucoll.calibration.meter import Meter
from gpucoll.calibration.sweep import Way, hopeful, ways
from gpucoll.calibration.tune import executors
from gpucoll.collectives import collective as collective_row

from . import records
from .cases import Case, sizes
from .data import Data, Turn
from .flags import at_least
from .interrupt import watched
from .summary import CONFIDENCE

PROGRAM = "gpucoll bench regret"
LEAST = 4  # bytes
FIRST, SECOND = 0.1, 1.0  # seconds for each way at each size, in the first pass and in the second
FEWEST, MOST = 2, 8  # times that the second pass is as long as the first
BEST = 3  # that are measured again, besides the choice
MEAN, WORST = 0.10, 0.30  # the goal: of the regrets, and of those beyond the intervals
LINE = "{:>12}  {:<26} {:>9} {:>9} {:>9}  {:<26} {:>9} {:>9} {:>9}  {:>7} {:>7}"
TITLES = (("size", "chosen", "median", "from", "to", "best", "median", "from", "to", "regret", "beyond"),
          ("(B)", "", "(us)", "(us)", "(us)", "", "(us)", "(us)", "(us)", "(%)", "(%)"))


class Timing(NamedTuple):
    """A way, its median seconds, and between which seconds its median lies with `CONFIDENCE`."""

    executor: str
    algorithm: str
    median: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """Who runs what."""
        return f"{self.executor}:{self.algorithm}"


class Row(NamedTuple):
    """One size: the choice, and the best of all that were measured twice, which may be the choice itself."""

    nbytes: int
    chosen: Timing
    best: Timing

    @property
    def regret(self) -> float:
        """The share by which the choice takes longer than the best."""
        return self.chosen.median / self.best.median - 1

    @property
    def beyond(self) -> float:
        """The share by which the choice surely takes longer: from interval to interval, 0 where they meet."""
        return max(0.0, self.chosen.low / self.best.high - 1)


def timing(way: Way, seconds: Sequence[float]) -> Timing:
    """Return the median of a sample and its interval, from one order statistic to another: no shape is assumed.

    With fewer than six seconds nothing is that sure, and the interval is the whole sample.

    >>> timing(("mpi", "ring"), [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 8.0, 7.0])
    Timing(executor='mpi', algorithm='ring', median=5.0, low=2.0, high=8.0)
    """
    row, count, left = sorted(seconds), len(seconds), 0
    outside = 1.0  # of the 2**count ways to lie about the median, those with at most `left` on the one side
    while (more := outside + math.comb(count, left + 1)) / 2 ** count <= (1 - CONFIDENCE) / 2:
        left, outside = left + 1, more
    return Timing(*way, statistics.median(row), row[left], row[-1 - left])


def judged(nbytes: int, chosen: Way, samples: Mapping[Way, Sequence[float]]) -> Row:
    """Return the row of a size from the second pass."""
    timings = {way: timing(way, seconds) for way, seconds in samples.items()}
    return Row(nbytes, timings[chosen], min(timings.values(), key=lambda one: one.median))


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Return mean and worst over all sizes, and whether that is within the goal.

    >>> slow, quick = Timing("mpi", "ring", 1.5, 1.25, 2.0), Timing("mpi", "tree", 1.0, 0.5, 1.0)
    >>> verdict([Row(8, slow, quick), Row(64, quick, quick)])
    {'mean': 0.25, 'worst': 0.5, 'beyond': 0.25, 'within': False}
    """
    mean, beyond = statistics.fmean(row.regret for row in rows), max(row.beyond for row in rows)
    return {"mean": mean, "worst": max(row.regret for row in rows), "beyond": beyond,
            "within": mean <= MEAN and beyond <= WORST}


def main(arguments: Sequence[str]) -> int:
    """Measure; return 0, or 1 where data were wrong. A collective call; wrong arguments end every rank with 2."""
    given = _parser().parse_args(arguments)
    try:
        name = collective_row(given.collective).name
        wanted = _sizes(byte_size(given.minbytes), byte_size(given.maxbytes), given.stepfactor)
        with gpucoll.init() as comm, executors(comm, "cpu") as comms:
            return _run(Regret(comm, comms, name, given.json), wanted)
    except (ArgumentError, UsageError, BackendError) as error:
        refuse(PROGRAM, str(error))  # alike on every rank


def _parser() -> Parser:
    found = Parser(PROGRAM, allow_abbrev=False, usage=f"mpiexec -n RANKS {PROGRAM} [all_reduce] [-b 1K -e 64M -f 4]",
                   description="Measure what auto chooses against all that it could have chosen; start it under "
                               "mpiexec.")
    found.add_argument("collective", nargs="?", default="all_reduce", help="all_reduce, broadcast, ... (all_reduce)")
    found.add_argument("-b", "--minbytes", default="1K", help="first size, of the larger of input and output (1K)")
    found.add_argument("-e", "--maxbytes", default="64M", help="last size (64M)")
    found.add_argument("-f", "--stepfactor", type=at_least(2), default=4, help="factor from size to size (4)")
    found.add_argument("-J", "--json", metavar="F.json", help="keep all that was measured; never overwrites")
    return found


def _sizes(first: int, last: int, factor: int) -> Sequence[int]:
    if first < LEAST:
        raise ArgumentError(f"-b/--minbytes {first} is less than a float32", code="GC-SIZE")
    return sizes(first, last, step=1, factor=factor)


def _run(regret: Regret, wanted: Sequence[int]) -> int:
    with watched(regret.comm.rank, functools.partial(regret.finish, interrupted=True)):
        regret.measure(wanted if regret.case.test != "barrier" else (0,))
        return regret.finish()


class Regret:
    """What is measured so far; `comms` has a communicator for each executor, `comm` chooses."""

    def __init__(self, comm: Communicator, comms: dict[str, Communicator], test: str, path: str | None = None) -> None:
        _check_ranks(comm)
        self.comm, self.case = comm, Case(test, "float32", "sum", 0, comm.size)
        self.rows: list[Row] = []
        self.sizes: list[dict[str, Any]] = []  # of the record
        self.wrong = Counter[str]()
        self.basis = comm.explain(test, 0)["basis"]
        self._comms, self._left, self._slow = comms, ways(comms, test), dict[Way, int]()
        self._meter = Meter(comm)
        self._file = _reserved(comm, path)

    def measure(self, wanted: Iterable[int]) -> None:
        """Measure every size, rank 0 prints a line for each. A collective call."""
        self._say(f"# {self.case.test} of float32 on {self.comm.size} ranks, {self.comm.nodes} "
                  f"node{'s' * (self.comm.nodes > 1)}: what auto chooses against the best of all that can be chosen",
                  *(f"#{LINE.format(*titles)[1:]}" for titles in TITLES))
        for nbytes in wanted:
            self._measure_size(Data(self.case, self.comm.rank, self.case.count(nbytes)))
            self._say(_line(self.rows[-1]))

    def _measure_size(self, data: Data) -> None:
        nbytes = self.case.nbytes(data.count)
        choice = self._call(self.comm, data, "auto")
        self.wrong.update(self._wrong(data, "auto", choice))
        chosen = self._chosen(nbytes)
        calls = {chosen: choice, **self._others(data, chosen)}
        first = {way: statistics.median(row) for way, row in self._samples(calls, FIRST).items()}
        self._left = hopeful(first, self._slow, nbytes // self.comm.size)
        again = {way: calls[way] for way in {chosen: 0.0, **dict.fromkeys(sorted(first, key=first.__getitem__)[:BEST])}}
        samples = self._longer(again)
        self.rows.append(judged(nbytes, chosen, samples))
        self.sizes.append(_recorded(self.rows[-1], first, samples))

    def _call(self, comm: Communicator, data: Data, algorithm: str) -> Callable[[], Any]:
        return functools.partial(getattr(comm, self.case.test), *data.arguments(Turn(0)), algorithm=algorithm)

    def _chosen(self, nbytes: int) -> Way:
        """Return what the call of auto has been: what has been called of that size."""
        rows = self.comm.explain(self.case.test, nbytes).candidates
        found: Way = self.comm.mpi.bcast(next(((row["executor"], row["algorithm"]) for row in rows if row["calls"]),
                                              None))
        return found

    def _others(self, data: Data, chosen: Way) -> dict[Way, Callable[[], Any]]:
        """Return the calls of all other ways that are left and not refused, each checked."""
        calls = {}
        for way in self._left:
            call = self._call(self._comms[way[0]], data, way[1])
            with contextlib.suppress(ArgumentError):  # alike on every rank, before data move
                if way != chosen:
                    self.wrong.update(self._wrong(data, ":".join(way), call))
                    calls[way] = call
        return calls

    def _wrong(self, data: Data, name: str, call: Callable[[], Any]) -> dict[str, int]:
        """Return how many elements of a call's result are wrong, on all ranks together; nothing where none are."""
        expected = data.expected(Turn(0))
        data.prepare(Turn(0), expected)
        found = data.wrong(Turn(0), call(), expected)
        total = self.comm.mpi.allreduce(found)
        return {f"{name} at {self.case.nbytes(data.count)} bytes": total} if total else {}

    def _longer(self, calls: Mapping[Way, Callable[[], Any]]) -> dict[Way, list[float]]:
        """Return the samples of the second pass."""
        found: dict[Way, list[float]] = {way: [] for way in calls}
        started, parts, spent = time.monotonic(), 0, 0.0
        while parts < FEWEST or (parts < MOST and spent < SECOND * len(calls)):
            for way, seconds in self._samples(calls, FIRST).items():
                found[way] += seconds
            parts, spent = parts + 1, self.comm.mpi.bcast(time.monotonic() - started)
        return found

    def _samples(self, calls: Mapping[Way, Callable[[], Any]], seconds: float) -> dict[Way, list[float]]:
        return dict(zip(calls, self._meter.samples([*calls.values()], seconds * len(calls)), strict=True))

    def finish(self, interrupted: bool = False) -> int:
        """Print the last lines and write the file; return the exit code. It needs no other rank."""
        file, self._file = self._file, None
        found = verdict(self.rows) if self.rows else None
        if file is not None:
            records.write(file, self.record(found, interrupted))
        self._say(*([] if found is None else [_verdict_line(found)]), f"# auto goes by {self.basis}",
                  *(f"# wrong elements: {count} of {what}" for what, count in self.wrong.items()),
                  *["# interrupted"] * interrupted)
        return 1 if self.wrong else 0

    def record(self, found: dict[str, Any] | None, interrupted: bool) -> dict[str, Any]:
        """Return what the file holds.

        ``sizes`` has for each its ``bytes``, ``regret`` and ``beyond``; ``chosen``, ``best`` and in ``second`` all that
        were measured twice, with ``median``, ``low`` and ``high`` seconds; in ``first`` the medians of all ways.
        ``verdict`` has their ``mean``, ``worst`` and worst ``beyond``, and whether they are ``within`` the goal;
        ``basis`` is the table that auto went by, without its folder.
        """
        return {"program": PROGRAM, "version": gpucoll.__version__, "collective": self.case.test,
                "ranks": self.comm.size, "nodes": self.comm.nodes, "basis": re.sub("/.*/", "", self.basis),
                "sizes": self.sizes, "verdict": found, "wrong": dict(self.wrong), "interrupted": interrupted}

    def _say(self, *lines: str) -> None:
        if self.comm.rank == 0:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()


def _check_ranks(comm: Communicator) -> None:
    if comm.size == 1:
        raise ArgumentError("one rank has nothing to choose; start it under mpiexec -n 8", code="GC-RANKS")
    if comm.options.emulated:
        raise UsageError("GPUCOLL_DEVICE=emulated is there for tests, not for speed; unset it", code="GC-DEVICE")


def _reserved(comm: Communicator, path: str | None) -> IO[str] | None:
    """Open the file on rank 0; ArgumentError, on every rank, where that cannot be done."""
    file, refusal = None, None
    if comm.rank == 0 and path:
        try:
            file = records.reserve(path)
        except ArgumentError as error:
            refusal = error
    refusal = comm.mpi.bcast(refusal)
    if refusal is not None:
        raise refusal
    return file


def _recorded(row: Row, first: Mapping[Way, float], samples: Mapping[Way, Sequence[float]]) -> dict[str, Any]:
    """Return what the file has of a size: all ways, by the first pass, and what decided."""
    return {"bytes": row.nbytes, "chosen": row.chosen._asdict(), "best": row.best._asdict(), "regret": row.regret,
            "beyond": row.beyond, "first": [{"executor": way[0], "algorithm": way[1], "median": seconds}
                                            for way, seconds in sorted(first.items(), key=lambda item: item[1])],
            "second": [timing(way, seconds)._asdict() for way, seconds in samples.items()]}


def _line(row: Row) -> str:
    sides = [text for one in (row.chosen, row.best)
             for text in (one.name, *(f"{1e6 * seconds:.2f}" for seconds in (one.median, one.low, one.high)))]
    return LINE.format(row.nbytes, *sides, f"{100 * row.regret:.1f}", f"{100 * row.beyond:.1f}")


def _verdict_line(found: Mapping[str, Any]) -> str:
    return (f"# regret: mean {100 * found['mean']:.1f} %, worst {100 * found['worst']:.1f} %, worst beyond the "
            f"{CONFIDENCE:.0%} intervals {100 * found['beyond']:.1f} %: {'within' if found['within'] else 'MISSES'} "
            f"the goal (mean {MEAN:.0%}, worst beyond {WORST:.0%})")
