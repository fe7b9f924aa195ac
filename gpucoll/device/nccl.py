"""One rank's NCCL communicator: the only file that names `cupy.cuda.nccl`.

What CuPy's binding lacks is called by ctypes in the library that it has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
SINCE = {"ncclAlltoAll": 22800, "ncclGather": 22800, "ncclScatter": 22800}  # versions, as ncclGetVersion counts them

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
PROTOTYPES = {
    "ncclAlltoAll": (_pointer, _pointer, _size, _int, _pointer, _pointer),
    "ncclGather": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    "ncclScatter": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
}


class Nccl:
    """NCCL's calls on addresses and streams; made by all ranks together, at most `timeout` seconds long.

    Collectives take the number of elements of a block, and names of our tables for dtype and op.
    """

    capturable = True

    def __init__(self, rank: int, size: int, unique_id: Any, device: Any, timeout: float) -> None:
        self._timeout, self._device, self.size = timeout, device, size
        with _reported("init"):
            self._comm = self._within("init", lambda: nccl.NcclCommunicator(size, unique_id, rank))
        # CuPy's destructor would wait for the other ranks whenever the collector comes by
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        with _reported("send and receive"):
            nccl.groupStart()
            try:
                for part in sends:
                    self._comm.send(part.address, part.nbytes, BYTE, part.peer, stream.ptr)
                for part in receives:
                    self._comm.recv(part.address, part.nbytes, BYTE, part.peer, stream.ptr)
            finally:
                nccl.groupEnd()
        return iter(())

    def all_reduce(self, source: int, target: int, count: int, dtype: str, op: str, stream: Any) -> None:
        with _reported("all_reduce"):
            self._comm.allReduce(source, target, count, DTYPES[dtype], OPS[op], stream.ptr)

    def reduce(self, source: int, target: int, count: int, dtype: str, op: str, root: int, stream: Any) -> None:
        with _reported("reduce"):
            self._comm.reduce(source, target, count, DTYPES[dtype], OPS[op], root, stream.ptr)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: str, op: str, stream: Any) -> None:
        with _reported("reduce_scatter"):
            self._comm.reduceScatter(source, target, count, DTYPES[dtype], OPS[op], stream.ptr)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: Any) -> None:
        with _reported("broadcast"):
            self._comm.broadcast(source, target, nbytes, BYTE, root, stream.ptr)

    def all_gather(self, source: int, target: int, nbytes: int, stream: Any) -> None:
        with _reported("all_gather"):
            self._comm.allGather(source, target, nbytes, BYTE, stream.ptr)

    def all_to_all(self, source: int, target: int, nbytes: int, stream: Any) -> None:
        self._foreign("ncclAlltoAll", source, target, nbytes, BYTE, self._comm.comm, stream.ptr)

    def gather(self, source: int, target: int, nbytes: int, root: int, stream: Any) -> None:
        self._foreign("ncclGather", source, target, nbytes, BYTE, root, self._comm.comm, stream.ptr)

    def scatter(self, source: int, target: int, nbytes: int, root: int, stream: Any) -> None:
        self._foreign("ncclScatter", source, target, nbytes, BYTE, root, self._comm.comm, stream.ptr)

    def _foreign(self, function: str, *arguments: Any) -> None:
        result = getattr(_library(), function)(*arguments)
        if result:
            raise BackendError(f"NCCL: {function} returned {result}: {last_error()}", code="GC-NCCL")

    def check(self) -> None:
        with _reported("communicator"):
            self._comm.check_async_error()

    def close(self) -> None:
        """Destroy the communicator; abort it where that takes longer than the timeout."""
        try:
            self._within("close", self._comm.destroy)
        except CollectiveTimeout:
            self.abort()

    def abort(self) -> None:
        """End what is under way on this rank. NCCL may itself wait for ever: then it is left to do so."""
        threading.Thread(target=self._comm.abort, name="gpucoll abort", daemon=True).start()

    def _within(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns; CollectiveTimeout where NCCL waits longer than the timeout for other ranks."""
        outcome: list[Any] = []

        def act() -> None:
            self._device.use()
            try:
                outcome.append((call(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=act, name=f"gpucoll NCCL {what}", daemon=True)
        thread.start()
        thread.join(min(self._timeout, threading.TIMEOUT_MAX))
        if not outcome:
            raise CollectiveTimeout(f"NCCL {what}: waited {self._timeout:g} s for the other ranks")
        result, error = outcome[0]
        if error is not None:
            raise error
        return result


def version() -> int:
    """Return NCCL's version at run time, e.g. 22703."""
    return int(nccl.get_version())


def lacks(function: str) -> str | None:
    """Return None where this NCCL has `function`, else the reason why not."""
    needed = SINCE.get(function, 0)
    return None if version() >= needed else f"NCCL {version()} has no {function}, {needed} has"


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the NCCL that CuPy has loaded."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    for name, arguments in PROTOTYPES.items():
        if lacks(name) is None:
            getattr(library, name).argtypes = arguments  # library[name] would be another object each time
    return library


def last_error() -> str:
    """Return NCCL's own words on its last error; there are none where it wrote them to its log only."""
    try:
        return (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
    except (OSError, AttributeError):  # before version 2.13
        return ""


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Raise NCCL's and CUDA's errors as BackendError; CuPy raises KeyError for codes that it does not know."""
    try:
        yield
    except KeyError as error:
        raise BackendError(f"NCCL {what}: error code {error}: {last_error()}", code="GC-NCCL") from error
    except (nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise BackendError(f"NCCL {what}: {error}: {last_error()}", code="GC-NCCL") from error
