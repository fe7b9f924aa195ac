"""What comes of the seconds: nccl-tests' statistics of a run, skew between ranks, ratios and their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

Array: TypeAlias = numpy.ndarray[Any, Any]

RESAMPLES = 1000
DECIMALS = 3  # of the us in lists: nanoseconds
CONFIDENCE = 0.95
OVER_RANKS = {0: lambda seconds: seconds[0], 1: lambda seconds: seconds.mean(axis=0),
              2: lambda seconds: seconds.min(axis=0), 3: lambda seconds: seconds.max(axis=0)}


def reported(seconds: Array, average: int) -> float:
    """Return the time that a line reports, from seconds of shape (ranks, repetitions): the median repetition.

    `average` is nccl-tests' -a: 0 rank 0's time, 1 the mean over ranks, 2 the fastest's, 3 the slowest's.
    """
    return float(numpy.median(OVER_RANKS[average](seconds)))


def per_iteration(seconds: Array, skipped: int = 0) -> dict[str, Any]:
    """Return nccl-tests' statistics of the repetitions, each as long as on the slowest rank; times in us.

    The first `skipped` count in the lists only. Percentiles are nearest ranks, as nccl-tests takes them.
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
    """Return the nearest rank of a sorted row."""
    return float(row[min(len(row) - 1, (len(row) * percent + 99) // 100 - 1)])


class Skew(NamedTuple):
    """How far the ranks' times lie apart, in seconds, and the rank that usually takes longest."""

    seconds: float
    late_rank: int


def skew(seconds: Array) -> Skew:
    """Return the median over repetitions of slowest less fastest rank, and the rank with the longest median time."""
    return Skew(float(numpy.median(seconds.max(axis=0) - seconds.min(axis=0))),
                int(numpy.median(seconds, axis=1).argmax()))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the mean of ratios that values twice as fast and half as fast alike."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))


class Interval(NamedTuple):
    """A ratio of medians, and between which ratios it lies with `CONFIDENCE`."""

    ratio: float
    low: float
    high: float


def ratio(new: Sequence[float], old: Sequence[float]) -> Interval:
    """Return the ratio of the medians of two samples; the interval comes from resampling both, always alike."""
    generator = numpy.random.Generator(numpy.random.PCG64(0))
    medians = [numpy.median(generator.choice(numpy.asarray(sample), (RESAMPLES, len(sample))), axis=1)
               for sample in (new, old)]
    low, high = numpy.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(numpy.median(new) / numpy.median(old)), float(low), float(high))
