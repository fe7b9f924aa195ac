"""`gpucoll tune`: measure this machine with this number of ranks, and write the table used by `auto`.

`gpucoll explain`: print the choice of `auto` with reasons, for the ranks started by mpiexec, or for a topology.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpucoll
from gpucoll import internal
from gpucoll.algorithms import algorithms
from gpucoll.calibration import packets
from gpucoll.calibration.fit import NATIVE_SIZES, SIZES, links, serves, sweep
from gpucoll.calibration.measure import ranks_of
from gpucoll.communicator import Communicator
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.collectives import collective as collective_row
from gpucoll.device.store import make_private
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.lab.formula import by_formula, constants, total_sent
from gpucoll.lab.sizes import byte_size
from gpucoll.lab.sweep import sweep as simulated
from gpucoll.launch.launchers import launched
from gpucoll.simulator import DEFAULT, load
from gpucoll.transport.rendezvous import by_first_rank
from gpucoll.tuner import segments
from gpucoll.tuner.choice import scheduled
from gpucoll.tuner.explanation import Explanation, on_topology
from gpucoll.tuner.table import LinkCost, Shape, Table, as_json, facts, read, table_path

EXECUTORS: dict[str, tuple[str, ...]] = {"cpu": ("shared", "hybrid", "mpi", "native"),
                                         "cuda": ("peer", "nccl", "native")}
EXPLAINED_RANKS = 8  # default of --ranks
# gpucoll's names by those of others.
TEXTBOOK_NAMES = {other: name for name, others in
                  tomllib.loads(Path(__file__).with_name("names.toml").read_text()).items() for other in others}


def tune(options: Any) -> int:
    """Measure and write the table; return 0. A collective call."""
    collectives = collectives_of(options)
    sizes = [size for size in SIZES if size <= byte_size(options.max_bytes)]
    if not sizes:
        raise ArgumentError(f"--max-bytes {options.max_bytes} is below the smallest size of the sweep, {SIZES[0]}",
                            code="GC-SIZE")
    with gpucoll.init() as comm:
        return _tune(comm, options, collectives, sizes)


def collectives_of(options: Any) -> list[str]:
    """Return the named collectives, by default all; raise ArgumentError for an unknown name."""
    names = options.collective.split(",") if options.collective else COLLECTIVES
    return [collective_row(name.strip()).name for name in names]


def _tune(comm: Communicator, options: Any, collectives: list[str], sizes: list[int]) -> int:
    if comm.size == 1:
        raise ArgumentError("a single rank has no algorithm to choose; start several: mpiexec -n 8 gpucoll tune, or "
                            "gpucoll run --standalone -n 8 -m gpucoll tune",
                            code="GC-SIZE")
    if options.device == "cuda" and None in comm.all_gather_object(comm.device):
        raise BackendError("--device cuda: a rank has no CUDA device; every rank needs CuPy and a driver",
                           code="GC-NO-GPU")
    if options.device == "cuda":
        import cupy

        # The measured arrays are allocated on the current device.
        cupy.cuda.Device(comm.device).use()
    started, host = time.perf_counter(), facts(by_mpi=comm.mpi is not None)
    path = table_path(host)
    say = functools.partial(_say, comm)
    # Check the folder now, so that a folder without write access does not waste minutes of measuring.
    by_first_rank(ranks_of(comm), lambda: make_folder(path.parent))
    with executors(comm, options.device) as comms:
        excluded = packets.check(comms, say) if options.device == "cuda" else ()
        shape = _shape(comms, options, collectives, sizes, say)._replace(excluded=excluded)
    by_first_rank(ranks_of(comm), lambda: write_table(path, table_before(path, host).merged(shape)))
    say(f"{path}: {comm.size} ranks on {comm.nodes} node{'s' * (comm.nodes > 1)}, "
        f"{time.perf_counter() - started:.1f} s")
    if options.json and comm.rank == 0:
        print(json.dumps({"file": str(path), "ranks": comm.size, "nodes": comm.nodes,
                          "links": [link._asdict() for link in shape.links],
                          "curves": [curve._asdict() for curve in shape.curves]}))
    return 0


def _say(comm: Communicator, line: str) -> None:
    """Print a progress line on rank 0, to standard error, because standard output carries the result."""
    if comm.rank == 0:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def executors(comm: Communicator, device: str) -> Iterator[dict[str, Communicator]]:
    """Yield a communicator of the same ranks for each executor of `device` that works here, by the executor's name."""
    with contextlib.ExitStack() as stack:
        link = internal.link_of(comm)
        names = [name if name != "mpi" else link.carrier for name in EXECUTORS[device]]
        if comm.mpi is None and device == "cpu":
            names.remove("native")
        made = {name: stack.enter_context(Communicator(link.part(f"tune {name}", range(comm.size)),
                                                       comm.options._replace(executor=name))) for name in names}
        working = {name: one for name, one in made.items() if serves(one, device)}
        if not working:
            raise BackendError(f"none of {', '.join(made)} works here; gpucoll doctor says why", code="GC-EXECUTOR")
        yield working


def _shape(comms: dict[str, Communicator], options: Any, collectives: list[str], sizes: list[int], say: Any) -> Shape:
    some, costs = next(iter(comms.values())), list[LinkCost]()
    for executor in comms:
        # MPI's own collectives have no constants of a model; hybrid uses the links of shared and mpi.
        if executor not in ("native", "hybrid"):
            for link in links(some, executor, options.device):
                costs.append(link)
                say(f"{link.executor:8} {link.name:8} alpha {1e6 * link.alpha:8.2f} us  beta {1e9 * link.beta:7.3f} "
                    f"ns/byte  gamma {1e9 * link.gamma:7.3f} ns/byte  gap {1e6 * link.gap:7.2f} us")
    if not options.sweep:
        comms, sizes = {name: comm for name, comm in comms.items() if name == "native"}, [*NATIVE_SIZES]
    curves = [curve for collective in collectives if comms
              for curve in sweep(comms, collective, sizes, options.device, say)]
    return Shape(some.size, some.nodes, options.device, time.strftime("%Y-%m-%d"), tuple(costs), tuple(curves))


def table_before(path: Path, host: Mapping[str, Any]) -> Table:
    """Return the existing table, or an empty table if none exists or the file is invalid or outdated."""
    try:
        table = read(path, host)
    except ArgumentError as error:
        warnings.warn(f"replaced: {error}", stacklevel=2)
        table = None
    return table or Table(str(path), dict(host), ())


def make_folder(folder: Path) -> None:
    """Make the folder; raise BackendError if no file can be written in the folder."""
    with _write_errors(folder):
        make_private(folder)
        tempfile.TemporaryFile(dir=folder).close()


def write_table(path: Path, table: Table) -> None:
    """Write the table atomically, for this user alone whatever the umask (see `read_trusted`); raise BackendError."""
    draft = path.with_suffix(f".{os.getpid()}")
    with _write_errors(path):
        draft.write_bytes(as_json(table))
        draft.chmod(0o600)
        draft.replace(path)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Return a context that turns OSError into BackendError."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"cannot write {path}: {error.strerror}; GPUCOLL_CACHE names another folder",
                           code="GC-FILE") from error


def known_as(text: str) -> str:
    """Return the algorithm or method that MPI, NCCL, PyTorch or a textbook names `text`; "" if unknown.

    >>> known_as("hypercube"), known_as("mpi allreduce"), known_as("sort")
    ('recursive_doubling', 'all_reduce', '')
    """
    wanted, *others = (re.sub(r"[\W_]", "", name.lower()) for name in (text, *TEXTBOOK_NAMES))
    return next((name for name, other in zip(TEXTBOOK_NAMES.values(), others, strict=True) if other == wanted), "")


def explain(options: Any) -> int:
    """Print the explanation on rank 0; return 0. A name of others is answered first, with gpucoll's name."""
    name = "" if options.collective in COLLECTIVES else known_as(options.collective)
    if name:
        kinds = [row for row in COLLECTIVES if name in algorithms(row)]
        words = f"the algorithm {name!r} of {', '.join(kinds)}" if kinds else f"comm.{name}"
        if launched()[1] == 0:
            print(f"{options.collective}: {words} in gpucoll", file=sys.stderr if options.json else sys.stdout)
        options.collective = [*kinds, name][0]
        if options.collective not in COLLECTIVES:
            return 0
    here = launched()[0] > 1 and options.ranks is None and options.topology is None \
        and not options.formula
    if here:
        with gpucoll.init() as comm:
            explanation = comm.explain(options.collective, byte_size(options.size), options.dtype, options.device)
    else:
        explanation = _elsewhere(options)
    if launched()[1] == 0:
        print(json.dumps(explanation) if options.json else explanation, flush=True)
    return 0


def _elsewhere(options: Any) -> Explanation:
    """Return the simulator's ranking of the algorithms on a topology, by default one switch with equal links."""
    nbytes, ranks = byte_size(options.size), EXPLAINED_RANKS if options.ranks is None else options.ranks
    row, topology = collective_row(options.collective), load(options.topology or DEFAULT)
    nodes = topology.nodes(ranks)
    names = scheduled(row.name, ranks, 1 if nodes is None else max(nodes) + 1)
    rows = simulated(row.name, [], [ranks], [nbytes], topology, segments).rows
    rows = [one for one in rows if one.algorithm in names]
    if not rows:
        raise ArgumentError(f"nothing can be predicted for {row.name} for {ranks} ranks", code="GC-SIMULATE")
    found = on_topology(row.name, nbytes, topology, rows)
    by_name = {one.algorithm: one for one in rows}
    if options.formula:
        found["formula"] = constants(topology)
    for candidate in found["candidates"]:
        one = by_name[candidate["algorithm"]]
        total = total_sent(row.name, one.algorithm, ranks, one.segments, nodes)
        candidate["total"] = None if total is None else float(total * nbytes)
        if options.formula:
            candidate["formula"] = by_formula(one, topology)
    return found
