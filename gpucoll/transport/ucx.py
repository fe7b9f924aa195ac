"""Messages between processes by UCX, for ranks of several hosts without MPI.

UCX chooses the network: sockets, InfiniBand, RoCE. Its own variables (UCX_TLS, UCX_NET_DEVICES, ...) restrict the
choice. A process has one `Worker`, shared by all communicators. The bits of a tag keep messages of different
communicators, senders and dtypes apart (see kernels/binding/ucx.cc). UCX neither authenticates nor encrypts the
connections, as MPI and NCCL do not: use a network of trusted processes.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy

from gpucoll.errors import BackendError
from gpucoll.progress.operations import ProbeResult
from gpucoll.transport.mailbox import are_compatible
from gpucoll.transport.process import PROCESS
from gpucoll.transport.tags import FAREWELL_BYTES, TAGS, Tag

# UCX's settings, unless the user has set them. The program's own handlers of signals stay, and so does this library's
# report of a lost rank: UCX would print its own in addition.
UCX_SETTINGS = {"UCX_ERROR_SIGNALS": "", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
RETRY = 1e-3  # seconds between two tries to agree on a number


@functools.cache
def library() -> tuple[Any, str]:
    """Return the module `gpucoll._ucx` with UCX opened, or None, and the version of UCX, or the reason for None."""
    for name, value in UCX_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("gpucoll._ucx")
        return module, module.open(str(_path()))
    except (ImportError, RuntimeError) as error:
        return None, f"{error}; pip install 'gpucoll[ucx]'"


def _path() -> Path:
    """Return the path of UCX's library: of the package `libucx`, else the system's."""
    package = importlib.util.find_spec("libucx")
    folders = [] if package is None else package.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder, "lib", "libucp.so.0")).exists()),
                Path("libucp.so.0"))


class UcxProcess:
    """UCX's worker of this process."""

    def __init__(self) -> None:
        module, reason = library()
        self.reason: str = reason
        self.worker: Any = None
        self.address: bytes = b""
        self.contexts: int = 0  # the next number for a communicator of this process
        # The names of the communicators that agree on a number now. The least name comes first.
        self._agreeing: list[str] = []
        self._taking = ""  # the name that this rank agrees on now
        self._lock = threading.Lock()  # guards `contexts`, `_agreeing` and `_taking`
        if PROCESS.lost_ucx:
            self.reason = "the parent of this process has used UCX; start ranks by spawn"
        elif module is not None:
            try:
                self.worker = module.Worker()
                self.address = self.worker.address()
            except RuntimeError as error:  # UCX's settings fit no network of this host, for example
                self.reason = str(error)

    def context(self, name: str, everyone: Callable[[int], Sequence[int]]) -> int:
        """Return a number for the communicator `name`, free on all its ranks; `everyone` gathers a number of each rank.

        A collective call of these ranks. Several threads may make communicators at once, in different orders on
        different ranks. So a rank takes part for a single name at a time, the least under way, and all begin again
        until every rank takes part for the same name.
        """
        # Wait for all ranks before taking part: a rank yet to come may first be making another communicator.
        everyone(-1)
        with self._lock:
            self._agreeing.append(name)
        highest = -1
        try:
            while True:
                with self._lock:
                    if not self._taking and min(self._agreeing) == name:
                        self._taking = name
                    mine = self.contexts if self._taking == name else -1
                highest = max(highest, mine)  # an error of `everyone` may come after other ranks have agreed
                numbers = everyone(mine)
                highest = max(highest, *numbers)
                if min(numbers) >= 0:
                    return max(numbers)
                self._take_no_part(name)
                time.sleep(RETRY)
        finally:
            # Also after an error: other ranks may have taken this rank's number.
            self._take_no_part(name, highest + 1)
            with self._lock:
                self._agreeing.remove(name)

    def _take_no_part(self, name: str, next_number: int = 0) -> None:
        """Let another name have its turn; the numbers below `next_number` are taken."""
        with self._lock:
            # In one step: the next name must not be given a number just taken.
            self.contexts = max(self.contexts, next_number)
            if self._taking == name:
                self._taking = ""


def messages(ranks: Any, name: str) -> tuple[UcxMessages, UcxMessages] | dict[int, str]:
    """Return the carriers of a communicator's own and of its users' messages; or the reasons of ranks without UCX.

    A collective call of `ranks`, a `mailbox.StoreRanks`; `name` is the communicator's, the same on all ranks.
    """
    here = PROCESS.ucx = PROCESS.ucx or UcxProcess()
    everyone = ranks.allgather((here.address, here.reason))
    lacking = {rank: reason for rank, (address, reason) in enumerate(everyone) if not address}
    if lacking:
        return lacking
    # No rank has used the number before: late messages of a closed communicator stay apart.
    context = here.context(name, ranks.allgather)
    module, _ = library()
    if context >> module.CONTEXT_BITS or ranks.size >> module.SOURCE_BITS:
        raise BackendError(f"UCX's tags allow {1 << module.CONTEXT_BITS} communicators in the life of a process, and "
                           f"{1 << module.SOURCE_BITS} ranks")
    addresses = [address for address, *_ in everyone]
    base = context << module.CONTEXT_SHIFT
    return (UcxMessages(here, base, ranks.rank, addresses),
            UcxMessages(here, base | 1 << module.USER_SHIFT, ranks.rank, addresses, matches=True))


class UcxMessages:
    """Messages between the ranks of a communicator, with mpi4py's methods, each to or from an array of bytes.

    Receives with `matches` look at a message before receiving it: a message of another dtype, or too long, leaves the
    array unwritten. Without `matches` they are posted to UCX, and data arrive with fewer copies.
    """

    def __init__(self, process: UcxProcess, base: int, rank: int, addresses: Sequence[bytes], *,
                 matches: bool = False) -> None:
        module, _ = library()
        self._worker, self._base, self._addresses, self._rank = process.worker, base, addresses, rank
        self._from_here, self._source_shift = base | rank << module.SOURCE_SHIFT, module.SOURCE_SHIFT
        self._dtype_shift, self._tags = module.DTYPE_SHIFT, (1 << module.TAG_BITS) - 1
        self._sources, self._dtypes = (1 << module.SOURCE_BITS) - 1, (1 << module.DTYPE_BITS) - 1
        # The bits of a tag that a receive compares: all but the dtype; then without source, and without tag.
        self._mask = (1 << 64) - 1 & ~(self._dtypes << self._dtype_shift)
        self._any_source = self._mask & ~(self._sources << self._source_shift)
        self._matches, self._matching = matches, threading.Lock()
        # Messages taken out of UCX's queue, and not yet begun to be received, by source and tag.
        self._removed: dict[tuple[int, int], tuple[int, int, int]] = {}
        # Receives without a message yet, in order, by source and tag.
        self._waiting: dict[tuple[int, int], collections.deque[ProbedReceive]] = {}

    def engine_wire(self) -> Any:
        """Return a capsule for the engine's own messages, with tags from ENGINE_TAGS on (kernels/engine/wire.h)."""
        return self._worker.wire(self._base, self._rank, self._addresses)

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to send ``[array, "B"]`` with the dtype code `dtype` to rank `dest`; return the request."""
        return self._worker.send(self._addresses[dest], self._from_here | dtype << self._dtype_shift | tag,
                                 _bytes(buffer[0]))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to receive from rank `source` into ``[array, "B"]``, C-ordered, with the dtype code `dtype`."""
        if not self._matches:
            return self._worker.receive(self._tag(source, tag), self._mask, _bytes(buffer[0]))
        request = ProbedReceive(self, (source, tag), _bytes(buffer[0]), dtype)
        self._waiting.setdefault((source, tag), collections.deque()).append(request)
        return request

    def match(self, key: tuple[int, int]) -> None:
        """Give the arrived messages of a sender with a tag to the receives that wait for them, in order."""
        # Without blocking: the lock's owner does the same work, perhaps this thread below a signal handler.
        if not self._matching.acquire(blocking=False):
            return
        try:
            waiting = self._waiting.get(key, ())
            while waiting:
                found = self._removed.get(key) or self._worker.probe(self._tag(*key), self._mask, True)
                if found is None:
                    return
                # Kept until the receive begins: an exception in between must not lose the message.
                self._removed[key] = found
                tag, nbytes, message = found
                waiting[0].take(self._worker, message, nbytes, tag >> self._dtype_shift & self._dtypes)
                del self._removed[key]
                waiting.popleft()
        finally:
            self._matching.release()

    def forget(self, request: ProbedReceive, key: tuple[int, int]) -> None:
        """Take a receive without a message out of the order; do nothing if it has a message."""
        with self._matching:
            waiting = self._waiting.get(key, collections.deque())
            if request in waiting:
                waiting.remove(request)

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message that could be received now, or None; `source` and `tag` None match any."""
        # A message awaited by a posted receive belongs to this receive.
        for key, waiting in list(self._waiting.items()):
            if waiting:
                self.match(key)
        # Tags from TAGS on are the library's own, and no user's receive with any tag takes them.
        mask = (self._mask if source is not None else self._any_source) & ~(0 if tag is not None else TAGS - 1)
        found = self._worker.probe(self._tag(source or 0, tag or 0), mask)
        if found is None:
            return None
        its_tag, nbytes, _ = found
        return ProbeResult(its_tag >> self._source_shift & self._sources, its_tag & self._tags, nbytes)

    def farewells(self, others: Collection[int]) -> dict[int, Any]:
        """Receive the farewells that have arrived from `others`; return the last one of each rank as a row of bytes."""
        found = dict[int, Any]()
        while (seen := self._worker.probe(self._tag(0, Tag.FAREWELL), self._any_source, True)) is not None:
            its_tag, _, message = seen
            row = numpy.zeros(FAREWELL_BYTES, numpy.uint8)
            request = self._worker.take(message, row)
            while not request.Test():  # short: the message has arrived
                pass
            found[its_tag >> self._source_shift & self._sources] = row
        return {rank: one for rank, one in found.items() if rank in others}

    def _tag(self, source: int, tag: int) -> int:
        return self._base | source << self._source_shift | tag


def _bytes(array: Any) -> Any:
    """Return the bytes of a C-ordered array as one row."""
    return array.reshape(-1).view(numpy.uint8)


class ProbedReceive:
    """The request of a receive; `length` and `came` as of `mailbox.StoredMessage`."""

    def __init__(self, carrier: UcxMessages, key: tuple[int, int], row: Any, dtype: int) -> None:
        self._carrier, self._key, self._row, self._dtype = carrier, key, row, dtype
        self._request: Any = None  # UCX's, once a message is matched
        self._nbytes: int | None = None
        self.came: int = 0

    def take(self, worker: Any, message: int, nbytes: int, came: int) -> None:
        """Begin to receive a message, into other memory if it does not fit the array."""
        fits = nbytes <= len(self._row) and are_compatible(came, self._dtype)
        row = self._row[:nbytes] if fits else numpy.empty(nbytes, numpy.uint8)
        self._request = worker.take(message, row)
        self.came = came

    @property
    def length(self) -> int | None:
        if self._nbytes is None:
            if self._request is None:
                self._carrier.match(self._key)
            self._nbytes = None if self._request is None else self._request.length
        return self._nbytes

    def Test(self, status: Any = None) -> bool:
        """Return whether the message has been received."""
        return self.length is not None

    def Cancel(self) -> None:
        """Stop receiving, unless a message is on the way."""
        if self._request is None:
            self._carrier.forget(self, self._key)
            self._nbytes = 0
        else:
            self._request.Cancel()
