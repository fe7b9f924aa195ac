"""`gpucoll nccl`: NCCL's choice of algorithm and protocol, and the choice by measured times."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpucoll.algorithms import evaluate
from gpucoll.analysis.document import write
from gpucoll.analysis.graphs.bounds import bound
from gpucoll.analysis.graphs.link_graph import load_graph
from gpucoll.analysis.nccl_tuning.machines import machine
from gpucoll.analysis.nccl_tuning.measurements import Run, SizeResult, compare, read_runs, tuner_file
from gpucoll.analysis.nccl_tuning.releases import ALGORITHMS, PROTOCOLS, Release, release
from gpucoll.analysis.nccl_tuning.tuning import COLLECTIVES, Estimate, Machine, Table, choices, table
from gpucoll.analysis.simulate.sweep import byte_sizes
from gpucoll.analysis.sizes import byte_text
from gpucoll.core.collectives import COLLECTIVES as ROWS
from gpucoll.errors import ArgumentError

MOST_RANKS = 128  # a bound takes seconds for so many ranks


def main(options: Any) -> int:
    """Print NCCL's choices on a machine, or compare files of nccl-tests; write the tuner's file."""
    first, *others = options.what
    model = release(options.nccl)
    gpus = machine(options.machine, options.sm) if options.machine else None
    if first not in ROWS:
        return _measured(options, gpus, model)
    if first not in COLLECTIVES:
        raise ArgumentError(f"NCCL chooses an algorithm for {', '.join(COLLECTIVES)}, not for {first}",
                            code="GC-COLLECTIVE")
    if gpus is None or len(others) > 1 or options.output:
        raise ArgumentError(f"name the machine, as in gpucoll nccl {first} 1M,64M --machine 'dgx_a100(2)'; -o needs "
                            "files of nccl-tests", code="GC-NCCL-MODEL")
    sizes = {nbytes: choices(gpus, model, first, nbytes) for nbytes in byte_sizes(others[0] if others else "1M")}
    limit = _bound(gpus, first)
    if options.json:
        print(json.dumps(_as_object(first, gpus, model, sizes, limit)))
    else:
        print("\n".join(_as_text(first, gpus, model, sizes, limit)))
    return 0


def _bound(gpus: Machine, collective: str) -> float | None:
    """Return the most algbw in GB/s that the machine's links allow; None without a graph of the links."""
    if not gpus.links or gpus.ranks > MOST_RANKS:
        return None
    return float(bound(load_graph(f"{gpus.links}({gpus.nodes})"), collective).algbw)


def _as_object(collective: str, gpus: Machine, model: Release, sizes: dict[int, list[Estimate]],
               limit: float | None) -> dict[str, Any]:
    cells = table(gpus, model, collective)
    return {"collective": collective, "machine": gpus.name, "ranks": gpus.ranks, "nodes": gpus.nodes,
            "nccl": _version(model), "bound_GBps": limit,
            "table": [{"algorithm": algorithm, "protocol": protocol, "latency_us": cell.latency,
                       "algbw_GBps": cell.algbw} for (algorithm, protocol), cell in cells.items() if cell.algbw],
            "sizes": [{"bytes": nbytes, "choice": found[0]._asdict(), "algbw_GBps": _algbw(nbytes, found[0]),
                       "candidates": [choice._asdict() for choice in found]} for nbytes, found in sizes.items()]}


def _place(ranks: int, nodes: int) -> str:
    return f"{ranks} GPUs of {nodes} node{'s' * (nodes > 1)}"


def _version(model: Release) -> str:
    return ".".join(map(str, model.since))


def _algbw(nbytes: int, choice: Estimate) -> float:
    return nbytes / choice.us / 1e3


def _as_text(collective: str, gpus: Machine, model: Release, sizes: dict[int, list[Estimate]],
             limit: float | None) -> Iterator[str]:
    yield f"{collective} on {gpus.name}, {_place(gpus.ranks, gpus.nodes)}, by NCCL {_version(model)}'s model"
    yield gpus.about
    yield from _table_text(table(gpus, model, collective))
    yield (f"{'bytes':>12}  {'choice':16} {'time us':>11} {'algbw GB/s':>10} {'busbw GB/s':>10}  {'next':16}   later"
           + "  of bound" * (limit is not None))
    factor = float(evaluate(ROWS[collective].busbw, P=gpus.ranks))
    for nbytes, found in sizes.items():
        algbw, rival = _algbw(nbytes, found[0]), found[min(1, len(found) - 1)]
        yield (f"{nbytes:12}  {found[0].algorithm + '/' + found[0].protocol:16} {found[0].us:11.2f} {algbw:10.2f} "
               f"{algbw * factor:10.2f}  {rival.algorithm + '/' + rival.protocol:16} "
               f"{100 * (rival.us / found[0].us - 1):5.0f} %" + (f" {100 * algbw / limit:7.0f} %" if limit else ""))
    if limit:
        yield f"bound: the links of {gpus.links}({gpus.nodes}) allow at most {limit:.6g} GB/s of algbw"


def _table_text(cells: Table) -> Iterator[str]:
    """Yield the lines of NCCL's table, without algorithms that this machine or collective does not have."""
    yield f"{'latency us / algbw GB/s':24}" + "".join(f"{protocol:>18}" for protocol in PROTOCOLS)
    for algorithm in ALGORITHMS:
        row = [cells[algorithm, protocol] for protocol in PROTOCOLS]
        if any(cell.algbw for cell in row):
            yield f"{algorithm:24}" + "".join(f"{cell.latency:9.1f} /{cell.algbw:7.1f}" if cell.algbw else f"{'-':>18}"
                                              for cell in row)


def _measured(options: Any, gpus: Machine | None, model: Release) -> int:
    """Compare the files of nccl-tests; print the result, and with ``-o`` write the tuner's file."""
    runs = read_runs(options.what)
    if gpus is not None and gpus.ranks != runs[0].ranks:
        raise ArgumentError(f"{gpus.name} has {gpus.ranks} GPUs, {runs[0].file} is of {runs[0].ranks} ranks",
                            code="GC-NCCL-TESTS")

    chosen = functools.partial(_chosen, gpus, model, runs[0].collective) if gpus else None
    rows = compare(runs, chosen)
    if options.output:
        write(Path(options.output), tuner_file(rows, chosen))
    print(json.dumps(_compared(runs, rows)) if options.json else "\n".join(_compared_text(runs, rows, options.output)))
    return 0


def _chosen(gpus: Machine, model: Release, collective: str, nbytes: int, algorithm: str = "",
            protocol: str = "") -> tuple[str, str]:
    """Return NCCL's choice on a machine; `algorithm` and `protocol`, if given, are forced."""
    for choice in choices(gpus, model, collective, nbytes):
        if algorithm in ("", choice.algorithm) and protocol in ("", choice.protocol):
            return choice.algorithm, choice.protocol
    raise ArgumentError(f"{gpus.name} does not have {algorithm or protocol}", code="GC-NCCL-TESTS")


def _compared(runs: Sequence[Run], rows: Sequence[SizeResult]) -> dict[str, Any]:
    return {"collective": runs[0].collective, "ranks": runs[0].ranks, "nodes": runs[0].nodes,
            "sizes": [{"bytes": row.nbytes, "us": {run.label: run.us[row.nbytes] for run in runs},
                       "best": row.best.label, "default": row.default and row.default.label,
                       "saving": row.saving, "won": row.is_won} for row in rows]}


def _compared_text(runs: Sequence[Run], rows: Sequence[SizeResult], output: str | None) -> Iterator[str]:
    usual = any(row.default for row in rows)
    yield f"{runs[0].collective}, {_place(runs[0].ranks, runs[0].nodes)}: times in us, out of place"
    yield (f"{'bytes':>12}" + "".join(f" {run.label:>16}" for run in runs) + f"  {'best':16}"
           + f"  {'NCCL':16} {'saves':>7}" * usual)
    for row in rows:
        own = f"  {row.default.label if row.default else '-':16} {100 * row.saving:5.1f} %"
        yield (f"{row.nbytes:12}" + "".join(f" {run.us[row.nbytes]:16.2f}" for run in runs) + f"  {row.best.label:16}"
               + own * usual)
    if usual:
        won = [byte_text(row.nbytes) for row in rows if row.is_won]
        yield f"another choice than NCCL's wins at {len(won)} of {len(rows)} sizes" + ": " * bool(won) + ", ".join(won)
    else:
        yield "no file has the times of NCCL's own choice: run without NCCL_ALGO and NCCL_PROTO, or name --machine"
    if output:
        yield f"{output}: for NCCL's example tuner, by NCCL_TUNER_PLUGIN and NCCL_TUNER_CONFIG_FILE"
