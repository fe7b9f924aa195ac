"""One run: every test, type, op, root and size in turn, and what comes of them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from gpucoll import ArgumentError, BackendError, Communicator, GpucollError

from . import compare, document, machine, osu, records, table
from .arguments import Options
from .cases import Case
from .contestants import Field, every_case, field, meet
from .data import Data, check_works
from .devices import of
from .findings import CROWDED_NOISE, slow_links, slow_memory, slow_ranks
from .measure import Bench, Measured, burst, measure
from .overlap import measure_overlap
from .pairs import measure_pairs
from .progress import SMALL, Progress


class Run:
    """What is measured so far; `record` is whole at any time, so that Ctrl-C keeps it."""

    def __init__(self, comm: Communicator, options: Options, arguments: Sequence[str] = ()) -> None:
        self.comm, self.options = comm, options
        self.bench = Bench(comm, options, of(comm, options.device, stream=options.flags.stream,
                                             memory=options.flags.memory))
        self.cases = list(every_case(options, comm.size))
        self.places = comm.mpi.allgather(machine.place(comm, self.bench.device))
        self.hosts = machine.host_names(self.places)
        self.record = document.opening(options, self.places, machine.facts(self.bench.device, self.places),
                                       records.words(arguments), records.environment(os.environ))
        self.progress = Progress(options.flags.progress if comm.rank == 0 else "off", self._work(), sys.stderr)
        is_crowded = max(map(self.hosts.count, self.hosts)) > self.record["gpucoll"]["machine"]["cores"]
        self.noise = CROWDED_NOISE if is_crowded else 0.0
        self._files = self._reserve()
        self._is_finished = False

    @property
    def own(self) -> dict[str, Any]:
        """The record's keys that nccl-tests does not have."""
        found: dict[str, Any] = self.record["gpucoll"]
        return found

    def _work(self) -> int | None:
        """Return the weight of all sizes; None where cycles have no end."""
        cycles = self.options.flags.run_cycles
        return cycles * len(self.cases) * sum(map(_weight, self.options.sizes)) if cycles else None

    def _reserve(self) -> dict[str, Any]:
        """Open the files that will be written, before anything is measured; alike on every rank where that fails."""
        flags, files, error = self.options.flags, {}, None
        if self.comm.rank == 0:
            try:
                files = {what: records.reserve(path) for what, path in (("json", flags.output_file), ("csv", flags.csv))
                         if path}
            except ArgumentError as refusal:
                error = refusal
        error = self.comm.mpi.bcast(error)
        if error is not None:
            raise error
        return files

    def measure(self) -> None:
        """Measure everything; a collective call, rank 0 prints. Raises GpucollError, alike on every rank."""
        with self.bench.device.measuring():
            self.copy = machine.copy_bandwidth(self.comm, self.bench.device)
            self.own["copy"] = {"bandwidth": self.copy.bandwidth, "bytes": self.copy.nbytes,
                                "per_rank": list(self.copy.per_rank)}
            self._find([] if self.noise else slow_memory(self.copy, self.hosts))
            self._check_the_check()
            peers = meet(self.comm, self.bench.device, self.options.against)
            fields = [field(self.comm, case, self.options, self.bench.device, peers) for case in self.cases]
            self._begin(fields)
            cycles = self.options.flags.run_cycles
            for _ in range(cycles) if cycles else itertools.count():
                for case, found in zip(self.cases, fields, strict=True):
                    self._case(case, found)

    def _check_the_check(self) -> None:
        """Raise BackendError, on every rank, where the check would not find a wrong result of some case."""
        mine = [case for case in self.cases if not check_works(case, self.comm.rank, self.bench.device)]
        for case in itertools.chain(*self.comm.mpi.allgather(mine)):
            raise BackendError(f"the check of results fails its own test: {case}", code="GC-BENCH")

    def _begin(self, fields: Sequence[Field]) -> None:
        """Print what comes before the data."""
        left = dict.fromkeys(left for found in fields for left in found.left_out)
        self.own["left_out"] = [{"what": one.what, "reason": one.reason} for one in left]
        self.several = max((sum(not one.peer for one in found.contestants) for found in fields), default=1) > 1
        self.say(table.header(self.options, machine.versions(), self.places))
        for file in self._files.values():
            self.say([f"# Writing {os.path.splitext(file.name)[1][1:].upper()} output to {file.name}"])
        self.say([f"# {self.copy.bandwidth:.4g} GB/s are read and written while each rank copies {self.copy.nbytes} "
                  "bytes"])
        self.say(f"# {one.what} left out: {one.reason}" for one in left)
        self.say(f"# {text}" for text in self.own["findings"])

    def _case(self, case: Case, found: Field) -> None:
        """Measure one case at every size."""
        if not found.contestants:
            return
        if len(self.options.tests) > 1:
            self.say(["#", f"# {case.test}"])
        self._say_titles(case, found)
        flags = self.options.flags
        measure_size = self._pairs if flags.pairs else self._overlap if flags.overlap else self._lines
        for nbytes in self.options.sizes if case.test != "barrier" else self.options.sizes[:1]:
            measure_size(case, found, nbytes)
            self.progress.done(_weight(nbytes), f"{case.test} of {nbytes} bytes")
        self._stragglers(case, found)

    def _say_titles(self, case: Case, found: Field) -> None:
        flags, name = self.options.flags, ", ".join(one.name for one in found.contestants if not one.peer)
        if flags.pairs:
            self.say(["#", *(table.PAIR.format(*row) for row in table.PAIR_TITLES)])
        elif flags.overlap:
            self.say(osu.overlap_titles(case.test, name))
        else:
            self.say(osu.latency_titles(case.test, name) if flags.style == "osu" else
                     table.titles(self.options, self.several))

    def _data(self, case: Case, nbytes: int) -> Data:
        flags, device = self.options.flags, self.bench.device
        calls = flags.agg_iters * burst(self.options, device.name, nbytes)
        return Data(case, self.comm.rank, case.count(nbytes), device, calls=calls, shift=flags.unalign,
                    fixed=bool(self.options.launches))

    def _lines(self, case: Case, found: Field, nbytes: int) -> None:
        """Measure one size of one case: a line for each algorithm."""
        data = self._data(case, nbytes)
        measured = measure(self.bench, found.contestants, data)
        both = list(zip(found.contestants, measured, strict=True))
        peers = {one.name: figures for one, figures in both if one.peer}
        for contestant, figures in both:
            if not contestant.peer:
                self._line(case, data.count, (contestant.name, figures), peers)

    def _line(self, case: Case, count: int, ours: tuple[str, Measured], peers: dict[str, Measured]) -> None:
        result = document.result(case, count, self.options, ours, peers, self.copy)
        self.record["results"].append(result)
        flags, name = self.options.flags, ours[0] if self.several else ""
        if flags.style == "osu":
            self.say([osu.latency_line(result, name)])
        else:
            stamp = document.now() if flags.report_timestamps else ""
            self.say([table.line(result, spread=bool(flags.per_iter_timing), stamp=stamp, name=name)])

    def _overlap(self, case: Case, found: Field, nbytes: int) -> None:
        data = self._data(case, nbytes)
        for contestant in found.contestants:
            if case.test in ("hypercube", "barrier"):
                continue
            overlap = measure_overlap(self.bench, contestant, data)
            self.own["overlap"].append(document.overlapped(case, data.count, contestant.name, overlap))
            self.say([osu.overlap_line(case.nbytes(data.count), overlap, contestant.name if self.several else "")])

    def _pairs(self, case: Case, found: Field, nbytes: int) -> None:
        pairs = measure_pairs(self.bench, case, nbytes)
        self._find(slow_links(pairs, self.hosts, self.noise))
        self.own["pairs"] += pairs
        self.say(table.pair_line(pair) for pair in pairs)

    def _stragglers(self, case: Case, found: Field) -> None:
        """Look for slow ranks at the largest size."""
        flags = self.options.flags
        if not (flags.pairs or flags.overlap):
            data = self._data(case, self.options.sizes[-1])
            self._find(slow_ranks(self.bench, found.contestants, data, self.hosts, self.noise))

    def _find(self, sentences: Iterable[str]) -> None:
        self.own["findings"] += [text for text in sentences if text not in self.own["findings"]]

    def finish(self, interrupted: bool = False) -> int:
        """Print what comes after the data and write the files; return the exit code. Of two calls one does it."""
        if self._is_finished:
            return 1
        self._is_finished = True
        results = list(self.record["results"])
        self.own["ratios"], self.own["interrupted"] = table.means(results), interrupted
        wrong = document.wrong_elements(results) + sum(pair["nwrong"] or 0 for pair in self.own["pairs"])
        bandwidth, errors = table.average(results), ["interrupted"] if interrupted else []
        self.record = {**self.record, "results": results, **document.closing(self.options, wrong, bandwidth, errors)}
        self._write()  # first: a launcher that ends its ranks may have closed their output already
        is_alike = self._conclude(results, wrong, bandwidth, [*errors, *self._draw()])
        too_slow = self.options.floor is not None and bandwidth < self.options.floor
        return 1 if wrong or too_slow or not is_alike or interrupted else 0

    def _conclude(self, results: Sequence[table.Result], wrong: int, bandwidth: float, errors: Sequence[str]) -> bool:
        """Print the last lines; return False where something became slower than the baseline."""
        self.progress.clear()
        if results and self.options.flags.style == "nccl":
            self.say([*table.details(results), *table.comparison(self.own["ratios"])])
        found = list(compare.changes(results, self.options.baseline))
        lines, is_alike = compare.report(found, len(results), self.options.flags.tolerance)
        self.say(f"# {text}" for text in self.own["findings"])
        self.say(lines if self.options.baseline else [])
        self.say(table.footer(self.options, wrong, bandwidth))
        self.say(f"# error: {text}" for text in errors)
        return is_alike or not self.options.baseline

    def _write(self) -> None:
        for what, file in self._files.items():
            if what == "json":
                records.write(file, self.record)
            else:
                with file:
                    file.write(records.csv_text(self.record))

    def _draw(self) -> list[str]:
        """Make the picture; return what prevented that, after all has been measured."""
        if self.comm.rank == 0 and self.options.flags.plot:
            from .plot import draw

            try:
                draw(self.record, self.options.flags.plot)
            except GpucollError as error:
                return [str(error)]
        return []

    def say(self, lines: Iterable[str]) -> None:
        """Print whole lines at once, on rank 0."""
        text = "".join(f"{line}\n" for line in lines)
        if self.comm.rank == 0 and text:
            self.progress.clear()
            sys.stdout.write(text)
            sys.stdout.flush()


def _weight(nbytes: int) -> int:
    return nbytes + SMALL


def run(comm: Communicator, options: Options, arguments: Sequence[str] = ()) -> int:
    """Measure what `options` say; return 1 where something was wrong or too slow, else 0. A collective call.

    Raises ArgumentError or DtypeError, alike on every rank and before anything is printed, where it cannot be done.
    """
    whole = Run(comm, options, arguments)
    whole.measure()
    return int(whole.finish())
