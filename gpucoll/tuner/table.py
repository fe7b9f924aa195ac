"""Tuning tables: measurements of a machine, written by `gpucoll tune` as JSON and used by ``algorithm="auto"``.

A table has a shape for each measured number of ranks, number of nodes and device. A shape has the link constants of
each executor, and curves: the seconds of an algorithm for given sizes. The user's cache has a table for each host and
MPI.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import socket
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.device.gpus import ClaimedGpu
from gpucoll.device.store import default_folder, read_trusted
from gpucoll.errors import ArgumentError
from gpucoll.launch.launchers import library_name
from gpucoll.version import __version__

NO_TABLE = "GC-TABLE"
BUILT_IN = "built-in"
MACHINES = Path(__file__).with_name("machines.json")  # tables of kinds of machines
FORMAT = 2


class LinkCost(NamedTuple):
    """The constants of one executor on one class of links: "node" (within a node) or "network" (between nodes)."""

    executor: str
    name: str
    alpha: float  # seconds per message, without its bytes
    beta: float  # seconds per byte
    gamma: float  # seconds per byte combined by the op
    gap: float  # seconds for each further message of a rank in the same round
    basis: str = ""  # of an estimate: where it comes from; "" for measured constants


class Curve(NamedTuple):
    """Measured seconds of an algorithm by size: the bytes of the larger of input and output."""

    collective: str
    executor: str
    algorithm: str
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def end(self) -> int:
        """The limit of the curve's validity in bytes: four times the last size, or no limit for calls without bytes."""
        return 4 * self.bytes[-1] if self.bytes[-1] else 1 << 62

    def at(self, nbytes: int) -> float:
        """Return the seconds for `nbytes`: interpolated linearly, and proportional beyond the last size."""
        if nbytes >= self.bytes[-1]:
            return self.seconds[-1] * nbytes / max(1, self.bytes[-1])
        return float(numpy.interp(nbytes, self.bytes, self.seconds))


class Shape(NamedTuple):
    """The measurements for a number of ranks, a number of nodes and a device: the key of a shape in a table.

    `excluded` are the kernels (`Traits.kernel`) of `peer` that `gpucoll tune` has seen bring wrong data.
    """

    ranks: int
    nodes: int
    device: str
    measured: str  # the date, of a committed measurement with its file; "" for estimates
    links: tuple[LinkCost, ...]
    curves: tuple[Curve, ...]
    excluded: tuple[str, ...] = ()


class Table(NamedTuple):
    """The measurements of a machine. `source` is the file or BUILT_IN, `host` the `facts` of the machine.

    Of a committed measurement, `host` describes the kind of machine, see `of_kind`.
    """

    source: str
    host: dict[str, Any]
    shapes: tuple[Shape, ...]

    def merged(self, shape: Shape) -> Table:
        """Return the table with `shape` in place of the old shape with the same ranks, nodes and device.

        Old curves without a new measurement are kept.
        """
        before = next((other.curves for other in self.shapes if other[:3] == shape[:3]), ())
        now = {curve[:3] for curve in shape.curves}
        shape = shape._replace(curves=(*shape.curves, *(curve for curve in before if curve[:3] not in now)))
        others = tuple(other for other in self.shapes if other[:3] != shape[:3])
        return self._replace(shapes=tuple(sorted((*others, shape), key=lambda one: one[:3])))


@functools.cache
def built_in() -> Table:
    """Return the table for machines without a table of their own."""
    return parse(BUILT_IN, Path(__file__).with_name("defaults.json").read_bytes())


def of_kind(gpus: Sequence[ClaimedGpu]) -> tuple[Shape, ...]:
    """Return the committed measurements of a kind of machine: with these GPUs, one for each rank; () without any.

    A kind is the name of the GPUs, their number, and whether processes share a GPU by MPS. `python -m
    gpucoll.bench.readme --machines` makes the file from results of `scripts/gpu_check`.
    """
    kind = {"gpu": [*{gpu.name for gpu in gpus}], "gpus": len({gpu.identity for gpu in gpus}),
            "by_mps": all(gpu.by_mps for gpu in gpus)}
    tables = [_row(Table, one) for one in json.loads(MACHINES.read_bytes())]
    return tuple(shape for one in tables if one.host == kind for shape in one.shapes if shape.ranks == len(gpus))


def parse(source: str, content: bytes) -> Table:
    """Return the table in the `content` of a file; raise ArgumentError for a file not written by `as_json`."""
    try:
        document = json.loads(content)
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        table: Table = _row(Table, {**document, "source": source})
        return table
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"tuning table {source}: {error}; `gpucoll tune` makes a new one", code=NO_TABLE) from None


ROW_TYPES: dict[str, type[Any]] = {"shapes": Shape, "links": LinkCost, "curves": Curve}


def _row(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a named tuple made of JSON's values; the lists named in `ROW_TYPES` have named tuples."""
    return kind(**{key: tuple(_row(ROW_TYPES[key], one) if key in ROW_TYPES else one for one in value)
                   if isinstance(value, list) else value for key, value in values.items()})


def as_json(table: Table) -> bytes:
    """Return the table as a file for `parse`."""
    return json.dumps({"format": FORMAT, **plain(table._replace(source=""))}, indent=1).encode()


def plain(value: Any) -> Any:
    """Return named tuples as what JSON can hold."""
    if hasattr(value, "_asdict"):
        return {key: plain(one) for key, one in value._asdict().items()}
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


PROCESSORS = Path("/proc/cpuinfo")


def facts(*, by_mpi: bool = True) -> dict[str, Any]:
    """Return the properties of this host and installation; a table measured with other properties is not valid.

    "cores" counts the host's cores, not the cores bound to this process, which depend on the number of ranks.
    """
    library = "none"
    if by_mpi:
        from mpi4py import MPI

        library = library_name(MPI.Get_library_version())
    return {"name": socket.gethostname(), "processor": processor(), "cores": os.cpu_count() or 1,
            "mpi": library, "numpy": numpy.__version__, "gpucoll": __version__}


def processor() -> str:
    """Return the processor's name as the kernel gives it."""
    text = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    named = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return " ".join(next(named, platform.machine()).split())


def table_path(host: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a host's table: a file for each host name, processor, number of cores and MPI."""
    mark = repr([host[key] for key in ("name", "processor", "cores", "mpi")])
    return default_folder(environment) / f"tune-{hashlib.sha256(mark.encode()).hexdigest()[:12]}.json"


def read(path: Path, host: Mapping[str, Any]) -> Table | None:
    """Return the table at `path`, None without a table; raise ArgumentError for a bad, old or another host's table."""
    try:
        table = parse(str(path), read_trusted(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ArgumentError(f"tuning table {path} cannot be read: {error}", code=NO_TABLE) from None
    for key, value in host.items():
        if table.host.get(key) != value:
            raise ArgumentError(f"tuning table {path}: it was measured with {key} {table.host.get(key)!r}, but here it "
                                f"is {value!r}; `gpucoll tune` makes a new one", code=NO_TABLE)
    return table


def load(*, by_mpi: bool = True) -> Table:
    """Return this host's table; the built-in table if the host has none or, with a warning, an invalid table."""
    host = facts(by_mpi=by_mpi)
    try:
        return read(table_path(host), host) or built_in()
    except ArgumentError as error:
        warnings.warn(f"{error}; until then the built-in table serves", stacklevel=2)
        return built_in()
