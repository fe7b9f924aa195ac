"""What keeps virtual ranks from going on, found once no rank can go on or all have ended."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import ClosedError, GpucollError, MismatchError, PeerError, RevokedError, listed, with_noun
from gpucoll.internal import INSIDE, Signature, code_of_difference
from gpucoll.precheck.matching import CLOSE, REFUSED, Arrival, MatchedCall, VirtualGroup
from gpucoll.precheck.turns import Turns, refusals

Finding = dict[str, Any]
# The kinds of findings for ranks that make different calls, by the code of the difference.
KINDS = {"GC-COLLECTIVE": "collective", "GC-DTYPE": "dtype", "GC-SHAPE": "shape", "GC-OP": "op", "GC-ROOT": "root",
         "GC-COUNTS": "counts", "GC-DEVICE": "device", "GC-ALGO": "algorithm"}
CLOSING = Signature.decode(CLOSE)
# The kinds of findings about programs that cannot be checked, or differ between two runs.
UNCHECKED = UNSUPPORTED, UNLIKE = "unsupported", "process"
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
        call_before = Signature.decode(next(iter(agreed.arrivals.values())).signature).collective
        message += f"; before, all ranks agreed in {call_before} at {', '.join(last)}"
    return {"kind": kind, "ranks": culprits, "places": [*dict.fromkeys(side.place for side in ordered if side.place)],
            "call": call, "message": message, "agreed": last, "calls": _listed(ordered)}


def _listed(sides: Iterable[RanksAtLine]) -> list[dict[str, Any]]:
    return [{"ranks": [*side.ranks], "place": side.place, "call": side.call} for side in sides]


def unsupported(message: str, place: str = "") -> Finding:
    """Return the finding about a program that cannot be checked, and whose ranks are not known."""
    return finding(UNSUPPORTED, [], [RanksAtLine((), place, message)], "", message)


def with_refusals(found: list[Finding]) -> list[Finding]:
    """Return the findings, and one more if the program does not show that the precheck has refused something."""
    told = [unsupported(*one) for one in refusals[:1] if UNSUPPORTED not in (other["kind"] for other in found)]
    refusals.clear()
    return found + told


def of_process(differences: Sequence[tuple[int, list[str], list[str]]]) -> list[Finding]:
    """Return the finding for the first calls that differ between two runs; the ranks agree in each run."""
    if not differences:
        return []
    _, *calls = differences[0]
    ranks = [rank for rank, *others in differences if others == calls]
    sides = [RanksAtLine((*ranks,), place, call) for call, place in calls]
    one, other = (f"{side.call} ({side.place})" for side in sides)
    return [finding(UNLIKE, ranks, sides, sides[0].call, f"{with_noun(ranks)}: {one} in one run, {other} in another; "
                    "ranks differ in the same way by the order of a set, hash() and the number of a process, unless "
                    "one rank tells the others; let two runs be the same")]


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
        failed = [(rank, rank.failure) for rank in self._turns.ranks if rank.failure is not None]
        own = [one for one in failed if not isinstance(one[1], PeerError | RevokedError)]
        groups: dict[tuple[str, str], list[tuple[int, BaseException, str]]] = collections.defaultdict(list)
        for rank, error in own or failed:
            place, call = _raised(error)
            groups[type(error).__name__, place or rank.last].append(
                (rank.number, error, call if isinstance(error, GpucollError) else rank.call))
        for (name, place), some in groups.items():
            ranks, (_, error, call) = [number for number, _, _ in some], some[0]
            self._explained.update(ranks)
            culprits = error.ranks or ranks if isinstance(error, MismatchError) else ranks
            self.findings.append(finding(_kind_of(error), culprits, [RanksAtLine((*ranks,), place, f"{name}: {error}")],
                                         call, f"ranks {listed(ranks)} end by {name}: {error}"))

    # ------------------------------------------------------------ calls of all ranks

    def _call(self, group: VirtualGroup, call: MatchedCall) -> None:
        world = group.members
        arrived = {world[rank] for rank in call.arrivals}
        missing = {*world} - arrived
        sides: dict[tuple[Signature, str], list[int]] = collections.defaultdict(list)
        for rank, one in sorted(call.arrivals.items()):
            sides[Signature.decode(one.signature), self._place(one, world[rank])].append(world[rank])
        shown = [RanksAtLine(tuple(ranks), place, self._words(signature, ranks[0]))
                 for (signature, place), ranks in sides.items()]
        calls: dict[Signature, list[int]] = collections.defaultdict(list)
        for (signature, _), ranks in sides.items():
            calls[signature] += ranks
        if not call.differs:
            # All have the same call so far. Ranks that left do not wait.
            if next(iter(calls)).collective in OWN_GROUPS:
                self._without(shown, arrived, sorted(missing))
            if CLOSING not in calls or not all(one.is_end for one in call.arrivals.values()):
                for rank, one in call.arrivals.items():
                    if not one.is_end:
                        self._waits_for[world[rank]] |= missing
            return
        self._explained |= arrived
        refused = [rank for one, ranks in calls.items() if one.refusal for rank in ranks]
        left = calls.pop(CLOSING, [])
        failed = [rank for rank in (*left, *refused) if self._turns.ranks[rank].failure is not None]
        if failed:
            self._join(failed, shown, refused=bool(refused))
            return
        # As many ranks leave as go on, or fewer: the leaving ranks miss a call. Otherwise the others make one too many.
        gone = left if len(left) <= len(arrived) - len(left) else sorted(arrived - {*left})
        most = max(calls.values(), key=len)
        culprits = refused or gone or sorted(arrived - {*most})
        names = dict.fromkeys(one.collective for one in sorted(calls, key=lambda one: -len(calls[one]))
                              if not one.refusal)
        message = "; ".join(f"{with_noun(side.ranks)}: {side.call}" + (f" ({side.place})" if side.place else "")
                            for side in shown)
        self.findings.append(finding(REFUSED if refused else _kind_of_difference([*calls], left=bool(left)), culprits,
                                     shown, ", ".join(names) or REFUSED, f"ranks make different calls: {message}",
                                     group))

    def _without(self, sides: Sequence[RanksAtLine], arrived: set[int], missing: Sequence[int]) -> None:
        """Report members of a new group, whose programs have ended without making the group."""
        ended = [rank for rank in missing if self._turns.ranks[rank].has_ended]
        failed = [rank for rank in ended if self._turns.ranks[rank].failure is not None]
        if failed:
            self._join(failed, sides)
        elif ended:
            self._explained |= arrived
            waiting = "; ".join(f"ranks {listed(side.ranks)} wait in {side.call} ({side.place})" for side in sides)
            self.findings.append(finding("group", ended, [
                *(RanksAtLine((rank,), self._turns.ranks[rank].last, "the end of the program") for rank in ended),
                *sides], sides[0].call, f"{waiting} for ranks {listed(ended)}, whose programs have ended"))

    def _place(self, arrival: Arrival, number: int) -> str:
        rank = self._turns.ranks[number]
        return arrival.place or (_raised(rank.failure)[0] if rank.failure else "") or rank.last

    def _words(self, call: Signature, number: int) -> str:
        if call == CLOSING:
            return "the end of the program, after the last call" if self._turns.ranks[number].has_ended else "close"
        if call.refusal:
            return "refused its arguments"
        if call.header or not call.dtype:
            return f"{call.collective}, root {call.root}" if call.root else call.collective
        return call.describe()

    def _join(self, failed: Sequence[int], sides: Sequence[RanksAtLine], *, refused: bool = False) -> None:
        """Add the waiting ranks to the finding of the rank awaited in vain."""
        for one in self.findings:
            if {*failed} & {*one["ranks"]}:
                one["kind"] = REFUSED if refused and one["kind"] != UNSUPPORTED else one["kind"]
                waiting = [side for side in sides if not {*side.ranks} & {*one["ranks"]}]
                one["places"] = [*dict.fromkeys([*one["places"], *(side.place for side in waiting)])]
                one["calls"] += _listed(waiting)
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
            verb = "send" if sends else "recv"
            if self._is_gone(group, other):
                self._alone(group, mine, other, line or ranks[mine].last, verb, f"tag {tag}, {nbytes} bytes")
            # A message that nobody waits for keeps no rank from going on.
            elif not ranks[mine].place or ranks[mine].call in (verb, "sendrecv", "close"):
                self._waits_for[mine].add(other)
        for number, (origin, wanted) in group.probes.items():
            others = [*range(group.size)] if origin is None else [origin]
            mine = world[number]
            alive = {world[one] for one in others if not self._is_gone(group, world[one])} - {mine}
            if alive:
                self._waits_for[mine] |= alive
            else:
                self._alone(group, mine, world[others[0]] if origin is not None else -1, ranks[mine].place, "recv",
                            "any tag" if wanted is None else f"tag {wanted}")

    def _is_gone(self, group: VirtualGroup, number: int) -> bool:
        """Return whether a rank makes no further call in the group: its program has ended."""
        rank = self._turns.ranks[number]
        here = [one for one in rank.transports if one.group is group]
        return rank.has_ended or rank.failure is not None or all(one.closed for one in here)

    def _alone(self, group: VirtualGroup, mine: int, other: int, place: str, verb: str, tag: str) -> None:
        self._explained.add(mine)
        there = self._turns.ranks[other] if other >= 0 else None
        if there is not None and there.failure is not None:
            self._join([other], [RanksAtLine((mine,), place, f"{verb}, {tag}")])
            return
        whom = "any rank" if other < 0 else f"rank {other}"
        way = "to" if verb == "send" else "from"
        sides = [RanksAtLine((mine,), place, f"{verb} {way} {whom}, {tag}")]
        if there is not None and there.last:
            sides.append(RanksAtLine((other,), there.last, "its last call"))
        kind = f"unmatched {'send' if verb == 'send' else 'receive'}"
        self.findings.append(finding(kind, [mine], sides, verb, f"rank {mine}: {sides[0].call} ({place}) is never "
                                     f"matched: {whom} has ended or closed its communicator", group))

    # ------------------------------------------------------------ cycles

    def _cycles(self) -> None:
        """Report cycles of waiting ranks. A cycle waiting for another cycle is left out."""
        waits = {rank: others - self._explained for rank, others in self._waits_for.items()
                 if rank not in self._explained}
        for start in sorted(waits):
            ring = _ring(start, waits)
            if ring:
                threads = [self._turns.ranks[one].in_call for one in ring]
                sides = [RanksAtLine((one.number,), one.place, one.call) for one in threads]
                chain = ", ".join(f"rank {side.ranks[0]} waits in {side.call} ({side.place}) for rank {after}"
                                  for side, after in zip(sides, [*ring[1:], ring[0]], strict=True))
                names = ", ".join(dict.fromkeys(side.call for side in sides))
                kind = "group" if any(side.call in OWN_GROUPS for side in sides) else "deadlock"
                self.findings.append(finding(kind, ring, sides, names, f"a cycle of waiting ranks: {chain}"))
            stuck = {*ring}
            while stuck:  # the cycle, and all ranks waiting for the cycle
                for one in stuck:
                    waits.pop(one, None)
                stuck = {one for one, others in waits.items() if others & stuck}

    def _left(self) -> None:
        """Report ranks that wait for something else, such as a poll for a message that never comes."""
        left = [rank for rank in self._turns.ranks if not rank.has_ended]
        sides = [RanksAtLine((rank.number,), rank.place, rank.call) for rank in left]
        if left:
            self.findings.append(finding("deadlock", [rank.number for rank in left], sides, sides[0].call,
                                         f"ranks {listed([rank.number for rank in left])} wait for ever: " + "; ".join(
                                             f"rank {side.ranks[0]} in {side.call} ({side.place})" for side in sides)))


def _raised(error: BaseException) -> tuple[str, str]:
    """Return the line of the user's code that raised `error`, and the function called there; "" if unknown.

    Frames of this library and of import statements are not the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [number for number, frame in enumerate(frames)
             if not frame.filename.startswith((*INSIDE, "<frozen importlib"))]
    if not users:
        return "", ""
    at = users[-1]
    return f"{frames[at].filename}:{frames[at].lineno}", frames[at + 1].name if at + 1 < len(frames) else ""


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


def _kind_of_difference(calls: Sequence[Signature], *, left: bool) -> str:
    if any(one.collective == "split" for one in calls):
        return "group"
    usual = "device" if len({one.where for one in calls}) > 1 else "collective"
    return "ended" if left else KINDS.get(code_of_difference(calls), usual)


def _ring(first: int, edges: Mapping[int, set[int]]) -> list[int]:
    """Return a shortest cycle through `first`; an empty list if there is none."""
    seen: set[int] = set()
    paths = collections.deque([[first]])
    while paths:
        path = paths.popleft()
        for after in sorted(edges.get(path[-1], ())):
            if after == first:
                return path
            if after not in seen:
                seen.add(after)
                paths.append([*path, after])
    return []
