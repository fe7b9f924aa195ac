"""Makes the record of a run (its keys: see `records`) from what was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gpucoll

from .arguments import Options
from .cases import Case
from .machine import Copy, Place, bound, revision
from .measure import Measured
from .overlap import Overlap
from .records import PLACEMENTS, VERSION
from .summary import per_iteration, reported, skew
from .table import STAMP


def result(case: Case, count: int, options: Options, ours: tuple[str, Measured], peers: Mapping[str, Measured],
           copy: Copy) -> dict[str, Any]:
    """Return one line's result; `ours` is an algorithm's name and what was measured, `peers` likewise."""
    name, measured = ours
    dtype, redop, root = case.printed
    sides = _sides(case, count, options, measured)
    limit, late = bound(case, count, copy), skew(measured.seconds[0])
    return {"size": case.nbytes(count), "count": count, "type": dtype, "redop": redop, "root": f"{root:6d}", **sides,
            "actual_iterations": measured.seconds.shape[-1], "experiment_name": name, "collective": case.test,
            "algorithm": name, "ranks": case.ranks, "device": options.device, "memory": options.flags.memory,
            "factor": case.factor, "bound": limit, "share": sides["out_of_place"]["bus_bw"] / limit if limit else None,
            "skew_us": late.seconds * 1e6, "late_rank": late.late_rank,
            "against": {peer: _against(case, count, options, found, sides) for peer, found in peers.items()}}


def _sides(case: Case, count: int, options: Options, measured: Measured) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for placement, seconds, wrong in zip(PLACEMENTS, measured.seconds, measured.wrong, strict=True):
        taken = reported(seconds, options.flags.average)
        algbw = case.moved(count) / taken / 1e9 if taken else 0.0
        clock = "cpu_time" if options.flags.report_cputime else "time"
        sides[placement] = {clock: taken * 1e6, "alg_bw": algbw, "bus_bw": algbw * case.factor, "nwrong": wrong}
        sides[f"{placement}_per_iter"] = per_iteration(seconds, options.flags.per_iter_skip)
    return sides


def _against(case: Case, count: int, options: Options, measured: Measured, ours: Mapping[str, Any]) -> dict[str, Any]:
    sides = _sides(case, count, options, measured)
    clock = "cpu_time" if options.flags.report_cputime else "time"
    return {**sides, "ratio": {placement: sides[placement][clock] / ours[placement][clock] for placement in PLACEMENTS}}


def overlapped(case: Case, count: int, name: str, found: Overlap) -> dict[str, Any]:
    """Return one line of overlap."""
    return {"collective": case.test, "algorithm": name, "size": case.nbytes(count), "overall_us": found.overall * 1e6,
            "compute_us": found.compute * 1e6, "pure_us": found.pure * 1e6, "overlap_pct": found.percent}


def wrong_elements(results: Sequence[Mapping[str, Any]]) -> int:
    """Return how many elements were wrong in all, those of peers too."""
    sides = [side for result in results for side in (result, *result["against"].values())]
    return sum(side[placement]["nwrong"] or 0 for side in sides for placement in PLACEMENTS)


def config(options: Options, places: Sequence[Place]) -> dict[str, Any]:
    """Return nccl-tests' `config`."""
    flags, (first, last) = options.flags, options.bounds
    step = {"step_factor": flags.stepfactor} if flags.stepfactor > 1 else {"step_bytes": flags.stepbytes}
    return {"nthreads": 1, "ngpus": 1, "minimum_bytes": first, "maximum_bytes": last, **step,
            "warmup_iters": flags.warmup_iters, "iterations": options.iterations or 20,
            "aggregated_iterations": flags.agg_iters, "validation": flags.check, "graph": options.launches,
            "blocking_collectives": truth(flags.blocking), "per_iter_timing": truth(flags.per_iter_timing),
            "per_iter_skip": flags.per_iter_skip, "parallel_init": "false",
            "devices": [{"rank": rank, "group": 0, "pid": place.pid, "hostname": place.host, "device": place.device,
                         "device_hex": place.identity, "device_info": place.info}
                        for rank, place in enumerate(places)]}


def truth(value: object) -> str:
    """Return nccl-tests' spelling of a truth."""
    return "true" if value else "false"


def opening(options: Options, places: Sequence[Place], machine: Mapping[str, Any], arguments: Sequence[str],
            environment: Sequence[str]) -> dict[str, Any]:
    """Return what is known of a run before it begins."""
    return {"version": VERSION, "start_time": now(), "args": list(arguments), "env": list(environment),
            "nccl_version": machine["nccl"], "config": config(options, places), "results": [],
            "gpucoll": {"version": gpucoll.__version__, "revision": revision(), "program": "gpucoll bench",
                        "tests": list(options.tests), "machine": dict(machine), "overlap": [], "pairs": [],
                        "findings": [], "left_out": [], "ratios": {}, "interrupted": False}}


def closing(options: Options, wrong: int, bandwidth: float, errors: Sequence[str]) -> dict[str, Any]:
    """Return what is known of a run once it has ended."""
    okay = "unchecked" if options.floor is None else truth(bandwidth >= options.floor)
    return {"out_of_bounds": {"count": wrong, "okay": truth(not wrong)},
            "average_bus_bandwidth": {"bandwidth": bandwidth, "okay": okay},
            "errors": list(errors), "end_time": now()}


def now() -> str:
    """Return the time as nccl-tests writes it."""
    return time.strftime(STAMP)
