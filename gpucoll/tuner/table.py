"""Tuning tables: measurements of a machine, written by `gpucoll tune` as JSON and used by ``algorithm="auto"``.

A table has a shape for each measured number of ranks, number of nodes and device. A shape has the link constants of
each executor, and curves: the seconds of an algorithm for given sizes. `gpucoll tune --topology` adds predictions for
the ranks of a graph of links, and files of synthesised algorithms in the same folder. The user's cache has a table for
each host and MPI.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.device.store import default_folder, read_trusted
from gpucoll.errors import ArgumentError
from gpucoll.launch.launchers import library_name
from gpucoll.version import __version__

CODE = "GC-TABLE"
BUILT_IN = "built-in"
FORMAT = 2
ANY = "any"  # in place of an executor: a time predicted on a graph, where there are links only


class LinkCost(NamedTuple):
    """The constants of one executor on one class of links: "node" (within a node) or "network" (between nodes)."""

    executor: str
    name: str
    alpha: float  # seconds per message, without its bytes
    beta: float  # seconds per byte
    gamma: float  # seconds per byte combined by the op
    gap: float  # seconds for each further message of a rank in the same round


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
    """The measurements for a number of ranks, a number of nodes and a device: the key of a shape in a table."""

    ranks: int
    nodes: int
    device: str
    measured: str  # the date
    links: tuple[LinkCost, ...]
    curves: tuple[Curve, ...]


class AlgorithmFile(NamedTuple):
    """A Python file of synthesised algorithms in the table's folder; the file is read with the table, for all ranks."""

    name: str
    collective: str
    algorithms: tuple[str, ...]
    sha256: str
    content: bytes = b""


class GraphTable(NamedTuple):
    """Predictions on a graph of links, for a number of ranks and a device; rank i of the graph is rank i of the job."""

    graph: str
    ranks: int
    device: str
    predicted: str  # the date
    files: tuple[AlgorithmFile, ...]
    curves: tuple[Curve, ...]
    digest: str  # of the graph's nodes and links: a changed graph may keep its name


class Table(NamedTuple):
    """The measurements of a machine. `source` is the file or BUILT_IN, `host` the `facts` of the machine.

    Where `graphs` have the ranks and the device of a call, their predictions decide: the latest tuning counts.
    """

    source: str
    host: dict[str, Any]
    shapes: tuple[Shape, ...]
    graphs: tuple[GraphTable, ...] = ()

    def graph(self, ranks: int, device: str) -> GraphTable | None:
        """Return the predictions for the ranks of a graph; None without a graph of so many ranks."""
        return next((one for one in self.graphs if one[1:3] == (ranks, device)), None)

    def predicted(self, graph: GraphTable) -> Table:
        """Return the table with `graph` in place of the old predictions for the same ranks and device.

        Predictions for other collectives on the same graph are kept.
        """
        before = self.graph(graph.ranks, graph.device)
        if before is not None and (before.graph, before.digest) == (graph.graph, graph.digest):
            now = {curve.collective for curve in graph.curves}
            graph = graph._replace(files=(*graph.files, *(one for one in before.files if one.collective not in now)),
                                   curves=(*graph.curves, *(one for one in before.curves if one.collective not in now)))
        return self._replace(graphs=(*self._other_graphs(graph.ranks, graph.device), graph))

    def _other_graphs(self, ranks: int, device: str) -> tuple[GraphTable, ...]:
        return tuple(one for one in self.graphs if one[1:3] != (ranks, device))

    def nearest(self, ranks: int, nodes: int, device: str) -> Shape | None:
        """Return the most similar shape of this device: first by one node or several, then by the number of ranks."""
        alike = [shape for shape in self.shapes if shape.device == device]
        return min(alike, key=lambda shape: (min(shape.nodes, 2) != min(nodes, 2),
                                             abs(math.log2(shape.ranks / ranks)), shape.nodes != nodes), default=None)

    def merged(self, shape: Shape) -> Table:
        """Return the table with `shape` in place of the old shape with the same ranks, nodes and device.

        Old curves without a new measurement are kept; predictions for the same ranks and device are not.
        """
        before = next((other.curves for other in self.shapes if other[:3] == shape[:3]), ())
        now = {curve[:3] for curve in shape.curves}
        shape = shape._replace(curves=(*shape.curves, *(curve for curve in before if curve[:3] not in now)))
        others = tuple(other for other in self.shapes if other[:3] != shape[:3])
        return self._replace(shapes=tuple(sorted((*others, shape), key=lambda one: one[:3])),
                             graphs=self._other_graphs(shape.ranks, shape.device))


@functools.cache
def built_in() -> Table:
    """Return the table for machines without a table of their own."""
    return parse(BUILT_IN, Path(__file__).with_name("defaults.json").read_bytes())


def parse(source: str, content: bytes) -> Table:
    """Return the table in the `content` of a file; raise ArgumentError for a file not written by `as_json`."""
    try:
        document = json.loads(content)
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        table: Table = _row(Table, {**document, "source": source})
        return table
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"tuning table {source}: {error}; `gpucoll tune` makes a new one", code=CODE) from None


ROWS = {"shapes": Shape, "graphs": GraphTable, "links": LinkCost, "curves": Curve, "files": AlgorithmFile}


def _row(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a named tuple made of JSON's values; the lists named in `ROWS` have named tuples."""
    return kind(**{key: tuple(_row(ROWS[key], one) if key in ROWS else one for one in value)
                   if isinstance(value, list) else value for key, value in values.items()})


def as_json(table: Table) -> bytes:
    """Return the table as a file for `parse`; the content of files of algorithms stays in these files."""
    return json.dumps({"format": FORMAT, **_plain(table._replace(source=""))}, indent=1).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {key: _plain(one) for key, one in value._asdict().items() if not isinstance(one, bytes)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


PROCESSORS = Path("/proc/cpuinfo")


def facts() -> dict[str, Any]:
    """Return the properties of this host and installation; a table measured with other properties is not valid.

    "cores" counts the host's cores, not the cores bound to this process, which depend on the number of ranks.
    """
    from mpi4py import MPI

    return {"name": socket.gethostname(), "processor": processor(), "cores": os.cpu_count() or 1,
            "mpi": library_name(MPI.Get_library_version()), "numpy": numpy.__version__, "gpucoll": __version__}


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
    """Return the table at `path` with the content of its files of algorithms; None without a table.

    Raises ArgumentError for a bad, old or another host's table, and for a missing or changed file of algorithms.
    """
    try:
        table = parse(str(path), read_trusted(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ArgumentError(f"tuning table {path} cannot be read: {error}", code=CODE) from None
    for key, value in host.items():
        if table.host.get(key) != value:
            raise ArgumentError(f"tuning table {path}: it was measured with {key} {table.host.get(key)!r}, but here it "
                                f"is {value!r}; `gpucoll tune` makes a new one", code=CODE)
    return table._replace(graphs=tuple(graph._replace(files=tuple(_with_content(path, file) for file in graph.files))
                                       for graph in table.graphs))


def _with_content(path: Path, file: AlgorithmFile) -> AlgorithmFile:
    """Return a file of algorithms with the content; raise ArgumentError for a missing or changed file."""
    place = path.with_name(Path(file.name).name)  # in the table's folder, whatever the table says
    try:
        content = read_trusted(place)
        is_same = hashlib.sha256(content).hexdigest() == file.sha256
        fault = None if is_same else "has changed since the table was written"
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
    if fault is not None:
        raise ArgumentError(f"tuning table {path}: the file {place} of {', '.join(file.algorithms)} {fault}; "
                            "`gpucoll tune --topology` makes both again", code=CODE)
    return file._replace(content=content)


def load() -> Table:
    """Return this host's table; the built-in table if the host has none or, with a warning, an invalid table."""
    host = facts()
    try:
        return read(table_path(host), host) or built_in()
    except ArgumentError as error:
        warnings.warn(f"{error}; until then the built-in table serves", stacklevel=2)
        return built_in()
