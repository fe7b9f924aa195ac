"""Topologies: levels of links between ranks, read from small TOML files."""

from __future__ import annotations

import functools
import importlib.resources
from pathlib import Path
from typing import NamedTuple

from gpucoll.core import toml
from gpucoll.errors import ArgumentError, nearest

CODE = "GC-TOPOLOGY"
DEFAULT = "switch"
SHIPPED = importlib.resources.files("gpucoll.analysis").joinpath("topologies")


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


MEDIA = {"switch": ("links",), "bus": (), "mesh": (), "torus": ("dimensions", "hop")}  # and keys of their own
CHECKS: dict[str, toml.Check] = {
    "name": toml.name, "medium": toml.one_of(*MEDIA),
    **dict.fromkeys(("alpha", "beta", "gamma", "hop", "gap"), toml.seconds),
    **dict.fromkeys(("ranks", "groups", "links"), toml.count), "dimensions": functools.partial(toml.count, most=64),
}


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
    return tuple(sorted(file.name.removesuffix(".toml") for file in SHIPPED.iterdir() if file.name.endswith(".toml")))


@functools.cache
def shipped(name: str) -> Topology:
    """Return the topology `name` of the package; ArgumentError names the nearest where there is none."""
    if name not in names():
        raise ArgumentError(f"no topology is named {name!r}{nearest(name, names())}", code=CODE)
    return parse(name, SHIPPED.joinpath(f"{name}.toml").read_bytes())


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
    file = toml.TomlFile(f"topology {name}", CODE)
    table = file.read(text, ("about", "level"))
    about, levels = table.get("about", ""), file.tables(table, "level")
    if not isinstance(about, str):
        raise file.error(f"about {about!r} is no text")
    return checked(Topology(name, tuple(file.row(Level, level, CHECKS, where) for where, level in levels), about))


def checked(topology: Topology) -> Topology:
    """Return `topology`, all values of which make sense; ArgumentError names the level and the key."""
    file = toml.TomlFile(f"topology {topology.name}", CODE)
    if not topology.levels:
        raise file.error("it has no level: no [[level]]")
    for index, level in enumerate(topology.levels, 1):
        file.check(level._asdict(), CHECKS, f"level {index}")
        for medium, keys in MEDIA.items():  # none is given that means nothing to the medium
            for key in keys:
                if medium != level.medium and getattr(level, key) != Level._field_defaults[key]:
                    raise file.error(f"{key} belongs to a {medium}, not to a {level.medium}", f"level {index}")
    _check_nesting(file, topology)
    return topology


def _check_nesting(file: toml.TomlFile, topology: Topology) -> None:
    """Every group holds whole groups of the level below."""
    below, last = 1, len(topology.levels)
    for index, level in enumerate(topology.levels, 1):
        fault = None
        if level.groups is not None and (index > 1 or index == last or level.ranks is not None):
            fault = "groups belongs to the first of several levels, in place of ranks"
        elif level.ranks is None and level.groups is None and index < last:
            fault = "ranks is missing: only the last level joins all"
        elif level.ranks is not None and level.ranks % below:
            fault = f"ranks {level.ranks} is no multiple of {below}, those below"
        elif level.ranks is not None and index > 1 and topology.levels[0].groups is not None:
            fault = "ranks cannot stand above groups"
        if fault is not None:
            raise file.error(fault, f"level {index}")
        below = level.ranks or below
