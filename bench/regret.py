"""`gpucoll bench regret`: the time lost by `auto` against the fastest way to do a collective, size by size.

At every size the choice of `auto` takes turns with all other possible executors and algorithms (ways). The minimum of
many noisy medians is too small, since it was selected by luck. So the few best ways and the choice are measured
again, longer, and judged only by this second pass. The result of every way is checked first.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gpucoll
from gpucoll import ArgumentError, BackendError, Communicator, UsageError
from gpucoll.calibration.commands import executors
from gpucoll.calibration.measure import Way, hopeful, samples, ways
from gpucoll.core.collectives import collective as collective_row
from gpucoll.launch.arguments import Parser, refuse

from . import records
from .arguments import at_least, size
from .cases import Case, sizes
from .data import Data, Turn
from .interrupt import watched
from .summary import CONFIDENCE, ratio

PROGRAM = "gpucoll bench regret"
FIRST, SECOND = 0.1, 1.0  # seconds for each way at each size, in the first and the second pass
FEWEST, MOST = 2, 8  # limits for the length of the second pass, in lengths of the first
BEST = 3  # ways measured again, besides the choice
MEAN, WORST = 0.10, 0.30  # the goal: for the mean regret, and for the worst regret beyond the interval
LINE = "{:>12}  {:<26} {:>9}  {:<26} {:>9}  {:>8} {:>8} {:>8}"
TITLES = (("size", "chosen", "median", "best", "median", "regret", "from", "to"),
          ("(B)", "", "(us)", "", "(us)", "(%)", "(%)", "(%)"))


def judged(nbytes: int, chosen: Way, samples: Mapping[Way, Sequence[float]]) -> dict[str, Any]:
    """Return the record of a size: the choice, and the best way of the second pass, possibly the choice itself.

    ``regret`` is the relative extra time of the choice, ``low`` and ``high`` are its confidence interval. ``beyond`` is
    the certain part of the extra time.
    """
    second = [{"executor": way[0], "algorithm": way[1], "median": statistics.median(seconds)}
              for way, seconds in samples.items()]
    best, row = min(samples, key=lambda way: statistics.median(samples[way])), dict(zip(samples, second, strict=True))
    found = ratio(samples[chosen], samples[best])
    return {"bytes": nbytes, "chosen": row[chosen], "best": row[best], "regret": found.ratio - 1, "low": found.low - 1,
            "high": found.high - 1, "beyond": max(0.0, found.low - 1), "second": second}


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and worst regret over all sizes, and whether the goal is reached."""
    mean, beyond = statistics.fmean(row["regret"] for row in rows), max(row["beyond"] for row in rows)
    return {"mean": mean, "worst": max(row["regret"] for row in rows), "beyond": beyond,
            "within": mean <= MEAN and beyond <= WORST}


def line(row: Mapping[str, Any]) -> str:
    """Return the line of a size."""
    sides = [text for one in (row["chosen"], row["best"])
             for text in (f"{one['executor']}:{one['algorithm']}", f"{1e6 * one['median']:.2f}")]
    return LINE.format(row["bytes"], *sides, *(f"{100 * row[key]:.1f}" for key in ("regret", "low", "high")))


def parser() -> Parser:
    """Return the parser of the command line."""
    flags = Parser(PROGRAM, allow_abbrev=False, usage=f"mpiexec -n RANKS {PROGRAM} [all_reduce] [-b 1K -e 64M -f 4]",
                   description="Compare the choice of auto with the best possible choice, by measuring.")
    flags.add_argument("collective", nargs="?", default="all_reduce", help="all_reduce, broadcast, ... (all_reduce)")
    flags.add_argument("-b", "--minbytes", type=size, default="1K", help="first size, of the larger array (1K)")
    flags.add_argument("-e", "--maxbytes", type=size, default="64M", help="last size (64M)")
    flags.add_argument("-f", "--stepfactor", type=at_least(2), default=4, help="factor from size to size (4)")
    flags.add_argument("-J", "--json", metavar="F.json", help="all measurements; never overwrites")
    return flags


def main(arguments: Sequence[str]) -> int:
    """Measure; return 0, or 1 if data were wrong. A collective call; wrong arguments end every rank with code 2."""
    given = parser().parse_args(arguments)
    try:
        name = collective_row(given.collective).name
        if given.minbytes < 4:
            raise ArgumentError(f"-b/--minbytes {given.minbytes} is less than a float32", code="GC-SIZE")
        wanted = sizes(given.minbytes, given.maxbytes, step=1, factor=given.stepfactor)
        with gpucoll.init() as comm, executors(comm, "cpu") as comms:
            regret = Regret(comm, comms, name, given.json)
            with watched(comm.rank, functools.partial(regret.finish, interrupted=True)):
                regret.measure(wanted if name != "barrier" else (0,))
                return regret.finish()
    except (ArgumentError, UsageError, BackendError) as error:
        refuse(PROGRAM, str(error))  # the same error on every rank


class Regret:
    """The measurements so far; `comms` has a communicator for each executor, `comm` makes the choice.

    The file at `path` has ``sizes`` as returned by `judged`, with the medians of all ways in ``first``; ``verdict``
    over all sizes; and ``basis``, the table used by auto, without its folder.
    """

    def __init__(self, comm: Communicator, comms: dict[str, Communicator], test: str, path: str | None = None) -> None:
        if comm.size == 1:
            raise ArgumentError("one rank has nothing to choose; start it under mpiexec -n 8", code="GC-RANKS")
        if comm.options.emulated:
            raise UsageError("GPUCOLL_DEVICE=emulated is there for tests, not for speed; unset it", code="GC-DEVICE")
        self.comm, self.case = comm, Case(test, "float32", "sum", 0, comm.size)
        self.sizes: list[dict[str, Any]] = []
        self.wrong = Counter[str]()
        self.basis = comm.explain(test, 0)["basis"]
        self._comms, self._left, self._slow = comms, ways(comms, test), dict[Way, int]()
        self._files = records.reserve_together(comm.mpi, {"json": path} if path else {})

    def measure(self, wanted: Iterable[int]) -> None:
        """Measure every size; rank 0 prints a line for each. A collective call."""
        self._say(f"# {self.case.test} of float32 on {self.comm.size} ranks, {self.comm.nodes} "
                  f"node{'s' * (self.comm.nodes > 1)}: what auto chooses against the best of all that can be chosen",
                  *(f"#{LINE.format(*titles)[1:]}" for titles in TITLES))
        for asked in wanted:
            data = Data(self.case, self.comm.rank, self.case.count(asked))
            nbytes = self.case.nbytes(data.count)
            calls, chosen = self._calls(data)
            first = {way: statistics.median(row) for way, row in self._samples(calls).items()}
            self._left = hopeful(first, self._slow, nbytes // self.comm.size)
            quickest = sorted(first, key=first.__getitem__)
            again = {way: calls[way] for way in dict.fromkeys([chosen, *quickest[:BEST]])}
            samples: dict[Way, list[float]] = {way: [] for way in again}
            started, parts, spent = time.monotonic(), 0, 0.0
            while parts < FEWEST or (parts < MOST and spent < SECOND * len(again)):
                for way, seconds in self._samples(again).items():
                    samples[way] += seconds
                parts, spent = parts + 1, self.comm.mpi.bcast(time.monotonic() - started)
            self.sizes.append({**judged(nbytes, chosen, samples), "first": [
                {"executor": way[0], "algorithm": way[1], "median": first[way]} for way in quickest]})
            self._say(line(self.sizes[-1]))

    def _calls(self, data: Data) -> tuple[dict[Way, Callable[[], Any]], Way]:
        """Return the calls of all remaining possible ways, each made and checked once, and the choice of auto."""
        def checked(comm: Communicator, algorithm: str, name: str) -> Callable[[], Any]:
            call = functools.partial(getattr(comm, self.case.test), *data.arguments(Turn(0)), algorithm=algorithm)
            expected = data.expected(Turn(0))
            data.prepare(Turn(0), expected)
            wrong = self.comm.mpi.allreduce(data.wrong(Turn(0), call(), expected))
            if wrong:
                self.wrong[f"{name} at {nbytes} bytes"] += wrong
            return call

        nbytes = self.case.nbytes(data.count)
        choice = checked(self.comm, "auto", "auto")
        candidates = self.comm.explain(self.case.test, nbytes).candidates  # one call of this size has been made
        chosen: Way = self.comm.mpi.bcast(next(
            ((row["executor"], row["algorithm"]) for row in candidates if row["calls"]), None))
        calls = {chosen: choice}
        for way in self._left:
            if way != chosen:
                with contextlib.suppress(ArgumentError):  # the same on every rank, before any data move
                    calls[way] = checked(self._comms[way[0]], way[1], ":".join(way))
        return calls, chosen

    def _samples(self, calls: Mapping[Way, Callable[[], Any]]) -> dict[Way, list[float]]:
        return dict(zip(calls, samples(self.comm, [*calls.values()], FIRST * len(calls)), strict=True))

    def finish(self, interrupted: bool = False) -> int:
        """Print the last lines and write the file; return the exit code. No communication."""
        lines, judgement = [f"# auto goes by {self.basis}"], verdict(self.sizes) if self.sizes else None
        if "json" in self._files:
            records.write(self._files.pop("json"), {
                "program": PROGRAM, "version": gpucoll.__version__, "collective": self.case.test,
                "ranks": self.comm.size, "nodes": self.comm.nodes, "basis": re.sub("/.*/", "", self.basis),
                "sizes": self.sizes, "verdict": judgement, "wrong": dict(self.wrong), "interrupted": interrupted})
        if judgement:
            mean, worst, beyond = (f"{100 * judgement[key]:.1f} %" for key in ("mean", "worst", "beyond"))
            lines.insert(0, f"# regret: mean {mean}, worst {worst}, worst beyond the {CONFIDENCE:.0%} intervals "
                            f"{beyond}: {'within' if judgement['within'] else 'MISSES'} the goal (mean {MEAN:.0%}, "
                            f"worst beyond {WORST:.0%})")
        lines += [f"# wrong elements: {count} of {what}" for what, count in self.wrong.items()]
        self._say(*lines, *["# interrupted"] * interrupted)
        return 1 if self.wrong else 0

    def _say(self, *lines: str) -> None:
        if self.comm.rank == 0:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
