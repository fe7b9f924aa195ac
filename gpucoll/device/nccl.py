"""One rank's NCCL communicator, through CuPy's binding `cupy.cuda.nccl`.

Functions missing in the binding are called by ctypes, in the NCCL library already loaded by CuPy. A window is memory
registered with NCCL for faster collectives.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.device import GroupPart, Waiting
from gpucoll.device.gpus import cupy, nccl
from gpucoll.device.gpus import library as loaded
from gpucoll.device.nccl_settings import SELECTION_SINCE, WINDOWS, selecting, written
from gpucoll.errors import BackendError, CollectiveTimeout
from gpucoll.progress.operations import Operation, Pending, keep_for_ever
from gpucoll.progress.waits import Progress

# Enumerations of nccl.h, under the names in the tables of `gpucoll.core`.
NCCL_DTYPES = {"ncclInt8": 0, "ncclUint8": 1, "ncclInt32": 2, "ncclUint32": 3, "ncclInt64": 4, "ncclUint64": 5,
               "ncclFloat16": 6, "ncclFloat32": 7, "ncclFloat64": 8, "ncclBfloat16": 9, "ncclFloat8e4m3": 10,
               "ncclFloat8e5m2": 11}
NCCL_OPS = {"ncclSum": 0, "ncclProd": 1, "ncclMax": 2, "ncclMin": 3, "ncclAvg": 4}
NCCL_UINT8 = NCCL_DTYPES["ncclUint8"]
CUPYS = {"all_reduce": "allReduce", "reduce": "reduce", "reduce_scatter": "reduceScatter", "broadcast": "broadcast",
         "all_gather": "allGather"}
# Collectives missing in CuPy's binding, and the NCCL version introducing these functions, as ncclGetVersion counts.
FOREIGN = {"all_to_all": "ncclAlltoAll", "gather": "ncclGather", "scatter": "ncclScatter"}
FOREIGN_SINCE = 22800
# The functions of the collectives that take an algorithm of NCCL.
SELECTING = {"all_reduce": "ncclAllReduceConfig", "reduce": "ncclReduceConfig", "broadcast": "ncclBroadcastConfig",
             "reduce_scatter": "ncclReduceScatterConfig", "all_gather": "ncclAllGatherConfig"}
WINDOWS_SINCE = 22700
SPLIT_SINCE = 21800
NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
CUDA_ERROR = 1  # ncclUnhandledCudaError
# CuPy raises KeyError for an error code unknown to CuPy.
ERRORS = (KeyError, nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError)
_dropped: list[tuple[int, int]] = []  # memory for windows, to be freed: GPU and address
COMPLETE: Waiting = iter(())  # an operation already complete
# The usual cures: the variable, what to say, and the signs in NCCL's error. 401 and 802 are the errors of CUDA if the
# Fabric Manager cannot set up multicast; newer versions of NCCL name the variable themselves. Without cuMem, NCCL does
# not pass file descriptors between the processes.
CURES: list[tuple[str, str, tuple[str, ...]]] = [
    ("GPUCOLL_SHARE_GPU", "two ranks are on one GPU: start at most as many ranks as GPUs", ("duplicate gpu",)),
    ("NCCL_NVLS_ENABLE", "the multicast of NVLink switches has failed, often for a sick Fabric Manager: "
     "NCCL_NVLS_ENABLE=0 goes on without",
     ("nvls", "multicast", "failure 401", "failure 802", "error 401", "error 802")),
    ("NCCL_CUMEM_ENABLE", "the exchange of cuMem handles between the ranks has failed: NCCL_CUMEM_ENABLE=0 goes on "
     "without", ("cumem", "shareable", "convert fd", "memory handle")),
]
HANGS = ("if NCCL itself hangs: NCCL_DEBUG=INFO prints more, and NCCL_NVLS_ENABLE=0 or NCCL_CUMEM_ENABLE=0 are the "
         "usual cures")


class NcclCall(NamedTuple):
    """A collective of NCCL on given memory."""

    what: str  # name for error messages
    needed: tuple[Hashable, ...]  # keys of the connections used by the collective
    enqueue: Callable[[Any], None]  # enqueues the collective on a stream


FLOAT8_SINCE = 22400, 90  # NCCL version and compute capability supporting reductions of float8


class Family:
    """NCCL communicators with common resources: a communicator, and all parts made of it by `Nccl.split`.

    NCCL allows one thread at a time in a family. The abort of one communicator ends the work of the whole family.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared  # whether parts join the family
        # The calls that wait for their turn in NCCL, the call now in NCCL first.
        self.turns: collections.deque[object] = collections.deque()
        self.is_aborted = False


class Nccl:
    """The NCCL communicator of one rank: calls on addresses and streams.

    `make` returns the communicator of CuPy's binding; all ranks make it together, by the id that the operation
    ``agree()`` returns, at the first call or in `open`. `waits` waits for them. A communicator made by `split` belongs
    to the `family` of its parent.

    NCCL connects two ranks at the first message in each direction, and all ranks at the first collective with a new
    algorithm. Connecting blocks the calling thread inside NCCL until the other ranks make the same call. Therefore a
    call that may connect runs in a helper thread. Meanwhile the caller waits with a deadline and the chance to abort.
    """

    capturable = True

    def __init__(self, make: Callable[[Any], Any], size: int, device: Any, waits: Progress, family: Family,
                 agree: Callable[[], Generator[Pending, None, Any]] | None = None) -> None:
        self._waits, self._device = waits, device
        self.size: int = size
        self._family = family
        self._make, self._agree = make, agree
        self._comm: Any = None
        self.registers: bool = os.environ.get("NCCL_LEGACY_CUDA_REGISTER", "0") != "0"
        self._connected: set[Hashable] = set()
        # Only the first `abort` may call NCCL, and the watchdog's thread may abort at the same time as the caller.
        self._aborting, self._is_aborted = threading.Lock(), False
        self._windows: list[tuple[int, range]] = []  # handle and addresses of each window

    def open(self) -> Nccl:
        """Make the communicator now, and wait for the other ranks."""
        self._waited("init", self._opened())
        return self

    def _opened(self) -> Operation:
        came: list[Any] = []
        unique_id = None if self._agree is None else (yield from self._agree())
        yield from self._call_together("init", lambda: self._make(unique_id), came)
        # Never run CuPy's destructor: the garbage collector would call the destructor at an arbitrary time, and the
        # destructor waits for the other ranks.
        keep_for_ever(came[0])
        with self._aborting:
            self._comm, is_late = came[0], self._is_aborted
        if is_late:
            self._begin("abort", came[0].abort)

    def group(self, sends: Sequence[GroupPart], receives: Sequence[GroupPart], stream: Any) -> Waiting:
        def enqueue() -> None:
            nccl.groupStart()
            try:
                for part in sends:
                    self._comm.send(part.address, part.nbytes, NCCL_UINT8, part.peer, stream.ptr)
                for part in receives:
                    self._comm.recv(part.address, part.nbytes, NCCL_UINT8, part.peer, stream.ptr)
            finally:
                nccl.groupEnd()

        # NCCL connects each direction of a pair of ranks on its own.
        ends = [*(("to", part.peer) for part in sends), *(("from", part.peer) for part in receives)]
        return self._call("send and receive", ends, enqueue)

    def call(self, call: NcclCall, stream: Any) -> Waiting:
        """Enqueue a collective; yield while the ranks connect."""
        enqueue = functools.partial(call.enqueue, stream)
        # In a capture NCCL may register the buffers with the other ranks and then blocks in every call, not only in
        # the first call: always use a helper thread.
        if stream.is_capturing():
            return self._in_turn(call.what, call.needed, enqueue, by_helper=True)
        return self._call(call.what, call.needed, enqueue)

    def launcher(self, call: NcclCall) -> Callable[[Any], None] | None:
        """Return a function that enqueues `call` on a stream without waiting; None before the ranks are connected."""
        # In a family a call may have to wait for its turn.
        if self._family.shared or not self._connected.issuperset(call.needed):
            return None

        def launch(stream: Any) -> None:
            try:
                call.enqueue(stream)
            except ERRORS as error:
                raise _ours(call.what, error) from error

        return launch

    def collective(self, name: str, source: int, target: int, count: int, dtype: str, *more: int,
                   selection: str = "") -> NcclCall:
        """Return the collective `name` on the arrays at the addresses `source` and `target`.

        `count` is the number of elements, of a block in collectives with blocks; `dtype` is a key of `NCCL_DTYPES`.
        `more` are the op of a reducing collective, a value of `NCCL_OPS`, and the root of a rooted collective.
        `selection` is NCCL's algorithm, or "" for NCCL's choice.
        """
        config = [ctypes.byref(selecting(selection))] if selection else []
        what = SELECTING[name] if selection else FOREIGN.get(name, name)
        function = functools.partial(self._foreign, what, config) if selection or name in FOREIGN else \
            getattr(self._comm, CUPYS[name])
        arguments = source, target, count, NCCL_DTYPES[dtype], *more

        def enqueue(stream: Any) -> None:
            function(*arguments, stream.ptr)

        # NCCL chooses an algorithm by the size, and has other algorithms for arrays in windows. A call of another order
        # of magnitude may need new connections, so the key of the connections holds the bit length of `count`.
        in_windows = all(any(end in there for _, there in self._windows) for end in (source, target))
        return NcclCall(what, ((what, selection, count.bit_length(), *arguments[3:5], in_windows),), enqueue)

    def _foreign(self, function: str, config: Sequence[Any], *arguments: int) -> None:
        *most, stream = arguments
        _check(function, *most, self._comm.comm, stream, *config)

    def split(self, color: int | None, key: int, size: int, waits: Progress | None) -> Nccl | None:
        """Return the communicator of the `size` ranks of the same `color`, ordered by `key`; None without a color.

        `waits` are those of the part. A collective call of all ranks, with no work under way on the GPU.
        """
        self._check_family()
        color = NO_COLOR if color is None else color
        part = Nccl(lambda _: self._comm.commSplit(color, key), size, self._device, self._waits, self._family).open()
        part._waits = waits or part._waits  # from here on the part waits for its own ranks alone
        return None if part._comm is None else part

    def _call(self, what: str, needed: Sequence[Hashable], enqueue: Callable[[], Any]) -> Waiting:
        """Enqueue at once if all connections in `needed` exist; else return an operation connecting and enqueuing."""
        if self._family.shared or self._family.turns or not self._connected.issuperset(needed):
            return self._in_turn(what, needed, enqueue)
        with _reported(what):
            enqueue()
        return COMPLETE

    def _in_turn(self, what: str, needed: Sequence[Hashable], enqueue: Callable[[], Any], *, by_helper: bool = False
                 ) -> Waiting:
        """Enqueue after all calls that came before to the family; in a helper thread, if the ranks may connect."""
        turn, turns, begun = object(), self._family.turns, None
        turns.append(turn)
        try:
            while turns[0] is not turn:
                yield lambda: turns[0] is turn
            self._check_family()
            with _reported(what):
                if self._comm is None:
                    yield from self._opened()
                    self._check_family()
                if by_helper or not self._connected.issuperset(needed):
                    begun = self._begin(what, enqueue)
                    yield begun.done
                    begun.result()
                    self._connected.update(needed)
                else:
                    enqueue()
            # A family aborted meanwhile has enqueued nothing, or a kernel that ends without a result.
            self._check_family()
        finally:
            # A helper thread still in NCCL keeps its turn: later calls wait until their deadlines.
            if begun is None or begun.done():
                turns.remove(turn)

    def register(self, start: int, nbytes: int) -> None:
        """Register memory of `allocate` as a window, of one size on all ranks. A collective call. NCCL may decline."""
        window = ctypes.c_void_p()

        def call() -> None:
            _check("ncclCommWindowRegister", self._comm.comm, start, nbytes, ctypes.byref(window), SYMMETRIC)

        self._waited("window", self._call_together("window", call, []))
        if window.value:
            self._windows.append((window.value, range(start, start + nbytes)))

    def check(self) -> None:
        # After an abort the memory of NCCL's communicator may be freed.
        if self._comm is not None and not self._is_aborted:
            self._check_family()
            with _reported("communicator"):
                self._comm.check_async_error()

    def _check_family(self) -> None:
        # The kernels of an aborted family end without results, and NCCL reports no error.
        if self._family.is_aborted:
            raise BackendError("NCCL: the communicator was aborted, or with split_share another one that shares its "
                               "resources", code="GC-NCCL")

    def close(self, *, captured: bool) -> None:
        """Destroy the communicator in a helper thread; after the timeout return and leave the thread running.

        NCCL waits until all graphs with `captured` calls are destroyed. In this case return at once; a communicator of
        a family then stays, since the wait would be in NCCL beside the family's other calls.
        """
        if self._comm is None:  # no message has come
            return
        if captured:
            if not self._family.shared:
                self._begin("close", self._destroy)
        else:
            # Waits of its own, without the hooks: other ranks may have closed and ended by now, as they should. No
            # abort after a timeout, because NCCL forbids aborting a communicator under destruction.
            with contextlib.suppress(CollectiveTimeout):
                Progress(self._waits.timeout).run(self._call_together("close", self._destroy, []), "NCCL close")

    def _destroy(self) -> None:
        # A graph launched earlier may still use the windows.
        if self._windows:
            cupy.cuda.Device().synchronize()
        for window, _ in self._windows:
            _check("ncclCommWindowDeregister", self._comm.comm, window)
        self._comm.destroy()

    def abort(self) -> None:
        """Abort the operations under way on this rank, in a helper thread; idempotent; return at once."""
        # A helper thread, because NCCL's abort may block for ever. Only the first call aborts: CuPy's communicator
        # records an abort only after the end of the abort, so a second abort would free the memory twice.
        with self._aborting:
            is_first, self._is_aborted = not self._is_aborted, True
            self._family.is_aborted = True
        if is_first and self._comm is not None:
            self._begin("abort", self._comm.abort)

    def _waited(self, what: str, operation: Operation) -> None:
        """Run an operation in which all ranks meet inside of NCCL; a failure revokes the communicator."""
        try:
            self._waits.run(operation, f"NCCL {what}")
        except CollectiveTimeout as late:
            raise CollectiveTimeout(f"{late.args[0]}; {HANGS}", ranks=late.ranks) from late

    def _call_together(self, what: str, call: Callable[[], Any], came: list[Any]) -> Operation:
        """Append the result of `call`, run in a helper thread, to `came`; abort a communicator that comes too late."""
        begun = self._begin(what, call)
        try:
            with _reported(what):
                yield begun.done
                came.append(begun.result())
        except BaseException as error:
            # An error of CUDA, such as those of NVLS, is this GPU's; others may tell of a rank that has died.
            if isinstance(error, BackendError) and getattr(error.__cause__, "status", None) == CUDA_ERROR:
                error.own = True
            # NCCL gives the handle to abort only at the end of `call`.
            begun.add_done_callback(self._give_up)
            raise

    def _give_up(self, begun: concurrent.futures.Future[Any]) -> None:
        comm = None if begun.exception() else begun.result()
        if comm is not None:
            keep_for_ever(comm)  # see `__init__`
            self._begin("abort", comm.abort)

    def _begin(self, what: str, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Run `call` in a helper thread; return a future for the result."""
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


def joined(rank: int, size: int, unique_id: Any, device: Any, waits: Progress, settings: Mapping[str, Any]) -> Nccl:
    """Return the communicator of `size` ranks with the same `unique_id` and these `settings` of NCCL.

    A collective call, unless `unique_id` is the operation in which the ranks agree on the id, at their first call. Such
    a communicator has no parts. The parts of others share the resources if the settings say so.
    """
    agree = unique_id if callable(unique_id) else None
    own = {name: value for name, value in settings.items()
           if name != WINDOWS and (agree is None or name not in ("split_share", "shrink_share"))}
    if own.get("split_share") and version() < SPLIT_SINCE:
        raise BackendError(f"nccl: split_share: NCCL {version()} has no ncclCommSplit, which needs {SPLIT_SINCE}",
                           code="GC-NCCL")
    config = written(nccl.NcclConfig(), own) if own else None
    family = Family(shared=bool(own.get("split_share")))
    if agree is not None:
        return Nccl(lambda one: nccl.NcclCommunicator(size, one, rank, config), size, device, waits, family, agree)
    return Nccl(lambda _: nccl.NcclCommunicator(size, unique_id, rank, config), size, device, waits, family).open()


def version() -> int:
    """Return NCCL's version at run time, e.g. 22703."""
    return int(nccl.get_version())


def lacks(collective: str) -> str | None:
    """Return None if the loaded NCCL supports `collective`, else the reason."""
    if collective in CUPYS or (collective in FOREIGN and version() >= FOREIGN_SINCE):
        return None
    if collective in FOREIGN:
        return f"NCCL {version()} has no {FOREIGN[collective]}, {FOREIGN_SINCE} has"
    return f"NCCL has no {collective}"


def lacks_selection() -> str | None:
    """Return None if the loaded NCCL takes an algorithm for each call, else the reason."""
    return None if version() >= SELECTION_SINCE else \
        f"NCCL {version()} takes no algorithm for a call, {SELECTION_SINCE} does; NCCL_ALGO is for a whole process"


def lacks_float8(capability: int) -> str | None:
    """Return None if the loaded NCCL reduces float8 on GPUs of a compute capability, such as 90, else the reason."""
    if version() < FLOAT8_SINCE[0]:
        return f"NCCL {version()} does not reduce float8, {FLOAT8_SINCE[0]} does"
    needed = FLOAT8_SINCE[1]
    return None if capability >= needed else f"NCCL reduces float8 from sm_{needed} on, and a rank has sm_{capability}"


@functools.cache
def _library() -> Any:
    library = loaded("libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name in FOREIGN.values() if version() >= FOREIGN_SINCE else ():
        root = [] if name == "ncclAlltoAll" else [integer]
        # Set the types by `getattr`: `library[name]` returns a new function object each time.
        getattr(library, name).argtypes = (pointer, pointer, ctypes.c_size_t, integer, *root, pointer, pointer)
    for name in SELECTING.values() if version() >= SELECTION_SINCE else ():
        more = {"ncclReduceConfig": 2, "ncclAllGatherConfig": 0}.get(name, 1) * [integer]  # op and root
        getattr(library, name).argtypes = (pointer, pointer, ctypes.c_size_t, integer, *more, *3 * [pointer])
    if version() >= WINDOWS_SINCE:
        library.ncclMemAlloc.argtypes = (pointer, ctypes.c_size_t)
        library.ncclMemFree.argtypes = (pointer,)
        library.ncclCommWindowRegister.argtypes = (pointer, pointer, ctypes.c_size_t, pointer, integer)
        library.ncclCommWindowDeregister.argtypes = (pointer, pointer)
    return library


def _check(function: str, *arguments: Any) -> None:
    """Call a function of the NCCL library; raise BackendError for any code except success."""
    result = getattr(_library(), function)(*arguments)
    if result:
        raise BackendError(f"NCCL: {_with_cure(f'{function} returned {result}: {last_error()}')}", code="GC-NCCL")


def allocate(nbytes: int) -> int:
    """Return the address of new memory on the current GPU, suitable for a window; before, free what `free` has kept."""
    for one in [one for one in list(_dropped) if one[0] == cupy.cuda.runtime.getDevice()]:
        with contextlib.suppress(ValueError):  # another thread has freed it
            _dropped.remove(one)
            cupy.cuda.Device().synchronize()  # as cudaFree does, and ncclMemFree does not
            _check("ncclMemFree", one[1])
    pointer = ctypes.c_void_p()
    _check("ncclMemAlloc", ctypes.byref(pointer), nbytes)
    return pointer.value or 0


def free(pointer: int) -> None:
    """Keep memory of `allocate` for the next `allocate`: a wait in a garbage collection would spoil a capture."""
    _dropped.append((cupy.cuda.runtime.getDevice(), pointer))


def last_error() -> str:
    """Return NCCL's text of the last error; an empty string if NCCL wrote the text only to a log."""
    try:
        return (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
    # NCCL before 2.13 has no ncclGetLastError.
    except (OSError, AttributeError):
        return ""


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise _ours(what, error) from error


def _ours(what: str, error: Exception) -> BackendError:
    reason = f"error code {error}" if isinstance(error, KeyError) else str(error)
    return BackendError(f"NCCL {what}: {_with_cure(f'{reason}: {last_error()}')}", code="GC-NCCL")


def _with_cure(said: str) -> str:
    """Return NCCL's words of an error on one line, with the usual cure, as far as NCCL does not name it.

    >>> _with_cure("unhandled cuda error: Cuda failure 401 'the operation cannot be performed in the present state'")
    "unhandled cuda error: Cuda failure 401 'the operation cannot be performed in the present state'; \
the multicast of NVLink switches has failed, often for a sick Fabric Manager: NCCL_NVLS_ENABLE=0 goes on without; \
NCCL_DEBUG=INFO prints more"
    """
    said = " ".join(said.split())
    lower = said.lower()
    cures = [cure for variable, cure, signs in CURES if variable not in said and any(sign in lower for sign in signs)]
    more = [] if "NCCL_DEBUG" in said else ["NCCL_DEBUG=INFO prints more"]
    return "; ".join([said.rstrip(": "), *cures, *more])
