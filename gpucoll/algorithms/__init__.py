"""The registry of algorithms: one file each, found at run time.

An algorithm is a per-rank generator of rounds (`gpucoll.schedule`). A decorator registers it
under the name of its file, with its cost as data: formulas in ``P`` (ranks), ``N`` (bytes
of the larger of input and output), ``S`` (segments) and ``lg(x)`` (floor of log2 x).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers as numbers_abc
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from gpucoll.collectives import COLLECTIVES
from gpucoll.collectives import collective as collective_row
from gpucoll.dtypes import row_of
from gpucoll.errors import ArgumentError, nearest
from gpucoll.ops import op_of
from gpucoll.schedule import Copy, Round, Schedule, Slice


def evaluate(formula: str, **values: Any) -> Any:
    """Return the value of a formula of the registry: our own data, never a user's text.

    >>> evaluate("lg(2 * P - 1)", P=5)
    3
    """
    return eval(formula, {"__builtins__": {}, "min": min, "max": max, "lg": lambda x: int(x).bit_length() - 1}, values)


class Cost(NamedTuple):
    """What an algorithm costs; each a formula, evaluated by `price`."""

    rounds: str  # rounds on the longest chain of dependent messages: the factor of alpha
    path: str  # bytes along that chain, every message on a link of its own: the factor of beta
    sent: str  # the most bytes that one rank sends
    received: str  # the most bytes that one rank receives
    reduced: str  # the most bytes that one rank combines: the factor of gamma

    def price(self, size: int, nbytes: float, segments: int = 1) -> dict[str, float]:
        """Return every formula's value for `size` ranks, `nbytes` bytes and `segments`."""
        return {field: evaluate(formula, P=size, N=nbytes, S=segments) for field, formula in self._asdict().items()}


class Algorithm(NamedTuple):
    """One algorithm for one collective."""

    collective: str
    name: str
    make: Callable[..., Iterable[Round]]
    chunks: str
    cost: Cost
    options: frozenset[str]


DEVICES = ("cpu", "cuda", "emulated")  # every schedule runs on each
_REGISTRY: dict[tuple[str, str], Algorithm] = {}


def algorithm(collective: str, *, chunks: str = "P * S", **cost: str) -> Callable:
    """Register the decorated generator for `collective` under its file's name.

    It is called with `rank`, `size` >= 2 and those of `root`, `segments` and `nodes` that it takes.
    """

    def register(make: Callable[..., Iterable[Round]]) -> Callable[..., Iterable[Round]]:
        name = make.__module__.rpartition(".")[2]
        options = frozenset(inspect.signature(make).parameters) - {"rank", "size"}
        _REGISTRY[collective, name] = Algorithm(collective, name, make, chunks, Cost(**cost), options)
        return make

    return register


@functools.cache
def registry() -> dict[tuple[str, str], Algorithm]:
    """Return all algorithms by (collective, name); the sibling files are imported at the first call."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def algorithms(collective: str, *, size: int | None = None, op: object = None, dtype: object = None,
               device: str = "cpu") -> tuple[str, ...]:
    """Return the names of the algorithms of `collective` that accept just that.

    `size` is the number of ranks, `op` and `dtype` as in the collectives, `device` "cpu", "cuda"
    or "emulated". Any name that it returns works; an `op` is ignored where nothing is reduced. Raises
    ArgumentError for an unknown collective, op or device.

    >>> algorithms("reduce_scatter")
    ('direct', 'ring')
    """
    if device not in DEVICES:
        raise ArgumentError(f"no device is named {device!r}{nearest(device, DEVICES)}", code="GC-DEVICE")
    kind = None if dtype is None else row_of(dtype).kind
    if collective_row(collective).reduces and op is not None and kind not in (None, *op_of(op).kinds):
        return ()
    return tuple(name for row, name in registry() if row == collective)


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm; ArgumentError with code GC-ALGO says which there are."""
    collective_row(collective)
    try:
        return registry()[collective, name]
    except (KeyError, TypeError):
        raise ArgumentError(f"{collective} has no algorithm {name!r}"
                            f"{nearest(name, algorithms(collective))}", code="GC-ALGO") from None


def schedule(collective: str, algorithm: str, *, rank: int, size: int, root: int = 0, segments: int = 1,
             nodes: Iterable[int] | None = None) -> Schedule:
    """Return what rank `rank` of `size` does in `collective` by `algorithm`.

    `root` counts where the collective has one; `segments` is the pipelining: into how many
    messages a rank's part is cut; `nodes` is the node of each rank, for algorithms that
    heed it. Raises ArgumentError.

    >>> for steps in schedule("all_gather", "ring", rank=0, size=2):
    ...     for step in steps: print(step)
    Copy(src=Slice(buffer='input', first=0, count=1), dst=Slice(buffer='output', first=0, count=1))
    Send(src=Slice(buffer='input', first=0, count=1), peer=1)
    Recv(dst=Slice(buffer='output', first=1, count=1), peer=1)
    """
    found = find(collective, algorithm)
    _check_numbers(rank=rank, size=size, root=root, segments=segments)
    nodes = None if nodes is None else tuple(nodes)
    if nodes is not None and len(nodes) != size:
        raise ArgumentError(f"nodes names {len(nodes)} ranks, size is {size}", code="GC-ALGO")
    given = {"root": root, "segments": segments, "nodes": nodes}
    options = {name: given[name] for name in found.options}
    pieces = segments if "segments" in found.options else 1
    chunks = evaluate(found.chunks, P=size, S=pieces)
    if size == 1:
        return Schedule(collective, algorithm, rank, size, chunks, lambda: _alone(collective, chunks))
    return Schedule(collective, algorithm, rank, size, chunks, lambda: found.make(rank, size, **options))


def _alone(collective: str, chunks: int) -> Iterator[Round]:
    """A lone rank's part in anything: its input is its output. No algorithm ever sees one rank."""
    if COLLECTIVES[collective].output.where != "nowhere":
        yield (Copy(Slice("input", 0, chunks), Slice("output", 0, chunks)),)


def _check_numbers(**numbers: object) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, numbers_abc.Integral):
            raise ArgumentError(f"{name} {value!r} is not a whole number", code="GC-ALGO")
    _check_ranges(**numbers)  # type: ignore[arg-type] # they are integers


def _check_ranges(*, rank: int, size: int, root: int, segments: int) -> None:
    if size < 1 or segments < 1:
        raise ArgumentError(f"size {size} and segments {segments} must be at least 1", code="GC-ALGO")
    for name, value in (("rank", rank), ("root", root)):
        if not 0 <= value < size:
            raise ArgumentError(f"{name} {value} is not in 0..{size - 1}", code="GC-ALGO")
