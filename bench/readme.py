"""README's section on performance, made from the newest committed results: `python -m gpucoll.bench.readme`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import read
from .summary import geometric_mean

FOLDER = Path(__file__).parent / "results"
BEGIN, END = "<!-- made by python -m gpucoll.bench.readme -->", "<!-- end of what bench.readme makes -->"
SMALL, LARGE = 4 << 10, 1 << 20  # bytes: up to there latency counts, from there bandwidth
Result = Mapping[str, Any]


def newest(folder: Path = FOLDER) -> Path | None:
    """Return the newest file of `scripts/bench`, by the date in its name; None where there is none."""
    suites = [path for path in folder.glob("*.json") if path.read_text().startswith('{"suite"')]
    return max(suites, key=lambda path: path.stem[-10:], default=None)


def block(path: Path) -> str:
    """Return the section, from the first marker to the last."""
    records = read(str(path))
    machine, version = records[0]["gpucoll"]["machine"], records[0]["gpucoll"]["version"]
    results = [result for record in records for result in record["results"]]
    lines = [
        BEGIN,
        f"Measured by `scripts/bench` on {path.stem[-10:]}: gpucoll {version}, {machine['cpu']}, {machine['cores']} "
        f"cores, {machine['mpi']}, NumPy {machine['numpy']}; all results checked, none wrong. Each figure is the "
        "geometric mean of MPI's time (its own blocking call by mpi4py, measured in turn in the same run) over "
        "gpucoll's, so that above 1 is faster than MPI; `share` is the busbw of the largest size over the bound that "
        "the machine's copy bandwidth sets.",
        "",
        f"| collective | ranks | memory | algorithm | up to {SMALL >> 10} KiB | from {LARGE >> 20} MiB "
        "| best busbw (GB/s) | share |",
        "|---|---|---|---|---|---|---|---|",
        *_rows(results), *_remarks(records), END, ""]
    wrong = sum(int(record["out_of_bounds"]["count"]) for record in records)
    return "\n".join(lines).replace("none wrong", "none wrong" if not wrong else f"{wrong} elements wrong")


def _rows(results: Sequence[Result]) -> Iterator[str]:
    for key in dict.fromkeys(map(_key, results)):
        mine = [one for one in results if _key(one) == key and one["size"]]
        best = max(mine, key=lambda one: one["out_of_place"]["bus_bw"])
        small, large = (_mean(one for one in mine if accepts(one["size"])) for accepts in (
            lambda size: size <= SMALL, lambda size: size >= LARGE))
        largest = max(mine, key=lambda one: one["size"])["share"]
        share = "" if largest is None else f"{100 * largest:.0f} %"
        yield f"| {' | '.join(key)} | {small} | {large} | {best['out_of_place']['bus_bw']:.2f} | {share} |"


def _key(result: Result) -> tuple[str, str, str, str]:
    return result["collective"], str(result["ranks"]), result.get("memory", "ordinary"), result["algorithm"]


def _mean(results: Iterable[Result]) -> str:
    ratios = [one["against"]["mpi"]["ratio"]["out_of_place"] for one in results if "mpi" in one["against"]]
    return f"{geometric_mean(ratios):.2f}" if ratios else ""


def _remarks(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return a sentence on overlap, and one on runs with more ranks than cores."""
    overlap = [line for record in records for line in record["gpucoll"]["overlap"]]
    if overlap:
        best = max(overlap, key=lambda line: line["overlap_pct"])
        yield ""
        yield (f"Of {best['collective']} up to {best['overlap_pct']:.0f} % hide behind computing (`--overlap`; "
               f"{best['size']} bytes).")
    cores = records[0]["gpucoll"]["machine"]["cores"]
    crowded = sorted({result["ranks"] for record in records for result in record["results"]
                      if result["ranks"] > record["gpucoll"]["machine"]["cores"]})
    if crowded:
        yield ""
        yield f"Runs on {' and '.join(map(str, crowded))} ranks share {cores} cores."


def main() -> int:
    """Print the section; 1 where no results are committed."""
    path = newest()
    sys.stdout.write(block(path) if path else "")
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
