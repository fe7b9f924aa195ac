"""The calls of virtual ranks, matched on every communicator; messages between two ranks, matched by sender and tag."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpucoll.internal import Mailbox, Operation, Signature, code_of
from gpucoll.precheck.records import OBJECT_BYTE
from gpucoll.precheck.turns import Turns, VirtualRank

CLOSE = Signature("close").encode()
REFUSED = "refused"


class Arrival(NamedTuple):
    """A rank's call: the encoded signature, the line, and what the rank gives to the call.

    `is_end` says that the rank's program has ended here.
    """

    signature: str
    place: str
    given: Any
    is_end: bool


class MatchedCall:
    """The calls number k of all ranks of a communicator: complete once all ranks have made the same call."""

    def __init__(self) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.is_complete: bool = False
        self.differs: bool = False
        self.result: Any = None


class VirtualGroup:
    """The ranks of one communicator: `members` are their numbers in the world, in rank order."""

    def __init__(self, turns: Turns, members: Sequence[int], groups: list[VirtualGroup]) -> None:
        self.turns: Turns = turns
        self.members: tuple[int, ...] = tuple(members)
        self.groups: list[VirtualGroup] = groups
        self.size: int = len(self.members)
        self.calls: dict[int, MatchedCall] = {}  # the calls under way, by number
        self.agreed: MatchedCall | None = None  # the last complete call
        self.mail: VirtualMail = VirtualMail(self)
        self.probes: dict[int, tuple[int | None, int | None]] = {}  # by rank: source and tag of a message looked for
        self._counts = [0] * self.size
        groups.append(self)

    def rank_of(self, number: int) -> VirtualRank:
        return self.turns.ranks[self.members[number]]

    def parts(self, colors: Sequence[int | None], keys: Sequence[int]) -> dict[int, VirtualGroup]:
        """Return a new group for each color of the ranks, in the order of the ranks' keys."""
        ordered = sorted((color, key, rank) for rank, (color, key) in enumerate(zip(colors, keys, strict=True))
                         if color is not None)
        return {one: VirtualGroup(self.turns, [self.members[rank] for color, _, rank in ordered if color == one],
                                  self.groups) for one in dict.fromkeys(color for color, _, _ in ordered)}

    def arrive(self, rank: int, signature: str, place: str, given: Any = None,
               combine: Callable[[list[Any]], Any] | None = None, *, is_end: bool = False) -> MatchedCall:
        """Note the next call of `rank`. The last rank to come calls ``combine`` with what all ranks give."""
        number, turns = self._counts[rank], self.turns
        self._counts[rank] += 1
        turns.events += 1
        self.rank_of(rank).last = place or self.rank_of(rank).last
        turns.records.note(self.rank_of(rank), self, place, signature)
        call = self.calls.setdefault(number, MatchedCall())
        call.arrivals[rank] = Arrival(signature, place, given, is_end)
        first = next(iter(call.arrivals.values())).signature
        call.differs |= signature != first
        if len(call.arrivals) == self.size and not call.differs:
            del self.calls[number]
            if combine is not None:
                call.result = combine([call.arrivals[one].given for one in range(self.size)])
            call.is_complete = True
            if signature != CLOSE:
                self.agreed = call
            call.arrivals = {one: there._replace(given=None) for one, there in call.arrivals.items()}
            for other in self.members:
                turns.wake(turns.ranks[other])
        return call

    def exchange(self, rank: int, signature: Signature, given: Any, combine: Callable[[list[Any]], Any],
                 found: list[Any]) -> Operation:
        """Append to `found` the result of ``combine``, made once for all ranks."""
        call = self.arrive(rank, signature.encode(), self.turns.site(), given, combine)
        if not call.is_complete:
            yield lambda: call.is_complete
        found.append(call.result)


class VirtualMail(Mailbox):
    """The messages between the ranks of a group; the rank of a matched message looks again."""

    def __init__(self, group: VirtualGroup) -> None:
        super().__init__()
        self._group = group
        self.places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # lines of the calls

    def post(self, mine: Any) -> Any:
        """Match `mine` as a mailbox does, and wake both ranks."""
        group, (source, target, tag) = self._group, mine.key
        group.turns.events += 1
        rank = group.rank_of(source if mine.sends else target)
        rank.last = place = group.turns.site()
        nbytes = "" if mine.dtype == code_of(OBJECT_BYTE) else f", {mine.nbytes} bytes"
        call = f"{'send' if mine.sends else 'recv'} from rank {source} to rank {target}, tag {tag}{nbytes}"
        group.turns.records.note(rank, group, place, call)
        self.places[mine] = place
        super().post(mine)
        for rank in (source, target):
            group.turns.wake(group.rank_of(rank))
        return mine

    def unmatched(self) -> list[tuple[tuple[int, int, int], bool, int, str]]:
        """Return the messages that wait: (source, target, tag), whether it is a send, its bytes and its line."""
        return [(key, sends, len(one.row), self.places.get(one, ""))
                for (key, sends), there in self._waiting.items() for one in there if one.length is None]
