"""What keeps virtual ranks from going on, found once no rank can go on or all have ended."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import ClosedError, GpucollError, MismatchError, PeerError, RevokedError, listed, with_noun
from gpucoll.internal import INSIDE, Signature, code_of_difference
from gpucoll.precheck.matching import CLOSE, REFUSED, MatchedCall, VirtualGroup
from gpucoll.precheck.turns import Turns, VirtualRank

Finding = dict[str, Any]
# The kinds of findings for ranks that make different calls, by the code of the difference.
KINDS = {"GC-COLLECTIVE": "collective", "GC-DTYPE": "dtype", "GC-SHAPE": "shape", "GC-OP": "op", "GC-ROOT": "root",
         "GC-COUNTS": "counts", "GC-DEVICE": "device", "GC-ALGO": "algorithm"}
GROUPS = ("split", "cart")  # calls of all ranks of a communicator that make groups
UNSUPPORTED = "unsupported"  # the kind of a finding about a program that cannot be checked
OWN_GROUPS = ("init_process_group", "new_group")  # torch's calls that wait for the members of the group made


class RanksAtLine(NamedTuple):
    """Ranks of the world in the same call at the same line: `call` in words."""

    ranks: tuple[int, ...]
    place: str
    call: str


def finding(kind: str, ranks: Iterable[int], sides: Sequence[RanksAtLine], call: str, message: str,
            group: VirtualGroup | None = None) -> Finding:
    """Return a finding; the places of `ranks`, the culprits, come first."""
    culprits = sorted(ranks)
    ordered = sorted(sides, key=lambda side: not {*culprits} & {*side.ranks})
    agreed = None if group is None else group.agreed
    last: list[str] = [] if agreed is None else [*dict.fromkeys(one.place for one in agreed.arrivals.values())]
    if agreed is not None and last:
        message += f"; before, all ranks agreed in {_name(next(iter(agreed.arrivals.values())).signature)} at " \
            f"{', '.join(last)}"
    return {"kind": kind, "ranks": culprits, "places": [*dict.fromkeys(side.place for side in ordered if side.place)],
            "call": call, "message": message, "agreed": last,
            "calls": [{"ranks": [*side.ranks], "place": side.place, "call": side.call} for side in ordered]}


class Analysis:
    """The state of all ranks at the end of a precheck."""

    def __init__(self, turns: Turns, groups: Sequence[VirtualGroup]) -> None:
        self._turns, self._groups = turns, groups
        self.findings: list[Finding] = []
        # For each rank that waits: the ranks it waits for.
        self._waits_for: dict[int, set[int]] = collections.defaultdict(set)
        self._explained: set[int] = set()  # ranks that are part of a finding

    def run(self) -> list[Finding]:
        """Return the findings: first the causes, and cycles of ranks that wait for each other."""
        self._failures()
        for group in self._groups:
            for call in group.calls.values():
                self._call(group, call)
            self._messages(group)
        self._cycles()
        if not self.findings:
            self._left()
        return self.findings

    # ------------------------------------------------------------ exceptions

    def _failures(self) -> None:
        """Report uncaught exceptions; an error that only repeats another rank's is left out."""
        groups: dict[tuple[str, str, str], list[VirtualRank]] = collections.defaultdict(list)
        for rank in self._turns.ranks:
            if rank.failure is not None:
                groups[type(rank.failure).__name__, place_of(rank.failure) or rank.last,
                       str(rank.failure)].append(rank)
        echoes = (PeerError, RevokedError)
        own = [key for key, ranks in groups.items() if not isinstance(ranks[0].failure, echoes)]
        merged: dict[tuple[str, str], list[tuple[str, list[VirtualRank]]]] = collections.defaultdict(list)
        for name, place, text in own or groups:
            merged[name, place].append((text, groups[name, place, text]))
        for (name, place), texts in merged.items():
            text, (first, *_) = texts[0]
            ranks = sorted(rank.number for _, some in texts for rank in some)
            named = getattr(first.failure, "ranks", ()) or ranks
            kind = _kind_of(first.failure)
            call = _call_of(first.failure) if isinstance(first.failure, GpucollError) else first.call
            where = [RanksAtLine(tuple(ranks), place, f"{name}: {text}")]
            self._explained.update(ranks)
            culprits = named if isinstance(first.failure, MismatchError) else ranks
            self.findings.append(finding(kind, culprits, where, call, f"ranks {listed(ranks)} end by {name}: {text}"))

    # ------------------------------------------------------------ calls of all ranks

    def _call(self, group: VirtualGroup, call: MatchedCall) -> None:
        world = group.members
        arrived = {world[rank] for rank in call.arrivals}
        missing = {*world} - arrived
        if not call.differs:
            # All have the same call so far. Ranks that left do not wait.
            signature = next(iter(call.arrivals.values())).signature
            if _name(signature) in OWN_GROUPS:
                self._without(call, world, sorted(missing))
            if signature != CLOSE or not all(one.is_end for one in call.arrivals.values()):
                for rank, one in call.arrivals.items():
                    if not one.is_end:
                        self._waits_for[world[rank]] |= missing
            return
        sides: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        for rank, one in sorted(call.arrivals.items()):
            sides[one.signature, self._place(one, world[rank])].append(world[rank])
        calls: dict[str, list[int]] = collections.defaultdict(list)
        for (signature, _), ranks in sides.items():
            calls[signature] += ranks
        self._explained |= arrived
        refused = [rank for one, ranks in calls.items() if _is_refusal(one) for rank in ranks]
        failed = [rank for rank in (*calls.get(CLOSE, ()), *refused) if self._turns.ranks[rank].failure is not None]
        shown = [RanksAtLine(tuple(ranks), place, self._words(signature, ranks[0]))
                 for (signature, place), ranks in sides.items()]
        if failed:
            self._join(failed, shown, refused=bool(refused))
            return
        signatures = [Signature.decode(one) for one in calls]
        most = max((ranks for one, ranks in calls.items() if one != CLOSE), key=len)
        left = calls.get(CLOSE, [])
        # As many ranks leave as go on, or fewer: the leaving ranks miss a call. Otherwise the others make one too many.
        gone = left if len(left) <= len(arrived) - len(left) else sorted(arrived - {*left})
        culprits = refused or gone or sorted(arrived - {*most})
        kind = "refused" if refused else self._kind(signatures)
        ordered = sorted(calls, key=lambda one: -len(calls[one]) if one != CLOSE else 1)
        names = ", ".join(dict.fromkeys(_name(one) for one in ordered if one != CLOSE and not _is_refusal(one)))
        message = "; ".join(f"{with_noun(side.ranks)}: {side.call}" + (f" ({side.place})" if side.place else "")
                            for side in shown)
        self.findings.append(finding(kind, culprits, shown, names or REFUSED,
                                     f"ranks make different calls: {message}", group))

    def _without(self, call: MatchedCall, world: Sequence[int], missing: Sequence[int]) -> None:
        """Report members of a new group, whose programs have ended without making the group."""
        ended = [rank for rank in missing if self._turns.ranks[rank].has_ended]
        failed = [rank for rank in ended if self._turns.ranks[rank].failure is not None]
        lines = dict.fromkeys((one.signature, one.place) for one in call.arrivals.values())
        shown = [RanksAtLine(tuple(world[rank] for rank, one in sorted(call.arrivals.items())
                                   if (one.signature, one.place) == line), line[1], _words(line[0])) for line in lines]
        if failed:
            self._join(failed, shown)
        elif ended:
            self._explained |= {world[rank] for rank in call.arrivals}
            waiting = "; ".join(f"ranks {listed(side.ranks)} wait in {side.call} ({side.place})" for side in shown)
            self.findings.append(finding("group", ended, [
                *(RanksAtLine((rank,), self._turns.ranks[rank].last, "the end of the program") for rank in ended),
                *shown], shown[0].call, f"{waiting} for ranks {listed(ended)}, whose programs have ended"))

    def _kind(self, signatures: Sequence[Signature]) -> str:
        others = [one for one in signatures if one.encode() != CLOSE]
        if len(others) < len(signatures):
            return "group" if any(one.collective in GROUPS for one in others) else "ended"
        if any(one.collective in GROUPS for one in signatures):
            return "group"
        usual = "device" if len({one.where for one in signatures}) > 1 else "collective"
        return KINDS.get(code_of_difference(signatures), usual)

    def _place(self, arrival: Any, number: int) -> str:
        rank = self._turns.ranks[number]
        return arrival.place or (place_of(rank.failure) if rank.failure else "") or rank.last

    def _words(self, signature: str, number: int) -> str:
        if signature != CLOSE:
            return _words(signature)
        return "the end of the program, after the last call" if self._turns.ranks[number].has_ended else "close"

    def _join(self, failed: Sequence[int], sides: Sequence[RanksAtLine], *, refused: bool = False) -> None:
        """Add the waiting ranks to the finding of the rank awaited in vain."""
        for one in self.findings:
            if {*failed} & {*one["ranks"]}:
                one["kind"] = REFUSED if refused and one["kind"] != UNSUPPORTED else one["kind"]
                waiting = [side for side in sides if not {*side.ranks} & {*one["ranks"]}]
                one["places"] = [*dict.fromkeys([*one["places"], *(side.place for side in waiting)])]
                one["calls"] += [{"ranks": [*side.ranks], "place": side.place, "call": side.call} for side in waiting]
                one["call"] = one["call"] or ", ".join(dict.fromkeys(side.call.split()[0] for side in waiting))
                one["message"] += "".join(f"; ranks {listed(side.ranks)} wait in {side.call} ({side.place})"
                                          for side in waiting)

    # ------------------------------------------------------------ messages between two ranks

    def _messages(self, group: VirtualGroup) -> None:
        world, ranks = group.members, self._turns.ranks
        for (source, target, tag), sends, nbytes, line in group.mail.unmatched():
            mine, other = world[source if sends else target], world[target if sends else source]
            if ranks[mine].failure is not None or (ranks[mine].has_ended and not sends):
                continue
            place = line or ranks[mine].last
            if not self._is_gone(group, other):
                # A message that nobody waits for keeps no rank from going on.
                if not ranks[mine].place or ranks[mine].call in (_verb(sends), "sendrecv", "close"):
                    self._waits_for[mine].add(other)
                continue
            self._alone(group, mine, other, place, _verb(sends), f"tag {tag}", nbytes)
        for number, (origin, wanted) in group.probes.items():
            others = [*range(group.size)] if origin is None else [origin]
            mine = world[number]
            alive = {world[one] for one in others if not self._is_gone(group, world[one])} - {mine}
            if alive:
                self._waits_for[mine] |= alive
            else:
                self._alone(group, mine, world[others[0]] if origin is not None else -1, ranks[mine].place, "recv",
                            "any tag" if wanted is None else f"tag {wanted}", 0)

    def _is_gone(self, group: VirtualGroup, number: int) -> bool:
        """Return whether a rank makes no further call in the group: its program has ended."""
        rank = self._turns.ranks[number]
        here = [one for one in rank.transports if one.group is group]
        return rank.has_ended or rank.failure is not None or all(one.closed for one in here)

    def _alone(self, group: VirtualGroup, mine: int, other: int, place: str, verb: str, tag: str,
               nbytes: int) -> None:
        self._explained.add(mine)
        there = self._turns.ranks[other] if other >= 0 else None
        if there is not None and there.failure is not None:
            self._join([other], [RanksAtLine((mine,), place, f"{verb}, {tag}")])
            return
        whom = "any rank" if other < 0 else f"rank {other}"
        way = "to" if verb == "send" else "from"
        size = f", {nbytes} bytes" if nbytes else ""
        sides = [RanksAtLine((mine,), place, f"{verb} {way} {whom}, {tag}{size}")]
        if there is not None and there.last:
            sides.append(RanksAtLine((other,), there.last, "its last call"))
        kind = f"unmatched {'send' if verb == 'send' else 'receive'}"
        self.findings.append(finding(kind, [mine], sides, verb, f"rank {mine}: {sides[0].call} ({place}) is never "
                                     f"matched: {whom} has ended or closed its communicator", group))

    # ------------------------------------------------------------ cycles

    def _cycles(self) -> None:
        """Report every set of ranks that wait for each other in a cycle."""
        for members in _components(self._waits_for):
            if len(members) > 1 or members[0] in self._waits_for[members[0]]:
                if {*members} & self._explained:
                    continue
                ring = _ring(members, self._waits_for)
                threads = [self._turns.ranks[one].in_call for one in ring]
                sides = [RanksAtLine((one.number,), one.place, one.call) for one in threads]
                chain = ", ".join(f"rank {side.ranks[0]} waits in {side.call} ({side.place}) for rank {after}"
                                  for side, after in zip(sides, [*ring[1:], ring[0]], strict=True))
                names = ", ".join(dict.fromkeys(side.call for side in sides))
                kind = "group" if any(side.call in OWN_GROUPS for side in sides) else "deadlock"
                self.findings.append(finding(kind, ring, sides, names, f"a cycle of waiting ranks: {chain}"))

    def _left(self) -> None:
        """Report ranks that wait for something else, such as a poll for a message that never comes."""
        left = [rank for rank in self._turns.ranks if not rank.has_ended]
        sides = [RanksAtLine((rank.number,), rank.place, rank.call) for rank in left]
        if left:
            self.findings.append(finding("deadlock", [rank.number for rank in left], sides, sides[0].call,
                                         f"ranks {listed([rank.number for rank in left])} wait for ever: " + "; ".join(
                                             f"rank {side.ranks[0]} in {side.call} ({side.place})" for side in sides)))


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is the user's: neither of this library nor of an import statement."""
    return not frame.filename.startswith((*INSIDE, "<frozen importlib"))


def place_of(error: BaseException) -> str:
    """Return the line of the user's code that raised `error`, or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _call_of(error: BaseException) -> str:
    """Return the name of the library's function, called by the user's code, that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [number for number, frame in enumerate(frames) if _is_users(frame)]
    return frames[users[-1] + 1].name if users and users[-1] + 1 < len(frames) else ""


def _kind_of(error: BaseException | None) -> str:
    if isinstance(error, ClosedError):
        return "closed"
    if str(error).startswith("[GC-PRECHECK]"):  # a UsageError, or torch's error made of it
        return UNSUPPORTED
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, MismatchError) and error.ranks:
        return KINDS.get(error.code, "mismatch")
    return "raised"


def _verb(sends: bool) -> str:
    return "send" if sends else "recv"


def _is_refusal(signature: str) -> bool:
    return bool(Signature.decode(signature).refusal)


def _name(signature: str) -> str:
    return Signature.decode(signature).collective


def _words(signature: str) -> str:
    call = Signature.decode(signature)
    if call.refusal:
        return "refused its arguments"
    if call.header or not call.dtype:
        return f"{call.collective}, root {call.root}" if call.root else call.collective
    return call.describe()


def _components(edges: dict[int, set[int]]) -> list[list[int]]:
    """Return the strongly connected components of a graph. Source: R. Tarjan, 1972, without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []
    for start in [*edges]:
        work = [(start, iter(sorted(edges[start])))] if start not in index else []
        while work:
            node, following = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            after = next(following, None)
            if after is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    found.append(stack[at:])
                    del stack[at:]
            elif after not in index:
                work.append((after, iter(sorted(edges.get(after, ())))))
            elif after in stack:
                low[node] = min(low[node], index[after])
    return found


def _ring(members: Sequence[int], edges: dict[int, set[int]]) -> list[int]:
    """Return a shortest cycle through the lowest of some ranks that wait for each other."""
    first, inside = min(members), {*members}
    before: dict[int, int] = {}
    queue = collections.deque([first])
    while queue:
        node = queue.popleft()
        for after in sorted(edges[node] & inside):
            if after == first:
                ring = [node]
                while ring[-1] != first:
                    ring.append(before[ring[-1]])
                return ring[::-1]
            if after not in before:
                before[after] = node
                queue.append(after)
    return [first]
