"""The tables of the documents, from committed results: `python -m gpucoll.bench.readme [--machines] [FILE]`.

Without a file: docs/performance.md, from the newest results of `scripts/bench`. With a file of `scripts/gpu_check`: the
tables of docs/gpus.md; `--machines` writes `gpucoll/tuner/machines.json` instead, for `auto` on such machines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucoll.lab.sizes import byte_text
from gpucoll.tuner.table import MACHINES, Curve, Shape, Table, plain

from .records import read
from .summary import geometric_mean

FOLDER = Path(__file__).parent / "results"
BEGIN_MARK, END_MARK = "<!-- made by python -m gpucoll.bench.readme -->", "<!-- end of what bench.readme makes -->"
SHORT_TO, LONG_FROM = 64 << 10, 1 << 20  # latency counts up to the first, bandwidth from the second on
MPIS = ("mpich", "openmpi")
ON_GPUS = re.compile(r"(peer )?all_reduce, (\w+), (\d+) bytes")  # names of what `scripts/gpu_check` measures
Result = Mapping[str, Any]


def newest(folder: Path = FOLDER) -> list[Path]:
    """Return the newest file of `scripts/bench` for each MPI, by the date in the file's name."""
    found = [list(folder.glob(f"*-{mpi}-????-??-??.json")) for mpi in MPIS]
    return [max(paths, key=lambda path: path.stem[-10:]) for paths in found if paths]


def block(paths: Iterable[Path]) -> str:
    """Return the section between the markers, markers included: a table for each file."""
    explained = (
        "Each figure is MPI's time divided by gpucoll's, both on the slowest rank: above 1, gpucoll is faster. MPI's "
        "time is that of its own blocking call through mpi4py, measured in turn in the same run. A pair has the "
        "geometric mean and the smallest figure. `share` is the [busbw](guide/time.md#algbw-and-busbw) of the largest "
        "size, divided by the bound set by the machine's copy bandwidth.")
    return "\n\n".join([BEGIN_MARK, explained, *map(_table, paths), END_MARK, ""])


def _table(path: Path) -> str:
    records = read(str(path))
    machine, version = records[0]["gpucoll"]["machine"], records[0]["gpucoll"]["version"]
    # Older files record the cores of the first rank's binding: the host has at least the largest recorded number.
    cores = max(record["gpucoll"]["machine"]["cores"] for record in records)
    wrong = sum(int(record["out_of_bounds"]["count"]) for record in records)
    lines = [
        f"Measured by `scripts/bench` on {path.stem[-10:]}: gpucoll {version}, {machine['cpu']}, {cores} "
        f"cores, {machine['mpi']}, NumPy {machine['numpy']}; all results checked, "
        f"{f'{wrong} elements' if wrong else 'none'} wrong.",
        "",
        f"| collective | ranks | memory | algorithm | up to {SHORT_TO >> 10} KiB | from {LONG_FROM >> 20} MiB "
        "| best busbw (GB/s) | share |",
        "|---|---|---|---|---|---|---|---|"]
    rows: dict[tuple[Any, ...], list[Result]] = {}
    for record in records:
        for one in record["results"]:
            key = (one["collective"], one["ranks"], one.get("memory", "ordinary"), one["algorithm"])
            rows.setdefault(key, []).append(one)
    for key, results in rows.items():
        best = max(one["out_of_place"]["bus_bw"] for one in results)
        small, large = (_ratios(one for one in results if accepts(one["size"])) for accepts in (
            lambda size: size <= SHORT_TO, lambda size: size >= LONG_FROM))
        largest = max(results, key=lambda one: int(one["size"]))["share"]
        share = "" if largest is None or not large else f"{100 * largest:.0f} %"
        lines.append(f"| {' | '.join(map(str, key))} | {small} | {large} | {best:.2f} | {share} |")
    crowded = sorted({key[1] for key in rows if key[1] > cores})
    if crowded:
        lines += ["", f"Runs on {' and '.join(map(str, crowded))} ranks share {cores} cores."]
    return "\n".join(lines)


def _ratios(results: Iterable[Result]) -> str:
    ratios = [one["against"]["mpi"]["ratio"]["out_of_place"] for one in results if "mpi" in one["against"]]
    return f"{geometric_mean(ratios):.2f}, {min(ratios):.2f}" if ratios else ""


def of_gpus(path: Path) -> str:
    """Return the table of a file of `scripts/gpu_check` below its mark: microseconds by size; "" if there are none."""
    rows: dict[str, dict[str, str]] = {}
    for peer, algorithm, nbytes, microseconds in _times(path):
        name = f"{'`peer`: ' if peer else ''}`{algorithm}`"
        rows.setdefault(byte_text(nbytes), {})[name] = f"{microseconds:.1f}"
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [["bytes", *names], ["---"] * (1 + len(names)),
             *([size, *(row.get(name, "") for name in names)] for size, row in rows.items())]
    mark = f"<!-- figures: measured bench/results/{path.name} -->"
    return "\n".join([mark, *(f"| {' | '.join(line)} |" for line in lines), ""]) if rows else ""


def _times(path: Path) -> list[tuple[str, str, int, float]]:
    found = json.loads(path.read_text())["parts"].get("benchmark", {"findings": []})["findings"]
    return [(named[1] or "", named[2], int(named[3]), one["microseconds"]) for one in found
            if (named := ON_GPUS.fullmatch(one["name"])) and one["status"] == "passed"]


def machine(path: Path) -> Table:
    """Return the times of a file of `scripts/gpu_check` on one GPU, shared by two processes under MPS, as a table."""
    document = json.loads(path.read_text())
    gpu, = next(one["value"] for one in document["parts"]["facts"]["findings"] if one["name"] == "GPUs")
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for peer, algorithm, nbytes, microseconds in _times(path):
        executor = peer.strip() or ("native" if algorithm == "native" else "nccl")
        points.setdefault((executor, algorithm), []).append((nbytes, microseconds / 1e6))
    curves = tuple(Curve("all_reduce", *way, *zip(*some, strict=True)) for way, some in points.items())
    return Table("", {"gpu": [gpu.partition(",")[0]], "gpus": 1, "by_mps": True},
                 (Shape(2, 1, "cuda", f"{document['time'][:10]} in bench/results/{path.name}", (),
                        curves),))


def main(files: Sequence[str]) -> int:
    """Print the tables; return 1 without results."""
    if "--machines" in files:
        MACHINES.write_text(json.dumps([plain(machine(Path(name))) for name in files[1:]], indent=1))
        return 0
    text = "\n".join(map(of_gpus, map(Path, files))) if files else block(newest())
    sys.stdout.write(text)
    return 0 if text else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
