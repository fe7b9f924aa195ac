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
from .records import PLACEMENTS
from .summary import geometric_mean, per_iteration, reported, skew

STAMP = "%Y-%m-%d %H:%M:%S"


def result(case: Case, count: int, options: Options, ours: tuple[str, Measured], peers: Mapping[str, Measured],
           copy: Copy) -> dict[str, Any]:
    """Return one line's result; `ours` is an algorithm's name and what was measured, `peers` likewise."""
    name, measured = ours
    clock = "cpu_time" if options.flags.report_cputime else "time"

    def sides(measured: Measured) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for placement, seconds, wrong in zip(PLACEMENTS, measured.seconds, measured.wrong, strict=True):
            taken = reported(seconds, options.flags.average)
            algbw = case.moved(count) / taken / 1e9 if taken else 0.0
            found[placement] = {clock: taken * 1e6, "alg_bw": algbw, "bus_bw": algbw * case.factor, "nwrong": wrong}
            found[f"{placement}_per_iter"] = per_iteration(seconds, options.flags.per_iter_skip)
        return found

    own, against = sides(measured), {peer: sides(found) for peer, found in peers.items()}
    for found in against.values():
        found["ratio"] = {placement: found[placement][clock] / own[placement][clock] for placement in PLACEMENTS}
    dtype, redop, root = case.printed
    limit, late = bound(case, count, copy), skew(measured.seconds[0])
    return {"size": case.nbytes(count), "count": count, "type": dtype, "redop": redop, "root": f"{root:6d}", **own,
            "actual_iterations": measured.seconds.shape[-1], "experiment_name": name, "collective": case.test,
            "algorithm": name, "ranks": case.ranks, "device": options.flags.device, "memory": options.flags.memory,
            "factor": case.factor, "bound": limit, "share": own["out_of_place"]["bus_bw"] / limit if limit else None,
            "skew_us": late.seconds * 1e6, "late_rank": late.late_rank, "against": against}


def wrong_elements(results: Sequence[Mapping[str, Any]]) -> int:
    """Return how many elements were wrong in all, those of peers too."""
    sides = [side for result in results for side in (result, *result["against"].values())]
    return sum(side[placement]["nwrong"] or 0 for side in sides for placement in PLACEMENTS)


def means(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {peer: {collective: {algorithm: the geometric mean of its out-of-place ratios}}}."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for result in results:
        for peer, found in result["against"].items():
            by_algorithm = ratios.setdefault(peer, {}).setdefault(result["collective"], {})
            by_algorithm.setdefault(result["algorithm"], []).append(found["ratio"]["out_of_place"])
    return {peer: {test: {name: geometric_mean(row) for name, row in rows.items()} for test, rows in tests.items()}
            for peer, tests in ratios.items()}


def opening(options: Options, places: Sequence[Place], machine: Mapping[str, Any], arguments: Sequence[str],
            environment: Sequence[str]) -> dict[str, Any]:
    """Return what is known of a run before it begins."""
    flags = options.flags
    step = {"step_factor": flags.stepfactor} if flags.stepfactor > 1 else {"step_bytes": flags.stepbytes}
    config = {
        "nthreads": 1, "ngpus": 1, "minimum_bytes": flags.minbytes, "maximum_bytes": flags.maxbytes, **step,
        "warmup_iters": flags.warmup_iters, "iterations": options.iterations or 20,
        "aggregated_iterations": flags.agg_iters, "validation": flags.check, "graph": options.launches,
        "blocking_collectives": truth(flags.blocking), "per_iter_timing": truth(flags.per_iter_timing),
        "per_iter_skip": flags.per_iter_skip, "parallel_init": "false",
        "devices": [{"rank": rank, "group": 0, "pid": place.pid, "hostname": place.host, "device": place.device,
                     "device_hex": place.identity, "device_info": place.info} for rank, place in enumerate(places)]}
    return {"version": 3, "start_time": now(), "args": list(arguments), "env": list(environment),
            "nccl_version": machine["nccl"], "config": config, "results": [],
            "gpucoll": {"version": gpucoll.__version__, "revision": revision(), "program": "gpucoll bench",
                        "tests": list(options.tests), "machine": dict(machine), "overlap": [], "pairs": [],
                        "findings": [], "left_out": [], "ratios": {}, "interrupted": False}}


def closing(options: Options, wrong: int, bandwidth: float, errors: Sequence[str]) -> dict[str, Any]:
    """Return what is known of a run once it has ended."""
    okay = "unchecked" if options.floor is None else truth(bandwidth >= options.floor)
    return {"out_of_bounds": {"count": wrong, "okay": truth(not wrong)},
            "average_bus_bandwidth": {"bandwidth": bandwidth, "okay": okay}, "errors": list(errors), "end_time": now()}


def truth(value: object) -> str:
    """Return nccl-tests' spelling of a truth."""
    return "true" if value else "false"


def now() -> str:
    """Return the time as nccl-tests writes it."""
    return time.strftime(STAMP)
