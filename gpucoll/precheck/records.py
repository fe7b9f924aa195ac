"""The calls of each rank of one run, compared with those of another run of the same program.

The runs are processes of their own. What differs between two processes differs between the ranks of a job too: hashes
of texts, and with them the order of a set, and the number of the process.
"""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.internal import Signature

OBJECT_BYTE = numpy.dtype("uint8")  # of objects, whose lengths may differ between two runs of a right program
PROGRAM_END = "the end of the program"


class Records:
    """The calls of `size` ranks in order, as numbers in `known`."""

    def __init__(self, size: int) -> None:
        self._known: dict[tuple[str, str], int] = {(PROGRAM_END, ""): 0}  # by call and line
        self._calls: list[list[int]] = [[] for _ in range(size)]

    def note(self, rank: Any, group: Any, place: str, call: str) -> None:
        """Note the next call of a rank in a group: an encoded signature, or words."""
        key = f"{call}\n{rank.groups.get(group, 0)}", place
        self._calls[rank.number].append(self._known.setdefault(key, len(self._known)))

    def as_json(self) -> list[Any]:
        """Return the calls of ranks that have ended: a table of calls and lines, and each rank's rows of the table."""
        return [[(_words(call), place) for call, place in self._known], [[*calls, 0] for calls in self._calls]]


def _words(text: str) -> str:
    call, number = Signature.decode(text), text.rpartition("\n")[2]
    words = call.describe() if call.dtype and call.dtype != OBJECT_BYTE.name else f"{call.collective}, root {call.root}"
    return words + (f", on communicator {number}" if number.strip("0").isdecimal() else "")


def unlike(first: list[Any], second: list[Any]) -> list[tuple[int, list[str], list[str]]]:
    """Return for each rank the first call that differs: the rank, and the call and the line in each run."""
    found = []
    for rank, both in enumerate(zip(first[1], second[1], strict=True)):
        pairs = ((first[0][mine], second[0][other]) for mine, other in zip(*both, strict=False))
        found += [(rank, *pair) for pair in pairs if pair[0][0] != pair[1][0]][:1]
    return found
