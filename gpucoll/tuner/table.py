"""What was measured of a machine: the table that `gpucoll tune` writes and `auto` chooses by, as readable TOML.

A table holds shapes: so many ranks on so many nodes. A shape has, for each executor, the constants of its links, and
curves: the seconds that an algorithm took for given sizes.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError, nearest

CODE = "GC-TABLE"
BUILT_IN = "built-in"
FORMAT = 1
DEVICES = ("cpu", "cuda")


class Link(NamedTuple):
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
        """Return the seconds for `nbytes`: between two sizes on a straight line, beyond the last in proportion.

        >>> Curve("all_reduce", "mpi", "ring", (100, 300), (1.0, 2.0)).at(200)
        1.5
        """
        if nbytes >= self.bytes[-1]:
            return self.seconds[-1] * nbytes / max(1, self.bytes[-1])
        above = next(index for index, size in enumerate(self.bytes) if size > nbytes)
        if above == 0:
            return self.seconds[0]
        low, high = self.bytes[above - 1], self.bytes[above]
        share = (nbytes - low) / (high - low)
        return self.seconds[above - 1] * (1 - share) + self.seconds[above] * share


class Shape(NamedTuple):
    """What was measured for so many ranks on so many nodes."""

    ranks: int
    nodes: int
    device: str
    measured: str  # the day
    links: tuple[Link, ...]
    curves: tuple[Curve, ...]

    @property
    def key(self) -> tuple[int, int, str]:
        """What tells it from the other shapes of a table."""
        return self.ranks, self.nodes, self.device


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
        before = next((other.curves for other in self.shapes if other.key == shape.key), ())
        now = {curve[:3] for curve in shape.curves}
        shape = shape._replace(curves=(*shape.curves, *(curve for curve in before if curve[:3] not in now)))
        others = tuple(other for other in self.shapes if other.key != shape.key)
        return self._replace(shapes=tuple(sorted((*others, shape), key=lambda one: one.key)))


@functools.cache
def built_in() -> Table:
    """Return the table that serves where a machine has none of its own."""
    return parse(BUILT_IN, importlib.resources.files("gpucoll.tuner").joinpath("defaults.toml").read_text())


def parse(source: str, text: str) -> Table:
    """Return the table that `text` says; ArgumentError tells what is wrong with it."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _bad(source, f"it is no TOML: {error}") from None
    if found.get("format") != FORMAT:
        raise _bad(source, f"its format is {found.get('format')!r}, not {FORMAT}")
    host, shapes = found.get("host", {}), found.get("shape", [])
    if set(found) - {"format", "host", "shape"} or not isinstance(host, dict) or not isinstance(shapes, list):
        raise _bad(source, "beside format it has a [host] and [[shape]]s only")
    return Table(source, host, tuple(_shape(source, shape) for shape in shapes))


def _bad(source: str, reason: str) -> ArgumentError:
    return ArgumentError(f"tuning table {source}: {reason}; `gpucoll tune` makes a new one", code=CODE)


def _shape(source: str, table: Any) -> Shape:
    given = dict(_fields(source, "shape", table, Shape, {"links": "link", "curves": "curve"}))
    given["links"] = tuple(_link(source, link) for link in given["links"])
    given["curves"] = tuple(_curve(source, curve) for curve in given["curves"])
    shape = Shape(**given)
    if not all(isinstance(number, int) and number >= 1 for number in (shape.ranks, shape.nodes)) \
            or shape.device not in DEVICES or not isinstance(shape.measured, str):
        raise _bad(source, f"ranks {shape.ranks!r}, nodes {shape.nodes!r}, device {shape.device!r} are no shape")
    return shape


def _fields(source: str, what: str, table: Any, kind: Any, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of `kind` from a TOML table, which has them under `names` of their own where those say so."""
    if not isinstance(table, dict):
        raise _bad(source, f"{what} {table!r} is no table")
    expected = {names.get(field, field): field for field in kind._fields}
    for key in table:
        if key not in expected:
            raise _bad(source, f"unknown key {key!r} in {what}{nearest(key, [*expected])}")
    for key, field in expected.items():
        if key not in table and field not in names:
            raise _bad(source, f"{key} is missing in {what}")
        yield field, table.get(key, [])


def _link(source: str, table: Any) -> Link:
    link = Link(**dict(_fields(source, "link", table, Link, {})))
    if link.name not in ("node", "network"):
        raise _bad(source, f"link {link.name!r} is neither node nor network")
    for key in ("alpha", "beta", "gamma", "gap"):
        if not _seconds(getattr(link, key)):
            raise _bad(source, f"{key} {getattr(link, key)!r} of {link.executor} is not a number of seconds, 0 or more")
    return link


def _curve(source: str, table: Any) -> Curve:
    curve = Curve(**dict(_fields(source, "curve", table, Curve, {})))
    where = f"{curve.collective} by {curve.algorithm} on {curve.executor}"
    if curve.collective not in COLLECTIVES:
        raise _bad(source, f"unknown collective {curve.collective!r}{nearest(curve.collective, COLLECTIVES)}")
    if not (isinstance(curve.bytes, list) and isinstance(curve.seconds, list) and curve.bytes
            and len(curve.bytes) == len(curve.seconds) and all(map(_seconds, curve.seconds))
            and all(isinstance(size, int) and size >= 0 for size in curve.bytes)
            and curve.bytes == sorted(set(curve.bytes))):
        raise _bad(source, f"bytes and seconds of {where} are no curve")
    return curve._replace(bytes=tuple(curve.bytes), seconds=tuple(curve.seconds))


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


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
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)
