"""How two runs differ, beyond chance: for `--compare old.json`, and on the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .records import PLACEMENTS
from .summary import CONFIDENCE, Interval, ratio

Result = Mapping[str, Any]
FEWEST = 5  # repetitions on both sides, for a verdict of the page
# What has to be alike; what a file does not say is taken to be the same: nccl-tests' lack the first five.
SAME = ("collective", "algorithm", "ranks", "device", "memory", "size", "type", "redop")


class Change(NamedTuple):
    """One figure that was measured before: medians in us, and the interval of new time over old."""

    what: str
    new: float
    old: float
    interval: Interval

    def verdict(self, tolerance: float = 0.0) -> str:
        """Return "slower" or "faster" where the whole interval lies beyond the tolerance, else "alike"."""
        if self.interval.low > 1 + tolerance:
            return "slower"
        return "faster" if self.interval.high < 1 / (1 + tolerance) else "alike"


def change(what: str, new: Sequence[float], old: Sequence[float]) -> Change:
    """Return how the times of one figure changed."""
    return Change(what, statistics.median_high(new), statistics.median_high(old), ratio(new, old))


def changes(results: Iterable[Result], baseline: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Return each figure of `results` that a record of `baseline` holds as well."""
    for new in results:
        old: Result = next((one for record in baseline for one in record["results"] if is_same(one, new)), {})
        for placement in PLACEMENTS:
            # Every repetition's time, or where a file has only their mean, that.
            times = [side[f"{placement}_per_iter"]["times_us"] if f"{placement}_per_iter" in side else
                     [side[placement]["time"]] for side in (new, old) if side.get(placement)]
            if len(times) == 2 and all(time > 0 for row in times for time in row):
                words = [new[key] for key in ("collective", "size", "type", "redop", "algorithm")]
                yield change(" ".join(map(str, (*words, placement.replace("_", "-")))), *times)


def is_same(old: Result, new: Result) -> bool:
    """Return whether two results are of the same case."""
    alike = all(old.get(key, new.get(key)) == new.get(key, old.get(key)) for key in SAME)
    return alike and str(old["root"]).strip() == str(new["root"]).strip()


def report(found: Sequence[Change], results: int, tolerance: float) -> tuple[list[str], bool]:
    """Return the lines to print, and whether all is well: something was compared and nothing became slower."""
    verdicts = [one.verdict(tolerance) for one in found]
    lines = [f"# compare: {verdict.upper() if verdict == 'slower' else verdict}  {one.what}  {one.old:.4g} us -> "
             f"{one.new:.4g} us, {one.interval.ratio:.3f} times as long "
             f"[{one.interval.low:.3f}, {one.interval.high:.3f}]"
             for one, verdict in zip(found, verdicts, strict=True) if verdict != "alike"]
    lines.append(f"# compare: {len(found)} figures, {verdicts.count('slower')} slower, {verdicts.count('faster')} "
                 f"faster by over {100 * tolerance:g} % with {100 * CONFIDENCE:g} % confidence; "
                 f"{len(PLACEMENTS) * results - len(found)} have no counterpart")
    return lines, bool(found) and "slower" not in verdicts
