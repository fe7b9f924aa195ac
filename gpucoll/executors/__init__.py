"""What runs a schedule: one file for each transport, all behind one small protocol; and how calls are told apart.

A `Task` is a collective with everything resolved; its words are what ranks compare before data move. `Executor.run` is
an operation in the sense of `gpucoll.progress.waits`: a generator that yields a predicate whenever it must wait. A
device executor enqueues on the task's stream and yields nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpucoll.core.dtypes import Dtype
from gpucoll.core.ops import Op
from gpucoll.core.signature import Signature, code_of_difference, described, is_refusal
from gpucoll.errors import MismatchError, PeerError, listed
from gpucoll.plan import Plan
from gpucoll.progress.operations import Operation

# Not the user's. contextlib runs the end of `with comm.group():`
INSIDE = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, threading.__file__, contextlib.__file__]


@dataclass
class Task:
    """One collective on one rank: flat buffers (None where this rank has none) and what to do with them.

    `nbytes` are those of the larger of input and output over all ranks; `in_place`: both are the same memory here.
    `lengths` are those of the blocks of input and output, in elements, where blocks are not alike. `device` is where
    the buffers are, `stream` what the task is enqueued on. A `repeated` one was made before on
    the same arrays, all given by the user, and may be again. `shape` is that of an array, or of a block where
    there is one for each rank, beyond the first axis where blocks differ in it. `header` is the call whose shapes this
    one tells.
    """

    collective: str
    algorithm: str
    plan: Plan | None
    input: Any
    output: Any
    dtype: Dtype
    op: Op | None = None
    root: int = 0
    nbytes: int = 0
    in_place: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    device: str = "cpu"
    stream: Any = None
    repeated: bool = False
    shape: tuple[int, ...] = ()
    header: str = ""

    @functools.cached_property
    def words(self) -> str:
        """The signature of the call, as ranks show it."""
        algorithm = self.algorithm
        if self.plan is not None and self.plan.digest:
            algorithm += f" #{self.plan.digest}"  # a user's, of which ranks may have unlike ones
        op = "" if self.op is None else self.op.expression or self.op.name
        return Signature(self.collective, self.nbytes, self.dtype.name, self.root,
                         "" if self.device == "cpu" else "on devices", self.header, self.shape, algorithm, op).encode()


# Ways to make a call of MPI's that are open to all ranks: by one that waits until it has ended, and with the result in
# place of the input. MPI takes either from all ranks or from none.
WAITS, IN_PLACE = 1, 2
# What does a call, given the addresses of result and input, 0 for none, and such ways. It is called until it returns
# True, or a blocking call, which is made whenever all three are the same.
Called: TypeAlias = Callable[[int, int, int], bool | Callable[[], object]]


class Meets(Protocol):
    """The ranks of a node, which meet in the engine to compare a call that another executor then makes."""

    engine: Any

    @property
    def compares_calls(self) -> bool:
        """Whether all ranks' calls are compared by the engine."""

    def plan_by_calls(self, task: Task, key: Any, made: Callable[[], Called]) -> Any:
        """Return the engine's plan of such a call; `key` tells apart what `made` depends on."""

    def walk(self, plan: Callable[[], Any], x: Any, out: Any) -> Operation:
        """Carry out a plan on these arrays."""


class Executor(Protocol):
    """Runs tasks; made for a communicator, closed with it.

    One on a GPU may have `launcher`, too: what enqueues calls like a task, on the same memory, and never waits.
    """

    name: str

    def serves(self, task: Task) -> str | None:
        """Return None where it can run `task`, else the reason why not.

        Asked before there is a plan, and once more when there is one: then it gets ready, alike on every rank.
        """

    def run(self, task: Task) -> Operation:
        """Carry out `task`; yield a predicate whenever it must wait."""

    def close(self) -> None:
        """Give back what it holds; idempotent."""


Launcher: TypeAlias = Callable[[Any], None]  # enqueues a call on a stream


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
    while frame is not None and frame.f_code.co_filename.startswith((*INSIDE,)):
        frame = frame.f_back  # type: ignore[assignment] # None ends the walk
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def disagreement(ranks: Sequence[int], calls: Sequence[str], *, moved: bool = False) -> MismatchError | PeerError:
    """Return what `ranks` raise that show these `calls`; a second line of each is where.

    The culprits are those that refuse their arguments, or else all but the largest group, the one of the lowest rank
    where several are as large. Unless data have `moved` the communicator goes on.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    sites: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for rank, text in zip(ranks, calls, strict=True):
        words, _, site = text.partition("\n")
        groups[words].append(rank)
        sites[words].update({site: None} if site else {})
    table = "; ".join(f"ranks {', '.join(map(str, members))}: {described(words)}"
                      + (f" ({', '.join(sites[words])})" if sites[words] else "") for words, members in groups.items())
    refused = tuple(rank for words, members in groups.items() if is_refusal(words) for rank in members)
    nothing = "" if moved else ", and nothing was moved"
    if refused:
        named = listed(refused)
        error: MismatchError | PeerError = PeerError(f"ranks {named} refused their arguments{nothing}: {table}",
                                                     ranks=refused)
    else:
        most = max(groups.values(), key=len)
        error = MismatchError(f"ranks make different calls{nothing}: {table}",
                              code=code_of_difference([*map(Signature.decode, groups)]),
                              ranks=tuple(sorted({*ranks} - {*most})))
    error.settled = not moved
    return error
