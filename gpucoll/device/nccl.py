"""One rank's NCCL communicator: the only file that names `cupy.cuda.nccl`.

What CuPy's binding lacks is called by ctypes in the library that it has loaded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
from cupy.cuda import nccl

from gpucoll.device import Part, Waiting
from gpucoll.errors import BackendError, CollectiveTimeout

# nccl.h's enumerations, under the names of our tables
DTYPES = {"ncclInt8": 0, "ncclUint8": 1, "ncclInt32": 2, "ncclUint32": 3, "ncclInt64": 4, "ncclUint64": 5,
          "ncclFloat16": 6, "ncclFloat32": 7, "ncclFloat64": 8, "ncclBfloat16": 9, "ncclFloat8e4m3": 10,
          "ncclFloat8e5m2": 11}
OPS = {"ncclSum": 0, "ncclProd": 1, "ncclMax": 2, "ncclMin": 3, "ncclAvg": 4}
BYTE = DTYPES["ncclUint8"]
CUPYS = {"all_reduce": "allReduce", "reduce": "reduce", "reduce_scatter": "reduceScatter", "broadcast": "broadcast",
         "all_gather": "allGather"}
FOREIGN = {"all_to_all": "ncclAlltoAll", "gather": "ncclGather", "scatter": "ncclScatter"}  # that CuPy does not have
FOREIGN_SINCE = 22800  # version, as ncclGetVersion counts them
WINDOWS_SINCE = 22700
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
ERRORS = (KeyError, nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError)  # KeyError: CuPy's for codes it does not know
NOTHING: Waiting = iter(())  # to wait for


class NcclCall(NamedTuple):
    """One of NCCL's collectives on given memory: what the ranks must have connected for, and what enqueues it."""

    what: str
    needed: tuple[Hashable, ...]
    enqueue: Callable[[Any], None]  # on a stream


FLOAT8_SINCE = 22400, 90  # version and compute capability


class Nccl:
    """NCCL's calls on addresses and streams; made by all ranks together, at most `timeout` seconds long.

    Collectives take the number of elements or bytes of a block, and names of our tables for dtype and op.

    NCCL connects two ranks at the first message in each direction, and all of them at the first collective by one of
    its algorithms: in C, on the host, until the other ranks have made the same call. Such a call is made in a thread of
    its own, while the caller waits as for anything else: with a deadline, and an abort that ends it.
    """

    capturable = True

    def __init__(self, rank: int, size: int, unique_id: Any, device: Any, timeout: float) -> None:
        self._timeout, self._device, self.size = timeout, device, size
        self.registers = os.environ.get("NCCL_LEGACY_CUDA_REGISTER", "0") != "0"
        self._connected: set[Hashable] = set()
        self._connecting: concurrent.futures.Future[Any] | None = None
        self._aborting, self._is_aborted = threading.Lock(), False
        self._windows: list[tuple[int, range]] = []  # and which addresses they have
        with _reported("init"):
            self._comm = self._within("init", lambda: nccl.NcclCommunicator(size, unique_id, rank))
        # CuPy's destructor would wait for the other ranks whenever the collector comes by
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        def enqueue() -> None:
            nccl.groupStart()
            try:
                for part in sends:
                    self._comm.send(part.address, part.nbytes, BYTE, part.peer, stream.ptr)
                for part in receives:
                    self._comm.recv(part.address, part.nbytes, BYTE, part.peer, stream.ptr)
            finally:
                nccl.groupEnd()

        ends = [*(("to", part.peer) for part in sends), *(("from", part.peer) for part in receives)]
        return self._call("send and receive", ends, enqueue)

    def call(self, call: NcclCall, stream: Any) -> Waiting:
        """Enqueue a collective. In a capture NCCL may register the buffers: all ranks then meet on the host each time.
        """
        enqueue = functools.partial(call.enqueue, stream)
        if stream.is_capturing():
            return self._connect(call.what, call.needed, enqueue)
        return self._call(call.what, call.needed, enqueue)

    def launcher(self, call: NcclCall) -> Callable[[Any], None] | None:
        """Return what enqueues `call` on a stream and never waits; None before the ranks have connected for it."""
        if not self._connected.issuperset(call.needed):
            return None

        def launch(stream: Any) -> None:
            try:
                call.enqueue(stream)
            except ERRORS as error:
                raise _ours(call.what, error) from error

        return launch

    def collective(self, name: str, source: int, target: int, count: int, dtype: str, *more: int) -> NcclCall:
        """Return a call; `more` are the op of what reduces, one of `OPS`, and the root where there is one.

        NCCL chooses its algorithm by the size: a call of another order of magnitude may be the first to use one. For
        arrays in windows it has others.
        """
        what = FOREIGN.get(name, name)
        function = functools.partial(self._foreign, what) if name in FOREIGN else getattr(self._comm, CUPYS[name])
        arguments = source, target, count, DTYPES[dtype], *more

        def enqueue(stream: Any) -> None:
            function(*arguments, stream.ptr)

        in_windows = all(any(end in there for _, there in self._windows) for end in (source, target))
        return NcclCall(what, ((what, count.bit_length(), *arguments[3:5], in_windows),), enqueue)

    def _foreign(self, function: str, source: int, target: int, count: int, dtype: int, *root_and_stream: int) -> None:
        *root, stream = root_and_stream
        _check(function, source, target, count, dtype, *root, self._comm.comm, stream)

    def _call(self, what: str, needed: Sequence[Hashable], enqueue: Callable[[], Any]) -> Waiting:
        """Enqueue where the connections that are `needed` are there; else make them first, in the waiting returned."""
        if self._connecting is not None or not self._connected.issuperset(needed):
            return self._connect(what, needed, enqueue)
        try:
            enqueue()
        except ERRORS as error:
            raise _ours(what, error) from error
        return NOTHING

    def _connect(self, what: str, needed: Sequence[Hashable], enqueue: Callable[[], Any]) -> Waiting:
        while self._connecting is not None:  # one thread at a time may call NCCL
            yield self._connecting.done
        self._connecting = begun = self._begin(what, enqueue)
        yield begun.done
        self._connecting = None
        with _reported(what):
            begun.result()
        self._connected.update(needed)

    def register(self, start: int, nbytes: int) -> None:
        """Make memory of `allocate` a window, the same bytes on all ranks; a collective call. NCCL may make none."""
        window = ctypes.c_void_p()

        def call() -> None:
            _check("ncclCommWindowRegister", self._comm.comm, start, nbytes, ctypes.byref(window), SYMMETRIC)

        self._within("window", call)
        if window.value:
            self._windows.append((window.value, range(start, start + nbytes)))

    def check(self) -> None:
        if not self._is_aborted:  # else its memory may be gone
            with _reported("communicator"):
                self._comm.check_async_error()

    def close(self, *, captured: bool) -> None:
        """Destroy the communicator, in a thread that is left to itself where that takes longer than the timeout.

        NCCL waits for the last graph that has `captured` a call: then so does that thread, and nobody else.
        """
        if captured:
            self._begin("close", self._destroy)
        else:
            with contextlib.suppress(CollectiveTimeout):
                self._within("close", self._destroy)  # NCCL forbids to abort what is being destroyed

    def _destroy(self) -> None:
        if self._windows:
            cupy.cuda.Device().synchronize()  # a graph that was launched before may still use them
        for window, _ in self._windows:
            _check("ncclCommWindowDeregister", self._comm.comm, window)
        self._comm.destroy()

    def abort(self) -> None:
        """End what is under way on this rank; idempotent. NCCL may itself wait for ever: then it is left to do so.

        CuPy's communicator is not told of an abort before that has ended: a second one would free the memory twice.
        """
        with self._aborting:
            is_first, self._is_aborted = not self._is_aborted, True
        if is_first:
            self._begin("abort", self._comm.abort)

    def _within(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns; CollectiveTimeout where NCCL waits longer than the timeout for other ranks."""
        try:
            return self._begin(what, call).result(min(self._timeout, threading.TIMEOUT_MAX))
        except concurrent.futures.TimeoutError:
            raise CollectiveTimeout(f"NCCL {what}: waited {self._timeout:g} s for the other ranks") from None

    def _begin(self, what: str, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Return what will come of `call`, made by a thread that no process waits for at its end, as an executor's."""
        outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def act() -> None:
            try:
                with self._device.current:
                    result = call()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        threading.Thread(target=act, name=f"gpucoll NCCL {what}", daemon=True).start()
        return outcome


def version() -> int:
    """Return NCCL's version at run time, e.g. 22703."""
    return int(nccl.get_version())


def lacks(collective: str) -> str | None:
    """Return None where this NCCL has `collective`, else the reason why not."""
    if collective in CUPYS or (collective in FOREIGN and version() >= FOREIGN_SINCE):
        return None
    if collective in FOREIGN:
        return f"NCCL {version()} has no {FOREIGN[collective]}, {FOREIGN_SINCE} has"
    return f"NCCL has no {collective}"


def lacks_float8(capability: int) -> str | None:
    """Return None where this NCCL reduces float8 on GPUs of compute capability `capability`, as 90, else why not."""
    if version() < FLOAT8_SINCE[0]:
        return f"NCCL {version()} does not reduce float8, {FLOAT8_SINCE[0]} does"
    needed = FLOAT8_SINCE[1]
    return None if capability >= needed else f"NCCL reduces float8 from sm_{needed} on, and a rank has sm_{capability}"


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the NCCL that CuPy has loaded."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name in FOREIGN.values() if version() >= FOREIGN_SINCE else ():
        root = [] if name == "ncclAlltoAll" else [integer]
        # library[name] would be another object each time
        getattr(library, name).argtypes = (pointer, pointer, ctypes.c_size_t, integer, *root, pointer, pointer)
    if version() >= WINDOWS_SINCE:
        library.ncclMemAlloc.argtypes = (pointer, ctypes.c_size_t)
        library.ncclMemFree.argtypes = (pointer,)
        library.ncclCommWindowRegister.argtypes = (pointer, pointer, ctypes.c_size_t, pointer, integer)
        library.ncclCommWindowDeregister.argtypes = (pointer, pointer)
    return library


def _check(function: str, *arguments: Any) -> None:
    """Call a function of NCCL's library; BackendError where it returns another code than success."""
    result = getattr(_library(), function)(*arguments)
    if result:
        raise BackendError(f"NCCL: {function} returned {result}: {last_error()}", code="GC-NCCL")


def allocate(nbytes: int) -> int:
    """Return memory of the current GPU that can become a window."""
    pointer = ctypes.c_void_p()
    _check("ncclMemAlloc", ctypes.byref(pointer), nbytes)
    return pointer.value or 0


def free(pointer: int) -> None:
    """Give such memory back."""
    _check("ncclMemFree", pointer)


def last_error() -> str:
    """Return NCCL's own words on its last error; there are none where it wrote them to its log only."""
    try:
        return (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
    except (OSError, AttributeError):  # before version 2.13
        return ""


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise _ours(what, error) from error


def _ours(what: str, error: Exception) -> BackendError:
    words = f"error code {error}" if isinstance(error, KeyError) else str(error)
    return BackendError(f"NCCL {what}: {words}: {last_error()}", code="GC-NCCL")
