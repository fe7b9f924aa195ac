"""Hierarchical: first inside every node, then across nodes; a link between nodes carries each byte only once.

Any two algorithms can be combined: ``hierarchical(ring,tree)`` is a ring inside a node and a tree across nodes. In an
all-reduce, the ranks of a node first reduce-scatter. Then rank k of every node all-reduces share k with rank k of the
other nodes. Finally, the ranks of a node all-gather. The `segments` of the data start one round apart, so that the
links between nodes are busy while the nodes reduce.

    node 0   0 ◄─► 1      inside: shares        0 and 2, 1 and 3 across: all links at once
             │     │
    node 1   2 ◄─► 3      inside: all shares    2 nodes of 2 ranks: N bytes each way between them

If the inner algorithm has no reduce-scatter and all-gather (a tree), or if the nodes have different sizes, an
all-reduce goes through the first rank of each node. The other collectives divide nodes of different sizes into groups,
whose size is the greatest common divisor of the node sizes. Without `nodes`, groups replace nodes; their size is the
largest divisor of P not above the square root of P.

Cost: the inner cost, plus the outer cost for a share of the data. The byte counts are upper bounds,
because the inner and the outer maximum may belong to different ranks, and segments share rounds. With the defaults an
all-reduce takes 2 (1 + log2 M) rounds and 2 (P - 1) N / P bytes. Good if links between nodes are slower than links
inside a node. Source: see the two algorithms named.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from gpucoll.algorithms import (
    Algorithm,
    Cost,
    Make,
    Nodes,
    Traits,
    algorithm,
    evaluate,
    find,
    library_names,
    names_of,
    own_names,
    phases,
)
from gpucoll.core.schedule import Buffer, Copy, Rounds, Slice, following, moved, spread, within
from gpucoll.core.topology import Grid, grid, group, members_of, node_shape
from gpucoll.errors import ArgumentError

MoveSlice: TypeAlias = Callable[[Slice], Slice]

INNER_PHASES = ("reduce_scatter", "all_gather")
WORK: dict[str, Buffer] = {"input": "scratch", "output": "scratch"}
# By the name of an all-reduce: the two halves, or the reduction to a rank and the broadcast back.
HALF_PAIRS = {"halving_doubling": ("recursive_halving", "recursive_doubling"), "two_shot": ("direct", "direct"),
              **{name: (name, name) for name in ("circulant", "direct", "ring")}}
ROOTED_PAIRS = {"reduce_broadcast": ("binomial", "binomial"), "star": ("linear", "linear"),
                **{name: (name, name) for name in ("binomial", "chain", "double_tree", "linear", "tree")}}
# Reduction and broadcast in place of the halves for nodes of different sizes: long arrays, any number of ranks.
ANY_SIZES = ("reduce_scatter_gather", "scatter_all_gather")

# 4 MiB of the call per segment: messages of a segment cross nodes while the next segment is reduced.
TRAITS = Traits(1 << 22, layout="groups")
SENT = "(P - 1) * N / P"
HOPS = "lg(2 * G - 1) + lg(2 * M - 1)"
FOLLOWING = "(P > 1) * (S - 1)"  # rounds added by the segments after the first
ONCE: dict[str, Any] = {"chunks": "P", "vectorised": "1", "rounds": HOPS, "path": SENT, "sent": SENT, "traits": TRAITS}
EXCHANGED = "(G - 1) * N / G + (M - 1) * N / M"


# Combine the costs of both parts: the outer algorithm runs on a share of the data where the inner has two halves.
def _bind(entry: Algorithm, text: str) -> Algorithm:
    names = names_of(text)
    if len(names) != 2:
        raise ArgumentError(f"hierarchical({text}): give two names, for inside a node and across nodes, as in "
                            "hierarchical(ring,tree)", code="GC-ALGO")
    inside, across = _inside(entry.collective, names[0]), _across(entry.collective, names[1])

    def unfit(size: int, nodes: Nodes) -> str | None:
        group, count = node_shape(size, nodes)
        return next(filter(None, [*(one.unfit(group, None) for one in inside), across.unfit(count, None)]), None)

    shares = entry.collective in INNER_PHASES or names[0] in HALF_PAIRS
    parts = [*((one, "G", "N") for one in inside), (across, "M", "(N / G)" if shares else "N")]
    costs = [[_named(formula, ranks, nbytes) for formula in part.cost] for part, ranks, nbytes in parts]
    whole = entry.collective == "all_reduce"
    if whole:
        costs.append([FOLLOWING, *["0"] * (len(Cost._fields) - 1)])
    return entry._replace(
        make=functools.partial(entry.make, inner=names[0], outer=names[1]), unfit=unfit,
        chunks=f"G * ({_named(across.chunks, 'M', 'N')}) * S" if whole else "P", vectorised=" and ".join(
            [*(_named(one.vectorised, "G", "N") for one in inside), _named(across.vectorised, "M", "N")]),
        cost=Cost(*(" + ".join(f"({one})" for one in column) for column in zip(*costs, strict=True))))


def _variants(collective: str, size: int) -> Iterator[str]:
    """Yield every algorithm inside nodes with a fixed outer one, then every algorithm across nodes with a fixed one."""
    across = [*phases(collective)] if collective in INNER_PHASES else [
        name for name in library_names(collective) if name != "hierarchical"]
    inside = [*HALF_PAIRS, *ROOTED_PAIRS] if collective == "all_reduce" else across
    some = "direct" if collective == "all_to_all" else "circulant"
    yield from (f"{name},{some}" for name in inside)
    yield from (f"{some},{name}" for name in across if name != some)


def _inside(collective: str, name: str) -> list[Algorithm]:
    if collective == "all_reduce":
        kinds, table = (INNER_PHASES, HALF_PAIRS) if name in HALF_PAIRS else (("reduce", "broadcast"), ROOTED_PAIRS)
        _check(name, {**HALF_PAIRS, **ROOTED_PAIRS})
        return [find(kind, one) for kind, one in zip(kinds, table[name], strict=True)]
    return [_across(collective, name)]


def _across(collective: str, name: str) -> Algorithm:
    if name.startswith("hierarchical") or name in own_names(collective):
        raise ArgumentError("hierarchical: hierarchical and users' algorithms cannot be parts", code="GC-ALGO")
    if collective in INNER_PHASES:
        _check(name, phases(collective))
    return find(collective, name)


def _check(name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ArgumentError(f"hierarchical: {name!r} cannot be a part here; possible are {', '.join(sorted(known))}",
                            code="GC-ALGO")


def _named(formula: str, ranks: str, nbytes: str) -> str:
    """Return `formula` with other names for ranks and bytes, and a single segment."""
    return re.sub(r"\bN\b", nbytes, re.sub(r"\bP\b", ranks, re.sub(r"\bS\b", "1", formula)))


@algorithm("all_reduce", chunks="G * M * S", vectorised="1", bind=_bind, variants=_variants,
           rounds=f"2 * (min(1, G - 1) + lg(2 * M - 1)) + {FOLLOWING}",
           path="2 * (min(1, G - 1) * N / G + (M - 1) * N / P)", sent=f"2 * {SENT}", reduced=SENT,
           gaps="2 * max(0, G - 2)", traits=TRAITS)
def hierarchical_all_reduce(rank: int, size: int, nodes: Nodes = None, segments: int = 1, inner: str = "direct",
                            outer: str = "circulant") -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [steps[0].peer for steps in hierarchical_all_reduce(rank=0, size=4, nodes=(0, 0, 1, 1))]
    [1, 2, 2, 1]
    """
    even = nodes is None or len(set(map(len, members_of(nodes)))) == 1
    return (_by_shares if even and inner in HALF_PAIRS else _by_first_ranks)(rank, size, nodes, segments, inner, outer)


def _by_shares(rank: int, size: int, nodes: Nodes, segments: int, inner: str, outer: str) -> Rounds:
    place, across = grid(rank, size, nodes), find("all_reduce", outer)
    begun = across.count_chunks(place.nodes, 1)
    ranks = [(one, place.each) for one in _inside("all_reduce", inner)] + [(across, place.nodes)]
    # Messages match in order: between ranks with different numbers of rounds, segments would be mixed up.
    apart = segments if all(evaluate(one.vectorised, P=count) for one, count in ranks) else 1
    share = begun * segments // apart
    scatter, gather = (phases(kind)[one] for kind, one in zip(INNER_PHASES, HALF_PAIRS[inner], strict=True))

    def segment(first: int) -> Rounds:
        yield from _in_node(scatter, place, within({}, first, share))
        yield from _across_nodes(across.make, place, spread({"input": "output"} if place.each > 1 else {}, begun, share,
                                                            first + place.local * share, apart * place.each * share))
        yield from _in_node(gather, place, within({}, first, share))

    return following(*(segment(number * place.each * share) for number in range(apart)))


def _by_first_ranks(rank: int, size: int, nodes: Nodes, segments: int, inner: str, outer: str) -> Rounds:
    """Yield an all-reduce by way of the first rank of each node: reduce there, all-reduce across nodes, broadcast."""
    ranks = members_of(nodes or [one // group(size) for one in range(size)])
    node, mine = next((number, one) for number, one in enumerate(ranks) if rank in one)
    across, (up, down) = find("all_reduce", outer), ROOTED_PAIRS.get(inner, ANY_SIZES)
    share = across.count_chunks(len(ranks), 1)
    chunks = share * max(map(len, ranks)) * segments
    summed: dict[str, Buffer] = {"input": "output"} if len(mine) > 1 else {}
    yield from _rooted(find("reduce", up), rank, mine, chunks, {})
    if rank == mine[0] and len(ranks) > 1:
        yield from moved(across.make(node, len(ranks)), spread(summed, share, chunks), lambda peer: ranks[peer][0])
    yield from _rooted(find("broadcast", down), rank, mine, chunks, summed)


def _rooted(way: Algorithm, rank: int, ranks: tuple[int, ...], onto: int, renamed: dict[str, Buffer]) -> Rounds:
    """Yield a rooted collective among `ranks`; the first of `ranks` is the root."""
    if len(ranks) > 1:
        place = spread(renamed, way.count_chunks(len(ranks), 1), onto)
        yield from moved(way.make(ranks.index(rank), len(ranks)), place, lambda peer: ranks[peer])


def _in_node(make: Make, place: Grid, move: MoveSlice) -> Rounds:
    if place.each > 1:
        yield from moved(make(place.local, place.each), move, lambda local: place.rank_of(place.node, local))


def _across_nodes(make: Make, place: Grid, move: MoveSlice) -> Rounds:
    """Yield the rounds of `make` among the ranks with the same number in all groups."""
    if place.nodes > 1:
        yield from moved(make(place.node, place.nodes), move, lambda node: place.rank_of(node, place.local))


@algorithm("reduce_scatter", **ONCE, bind=_bind, variants=_variants, reduced=SENT)
def hierarchical_reduce_scatter(rank: int, size: int, nodes: Nodes = None, inner: str = "circulant",
                                outer: str = "circulant") -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank; scratch has the blocks by number, then by group."""
    place = grid(rank, size, nodes)
    first = place.local * place.nodes
    yield tuple(Copy(Slice("input", rank), Slice("scratch", index)) for index, rank in enumerate(_by_number(place)))
    yield from _in_node(phases("reduce_scatter")[inner], place, within(WORK, 0, place.nodes))
    yield from _across_nodes(phases("reduce_scatter")[outer], place, within(WORK, first))
    yield (Copy(Slice("scratch", first + place.node), Slice("output", 0)),)


@algorithm("all_gather", **ONCE, bind=_bind, variants=_variants)
def hierarchical_all_gather(rank: int, size: int, nodes: Nodes = None, inner: str = "circulant",
                            outer: str = "circulant") -> Rounds:
    """Leave the inputs of all ranks, in rank order, on every rank; scratch has the inputs by number, then by group."""
    place = grid(rank, size, nodes)
    first = place.local * place.nodes
    yield (Copy(Slice("input", 0), Slice("scratch", first + place.node)),)
    yield from _across_nodes(phases("all_gather")[outer], place, within(WORK, first))
    yield from _in_node(phases("all_gather")[inner], place, within(WORK, 0, place.nodes))
    yield tuple(Copy(Slice("scratch", index), Slice("output", rank)) for index, rank in enumerate(_by_number(place)))


def _by_number(place: Grid) -> list[int]:
    """Return all ranks: number 0 of all groups, number 1 of all groups, and so on."""
    return [place.rank_of(node, local) for local in range(place.each) for node in range(place.nodes)]


@algorithm("all_to_all", chunks="P", vectorised="1", bind=_bind, variants=_variants, sent=EXCHANGED, traits=TRAITS,
           rounds="min(1, G - 1) + min(1, M - 1)", path="min(1, G - 1) * N / G + min(1, M - 1) * N / M",
           gaps="max(0, G - 2) + max(0, M - 2)")
def hierarchical_all_to_all(rank: int, size: int, nodes: Nodes = None, inner: str = "direct",
                            outer: str = "direct") -> Rounds:
    """Leave block `rank` of every rank's input, in rank order, on every rank.

    A rank first gives number k of its own group the blocks for number k of all groups. Number k then sends each group a
    single message with all blocks for this group. Scratch has four copies of the blocks: before and after either part.
    """
    place = grid(rank, size, nodes)
    yield tuple(Copy(Slice("input", peer), Slice("scratch", index)) for index, peer in enumerate(_by_number(place)))
    yield from _in_node(find("all_to_all", inner).make, place, _room(size, 0, 1, place.nodes))
    if place.each > 1 and place.nodes > 1:
        yield tuple(Copy(Slice("scratch", size + local * place.nodes + node), Slice("scratch", 2 * size + index))
                    for index, (node, local) in enumerate(_by_group(place)))
    before, after = (2 if place.each > 1 else 0), (3 if place.nodes > 1 else 1)
    yield from _across_nodes(find("all_to_all", outer).make, place, _room(size, before, after, place.each))
    yield tuple(Copy(Slice("scratch", after * size + index), Slice("output", place.rank_of(node, local)))
                for index, (node, local) in enumerate(_by_group(place)))


def _by_group(place: Grid) -> list[tuple[int, int]]:
    """Return the groups and numbers of all ranks, group after group."""
    return [(node, local) for node in range(place.nodes) for local in range(place.each)]


def _room(size: int, before: int, after: int, scale: int) -> MoveSlice:
    """Return a place for `moved`: a block of an inner algorithm becomes `scale` blocks of a copy in scratch.

    `before` and `after` number the copies for input and output; the scratch of the inner algorithm lies beyond copy 3.
    """
    copies = {"input": before, "output": after, "scratch": 4}
    return lambda part: Slice("scratch", copies[part.buffer] * size + part.first * scale, part.count * scale)
