"""Topologies: levels of links between ranks, read from small TOML files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from gpucoll.core import toml
from gpucoll.errors import ArgumentError, nearest

CODE = "GC-TOPOLOGY"
DEFAULT = "switch"
SHIPPED = Path(__file__).parent


class Level(NamedTuple):
    """One class of links, joining ranks, or the groups of the level below, into larger groups.

    `medium` is the kind of link. A unit is a rank, or a group of the level below.

    - ``switch``: every unit has `links` links to a switch, in each direction;
    - ``bus``: a group shares one link for both directions;
    - ``mesh``: every pair of units has a link in each direction;
    - ``torus``: the units form a torus of `dimensions`, as square as possible, numbered row by row; every unit has a
      link to both neighbours in every dimension, in each direction.

    `ranks` is the number of ranks in a group, or `groups` the number of groups formed by all ranks; with neither, all
    ranks are one group.
    """

    name: str
    alpha: float  # seconds of an empty message, from end to end
    beta: float  # seconds per byte on one link
    gamma: float = 0.0  # seconds per byte for combining data received through this level
    medium: str = "switch"
    ranks: int | None = None
    groups: int | None = None
    links: int = 1
    dimensions: int = 2
    hop: float = 0.0  # seconds for each link after the first on a route through a torus
    gap: float = 0.0  # seconds for each message after the first sent, or received, by a rank in one round


MEDIA: dict[str, tuple[str, ...]] = {
    "switch": ("links",), "bus": (), "mesh": (), "torus": ("dimensions", "hop")}  # with the keys of each
TOPOLOGY_CHECKS: dict[str, toml.Check] = {
    "name": toml.name, "medium": toml.one_of(*MEDIA),
    **dict.fromkeys(("alpha", "beta", "gamma", "hop", "gap"), toml.seconds),
    **dict.fromkeys(("ranks", "groups", "links"), toml.count), "dimensions": functools.partial(toml.count, most=64),
}


class Topology(NamedTuple):
    """A topology: levels, innermost first; `name` is the file's name without the ending."""

    name: str
    levels: tuple[Level, ...]
    about: str = ""

    @property
    def is_uniform(self) -> bool:
        """Whether the topology is one switch with equal links."""
        return len(self.levels) == 1 and self.levels[0].medium == "switch"

    def spans(self, size: int) -> tuple[int, ...]:
        """Return, for each level, the number of ranks in a group, for `size` ranks; raise ArgumentError for too many.

        >>> shipped("two_hosts").spans(6)
        (3, 6)
        """
        spans = [-(-size // (level.groups or 1)) if level.ranks is None else level.ranks for level in self.levels]
        if spans[-1] < size:
            raise ArgumentError(f"topology {self.name} joins at most {spans[-1]} ranks, not {size}", code=CODE)
        return tuple(spans)

    def nodes(self, size: int) -> tuple[int, ...] | None:
        """Return the innermost group of each rank as the rank's node; None for one level, a topology without nodes."""
        if len(self.levels) == 1:
            return None
        span = self.spans(size)[0]
        return tuple(rank // span for rank in range(size))


def names() -> tuple[str, ...]:
    """Return the names of the topologies shipped with the package.

    >>> names()
    ('fat_tree', 'mesh', 'nvlink_node', 'pcie_node', 'switch', 'torus_2d', 'torus_3d', 'two_hosts')
    """
    return tuple(sorted(file.name.removesuffix(".toml") for file in SHIPPED.iterdir() if file.name.endswith(".toml")))


@functools.cache
def shipped(name: str) -> Topology:
    """Return the shipped topology `name`; raise ArgumentError naming the nearest known name."""
    if name not in names():
        raise ArgumentError(f"no topology is named {name!r}{nearest(name, names())}", code=CODE)
    return parse(name, SHIPPED.joinpath(f"{name}.toml").read_bytes())


def load(name_or_file: str) -> Topology:
    """Return a shipped topology by name, or the topology in a TOML file by path.

    Parameters
    ----------
    name_or_file : str
        The name, or a path that ends in .toml.

    Returns
    -------
    Topology
        The levels of links.

    Raises
    ------
    ArgumentError
        An unknown name, or a file that cannot be read or is wrong (GC-TOPOLOGY).

    See Also
    --------
    simulate : Takes the topology.

    Examples
    --------
    >>> from gpucoll.simulator import load
    >>> load("two_hosts").name
    'two_hosts'
    """
    path = Path(name_or_file)
    if path.suffix != ".toml":
        return shipped(name_or_file)
    try:
        return parse(path.stem, path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"cannot read topology {name_or_file}: {error.strerror}", code=CODE) from None


def parse(name: str, text: bytes) -> Topology:
    """Return the topology described by a TOML file; raise ArgumentError naming the fault and its place.

    >>> parse("pair", b"[[level]]\\nname = 'cable'\\nalpha = 1e-6\\nbeta = 1e-9").levels[0].medium
    'switch'
    """
    file = toml.TomlFile(f"topology {name}", CODE)
    table = file.read(text, ("about", "level"))
    file.check({"about": table.get("about")}, {"about": toml.text})
    levels = tuple(file.row(Level, level, TOPOLOGY_CHECKS, where) for where, level in file.tables(table, "level"))
    return checked(Topology(name, levels, table.get("about", "")))


def checked(topology: Topology) -> Topology:
    """Return `topology` after checking all values; raise ArgumentError naming the level and the key."""
    file = toml.TomlFile(f"topology {topology.name}", CODE)
    if not topology.levels:
        raise file.error("the file has no [[level]]")
    for index, level in enumerate(topology.levels, 1):
        file.check(level._asdict(), TOPOLOGY_CHECKS, f"level {index}")
        for medium, keys in MEDIA.items():  # refuse keys without a meaning for the level's medium
            for key in keys:
                if medium != level.medium and getattr(level, key) != Level._field_defaults[key]:
                    raise file.error(f"{key} belongs to a {medium}, not to a {level.medium}", f"level {index}")
    _check_nesting(file, topology)
    return topology


def _check_nesting(file: toml.TomlFile, topology: Topology) -> None:
    """Raise ArgumentError unless every group consists of whole groups of the level below."""
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
