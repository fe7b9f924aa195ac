"""What runs a schedule: one file for each transport, all behind one small protocol.

A `Task` is a collective with everything resolved. `Executor.run` is an operation in the
sense of `gpucoll.waits`: a generator that yields a predicate whenever it must wait. A device
executor enqueues on the task's stream and yields nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpucoll.dtypes import Dtype
from gpucoll.ops import Op
from gpucoll.plan import Plan
from gpucoll.work import Operation


@dataclass
class Task:
    """One collective on one rank: flat buffers (None where this rank has none) and what to do with them.

    `nbytes` are those of the larger of input and output over all ranks; `in_place`: both are the same memory here.
    `lengths` are those of the blocks of input and output, in elements, where blocks are not alike. `device` is where
    the buffers are, `stream` what the task is enqueued on. A `repeated` one was made before on
    the same arrays, all given by the user, and may be again. `shape` is that of an array, or of a block where
    there is one for each rank, beyond the first axis where blocks differ in it. `detail` are more words that tell the
    call apart: that it is a header.
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
    detail: str = ""

    @functools.cached_property
    def words(self) -> str:
        """What is alike where ranks make the same call."""
        op = "" if self.op is None else f", op {self.op.expression or self.op.name}"
        by = self.algorithm
        if self.plan is not None and self.plan.digest:
            by += f" #{self.plan.digest}"  # a user's, of which ranks may have unlike ones
        return (f"{self.collective} by {by}, {self.nbytes} bytes of {self.dtype.name} in {self.shape}{op}, "
                f"root {self.root}{self.detail}")


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
