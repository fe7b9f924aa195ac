"""`--compare old.json`: what became slower than it was, beyond chance and beyond a tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .records import PLACEMENTS
from .summary import CONFIDENCE, Interval, ratio

Result = Mapping[str, Any]
# nccl-tests' files lack the first five.
SAME = ("collective", "algorithm", "ranks", "device", "memory", "size", "type", "redop")


class Change(NamedTuple):
    """One figure that was measured before: new time over old."""

    what: str
    new: float
    old: float
    interval: Interval

    def verdict(self, tolerance: float) -> str:
        """Return "slower" or "faster" where the whole interval lies beyond the tolerance, else "alike"."""
        if self.interval.low > 1 + tolerance:
            return "slower"
        return "faster" if self.interval.high < 1 / (1 + tolerance) else "alike"


def changes(results: Iterable[Result], baseline: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Return each figure of `results` that a record of `baseline` holds as well."""
    old = [one for record in baseline for one in record["results"]]
    for new in results:
        match = next((one for one in old if is_same(one, new)), None)
        yield from _sides(new, match) if match else ()


def is_same(old: Result, new: Result) -> bool:
    """Return whether two results are of the same case; what a file does not say is taken to be the same."""
    alike = all(old.get(key, new.get(key)) == new.get(key, old.get(key)) for key in SAME)
    return alike and str(old["root"]).strip() == str(new["root"]).strip()


def _sides(new: Result, old: Result) -> Iterator[Change]:
    for placement in PLACEMENTS:
        if old.get(placement) is None:
            continue
        what = (f"{new['collective']} {new['size']} {new['type']} {new['redop']} {new['algorithm']} "
                f"{placement.replace('_', '-')}")
        times = [_times(side, placement) for side in (new, old)]
        if all(time > 0 for row in times for time in row):
            yield Change(what, _middle(times[0]), _middle(times[1]), ratio(*times))


def _times(result: Result, placement: str) -> list[float]:
    """Return every repetition's time, or where a file has only their mean, that."""
    spread = result.get(f"{placement}_per_iter")
    body = result[placement]
    return list(spread["times_us"]) if spread else [body.get("time", body.get("cpu_time"))]


def _middle(row: Sequence[float]) -> float:
    return sorted(row)[len(row) // 2]


def report(found: Sequence[Change], results: int, tolerance: float) -> tuple[list[str], bool]:
    """Return the lines to print, and whether all is well: something was compared and nothing became slower."""
    verdicts = [change.verdict(tolerance) for change in found]
    lines = [f"# compare: {verdict.upper() if verdict == 'slower' else verdict}  {change.what}  {change.old:.4g} us -> "
             f"{change.new:.4g} us, {change.interval.ratio:.3f} times as long "
             f"[{change.interval.low:.3f}, {change.interval.high:.3f}]"
             for change, verdict in zip(found, verdicts, strict=True) if verdict != "alike"]
    alone = len(PLACEMENTS) * results - len(found)
    lines.append(f"# compare: {len(found)} figures, {verdicts.count('slower')} slower, {verdicts.count('faster')} "
                 f"faster by over {100 * tolerance:g} % with {100 * CONFIDENCE:g} % confidence; {alone} have no "
                 "counterpart")
    return lines, bool(found) and "slower" not in verdicts
