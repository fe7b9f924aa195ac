"""The registry of algorithms: one file each for the library's, imported at run time, and the user's own.

An algorithm is a generator of the rounds of a rank (`gpucoll.core.schedule`). The decorator `algorithm` registers a
library algorithm under the name of its file, and a user's algorithm under its own name. The cost is data: formulas in
``P`` (ranks), ``N`` (bytes of the larger of input and output), ``S`` (segments), ``M`` (nodes), ``G`` (ranks of the
largest node) and a few functions (see `evaluate`). Some algorithms take parameters in the name, as in ``torus(4x2)``.
"""

from __future__ import annotations

import functools
import importlib
import numbers as numbers_abc
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.core import parsing
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.collectives import collective as collective_row
from gpucoll.core.dtypes import row_of
from gpucoll.core.ops import op_of
from gpucoll.core.schedule import Copy, Rounds, Schedule, Slice, by_chunks, moved
from gpucoll.core.topology import hops, node_shape
from gpucoll.errors import ArgumentError, nearest
from gpucoll.verify.user import CHUNK_LIMIT, Claim, as_proved, counted, proved

FORMULA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "lg": lambda x: int(x).bit_length() - 1,
    "two": lambda x: 1 << int(x).bit_length() - 1,
    "rest": lambda x: x - (1 << int(x).bit_length() - 1),
    "ones": lambda x: sum(number.bit_count() for number in range(x)),
    "hops": hops,
}


def evaluate(formula: str, **values: Any) -> Any:
    """Return the value of a formula of the registry; formulas are trusted like the code around them.

    Formulas may use arithmetic, min, max and

    - ``lg(x)``, the floor of log2 x: ``lg(2 * P - 1)`` is log2 P rounded up;
    - ``two(x)``, the largest power of two not above x, and ``rest(x)``, the remainder x - two(x);
    - ``ones(x)``, the number of binary ones in all numbers below x;
    - ``hops(x)``, the hops along all sides of the torus of x ranks chosen by `gpucoll.core.topology`.

    >>> evaluate("lg(2 * P - 1)", P=5), evaluate("(two(P), rest(P), ones(P), hops(P))", P=6)
    (3, (4, 2, 7, 3))
    """
    return eval(_compiled(formula), {"__builtins__": {}, **FORMULA_FUNCTIONS}, values)


@functools.cache  # threads as ranks ask for the same costs
def _compiled(formula: str) -> CodeType:
    return parsing.code_of(formula, "<formula>", "eval")


class Cost(NamedTuple):
    """The cost of an algorithm as formulas, evaluated by `price`."""

    rounds: str  # rounds on the longest chain of dependent messages: the factor of alpha
    path: str  # bytes along the same chain, with a separate link for each message: the factor of beta
    sent: str  # most bytes sent by a rank
    received: str  # most bytes received by a rank
    reduced: str  # most bytes combined by a rank: the factor of gamma
    # Peers of rank 0 beyond the first in each round, sends and receives counted apart, in one segment: factor of gap.
    gaps: str = "0"

    def price(self, size: int, nbytes: float | Fraction, segments: int = 1,
              nodes: Sequence[int] | None = None) -> dict[str, float]:
        """Return the value of every formula for `size` ranks on `nodes`, `nbytes` bytes and `segments`."""
        group, count = node_shape(size, None if nodes is None else tuple(nodes))
        return {field: evaluate(formula, P=size, N=nbytes, S=segments, G=group, M=count)
                for field, formula in self._asdict().items()}


COUNTED = Cost("", "", "", "", "", "")  # of algorithms without formulas: costs are counted in the schedule


class Traits(NamedTuple):
    """Properties of an algorithm that executors, tuner, calibration and drawings need besides schedule and cost.

    `segment` is the number of bytes of a call, with `by_block` of each rank's block, for each segment of a pipeline.
    With `at_source` every rank reads an operand directly in the memory of the rank forming the operand, and no rank
    passes data on. In the memory of a node this algorithm costs `barriers` barriers and one pass over the data; with 0
    `barriers` the cost formulas hold there as well. `kernel` names a GPU kernel running the whole collective. `layout`
    places the ranks of a drawing: "groups", "grid", "in_order", or "" for a layout by links. `probes` are the sizes
    measured by calibration: bytes of a block, or of the whole array. `in_nccl` is NCCL's name of the algorithm for this
    collective, if it differs.
    """

    segment: int = 1 << 16
    by_block: bool = False
    at_source: bool = False
    barriers: int = 0
    kernel: str = ""
    layout: str = ""
    probes: tuple[int, ...] = ()
    in_nccl: str = ""


NO_TRAITS = Traits()
Make: TypeAlias = Callable[..., Rounds]
Nodes: TypeAlias = tuple[int, ...] | None  # the node of each rank


class Algorithm(NamedTuple):
    """An algorithm for a collective.

    `vectorised` is a formula of P, true where `make` also takes an array of ranks (see `all_ranks`). `bind` returns the
    algorithm with the parameters given in the name, and `variants` yields the possible parameters for a number of
    ranks. `unfit` returns the reason why the algorithm cannot run on a number of ranks and nodes, or None. With
    `in_rank_order` the inputs are combined in rank order, so all ranks form the same bits; with `at_once` also by a
    single reduction, so that a result is rounded once. `own` marks an algorithm of the user, proved before the first
    use.
    """

    collective: str
    name: str
    make: Make
    chunks: str
    cost: Cost
    options: frozenset[str]
    vectorised: str = "0"
    bind: Callable[[Algorithm, str], Algorithm] | None = None
    variants: Callable[[str, int], Iterable[str]] | None = None
    unfit: Callable[[int, Nodes], str | None] = lambda size, nodes: None
    in_rank_order: bool = False
    at_once: bool = False
    own: bool = False
    traits: Traits = NO_TRAITS

    def pieces(self, segments: int) -> int:
        """Return the number of segments in use: 1 where the algorithm is not pipelined."""
        return segments if "segments" in self.options else 1

    def count_chunks(self, size: int, segments: int, nodes: Nodes = None) -> int:
        """Return the number of chunks in the larger of input and output.

        Raises ArgumentError where a user's formula gives no usable number.
        """
        group, count = node_shape(size, nodes)
        values = {"P": size, "S": self.pieces(segments), "G": group, "M": count}
        if not self.own:
            return evaluate(self.chunks, **values)
        try:
            chunks = operator.index(evaluate(self.chunks, **values))
            if not 1 <= chunks <= CHUNK_LIMIT:
                raise ValueError(chunks)
        # A user's formula may raise any exception.
        except Exception as error:
            raise ArgumentError(f"{self.collective} by {self.name} for {size} ranks: chunks={self.chunks!r} is not a "
                                f"whole number of at least 1 ({error})", code="GC-PROOF") from None
        return chunks

    def price(self, size: int, nbytes: float | Fraction, segments: int = 1,
              nodes: Sequence[int] | None = None) -> dict[str, float]:
        """Return the cost, see `Cost.price`; without formulas the costs are counted in the proved schedule."""
        if self.cost is not COUNTED:
            return self.cost.price(size, nbytes, segments, nodes)
        if size == 1:
            return dict.fromkeys(Cost._fields, 0)
        counts = counted(self.claim(size, 0, segments, None if nodes is None else tuple(nodes)))
        alone = ("rounds", "gaps")
        return {name: float(count if name in alone else count * nbytes) for name, count in counts.items()}

    def given(self, root: int, segments: int, nodes: Nodes) -> dict[str, Any]:
        """Return the options accepted by the generator."""
        options = {"nodes": nodes, "root": root, "segments": segments}
        return {name: value for name, value in options.items() if name in self.options}

    def claim(self, size: int, root: int, segments: int, nodes: Nodes) -> Claim:
        """Return the claim to be proved for an algorithm of the user."""
        options = self.given(root, segments, nodes)
        chunks = self.count_chunks(size, segments, nodes)
        return Claim(self.collective, self.name, self.make, size, chunks, root, tuple(options.items()),
                     self.unfit is not Algorithm._field_defaults["unfit"])


MOST_SEGMENTS = 32
DEVICES = ("cpu", "cuda", "emulated")  # every schedule runs on each device
SCHEDULE_OPTIONS = frozenset({"root", "segments", "nodes"})
_REGISTRY: dict[tuple[str, str], Algorithm] = {}
# User algorithms with schedules already made: a second registration would leave ranks with different schedules.
_USED: set[tuple[str, str]] = set()
_PHASES: dict[tuple[str, str], Make] = {}


def algorithm(collective: str, name: str = "", *, rounds: str = "", path: str = "", sent: str = "", received: str = "",
              reduced: str = "0", gaps: str = "0", chunks: str | int = "P * S", vectorised: str = "0", bind: Any = None,
              variants: Any = None, unfit: Any = None, in_rank_order: str = "0",
              traits: Any = NO_TRAITS) -> Callable[[Make], Make]:
    """Register the decorated generator of rounds for `collective`, and return it.

    The generator is called with `rank`, `size` >= 2, and `root`, `segments` and `nodes` if it accepts them. Cost
    formulas are optional: without formulas rounds and bytes are counted. A generator without `root` is for root 0 of a
    rooted collective; for other roots the ranks are renumbered.

    A user's algorithm is proved at its first use for a number of ranks.

    Parameters
    ----------
    collective : str
        The name of a collective, such as "all_reduce".
    name : str, optional
        The name of a user's algorithm, by default that of the generator; a library algorithm has the name of its file.
    rounds : str, optional
        A formula of P ranks, N bytes and S segments: rounds on the longest chain of dependent messages.
    path : str, optional
        A formula: bytes along the same chain.
    sent : str, optional
        A formula: most bytes sent by a rank; by default `path`.
    received : str, optional
        A formula: most bytes received by a rank; by default `sent`.
    reduced : str, optional
        A formula: most bytes combined by a rank.
    gaps : str, optional
        A formula: peers of rank 0 beyond the first in each round.
    chunks : str or int, optional
        The number of chunks in the larger of input and output: a number or a formula of P ranks and S segments.
    vectorised : str, optional
        For the library's own algorithms: a formula, true where the generator takes an array of ranks.
    bind : callable or None, optional
        For parameters in the name.
    variants : callable or None, optional
        The possible parameters for a number of ranks.
    unfit : callable or None, optional
        ``unfit(size, nodes)`` returns the reason why the algorithm cannot run on `size` ranks, or None.
    in_rank_order : str, optional
        For the library's own algorithms: "1" if contributions are combined in rank order.
    traits : Traits, optional
        For the library's own algorithms.

    Returns
    -------
    callable
        The decorator.

    Raises
    ------
    ArgumentError
        A wrong schedule, at its first use: the error names rank, round and chunk (GC-PROOF). A name already taken, or a
        formula without a value (GC-ALGO).

    See Also
    --------
    schedule : The rounds of a registered algorithm.
    load : Algorithms from files.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> @gc.algorithm("broadcast", "in_turn", chunks=1)
    ... def in_turn(rank, size):
    ...     x, out = gc.Slice("input", 0), gc.Slice("output", 0)
    ...     if rank == 0:
    ...         yield gc.Copy(x, out),
    ...     for other in range(1, size):
    ...         if rank == 0:
    ...             yield gc.Send(x, other),
    ...         elif rank == other:
    ...             yield gc.Recv(out, 0),
    >>> gc.run_local(lambda comm: comm.broadcast(numpy.array([comm.rank + 7]), algorithm="in_turn"), 3)
    [array([7]), array([7]), array([7])]
    """
    collective_row(collective)
    sent = sent or path
    cost = Cost(rounds, path, sent, received or sent, reduced, gaps) if rounds or sent else COUNTED

    def register(make: Make) -> Make:
        module, _, file = getattr(make, "__module__", "").rpartition(".")
        entry = Algorithm(collective, file, make, str(chunks), cost, frozenset(), vectorised, bind, variants,
                          in_rank_order=in_rank_order != "0", at_once=in_rank_order == "1", traits=traits)
        if module != __name__:
            entry = _own(entry._replace(name=name or getattr(make, "__name__", ""), own=True))
        options = SCHEDULE_OPTIONS & parsing.signature_of(make).parameters.keys()
        entry = entry._replace(options=options, unfit=unfit or entry.unfit)
        if COLLECTIVES[collective].rooted and "root" not in entry.options:
            entry = entry._replace(make=_for_any_root(entry), options=entry.options | {"root"})
        _REGISTRY[collective, entry.name] = entry
        registry.cache_clear()
        return make

    return register


def _own(entry: Algorithm) -> Algorithm:
    """Return the row of a user's algorithm, checked; raise ArgumentError."""
    try:
        parameters = list(parsing.signature_of(entry.make).parameters.values())
        needed = [one.name for one in parameters if one.default is one.empty and one.name not in SCHEDULE_OPTIONS
                  and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    except (TypeError, ValueError):
        needed = []
    if needed[:2] != ["rank", "size"] or len(needed) > 2:
        raise ArgumentError(f"{entry.make!r} is not a generator f(rank, size, ...) of rounds; further parameters can "
                            f"be {', '.join(sorted(SCHEDULE_OPTIONS))}, and parameters with a default", code="GC-ALGO")
    taken = {name for (_, name), other in registry().items() if not other.own} | {"auto", "native", "all"}
    if entry.name in taken or not entry.name.isidentifier():
        raise ArgumentError(f"a user's algorithm cannot be named {entry.name!r}: "
                            f"{'the library has this' if entry.name in taken else 'a name has letters and digits'}; "
                            'give another name, as in @algorithm("all_reduce", "mine")', code="GC-ALGO")
    if (entry.collective, entry.name) in _USED:
        raise ArgumentError(f"{entry.collective}: {entry.name} is in use and cannot be replaced; give the new "
                            'algorithm another name, as in @algorithm("all_reduce", "mine")', code="GC-ALGO")
    if entry.vectorised != "0":
        raise ArgumentError(f"{entry.collective}: {entry.name}: a user's algorithm is generated for each rank "
                            "separately; omit vectorised", code="GC-ALGO")
    if entry.traits != NO_TRAITS:
        raise ArgumentError(f"{entry.collective}: {entry.name}: traits are for the library's own algorithms; "
                            "omit traits", code="GC-ALGO")
    if entry.cost is not COUNTED:
        try:
            values = [*entry.cost.price(3, 3.0).values()]
        except Exception as error:
            raise ArgumentError(f"{entry.collective}: {entry.name}: a cost formula has no value: {error}",
                                code="GC-ALGO") from None
        if not all(isinstance(value, int | float) for value in values):
            raise ArgumentError(f"{entry.collective}: {entry.name}: a cost formula is not a number", code="GC-ALGO")
    return entry


def _for_any_root(entry: Algorithm) -> Make:
    """Return a generator for any root, made from a generator for root 0: ranks and their blocks are renamed.

    Steps on blocks are split into steps of a single chunk: after renaming, a range of blocks may wrap, and the peer
    would not know the place of the cut.
    """
    row = COLLECTIVES[entry.collective]

    @functools.wraps(entry.make)
    def make(rank: int, size: int, root: int = 0, **options: Any) -> Rounds:
        if root and options.get("nodes") is not None:
            options["nodes"] = (*options["nodes"][root:], *options["nodes"][:root])
        rounds = entry.make((rank - root) % size, size, **options)
        if not root:
            return rounds
        chunks = entry.count_chunks(size, options.get("segments", 1), options.get("nodes")) if row.blocks else 0

        def place(part: Slice) -> Slice:
            has_blocks = part.buffer != "scratch" and (row.input if part.buffer == "input" else row.output).blocks
            return part._replace(first=(part.first + root * chunks // size) % chunks) if has_blocks else part

        return moved(map(by_chunks, rounds) if row.blocks else rounds, place, lambda peer: (peer + root) % size)

    return make


def phase(kind: str) -> Callable[[Make], Make]:
    """Register the decorated ``make(rank, size)`` as a phase, a part of other algorithms, under the name of its file.

    All `size` blocks keep their places, so blocks may have unequal lengths. A "reduce_scatter" phase reads the blocks
    of input and leaves block `rank` of output reduced. An "all_gather" phase finds block `rank` of output and leaves
    all blocks of output complete.
    """

    def register(make: Make) -> Make:
        _PHASES[kind, make.__module__.rpartition(".")[2]] = make
        return make

    return register


@functools.cache
def registry() -> dict[tuple[str, str], Algorithm]:
    """Return all algorithms by (collective, name); the first call imports the sibling files."""
    import pkgutil

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def own_names(collective: str, size: int | None = None) -> list[str]:
    """Return the names of the user's algorithms of `collective`; "auto" never chooses a user's algorithm."""
    return [name for name in algorithms(collective, size=size) if registry()[collective, name].own]


def library_names(collective: str, size: int | None = None) -> list[str]:
    """Return the names of the library's algorithms of `collective`."""
    return [name for name in algorithms(collective, size=size) if not registry()[collective, name].own]


def phases(kind: str) -> dict[str, Make]:
    """Return the phases of `kind`, "reduce_scatter" or "all_gather", by name."""
    registry()
    return {name: make for (other, name), make in sorted(_PHASES.items()) if other == kind}


def algorithms(collective: str, *, size: int | None = None, op: object = None, dtype: object = None,
               device: str = "cpu") -> tuple[str, ...]:
    """Return the names of the algorithms of `collective` that support the given size, op, dtype and device.

    Every returned name works.

    Parameters
    ----------
    collective : str
        The name of a collective, such as "all_reduce".
    size : int or None, optional
        The number of ranks; None: any.
    op : str or op or None, optional
        The op of a reduction; ignored if nothing is reduced.
    dtype : dtype or None, optional
        The dtype of the elements.
    device : str, optional
        "cpu", "cuda" or "emulated".

    Returns
    -------
    tuple of str
        The names, in alphabetical order.

    Raises
    ------
    ArgumentError
        An unknown collective, op or device (GC-COLLECTIVE, GC-OP, GC-DEVICE), or a `size` that is not a whole number of
        at least 1 (GC-ALGO).

    See Also
    --------
    schedule : The rounds of an algorithm.
    Communicator.explain : Their predicted times.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.algorithms("gather")
    ('binomial', 'linear')
    """
    if device not in DEVICES:
        raise ArgumentError(f"no device is named {device!r}{nearest(device, DEVICES)}", code="GC-DEVICE")
    if size is not None:
        _check_numbers(0, size, 0, 1)
    kind = None if dtype is None else row_of(dtype).kind
    row = COLLECTIVES.get(collective) or collective_row(collective)
    if row.reduces and op is not None and kind not in (None, *op_of(op).kinds):
        return ()
    return tuple(name for (row, name), entry in registry().items()
                 if row == collective and (size is None or entry.unfit(size, None) is None))


def names_of(text: str) -> list[str]:
    """Return the names of a comma-separated list; commas within the parentheses of a name do not separate.

    >>> names_of("ring, hierarchical(ring,torus(4x2))")
    ['ring', 'hierarchical(ring,torus(4x2))']
    """
    names, depth = [""], 0
    for sign in "".join(text.split()):
        depth += (sign == "(") - (sign == ")")
        names = [*names, ""] if sign == "," and depth <= 0 else [*names[:-1], names[-1] + sign]
    return names


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm; raise ArgumentError with code GC-ALGO for an unknown name or bad parameters.

    >>> find("all_reduce", "torus(4x2)").name
    'torus(4x2)'
    """
    match = re.fullmatch(r"(\w+)\((.*)\)", name) if isinstance(name, str) else None
    base, parameters = match.groups() if match else (name, None)
    try:
        entry = registry()[collective, base]
    except (KeyError, TypeError):
        collective_row(collective)  # raises for an unknown collective
        raise ArgumentError(f"{collective} has no algorithm {name!r}"
                            f"{nearest(base, algorithms(collective))}", code="GC-ALGO") from None
    if parameters is None:
        return entry
    if entry.bind is None:
        raise ArgumentError(f"{collective}: {base} takes no parameters, {name!r} has some", code="GC-ALGO")
    return entry.bind(entry, parameters)._replace(name=name)


def is_native(algorithm: Any) -> bool:
    """Return whether a call asks for NCCL's or MPI's own collective, with or without an algorithm of NCCL.

    >>> is_native("native"), is_native("native(ring)"), is_native("ring")
    (True, True, False)
    """
    return isinstance(algorithm, str) and algorithm.partition("(")[0] == "native"


def segments(collective: str, algorithm: str, nbytes: int, size: int) -> int:
    """Return the number of segments of a call on `nbytes`: 1 for an algorithm without pipelining."""
    entry = None if is_native(algorithm) else find(collective, algorithm)
    if entry is None or "segments" not in entry.options:
        return 1
    return max(1, min(MOST_SEGMENTS, -(-nbytes // _segment(entry.traits, size))))


def _segment(traits: Traits, size: int) -> int:
    """Return the bytes for each segment of a call."""
    return traits.segment * (size if traits.by_block else 1)


def schedule(collective: str, algorithm: str, *, rank: int, size: int, root: int = 0, segments: int = 1,
             nodes: Iterable[int] | None = None) -> Schedule:
    """Return the schedule of rank `rank` of `size` for `collective` by `algorithm`.

    Parameters
    ----------
    collective : str
        The name of a collective, such as "all_reduce".
    algorithm : str
        A name from `algorithms`.
    rank : int
        The rank, 0 to `size` - 1.
    size : int
        The number of ranks.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).
    nodes : iterable of int or None, optional
        The node of each rank, for algorithms that depend on nodes.

    Returns
    -------
    Schedule
        Iterating yields the rounds: tuples of `Send`, `Recv`, `RecvReduce`, `Copy` and `Reduce`.

    Raises
    ------
    ArgumentError
        An unknown collective or algorithm, or a number of ranks that the algorithm does not support (GC-COLLECTIVE,
        GC-ALGO).

    See Also
    --------
    draw : A drawing of all ranks.

    Examples
    --------
    >>> for steps in schedule("all_gather", "ring", rank=0, size=2):
    ...     for step in steps: print(step)
    Copy(src=Slice(buffer='input', first=0, count=1), dst=Slice(buffer='output', first=0, count=1))
    Send(src=Slice(buffer='input', first=0, count=1), peer=1)
    Recv(dst=Slice(buffer='output', first=1, count=1), peer=1)
    """
    entry = find(collective, algorithm)
    _check_numbers(rank, size, root, segments)
    return _make(entry, int(rank), size, root, segments, nodes)


def schedules(collective: str, algorithm: str, *, size: int, **options: Any) -> list[Schedule]:
    """Return the `schedule` of every rank."""
    return [schedule(collective, algorithm, rank=rank, size=size, **options) for rank in range(max(1, size))]


def all_ranks(collective: str, algorithm: str, *, size: int, segments: int = 1) -> Schedule | None:
    """Return a single schedule for all ranks, or None where the ranks need separate generators (`vectorised` is false).

    Numbers in the steps, `Slice.count` included, may be arrays with an entry for each rank. An array entry of 0 in
    `Slice.count` means: this rank has no such step. A plain 0 is a real step with an empty message, as in a barrier.

    >>> next(iter(all_ranks("all_gather", "ring", size=3)))[1].peer
    array([1, 2, 0])
    """
    entry = find(collective, algorithm)
    _check_numbers(0, size, 0, segments)
    group, count = node_shape(size, None)
    if size == 1 or not evaluate(entry.vectorised, P=size, G=group, M=count):
        return None
    return _make(entry, numpy.arange(size), size, 0, segments, None)


def _make(entry: Algorithm, rank: Any, size: int, root: int, segments: int, nodes: Iterable[int] | None) -> Schedule:
    nodes = None if nodes is None else tuple(nodes)
    if nodes is not None and len(nodes) != size:
        raise ArgumentError(f"nodes names {len(nodes)} ranks, size is {size}", code="GC-ALGO")
    reason = entry.unfit(size, nodes)
    if reason is not None:
        raise ArgumentError(f"{entry.collective}: {entry.name} does not support {size} ranks: {reason}", code="GC-ALGO")
    chunks = entry.count_chunks(size, segments, nodes)
    if size == 1:
        return Schedule(entry.collective, entry.name, rank, size, chunks, lambda: _alone(entry.collective, chunks))
    if entry.own:
        _USED.add((entry.collective, entry.name.partition("(")[0]))
        claim = entry.claim(size, root if COLLECTIVES[entry.collective].rooted else 0, segments, nodes)
        return Schedule(entry.collective, entry.name, rank, size, chunks, lambda: as_proved(claim, rank),
                        proved(claim)[-1])
    return Schedule(entry.collective, entry.name, rank, size, chunks,
                    lambda: entry.make(rank, size, **entry.given(root, segments, nodes)))


def _alone(collective: str, chunks: int) -> Rounds:
    """Yield the schedule of a lone rank: output is a copy of input. No generator is called with a single rank."""
    if COLLECTIVES[collective].output.where != "nowhere":
        yield (Copy(Slice("input", 0, chunks), Slice("output", 0, chunks)),)


def _check_numbers(rank: int, size: int, root: int, segments: int) -> None:
    for name, value in (("rank", rank), ("size", size), ("root", root), ("segments", segments)):
        if isinstance(value, bool) or not isinstance(value, numbers_abc.Integral):
            raise ArgumentError(f"{name} {value!r} is not a whole number", code="GC-ALGO")
    if size < 1 or segments < 1:
        raise ArgumentError(f"size {size} and segments {segments} must be at least 1", code="GC-ALGO")
    for name, value in (("rank", rank), ("root", root)):
        if not 0 <= value < size:
            raise ArgumentError(f"{name} {value} is not in 0..{size - 1}", code="GC-ALGO")
