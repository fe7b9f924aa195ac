"""Statistics of the measured seconds: nccl-tests' figures, skew, ratios with intervals, and comparison of two runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.core.dtypes import Array

from .records import PLACEMENTS

Result = Mapping[str, Any]  # of a record
FEWEST = 5  # repetitions of both files, for a verdict on the page
# Fields of the same case. A field missing in a file counts as equal: nccl-tests' files lack the first five.
SAME = ("collective", "algorithm", "ranks", "device", "memory", "size", "type", "redop")
RESAMPLES = 1000
DECIMALS = 3  # of the us in lists: nanoseconds
CONFIDENCE = 0.95
OVER_RANKS = {0: lambda seconds: seconds[0], 1: lambda seconds: seconds.mean(axis=0),
              2: lambda seconds: seconds.min(axis=0), 3: lambda seconds: seconds.max(axis=0)}


def reported(seconds: Array, average: int) -> float:
    """Return the time reported by a line, from seconds of shape (ranks, repetitions): the median repetition.

    `average` is nccl-tests' -a: 0 rank 0's time, 1 the mean over ranks, 2 the fastest rank's, 3 the slowest rank's.
    """
    return float(numpy.median(OVER_RANKS[average](seconds)))


def per_iteration(seconds: Array, skipped: int = 0) -> dict[str, Any]:
    """Return nccl-tests' statistics of the repetitions, each with the slowest rank's time; times in us.

    The first `skipped` repetitions appear only in the lists. Percentiles are nearest ranks, as in nccl-tests.
    """
    slowest = seconds.max(axis=0) * 1e6
    row = numpy.sort(slowest[skipped:])
    mean, deviation = float(row.mean()), float(row.std())
    return {"skipped_iterations": skipped, "min_us": float(row[0]), "max_us": float(row[-1]), "avg_us": mean,
            "p50_us": float(row[len(row) // 2]), "p95_us": percentile(row, 95), "p99_us": percentile(row, 99),
            "stdev_us": deviation, "cv_pct": 100 * deviation / mean if mean > 0 else 0.0,
            "times_us": slowest.round(DECIMALS).tolist(),
            "per_process_max_times_us": (seconds * 1e6).round(DECIMALS).tolist()}


def percentile(row: Array, percent: int) -> float:
    """Return a percentile of a sorted row, by the nearest rank."""
    return float(row[min(len(row) - 1, (len(row) * percent + 99) // 100 - 1)])


class Skew(NamedTuple):
    """The time between the ranks in seconds, and the rank usually slowest."""

    seconds: float
    late_rank: int


def skew(seconds: Array) -> Skew:
    """Return the median over repetitions of slowest minus fastest rank, and the rank with the longest median time."""
    return Skew(float(numpy.median(seconds.max(axis=0) - seconds.min(axis=0))),
                int(numpy.median(seconds, axis=1).argmax()))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean: twice as fast and half as fast balance each other."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))


class Interval(NamedTuple):
    """A ratio of medians, and its interval at the level `CONFIDENCE`."""

    ratio: float
    low: float
    high: float


def ratio(new: Sequence[float], old: Sequence[float]) -> Interval:
    """Return the ratio of two samples' medians; the interval is from resampling both, with a fixed seed."""
    generator = numpy.random.Generator(numpy.random.PCG64(0))
    medians = [numpy.median(generator.choice(numpy.asarray(sample), (RESAMPLES, len(sample))), axis=1)
               for sample in (new, old)]
    low, high = numpy.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(numpy.median(new) / numpy.median(old)), float(low), float(high))


# Comparison of two runs: for --compare, and on the page


class Change(NamedTuple):
    """A figure measured in both runs: medians in us, and the interval of new time over old."""

    what: str
    new: float
    old: float
    interval: Interval

    def verdict(self, tolerance: float = 0.0) -> str:
        """Return "slower" or "faster" if the whole interval lies beyond the tolerance, else "alike"."""
        if self.interval.low > 1 + tolerance:
            return "slower"
        return "faster" if self.interval.high < 1 / (1 + tolerance) else "alike"


def change(what: str, new: Sequence[float], old: Sequence[float]) -> Change:
    """Return the change between the times of a figure."""
    return Change(what, statistics.median_high(new), statistics.median_high(old), ratio(new, old))


def changes(results: Iterable[Result], baseline: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yield the change of each figure of `results` also found in a record of `baseline`."""
    for new in results:
        old: Result = next((one for record in baseline for one in record["results"] if is_same(one, new)), {})
        for placement in PLACEMENTS:
            # The times of all repetitions; some files have only their mean.
            times = [side[f"{placement}_per_iter"]["times_us"] if f"{placement}_per_iter" in side else
                     [side[placement]["time"]] for side in (new, old) if side.get(placement)]
            if len(times) == 2 and all(time > 0 for row in times for time in row):
                words = [new[key] for key in ("collective", "size", "type", "redop", "algorithm")]
                yield change(" ".join(map(str, (*words, placement.replace("_", "-")))), *times)


def is_same(old: Result, new: Result) -> bool:
    """Return whether two results are for the same case."""
    alike = all(old.get(key, new.get(key)) == new.get(key, old.get(key)) for key in SAME)
    return alike and str(old["root"]).strip() == str(new["root"]).strip()


def report(found: Sequence[Change], results: int, tolerance: float) -> tuple[list[str], bool]:
    """Return the lines to print, and whether all is well: at least one comparison, and no figure slower."""
    verdicts = [one.verdict(tolerance) for one in found]
    lines = [f"# compare: {verdict.upper() if verdict == 'slower' else verdict}  {one.what}  {one.old:.4g} us -> "
             f"{one.new:.4g} us, {one.interval.ratio:.3f} times as long "
             f"[{one.interval.low:.3f}, {one.interval.high:.3f}]"
             for one, verdict in zip(found, verdicts, strict=True) if verdict != "alike"]
    lines.append(f"# compare: {len(found)} figures, {verdicts.count('slower')} slower, {verdicts.count('faster')} "
                 f"faster by over {100 * tolerance:g} % with {100 * CONFIDENCE:g} % confidence; "
                 f"{len(PLACEMENTS) * results - len(found)} have no counterpart")
    return lines, bool(found) and "slower" not in verdicts
