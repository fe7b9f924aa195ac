"""The commands `verify`, `draw`, `convert` and `simulate`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, nearest
from gpucoll.internal import COLLECTIVES, find, is_file, loaded, named, prove, registry, schedules, segments, xml
from gpucoll.lab import sweep
from gpucoll.lab.document import write
from gpucoll.lab.draw import draw as drawing
from gpucoll.lab.verify import ProofRow, prove_registry


def verify(options: Any) -> int:
    """Prove the algorithms asked for; print a line per algorithm and a last line with the total."""
    started, rows, faults = time.perf_counter(), [], 0
    proved = _proved_files(options) if options.files else _proved_named(options, options.algorithm)
    for row in proved:
        rows.append(row._asdict())
        faults += row.fault is not None
        if not options.json:
            print(f"{row.collective:16} {row.algorithm:20} {row.schedules:6} schedules  {row.fault or 'proved'}")
    seconds = round(time.perf_counter() - started, 1)
    total = sum(row["schedules"] for row in rows)
    if options.json:
        print(json.dumps({"seconds": seconds, "schedules": total, "faults": faults, "algorithms": rows}))
    else:
        print(f"{total} schedules of {len(rows)} algorithms in {seconds} s: {faults or 'no'} faults")
    return 1 if faults else 0


def _proved_named(options: Any, name: str | None) -> Iterator[Any]:
    """Yield a row for every algorithm called `name` (None: every algorithm); raise ArgumentError if none exists."""
    known = sorted({one for kind, one in registry() if options.collective in (None, kind)})
    if not known:
        raise ArgumentError(f"there is no {options.collective!r}{nearest(options.collective, COLLECTIVES)}")
    if name is not None and name.partition("(")[0] not in known:
        raise ArgumentError(f"there is no {name!r}{nearest(name, known)}")
    yield from prove_registry(options.ranks, options.segments, options.collective, name, plans=options.plans)


def _proved_files(options: Any) -> Iterator[Any]:
    """Yield a row for every algorithm named or in a file; a wrong MSCCL file is a row with a fault."""
    for file in options.files:
        if not is_file(file):
            yield from _proved_named(options, file)
            continue
        try:
            for key in loaded(file):
                yield from prove_registry(options.ranks, options.segments, *key, plans=options.plans)
        except ArgumentError as error:
            if error.code != "GC-PROOF":
                raise
            yield ProofRow("-", file, 1, str(error))


def _asked_for(options: Any) -> tuple[str, str, int]:
    """Return collective, name and number of ranks of the algorithm given by name or file.

    Without ``--ranks`` the number is 8, or for a file's algorithm the first supported number of 8, 2, 3, ... 4096.
    """
    kind, name = options.collective or "all_reduce", options.algorithm
    if is_file(name):
        there = dict((one, one) for one in loaded(name) if options.collective in (None, one[0]))
        if not there:
            raise ArgumentError(f"{name} is not of {options.collective}", code="GC-FILE")
        kind, name = next(iter(there))
    entry, ranks = find(kind, name), options.ranks
    if ranks is None:
        ranks = 8 if not entry.own else next((size for size in (8, *range(2, 4097)) if not entry.unfit(size, None)), 8)
    return kind, name, ranks


def _output(options: Any) -> Path:
    """Return the path of `-o`; callers find the algorithm first, so that a wrong name is reported first."""
    if options.output is None:
        raise ArgumentError("name the file to write: -o FILE", code="GC-FILE")
    return Path(options.output)


def draw(options: Any) -> int:
    """Write the drawing, and print one line naming path, collective, algorithm and ranks."""
    (kind, name, ranks), path = _asked_for(options), _output(options)
    write(path, drawing(name, kind, size=ranks, root=options.root, segments=options.segments, form=path.suffix[1:]))
    print(f"{path}: {kind} by {name}, {ranks} rank{'s' * (ranks > 1)}")
    return 0


def convert(options: Any) -> int:
    """Prove the schedule, write MSCCL's XML, and print one line about the file."""
    (kind, name, ranks), path = _asked_for(options), _output(options)
    if path.suffix != ".xml":
        raise ArgumentError(f"{path} does not end in .xml", code="GC-FILE")
    everyone = schedules(kind, name, size=ranks, segments=options.segments)
    proof = prove(kind, everyone, chunks=everyone[0].chunks)
    write(path, xml(everyone))
    print(f"{path}: {kind} by {name}, {ranks} rank{'s' * (ranks > 1)}, {proof.messages} messages in {proof.rounds} "
          "rounds")
    return 0


def simulate(options: Any) -> int:
    """Predict the times of a collective's algorithms; print a table or a JSON object."""

    options.algorithm = options.algorithm and named(options.algorithm, options.collective)
    print(sweep.answer(options, segments))
    return 0
