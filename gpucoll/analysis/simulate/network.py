"""Topologies: levels of links between ranks, read from small TOML files."""

from __future__ import annotations

import functools
import importlib.resources
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.errors import ArgumentError, nearest

CODE = "GC-TOPOLOGY"
DEFAULT = "switch"


class Level(NamedTuple):
    """One class of links: what joins ranks, or the groups of the level below, into groups of its own.

    `medium` is how:

    - ``switch``: every rank or group below has `links` links to a switch, each way;
    - ``bus``: all of a group share one link, both ways together;
    - ``mesh``: every pair of ranks or groups below has a link of its own, each way;
    - ``torus``: ranks or groups below lie in a torus of `dimensions`, as square as their number allows, row
      after row, each with a link to either side in every dimension, each way.

    `ranks` is how many ranks a group holds, or `groups` how many groups all ranks form; all ranks are one group where
    neither is given.
    """

    name: str
    alpha: float  # seconds that a message takes without its bytes, from end to end
    beta: float  # seconds per byte on one link
    gamma: float = 0.0  # seconds per byte combined with what came by this level
    medium: str = "switch"
    ranks: int | None = None
    groups: int | None = None
    links: int = 1
    dimensions: int = 2
    hop: float = 0.0  # seconds for each link after the first on a way through a torus
    gap: float = 0.0  # seconds for each message after the first that a rank sends, or receives, in one round


class Topology(NamedTuple):
    """Levels, innermost first; `name` is its file's."""

    name: str
    levels: tuple[Level, ...]
    about: str = ""

    def spans(self, size: int) -> tuple[int, ...]:
        """Return how many ranks a group of each level holds where there are `size`; ArgumentError for too many.

        >>> shipped("two_hosts").spans(6)
        (3, 6)
        """
        spans = [-(-size // (level.groups or 1)) if level.ranks is None else level.ranks for level in self.levels]
        if spans[-1] < size:
            raise ArgumentError(f"topology {self.name} joins at most {spans[-1]} ranks, not {size}", code=CODE)
        return tuple(spans)

    def nodes(self, size: int) -> tuple[int, ...] | None:
        """Return the innermost group of each rank; None where there is one level, and so no nodes."""
        if len(self.levels) == 1:
            return None
        span = self.spans(size)[0]
        return tuple(rank // span for rank in range(size))


def names() -> tuple[str, ...]:
    """Return the topologies that the package brings.

    >>> names()
    ('fat_tree', 'mesh', 'nvlink_node', 'pcie_node', 'switch', 'torus_2d', 'torus_3d', 'two_hosts')
    """
    files = importlib.resources.files("gpucoll.analysis").joinpath("topologies").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@functools.cache
def shipped(name: str) -> Topology:
    """Return the topology `name` of the package; ArgumentError names the nearest where there is none."""
    if name not in names():
        raise ArgumentError(f"no topology is named {name!r}{nearest(name, names())}", code=CODE)
    file = importlib.resources.files("gpucoll.analysis").joinpath("topologies", f"{name}.toml")
    return parse(name, file.read_bytes())


def load(name_or_file: str) -> Topology:
    """Return a topology of the package by its name, or that of a TOML file by its path; ArgumentError."""
    path = Path(name_or_file)
    if path.suffix != ".toml":
        return shipped(name_or_file)
    try:
        return parse(path.stem, path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"cannot read topology {name_or_file}: {error.strerror}", code=CODE) from None


def parse(name: str, text: bytes) -> Topology:
    """Return the topology that a TOML file says; ArgumentError says what is wrong, and where.

    >>> parse("pair", b"[[level]]\\nname = 'cable'\\nalpha = 1e-6\\nbeta = 1e-9").levels[0].medium
    'switch'
    """
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"topology {name} is no TOML: {error}", code=CODE) from None
    _known(name, table, ("about", "level"))
    about, levels = table.get("about", ""), table.get("level")
    if not isinstance(about, str):
        raise ArgumentError(f"topology {name}: about {about!r} is no text", code=CODE)
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        raise ArgumentError(f"topology {name} has no [[level]]", code=CODE)
    return checked(Topology(name, tuple(_level(name, index, level) for index, level in enumerate(levels, 1)), about))


def _known(where: str, table: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            raise ArgumentError(f"topology {where}: unknown key {key!r}{nearest(key, keys)}", code=CODE)


def _level(name: str, index: int, table: dict[str, Any]) -> Level:
    where = f"{name}, level {index}"
    _known(where, table, Level._fields)
    for key in ("name", "alpha", "beta"):
        if key not in table:
            raise ArgumentError(f"topology {where}: {key} is missing", code=CODE)
    return Level(**table)


def checked(topology: Topology) -> Topology:
    """Return `topology`, all values of which make sense; ArgumentError names the level and the key."""
    for index, level in enumerate(topology.levels, 1):
        for key, value in level._asdict().items():
            _check_value(f"topology {topology.name}, level {index}", key, value)
        _check_medium(f"topology {topology.name}, level {index}", level)
    if not topology.levels:
        raise ArgumentError(f"topology {topology.name} has no level", code=CODE)
    _check_nesting(topology)
    return topology


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_text, "a name"), "medium": (_text, "a name"),
    **dict.fromkeys(("alpha", "beta", "gamma", "hop", "gap"), (_seconds, "a number of seconds, 0 or more")),
    **dict.fromkeys(("ranks", "groups", "links", "dimensions"), (_number, "a whole number, 1 or more")),
}
MEDIA = {"switch": ("links",), "bus": (), "mesh": (), "torus": ("dimensions", "hop")}


def _check_value(where: str, key: str, value: object) -> None:
    right, words = VALUES[key]
    if not right(value) and not (value is None and key in ("ranks", "groups")):
        raise ArgumentError(f"{where}: {key} {value!r} is not {words}", code=CODE)


def _check_medium(where: str, level: Level) -> None:
    """The medium is known, and no key is given that means nothing to it."""
    if level.medium not in MEDIA:
        raise ArgumentError(f"{where}: unknown medium {level.medium!r}{nearest(level.medium, MEDIA)}", code=CODE)
    for medium, keys in MEDIA.items():
        for key in keys:
            if medium != level.medium and getattr(level, key) != Level._field_defaults[key]:
                raise ArgumentError(f"{where}: {key} belongs to a {medium}, not to a {level.medium}", code=CODE)


def _check_nesting(topology: Topology) -> None:
    """Every group holds whole groups of the level below."""
    below = 1
    for index, level in enumerate(topology.levels, 1):
        where, last = f"topology {topology.name}, level {index}", index == len(topology.levels)
        if level.groups is not None and (index > 1 or last or level.ranks is not None):
            raise ArgumentError(f"{where}: groups belongs to the first of several levels, in place of ranks", code=CODE)
        if level.ranks is None and level.groups is None and not last:
            raise ArgumentError(f"{where}: ranks is missing: only the last level joins all", code=CODE)
        if level.ranks is not None and level.ranks % below:
            raise ArgumentError(f"{where}: ranks {level.ranks} is no multiple of {below}, those below", code=CODE)
        if level.ranks is not None and index > 1 and topology.levels[0].groups is not None:
            raise ArgumentError(f"{where}: ranks cannot stand above groups", code=CODE)
        below = level.ranks or below
