"""Messages between processes by UCX, for ranks of several hosts without MPI.

UCX chooses the network: sockets, InfiniBand, RoCE. Its own variables (UCX_TLS, UCX_NET_DEVICES, ...) restrict the
choice. A process has one `Worker`, shared by all communicators. The bits of a tag keep messages of different
communicators, senders and dtypes apart (see kernels/ucx.cc). UCX neither authenticates nor encrypts the connections, as
MPI and NCCL do not: use a network of trusted processes.
"""

from __future__ import annotations

import atexit
import collections
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy

from gpucoll.errors import BackendError
from gpucoll.progress.operations import ProbeResult, keep_for_ever
from gpucoll.transport.tags import Tag

# UCX's settings, unless the user has set them. The program's own handlers of signals stay, and so does this library's
# report of a lost rank: UCX would print its own in addition.
SETTINGS = {"UCX_ERROR_SIGNALS": "", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
LEAVES = 1.0  # seconds at exit for the last messages to leave


@functools.cache
def library() -> tuple[Any, str]:
    """Return the module `gpucoll._ucx` with UCX opened, or None, and the version of UCX, or the reason for None."""
    for name, value in SETTINGS.items():
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


_made: list[UcxProcess] = []  # those with connections, of this process alone


def _at_exit() -> None:
    while _made:
        _made.pop().close(LEAVES)


def _after_fork() -> None:
    # Never closed in the child: UCX would shut down the connections of the parent.
    keep_for_ever([one.worker for one in _made])
    _made.clear()


os.register_at_fork(after_in_child=_after_fork)
# Runs after the communicators' last messages: exit handlers run in reverse order, and theirs is registered later.
atexit.register(_at_exit)


class UcxProcess:
    """UCX's worker of this process, and the endpoints by the address of the other process."""

    def __init__(self) -> None:
        module, self.reason = library()
        self.worker: Any = module and module.Worker()
        self.address: bytes = self.worker.address() if self.worker else b""
        self.contexts = 0  # the number of contexts used by communicators of this process
        self._endpoints: dict[bytes, int] = {}
        if self.worker:
            _made.append(self)

    def close(self, patience: float) -> None:
        """Close all connections; the last messages leave before, within `patience` seconds."""
        self.worker.close(patience)
        if self in _made:
            _made.remove(self)

    def endpoint(self, address: bytes) -> int:
        """Return the number of the endpoint that leads to the process with this address."""
        if address not in self._endpoints:
            self._endpoints[address] = self.worker.connect(address)
        return self._endpoints[address]


@functools.cache
def _process(number: int) -> UcxProcess:
    return UcxProcess()


def messages(ranks: Any) -> tuple[UcxMessages, UcxMessages] | dict[int, str]:
    """Return the carriers of a communicator's own and of its users' messages; or the reasons of ranks without UCX.

    A collective call of `ranks`, a `mailbox.StoreRanks`.
    """
    # By process number: the child of a fork needs a worker of its own.
    here = _process(os.getpid())
    everyone = ranks.allgather((here.address, here.contexts, here.reason))
    lacking = {rank: reason for rank, (address, _, reason) in enumerate(everyone) if not address}
    if lacking:
        return lacking
    # All ranks use the same number, and no rank has used it before: late messages of a closed communicator stay apart.
    context = max(used for _, used, _ in everyone)
    here.contexts = context + 1
    module, _ = library()
    if context >> module.CONTEXT_BITS or ranks.size >> module.SOURCE_BITS:
        raise BackendError(f"UCX's tags have room for {1 << module.CONTEXT_BITS} communicators in a process' life, and "
                           f"for {1 << module.SOURCE_BITS} ranks", code="GC-COMM")
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
        self._process, self._worker, self._base, self._addresses = process, process.worker, base, addresses
        self._from_here, self._source_shift = base | rank << module.SOURCE_SHIFT, module.SOURCE_SHIFT
        self._dtype_shift, self._tags = module.DTYPE_SHIFT, (1 << module.TAG_BITS) - 1
        self._sources, self._dtypes = (1 << module.SOURCE_BITS) - 1, (1 << module.DTYPE_BITS) - 1
        # The bits of a tag that a receive compares: all but the dtype; then without source, and without tag.
        self._mask = (1 << 64) - 1 & ~(self._dtypes << self._dtype_shift)
        self._any_source = self._mask & ~(self._sources << self._source_shift)
        self._matches, self._matching = matches, threading.Lock()
        # Receives without a message yet, in order, by source and tag.
        self._waiting: dict[tuple[int, int], collections.deque[ProbedReceive]] = {}

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0, *, synchronous: bool = False) -> Any:
        """Begin to send ``[array, "B"]`` with the dtype code `dtype` to rank `dest`; return the request."""
        return self._worker.send(self._process.endpoint(self._addresses[dest]),
                                 self._from_here | dtype << self._dtype_shift | tag, _bytes(buffer[0]), synchronous)

    def Issend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin a send that is complete only after the receive has begun."""
        return self.Isend(buffer, dest, tag, dtype, synchronous=True)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to receive from rank `source` into ``[array, "B"]``, C-ordered, with the dtype code `dtype`."""
        if not self._matches:
            return self._worker.receive(self._tag(source, tag), self._mask, _bytes(buffer[0]))
        request = ProbedReceive(self, (source, tag), _bytes(buffer[0]), dtype)
        with self._matching:
            self._waiting.setdefault((source, tag), collections.deque()).append(request)
        return request

    def match(self, key: tuple[int, int]) -> None:
        """Give the arrived messages of a sender with a tag to the receives that wait for them, in order."""
        with self._matching:
            waiting = self._waiting.get(key, ())
            while waiting:
                found = self._worker.probe(self._tag(*key), self._mask, True)
                if found is None:
                    return
                tag, nbytes, message = found
                waiting.popleft().take(self._worker, message, nbytes, tag >> self._dtype_shift & self._dtypes)
            self._waiting.pop(key, None)

    def forget(self, request: ProbedReceive, key: tuple[int, int]) -> None:
        """Take a receive without a message out of the order; do nothing if it has a message."""
        with self._matching:
            waiting = self._waiting.get(key, collections.deque())
            if request in waiting:
                waiting.remove(request)

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message that could be received now, or None; `source` and `tag` None match any."""
        # Messages that a posted receive waits for belong to this receive.
        for key in list(self._waiting):
            self.match(key)
        mask = (self._mask if source is not None else self._any_source) & ~(0 if tag is not None else self._tags)
        found = self._worker.probe(self._tag(source or 0, tag or 0), mask)
        if found is None:
            return None
        its_tag, nbytes, _ = found
        return ProbeResult(its_tag >> self._source_shift & self._sources, its_tag & self._tags, nbytes)

    def aborted(self, others: Collection[int]) -> dict[int, int]:
        """Receive the abort messages that have arrived from `others`; return the reason of each rank."""
        reasons, reason = dict[int, int](), numpy.zeros(1, numpy.int64)
        while (found := self.seen(None, Tag.ABORT)) is not None:
            request = self._worker.receive(self._tag(found.source, Tag.ABORT), self._mask, reason.view(numpy.uint8))
            while not request.Test():  # short: the message has arrived
                pass
            reasons[found.source] = int(reason[0])
        return {rank: why for rank, why in reasons.items() if rank in others}

    def _tag(self, source: int, tag: int) -> int:
        return self._base | source << self._source_shift | tag


def _bytes(array: Any) -> Any:
    return array if array.dtype == numpy.uint8 else array.reshape(-1).view(numpy.uint8)


class ProbedReceive:
    """The request of a receive; `length` and `came` as of `mailbox.StoredMessage`."""

    def __init__(self, carrier: UcxMessages, key: tuple[int, int], row: Any, dtype: int) -> None:
        self._carrier, self._key, self._row, self._dtype = carrier, key, row, dtype
        self._request: Any = None  # UCX's, once a message is matched
        self._nbytes: int | None = None
        self.came = 0

    def take(self, worker: Any, message: int, nbytes: int, came: int) -> None:
        """Begin to receive a message, into other memory if it does not fit the array."""
        fits = nbytes <= len(self._row) and (came == self._dtype or 0 in (came, self._dtype))
        row = self._row[:nbytes] if fits else numpy.empty(nbytes, numpy.uint8)
        self._request, self.came = worker.take(message, row), came

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
