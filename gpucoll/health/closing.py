"""The ranks that close a communicator while this rank waits for them in a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

from gpucoll.core.signature import described
from gpucoll.errors import MismatchError, with_noun
from gpucoll.transport.tags import Tag


class Closing:
    """A look at the ranks of `link`, joined by MPI, that have come to `close`: they make no call any more."""

    def __init__(self, link: Any) -> None:
        from mpi4py import MPI

        self._rank, self._others, self._aborted = link.place.rank, {*range(link.place.size)}, link.aborted
        self._others.discard(self._rank)
        self._closes, self._anybody = functools.partial(link.wire.Iprobe, tag=Tag.SHUTDOWN), MPI.ANY_SOURCE
        # The missing ranks that were in `close` at the last look, each with the number of the call.
        self._found = set[tuple[int, int]]()

    def look(self, number: int, missing: Callable[[], Set[int]], call: str) -> None:
        """Raise MismatchError if a rank has come to `close` and not to this call, whose text is `call`.

        `missing` returns the ranks whose descriptions of the call have not arrived.
        """
        if not self._closes(self._anybody):
            return
        # Probe first: the description of a rank that did make the call came before the message from its `close`.
        # Require two looks in a row: another thread of this rank may be about to take the description. Of a rank that
        # has failed the guard tells, with the reason.
        closing = {rank for rank in self._others - {*self._aborted()} if self._closes(rank)}
        found = {(number, rank) for rank in closing & missing()}
        ranks = tuple(sorted(rank for _, rank in found & self._found))
        self._found = found
        if ranks:
            raise MismatchError(f"ranks make different calls: {with_noun(ranks)}: close; rank {self._rank}: "
                                f"{described(call)}", ranks=ranks)
