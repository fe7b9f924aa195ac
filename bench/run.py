"""One run: every test, type, op, root and size in turn, and the record of the results."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gpucoll
from gpucoll import Communicator, GpucollError

from . import machine, records, table
from .arguments import Settings
from .cases import BenchCase, Contestant
from .contestants import every_case, field, meet
from .data import Data
from .devices import of
from .measure import Bench, Measured, burst, measure, ranks_of
from .records import PLACEMENTS
from .summary import changes, geometric_mean, per_iteration, report, reported, skew
from .table import ProgressBar

BARRIER_BYTES = 256 << 10  # bytes taking as long as a barrier: added to each size's weight in the progress


class Run:
    """The measurements so far; `record` is valid at any time, so that Ctrl-C can save the record.

    Created on every rank. If the run is impossible, raise ArgumentError or DtypeError, the same on every rank, before
    printing.
    """

    def __init__(self, comm: Communicator, options: Settings, arguments: Sequence[str] = ()) -> None:
        flags = options.flags
        self.comm, self.options = comm, options
        self.bench: Bench = Bench(comm, options, of(comm, flags.device, stream=flags.stream, memory=flags.memory))
        self.cases: list[BenchCase] = list(every_case(options, comm.size))
        self.places: list[Any] = ranks_of(comm).allgather(machine.place(comm, self.bench.device))
        self.record: dict[str, Any] = opening(options, self.places, machine.facts(comm, self.bench.device, self.places),
                                       records.words(arguments), records.environment(os.environ))
        self.own: Any = self.record["gpucoll"]
        work = flags.run_cycles * len(self.cases) * sum(nbytes + BARRIER_BYTES for nbytes in options.sizes)
        self.progress: ProgressBar = ProgressBar(flags.progress if comm.rank == 0 else "off", work or None, sys.stderr)
        paths = {"json": flags.output_file, "csv": flags.csv}
        self._files = records.reserve_together(ranks_of(comm), {what: path for what, path in paths.items() if path})
        self._is_finished = False

    def measure(self) -> None:
        """Measure everything; rank 0 prints. A collective call; raises GpucollError, the same on every rank."""
        with self.bench.device.measuring():
            self.copy = machine.copy_bandwidth(self.comm, self.bench.device)
            self.own["copy"] = {"bandwidth": self.copy.bandwidth, "bytes": self.copy.nbytes,
                                "per_rank": list(self.copy.per_rank)}
            peers = meet(self.comm, self.bench.device, self.options.against)
            fields = [field(self.comm, case, self.options, self.bench.device, peers) for case in self.cases]
            left = dict.fromkeys(itertools.chain(*(left_out for _, left_out in fields)))
            self.own["left_out"] = [one._asdict() for one in left]
            self.several: bool = max((sum(not one.peer for one in found) for found, _ in fields), default=1) > 1
            self.say(table.header(self.options, machine.versions(self.own["machine"]), self.places))
            self.say(f"# Writing {what.upper()} output to {file.name}" for what, file in self._files.items())
            self.say([f"# {self.copy.bandwidth:.4g} GB/s are read and written while each rank copies "
                      f"{self.copy.nbytes} bytes", *(f"# {one.what} left out: {one.reason}" for one in left)])
            cycles = self.options.flags.run_cycles
            for _ in range(cycles) if cycles else itertools.count():
                for case, (contestants, _) in zip(self.cases, fields, strict=True):
                    if contestants:
                        self._case(case, contestants)

    def _case(self, case: BenchCase, contestants: Sequence[Contestant]) -> None:
        """Measure one case at every size."""
        if len(self.options.tests) > 1:
            self.say(["#", f"# {case.test}"])
        self.say(table.titles(self.options, self.several))
        for nbytes in self.options.sizes if case.test != "barrier" else self.options.sizes[:1]:
            self._lines(contestants, self._data(case, nbytes))
            self.progress.done(nbytes + BARRIER_BYTES, f"{case.test} of {nbytes} bytes")

    def _data(self, case: BenchCase, nbytes: int) -> Data:
        flags, device = self.options.flags, self.bench.device
        calls = flags.agg_iters * burst(self.options, device.name, nbytes)
        return Data(case, self.comm.rank, case.count(nbytes), device, calls=calls, shift=flags.unalign,
                    fixed=bool(self.options.launches))

    def _lines(self, contestants: Sequence[Contestant], data: Data) -> None:
        """Measure one size of one case: a line for each algorithm."""
        flags = self.options.flags
        both = list(zip(contestants, measure(self.bench, contestants, data), strict=True))
        peers = {one.name: measured for one, measured in both if one.peer}
        for one, measured in both:
            if one.peer:
                continue
            result = result_of(data.case, data.count, self.options, (one.name, measured), peers, self.copy)
            self.record["results"].append(result)
            name, stamp = one.name if self.several else "", now() if flags.report_timestamps else ""
            self.say([table.line(result, spread=bool(flags.per_iter_timing), stamp=stamp, name=name)])

    def finish(self, interrupted: bool = False) -> int:
        """Print the lines after the data and write the files; return the exit code. A second call does nothing."""
        if self._is_finished:
            return 1
        self._is_finished = True
        options, results = self.options, list(self.record["results"])
        self.own["ratios"], self.own["interrupted"] = means(results), interrupted
        wrong = wrong_elements(results)
        bandwidth, errors = table.average(results), ["interrupted"] * interrupted
        self.record = {**self.record, "results": results, **closing(options, wrong, bandwidth, errors)}
        # Write the files first: a launcher ending its ranks may already have closed their output.
        if "json" in self._files:
            records.write(self._files["json"], self.record)
        if "csv" in self._files:
            with self._files["csv"] as file:
                file.write(records.csv_text(self.record))
        if self.comm.rank == 0 and options.flags.plot:
            from .plot import draw

            try:
                draw(self.record, options.flags.plot)
            except GpucollError as error:
                errors.append(str(error))
        self.progress.clear()
        if results:
            self.say([*table.details(results), *table.comparison(self.own["ratios"])])
        found = list(changes(results, options.baseline))
        lines, is_alike = report(found, len(results), options.flags.tolerance)
        self.say([*(lines if options.baseline else []),
                  *table.footer(options, wrong, bandwidth), *(f"# error: {text}" for text in errors)])
        too_slow = options.floor is not None and bandwidth < options.floor
        return int(bool(wrong or too_slow or interrupted or (options.baseline and not is_alike)))

    def say(self, lines: Iterable[str]) -> None:
        """Print whole lines at once, on rank 0."""
        text = "".join(f"{line}\n" for line in lines)
        if self.comm.rank == 0 and text:
            self.progress.clear()
            sys.stdout.write(text)
            sys.stdout.flush()


# The record of a run; the keys are explained in `records`


def result_of(case: BenchCase, count: int, options: Settings, ours: tuple[str, Measured], peers: Mapping[str, Measured],
           copy: machine.CopySpeed) -> dict[str, Any]:
    """Return the result of one line; `ours` is an algorithm's name and its measurement, `peers` likewise."""
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
    limit, late = machine.bound(case, count, copy), skew(measured.seconds[0])
    return {"size": case.nbytes(count), "count": count, "type": dtype, "redop": redop, "root": f"{root:6d}", **own,
            "actual_iterations": measured.seconds.shape[-1], "experiment_name": name, "collective": case.test,
            "algorithm": name, "ranks": case.ranks, "device": options.flags.device, "memory": options.flags.memory,
            "factor": case.factor, "bound": limit, "share": own["out_of_place"]["bus_bw"] / limit if limit else None,
            "skew_us": late.seconds * 1e6, "late_rank": late.late_rank, "against": against}


def wrong_elements(results: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of wrong elements in all results, peers included."""
    sides = [side for result in results for side in (result, *result["against"].values())]
    return sum(side[placement]["nwrong"] or 0 for side in sides for placement in PLACEMENTS)


def means(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {peer: {collective: {algorithm: the geometric mean of the out-of-place ratios}}}."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for result in results:
        for peer, found in result["against"].items():
            by_algorithm = ratios.setdefault(peer, {}).setdefault(result["collective"], {})
            by_algorithm.setdefault(result["algorithm"], []).append(found["ratio"]["out_of_place"])
    return {peer: {test: {name: geometric_mean(row) for name, row in rows.items()} for test, rows in tests.items()}
            for peer, tests in ratios.items()}


def opening(options: Settings, places: Sequence[machine.RankPlace], facts: Mapping[str, Any], arguments: Sequence[str],
            environment: Sequence[str]) -> dict[str, Any]:
    """Return the record at the beginning of a run."""
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
            "nccl_version": facts["nccl"], "config": config, "results": [],
            "gpucoll": {"version": gpucoll.__version__, "revision": machine.revision(), "program": "gpucoll bench",
                        "tests": list(options.tests), "machine": dict(facts),
                        "left_out": [], "ratios": {}, "interrupted": False}}


def closing(options: Settings, wrong: int, bandwidth: float, errors: Sequence[str]) -> dict[str, Any]:
    """Return the entries added to the record at the end of a run."""
    okay = "unchecked" if options.floor is None else truth(bandwidth >= options.floor)
    return {"out_of_bounds": {"count": wrong, "okay": truth(not wrong)},
            "average_bus_bandwidth": {"bandwidth": bandwidth, "okay": okay}, "errors": list(errors), "end_time": now()}


def truth(value: object) -> str:
    """Return nccl-tests' spelling of a boolean."""
    return "true" if value else "false"


def now() -> str:
    """Return the time in nccl-tests' format."""
    return time.strftime(table.STAMP)
