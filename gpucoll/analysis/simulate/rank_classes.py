"""Classes of ranks with equal times, so that one rank of each class is enough to simulate very many ranks.

The kinds of `rank_kinds` are the first classes: ranks of one class have the same rounds, and their peers are given by a
row, with ranks of one or of several classes. On one switch of equal links, the end of a rank's round depends only on
the beginnings at both ends of its messages, and on the loads of the ports at both ends. If, for each round of a class,
all combinations of classes among the peers give the same end, then by induction over the waves all ranks of the class
end each round at the same time. If two combinations give different ends, waves or loads, the class is divided by the
classes of the peers, and the simulation starts again.

First, both ends of every message of every rank are compared: each send needs a receive at the peer, at the same
position among the messages of the pair, with the same chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from gpucoll.analysis.simulate.clock import total
from gpucoll.analysis.simulate.rank_kinds import Kind, PeerMessage, Unlike
from gpucoll.analysis.simulate.topologies import Level
from gpucoll.analysis.simulate.waves import Array

MOST_ROWS, MOST_REPLAYS = 1 << 20, 24  # rows of all replays
ROUNDED = 1 - 1e-12  # times that differ by less are equal: the same terms, added in another order


class Habit(NamedTuple):
    """The messages of a rank with a peer, in order: rounds and chunks of the sends, and of the receives."""

    sends: tuple[Array, Array]
    receives: tuple[Array, Array]


class RankClasses:
    """The ranks of all kinds in classes; `colours` has the class of each rank.

    Class c has the rounds of ``kinds[c]``. ``mine[c][row]`` is the habit towards a row of peers, as a number, and
    ``theirs[c][row]`` has the habit of each peer towards the rank.
    """

    def __init__(self, found: Sequence[Kind], size: int) -> None:
        self.kinds = [*found]
        self.colours, self._places = numpy.empty(size, numpy.int64), numpy.empty(size, numpy.int64)
        for number, kind in enumerate(found):
            self.colours[kind.ranks], self._places[kind.ranks] = number, numpy.arange(len(kind.ranks))
        numbers: dict[tuple[PeerMessage, ...], int] = {}
        self.mine = [[numbers.setdefault(habit, len(numbers)) for habit in _habits(kind)] for kind in found]
        self.habits = [Habit(*(_columns(one for one in habit if one.sends == sends) for sends in (True, False)))
                       for habit in numbers]
        self.theirs = [self._answers(kind) for kind in found]
        self._compare_ends()
        self.mixtures = [[self._mixture(number, row) for row in range(len(mine))]
                         for number, mine in enumerate(self.mine)]

    def _answers(self, kind: Kind) -> Array:
        """Return the habit of each peer towards the rank; raise Unlike for a peer without messages with the rank."""
        answers = numpy.full(kind.peers.shape, -1)
        for row, answer in zip(kind.peers, answers, strict=True):
            left = numpy.arange(len(row))
            while len(left):
                number = self.colours[row[left[0]]]
                back = self.kinds[number].peers
                matching = numpy.flatnonzero(back[:, self._places[row[left[0]]]] == kind.ranks[left[0]])
                if not len(matching):
                    raise Unlike
                inside = left[self.colours[row[left]] == number]
                inside = inside[back[matching[0], self._places[row[inside]]] == kind.ranks[inside]]
                answer[inside] = self.mine[number][matching[0]]
                left = left[answer[left] < 0]
        return answers

    def _compare_ends(self) -> None:
        """Raise Unlike unless the chunks of each pair's sends equal the chunks of the receives."""
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            for habit, row in zip(mine, theirs, strict=True):
                for other in _distinct(row):
                    if not numpy.array_equal(self.habits[habit].sends[1], self.habits[other].receives[1]):
                        raise Unlike

    def _keys(self, number: int, row: int) -> Array:
        return self.colours[self.kinds[number].peers[row]] * len(self.habits) + self.theirs[number][row]

    def _mixture(self, number: int, row: int) -> list[tuple[int, int]]:
        """Return the pairs of class and habit that occur in a row of peers."""
        return [divmod(int(key), len(self.habits)) for key in _distinct(self._keys(number, row))]

    def cut(self, wanted: set[tuple[int, int]]) -> None:
        """Cut classes by their peers in a row: `wanted` has pairs of class and row; raise Unlike where no cut helps.

        Of several rows of a class only the first is heeded.
        """
        changed = {number: row for number, row in sorted(wanted, reverse=True) if len(self.mixtures[number][row]) > 1}
        if not changed:
            raise Unlike
        for number, row in changed.items():
            keys, kind, theirs = self._keys(number, row), self.kinds[number], self.theirs[number]
            order = numpy.argsort(keys, kind="stable")
            parts = numpy.split(order, numpy.flatnonzero(numpy.diff(keys[order])) + 1)
            for at, part in zip(itertools.chain((number,), itertools.count(len(self.kinds))), parts, strict=False):
                if at == len(self.kinds):
                    self.kinds.append(kind)
                    self.theirs.append(theirs)
                    self.mine.append(self.mine[number])
                    self.mixtures.append([])
                self.kinds[at] = kind._replace(ranks=kind.ranks[part], peers=kind.peers[:, part])
                self.theirs[at] = theirs[:, part]
                self.colours[self.kinds[at].ranks] = at
                self.mixtures[at] = [[] for _ in self.mine[at]]
        for number, mixture in enumerate(self.mixtures):
            self.mixtures[number] = [self._mixture(number, row) if not pairs or any(one in changed for one, _ in pairs)
                                     else pairs for row, pairs in enumerate(mixture)]


def _habits(kind: Kind) -> Iterator[tuple[PeerMessage, ...]]:
    for row in range(len(kind.peers)):
        yield tuple(one._replace(peer=0) for one in kind.messages if one.peer == row)


def _columns(messages: Iterator[PeerMessage]) -> tuple[Array, Array]:
    rounds, chunks = numpy.array([(one.round, one.chunks) for one in messages], numpy.int64).reshape(-1, 2).T
    return rounds, chunks


def _distinct(values: Array) -> Array:
    """Return the distinct whole numbers in `values`; quick for small numbers."""
    small = len(values) and int(values.max()) < 4 * len(values)
    return numpy.flatnonzero(numpy.bincount(values)) if small else numpy.unique(values)


class Rows(NamedTuple):
    """The messages of one rank of each class, as that rank sees them: both ends of a message have rows.

    A node is a round of a class; `node` is the own round, `other` the peer's. Rows with one `message` are the
    combinations that occur. ``whose[message]`` is the class, and the row of peers.
    """

    node: Array
    other: Array
    sends: Array
    chunks: Array
    message: Array
    whose: list[tuple[int, int]]


def rows_of(classes: RankClasses, starts: Array) -> Rows:
    """Return the rows, in order of nodes and messages; class c has the nodes from ``starts[c]``."""
    own: list[Array] = []
    far: list[Array] = []
    counts: list[Array] = []
    bases: list[tuple[int, int, bool, int]] = []  # the first nodes of both classes, the direction, the first message
    whose: list[tuple[int, int]] = []
    for number, (mine, mixture) in enumerate(zip(classes.mine, classes.mixtures, strict=True)):
        for row, (habit, pairs) in enumerate(zip(mine, mixture, strict=True)):
            for sends in (True, False):
                rounds, chunks = classes.habits[habit][not sends]
                for other, theirs in pairs if len(rounds) else ():
                    own.append(rounds)
                    far.append(classes.habits[theirs][sends][0])
                    counts.append(chunks)
                    bases.append((starts[number], starts[other], sends, len(whose)))
                whose += [(number, row)] * len(rounds)
    lengths = numpy.array([*map(len, own)])
    node, other_node, direction, message = numpy.repeat(numpy.array(bases), lengths, axis=0).T
    message = message + numpy.arange(len(message)) - numpy.repeat(numpy.cumsum(lengths) - lengths, lengths)
    node = node + numpy.concatenate(own)
    order = numpy.lexsort((message, node))
    return Rows(node[order], (other_node + numpy.concatenate(far))[order], direction[order] == 1,
                numpy.concatenate(counts)[order], message[order], whose)


class Mixed(Exception):
    """Combinations of peers with unlike results: `places` has pairs of class and row of peers, to be cut."""

    def __init__(self, rows: Rows, messages: Array) -> None:
        super().__init__("a class has ranks with unlike times")
        self.places = {rows.whose[message] for message in messages.tolist()}


class ClassReplay:
    """One replay of the rounds of all classes: the order of the nodes, the wave and the costs of each row."""

    def __init__(self, classes: RankClasses, level: Level) -> None:
        lengths = [len(kind.reduced) for kind in classes.kinds]
        self.starts = numpy.cumsum([0, *lengths])
        self.gamma = level.gamma * numpy.array([*itertools.chain(*(kind.reduced for kind in classes.kinds))])
        self.rows = rows_of(classes, self.starts)
        self.of = numpy.repeat(numpy.arange(len(lengths)), lengths)
        self.first = numpy.searchsorted(self.rows.node, numpy.arange(self.starts[-1] + 1))
        self.heads = _first_rows(self.rows.message)

    def take_order(self, level: Level) -> None:
        """Find the order of the nodes and the costs of the rows; raise Mixed for a class with unlike ranks."""
        self.order = [*self._order()]
        self.alpha, self.beta = self._fares(level)
        self._same(self.alpha)
        self._same(self.beta)

    def _same(self, values: Array, wanted: Array | None = None) -> None:
        """Raise Mixed where the combinations of a message have unlike values, or not the value `wanted`."""
        low, high = numpy.minimum.reduceat(values, self.heads), numpy.maximum.reduceat(values, self.heads)
        unlike = low != high if wanted is None else high != wanted
        if unlike.any():
            raise Mixed(self.rows, self.rows.message[self.heads[unlike & (low == low[unlike].min())]])

    def _order(self) -> Iterator[Array]:
        """Yield the nodes that can end, step by step; note the waves, as `verify.symbolic.replay` counts.

        `waves` has the first and the last possible wave of each row: ranks of a class may have unlike waves.
        """
        rows, now, wave = self.rows, self.starts[:-1].copy(), numpy.zeros((2, len(self.starts) - 1), numpy.int64)
        self.waves = numpy.zeros((2, len(rows.node)), numpy.int64)
        begun = numpy.zeros(len(self.of), bool)
        active = numpy.flatnonzero(now < self.starts[1:])
        while len(active):
            begun[now[active]] = True
            seen, owner = self._rows(now[active])
            met = seen[begun[rows.other[seen]] & (self.waves[0, seen] == 0)]
            self.waves[:, met] = numpy.maximum(wave[:, self.of[rows.node[met]]], wave[:, self.of[rows.other[met]]]) + 1
            is_open = self.waves[0, seen] == 0
            waits = numpy.bincount(owner, is_open, len(active)) > 0
            if waits.all():
                raise Mixed(rows, numpy.unique(rows.message[seen[is_open]]))
            heads = _first_rows(rows.message[seen])
            if len(heads):
                low = numpy.minimum.reduceat(self.waves[0, seen], heads)
                high = numpy.maximum.reduceat(self.waves[1, seen], heads)
                for row, latest in zip(wave, (low, high), strict=True):
                    done = ~waits[owner[heads]]
                    numpy.maximum.at(row, active[owner[heads][done]], latest[done])
            nodes = now[active[~waits]]
            yield nodes
            now[active[~waits]] += 1
            active = active[now[active] < self.starts[active + 1]]

    def _rows(self, nodes: Array) -> tuple[Array, Array]:
        """Return the rows of `nodes`, and for each row the index of the node."""
        begins, lengths = self.first[nodes], self.first[nodes + 1] - self.first[nodes]
        owner = numpy.repeat(numpy.arange(len(nodes)), lengths)
        return numpy.arange(len(owner)) - numpy.repeat(numpy.cumsum(lengths) - lengths, lengths) + begins[owner], owner

    def _fares(self, level: Level) -> tuple[Array, Array]:
        """Return seconds, and seconds per byte of a chunk, of each row; see `Routes.fares`.

        A port carries the messages of a rank in one direction and wave: all messages belong to one node. Raises Mixed
        for a node with several messages in a direction, and unlike waves of one of the messages.
        """
        rows, heads = self.rows, self.heads
        side, far = rows.node * 2 + rows.sends, rows.other * 2 + ~rows.sends
        several = numpy.bincount(side[heads], minlength=2 * len(self.of)) > 1
        shared = several[side] | several[far]
        for limit in self.waves:
            self._same(numpy.where(shared, limit, 0))
        self._same(numpy.where(shared, self.waves[1] - self.waves[0], 0), numpy.zeros(len(heads)))
        most = int(self.waves.max(initial=0)) + 1
        port = side * most + numpy.where(several[side], self.waves[1], 0)
        ports, number, count = numpy.unique(port[heads], return_inverse=True, return_counts=True)
        load = numpy.bincount(number, rows.chunks[heads])
        near = numpy.searchsorted(ports, port)
        opposite = numpy.searchsorted(ports, far * most + numpy.where(several[far], self.waves[1], 0))
        alpha = level.alpha + level.gap * (numpy.maximum(count[near], count[opposite]) - 1)
        return alpha, level.beta * numpy.maximum(load[near], load[opposite])

    def parts(self, chunk: float) -> list[float]:
        """Return latency, bandwidth and reduction of the last rank to end; raise Mixed for unlike ends in a class."""
        began, ended = numpy.zeros((3, len(self.of))), numpy.zeros((3, len(self.of)))
        rows = self.rows
        for nodes in self.order:
            seen, owner = self._rows(nodes)
            here, there, sends = rows.node[seen], rows.other[seen], rows.sends[seen]
            src, dst, moments = numpy.where(sends, here, there), numpy.where(sends, there, here), total(began)
            # Nothing is buffered: a message starts with the later of its two ranks.
            parts = began[:, numpy.where(moments[src] >= moments[dst], src, dst)]
            parts[0] += self.alpha[seen]
            parts[1] += self.beta[seen] * chunk
            ended[:, nodes] = began[:, nodes]
            if len(seen):
                ended[:, here[_first_rows(owner)]] = parts[:, self._last(seen, owner, total(parts))]
            ended[2, nodes] += self.gamma[nodes] * chunk
            following = nodes[nodes + 1 < self.starts[self.of[nodes] + 1]]
            began[:, following + 1] = ended[:, following]
        latest = total(ended).argmax()
        return ended[:, latest].tolist()

    def _last(self, seen: Array, owner: Array, ends: Array) -> Array:
        """Return the place of the last row to end, for each node; raise Mixed where combinations make a difference."""
        heads = _first_rows(self.rows.message[seen])
        low, high, nodes = numpy.minimum.reduceat(ends, heads), numpy.maximum.reduceat(ends, heads), owner[heads]
        least, most = numpy.full(owner[-1] + 1, -1.0), numpy.full(owner[-1] + 1, -1.0)
        numpy.maximum.at(least, nodes, low)
        numpy.maximum.at(most, nodes, high)
        unlike = (least < most * ROUNDED)[nodes] & (low < high * ROUNDED) & (high == most[nodes])
        if unlike.any():
            raise Mixed(self.rows, self.rows.message[seen][heads][unlike])
        latest = numpy.flatnonzero(ends == most[owner])
        return latest[_first_rows(owner[latest])]


def _first_rows(values: Array) -> Array:
    """Return the first index of each run of equal values.

    >>> _first_rows(numpy.array([4, 4, 7])).tolist()
    [0, 2]
    """
    return numpy.flatnonzero(numpy.diff(values, prepend=-1))


def simulate_classes(found: Sequence[Kind], size: int, level: Level, chunks: Sequence[float]) -> list[list[float]]:
    """Return latency, bandwidth and reduction in seconds for each length of a chunk in bytes.

    Ranks are joined by one switch with the links of `level`. Raises Unlike where ranks need too many classes.
    """
    classes, left = RankClasses(found, size), MOST_ROWS
    for _ in range(MOST_REPLAYS):
        replay = ClassReplay(classes, level)
        left -= len(replay.rows.node)
        if left < 0:
            break
        try:
            replay.take_order(level)
            return [replay.parts(chunk) for chunk in chunks]
        except Mixed as mixed:
            classes.cut(mixed.places)
    raise Unlike
