"""What was measured of a machine: the table that `gpucoll tune` writes and `auto` chooses by, as readable TOML.

A table holds shapes: so many ranks on so many nodes. A shape has, for each executor, the constants of its links, and
curves: the seconds that an algorithm took for given sizes. A host has one for each MPI, in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import math
import os
import platform
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.core import toml
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.device.store import default_folder, read_trusted
from gpucoll.errors import ArgumentError
from gpucoll.launch.launchers import library_name
from gpucoll.version import __version__

CODE = "GC-TABLE"
BUILT_IN = "built-in"
FORMAT = 1
DEVICES = ("cpu", "cuda")


class LinkCost(NamedTuple):
    """The constants of one executor on one class of links: `name` is "node" within a node, "network" across."""

    executor: str
    name: str
    alpha: float  # seconds that a message takes without its bytes
    beta: float  # seconds per byte
    gamma: float  # seconds per byte combined
    gap: float  # seconds for each further message of a rank in one round


class Curve(NamedTuple):
    """Measured seconds of an algorithm by size, in bytes of the larger of input and output."""

    collective: str
    executor: str
    algorithm: str
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def end(self) -> int:
        """The size up to which it counts: up to the next one that would have been measured, about."""
        return 4 * self.bytes[-1] if self.bytes[-1] else 1 << 62

    def at(self, nbytes: int) -> float:
        """Return the seconds for `nbytes`: between two sizes on a straight line, beyond the last in proportion."""
        if nbytes >= self.bytes[-1]:
            return self.seconds[-1] * nbytes / max(1, self.bytes[-1])
        return float(numpy.interp(nbytes, self.bytes, self.seconds))


class Shape(NamedTuple):
    """What was measured for so many ranks on so many nodes; its first three fields tell it from a table's others."""

    ranks: int
    nodes: int
    device: str
    measured: str  # the day
    links: tuple[LinkCost, ...]
    curves: tuple[Curve, ...]


class Table(NamedTuple):
    """All that is known of a machine; `source` is the file, or BUILT_IN; `host` its facts."""

    source: str
    host: dict[str, Any]
    shapes: tuple[Shape, ...]

    def nearest(self, ranks: int, nodes: int, device: str) -> Shape | None:
        """Return the shape most like these ranks: of this device, with one node or several, near in ranks."""
        alike = [shape for shape in self.shapes if shape.device == device]
        return min(alike, key=lambda shape: (min(shape.nodes, 2) != min(nodes, 2),
                                             abs(math.log2(shape.ranks / ranks)), shape.nodes != nodes), default=None)

    def merged(self, shape: Shape) -> Table:
        """Return the table with `shape`, in place of what it had of the same ranks, nodes and device.

        Curves that were not measured now stay.
        """
        before = next((other.curves for other in self.shapes if other[:3] == shape[:3]), ())
        now = {curve[:3] for curve in shape.curves}
        shape = shape._replace(curves=(*shape.curves, *(curve for curve in before if curve[:3] not in now)))
        others = tuple(other for other in self.shapes if other[:3] != shape[:3])
        return self._replace(shapes=tuple(sorted((*others, shape), key=lambda one: one[:3])))


@functools.cache
def built_in() -> Table:
    """Return the table that serves where a machine has none of its own."""
    return parse(BUILT_IN, importlib.resources.files("gpucoll.tuner").joinpath("defaults.toml").read_bytes())


def parse(source: str, content: bytes) -> Table:
    """Return the table that a file says; ArgumentError tells what is wrong with it."""
    file = toml.TomlFile(f"tuning table {source}", CODE, "; `gpucoll tune` makes a new one")
    document = file.read(content, ("format", "host", "shape"))
    if document.get("format") != FORMAT:
        raise file.error(f"its format is {document.get('format')!r}, not {FORMAT}")
    host = document.get("host", {})
    if not isinstance(host, dict):
        raise file.error("host is no [host]")
    return Table(source, host, tuple(_shape(file, where, shape) for where, shape in file.tables(document, "shape")))


SHAPE: dict[str, toml.Check] = {"ranks": toml.count, "nodes": toml.count, "device": toml.one_of(*DEVICES),
                                "measured": toml.name}
LINK: dict[str, toml.Check] = {"executor": toml.name, "name": toml.one_of("node", "network"),
                               **dict.fromkeys(("alpha", "beta", "gamma", "gap"), toml.seconds)}
CURVE: dict[str, toml.Check] = {"collective": toml.one_of(*COLLECTIVES), "executor": toml.name, "algorithm": toml.name,
                                "bytes": toml.list_of(functools.partial(toml.count, least=0)),
                                "seconds": toml.list_of(toml.seconds)}


def _shape(file: toml.TomlFile, where: str, table: dict[str, Any]) -> Shape:
    links = tuple(file.row(LinkCost, link, LINK, place) for place, link in file.tables(table, "link", where))
    curves = tuple(_curve(file, place, curve) for place, curve in file.tables(table, "curve", where))
    own = {key: value for key, value in table.items() if key not in ("link", "curve")}
    return file.row(functools.partial(Shape, links=links, curves=curves), own, SHAPE, where)


def _curve(file: toml.TomlFile, where: str, table: dict[str, Any]) -> Curve:
    curve = file.row(Curve, table, CURVE, where)
    if not curve.bytes or len(curve.bytes) != len(curve.seconds) or list(curve.bytes) != sorted(set(curve.bytes)):
        raise file.error("bytes and seconds are no curve", where)
    return curve._replace(bytes=tuple(curve.bytes), seconds=tuple(curve.seconds))


def as_toml(table: Table, heading: str = "") -> str:
    """Return the text that `parse` reads; `heading` is its first line, a comment."""
    lines = [f"# {heading}"] * bool(heading) + [f"format = {FORMAT}", ""]
    if table.host:
        lines += ["[host]", *(f"{key} = {_toml(value)}" for key, value in table.host.items()), ""]
    for shape in table.shapes:
        lines += ["[[shape]]", *_keys(shape, ("ranks", "nodes", "device", "measured")), ""]
        for link in shape.links:
            lines += ["[[shape.link]]", *_keys(link, link._fields), ""]
        for curve in shape.curves:
            lines += ["[[shape.curve]]", *_keys(curve, curve._fields), ""]
    return "\n".join(lines)


def _keys(row: Any, names: Sequence[str]) -> Iterator[str]:
    return (f"{name} = {_toml(getattr(row, name))}" for name in names)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


PROCESSORS = Path("/proc/cpuinfo")


def facts() -> dict[str, Any]:
    """Return what a table belongs to: another host, MPI, or version of ours has other figures.

    The cores are the host's: those that a launcher has bound this process to depend on the number of ranks.
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
    """Return the file of a host's table: one for each name, processor, number of cores and MPI."""
    mark = repr([host[key] for key in ("name", "processor", "cores", "mpi")])
    return default_folder(environment) / f"tune-{hashlib.sha256(mark.encode()).hexdigest()[:12]}.toml"


def read(path: Path, host: Mapping[str, Any]) -> Table | None:
    """Return the table at `path`, None where there is none; ArgumentError for one that is bad, old or another's."""
    try:
        table = parse(str(path), read_trusted(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ArgumentError(f"tuning table {path}: it cannot be read: {error}", code=CODE) from None
    for key, value in host.items():
        if table.host.get(key) != value:
            raise ArgumentError(f"tuning table {path}: it was measured with {key} {table.host.get(key)!r}, and here it "
                                f"is {value!r}; `gpucoll tune` makes a new one", code=CODE)
    return table


def load() -> Table:
    """Return this host's table, or the built-in one: where it has none, and with a warning where it is refused."""
    host = facts()
    try:
        return read(table_path(host), host) or built_in()
    except ArgumentError as error:
        warnings.warn(f"{error}; until then the built-in table serves", stacklevel=2)
        return built_in()
