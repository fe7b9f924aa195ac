"""What a call is, in words and as a number, so that ranks can compare theirs before data move."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence

from gpucoll.errors import MismatchError, PeerError

REFUSED = "refused: "
HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@functools.lru_cache(1024)
def fingerprint(text: str) -> int:
    """Return a number of 60 bits that is the same for the same words."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") << 4


def shortened(text: str, nbytes: int) -> str:
    """Return `text` in as many bytes at most; where something had to go a number tells it from others.

    A second line stays.
    """
    if len(text.encode()) <= nbytes:
        return text
    words, newline, site = text.partition("\n")
    end = f"... {fingerprint(words):x}{newline}{site}"
    return words.encode()[:max(0, nbytes - len(end.encode()))].decode(errors="ignore") + end


def call_site() -> str:
    """Return ``file:line`` of the user's code that is running in this thread; "" where there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back  # type: ignore[assignment] # None ends the walk
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _field(pattern: re.Pattern[str], words: str) -> str:
    match = pattern.search(words)
    return match[1] if match else ""


# What is unlike, by the first part of the words that is. An algorithm that is chosen by the others comes last.
FIELDS = [(code, functools.partial(_field, re.compile(pattern))) for code, pattern in (
    ("GC-COLLECTIVE", r"^(\w+) by"), ("GC-DTYPE", r"bytes of (\w+)"), ("GC-SHAPE", r" in (\(.*?\))"),
    ("GC-OP", r", op (.*), root"), ("GC-ROOT", r", root (\d+)"), ("GC-COUNTS", r", (\d+) bytes"),
    ("GC-ALGO", r" by (.*), \d+ bytes"))]


def disagreement(ranks: Sequence[int], calls: Sequence[str], *, moved: bool = False) -> MismatchError | PeerError:
    """Return what `ranks` raise that make these `calls`, in words; a second line of each is where.

    The culprits are those that refuse their arguments, or else all but the largest group, the one of the lowest rank
    where several are as large. Unless data have `moved` the communicator goes on.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    sites: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for rank, text in zip(ranks, calls, strict=True):
        words, _, site = text.partition("\n")
        groups[words].append(rank)
        sites[words].update({site: None} if site else {})
    table = "; ".join(f"ranks {', '.join(map(str, members))}: {words}"
                      + (f" ({', '.join(sites[words])})" if sites[words] else "") for words, members in groups.items())
    refused = tuple(rank for words, members in groups.items() if words.startswith(REFUSED) for rank in members)
    nothing = "" if moved else ", and nothing was moved"
    if refused:
        named = ", ".join(map(str, refused))
        error: MismatchError | PeerError = PeerError(f"ranks {named} refused their arguments{nothing}: {table}",
                                                     ranks=refused)
    else:
        most = max(groups.values(), key=len)
        code = next((code for code, field in FIELDS if len({field(words) for words in groups}) > 1), "GC-CALL")
        error = MismatchError(f"ranks make different calls{nothing}: {table}", code=code,
                              ranks=tuple(sorted({*ranks} - {*most})))
    error.settled = not moved
    return error
