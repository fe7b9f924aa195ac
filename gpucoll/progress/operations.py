"""An operation under way, the handle to it that ``async_op=True`` returns, how long any has been under way; naps."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from gpucoll.errors import GpucollError

T = TypeVar("T")
Pending: TypeAlias = Callable[[], bool]
Operation: TypeAlias = Iterator[Pending]


def keep_for_ever(memory: object) -> None:
    """Let `memory` outlive even the interpreter: MPI may write into it until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def throw(operation: Operation, error: BaseException) -> None:
    """Tell an operation that it has failed: it calls back its messages, and keeps what cannot be called back."""
    if isinstance(operation, Generator):
        with contextlib.suppress(BaseException):
            operation.throw(error)


def beside(run: Callable[[Operation, str], None], call: Callable[[], T], name: str) -> T:
    """Return what `call` returns, which has no deadline of its own: a thread makes it, and `run` waits for its end."""
    came: list[tuple[Any, BaseException | None]] = []

    def make() -> None:
        try:
            came.append((call(), None))
        except BaseException as error:
            came.append((None, error))

    def waiting() -> Operation:
        threading.Thread(target=make, daemon=True).start()
        yield lambda: bool(came)

    run(waiting(), name)
    found, error = came[0]
    if error is not None:
        raise error
    return cast("T", found)


class Seen(NamedTuple):
    """A message that could be received now: who has sent it, with which tag, how long it is."""

    source: int
    tag: int
    nbytes: int


class Work:
    """A collective under way: the handle that ``async_op=True`` returns.

    It keeps its arrays alive. An error of the operation is raised by `wait` and `synchronize`. `completion` is what
    follows on a stream once the operation itself, the host's part, has ended: `gpucoll.communicator.gpu.Completion`.
    """

    def __init__(self, waits: Any, operation: Operation, name: str, result: Any, completion: Any = None,
                 pending: Pending | None = None) -> None:
        self.name = name
        self.error: GpucollError | None = None
        self._waits = waits
        self.operation = operation
        self._result = result
        self._completion = completion
        self._pending = pending
        self._deadline: float | None = None
        self._finished = False

    def step(self, late: Callable[[str], GpucollError]) -> bool:
        """Go on as far as possible without waiting; return whether the operation has ended."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._waits.timeout
        while self._pending is None or self._pending():
            self._waits.went_on = time.monotonic()
            self._pending = next(self.operation, None)
            if self._pending is None:
                self._finished = True
                return True
        if time.monotonic() > self._deadline:
            raise late(self.name)
        return False

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly, on its stream too; never waits."""
        return self.is_enqueued() and (self.error is not None or self._completion is None or self._completion.done())

    def is_enqueued(self) -> bool:
        """Return whether the host's part has ended."""
        if not self._ended():
            self._waits.advance()
        return self._ended()

    def _ended(self) -> bool:
        return self._finished or self.error is not None

    def _enqueue(self) -> None:
        self._waits.until(self.is_enqueued, self.name, float("inf"))  # which has a deadline of its own
        if self.error is not None:
            self._waits.note_reported(self.error)
            raise self.error

    def synchronize(self) -> None:
        """Block until the operation has ended; raise its error."""
        self._enqueue()
        if self._completion is not None:
            self._waits.finish(self._completion.done, self.name, self._deadline)

    def wait(self) -> Any:
        """Return the result once it may be used: on host arrays when the operation has ended, on a GPU in the current
        stream, which is made to wait for it."""
        self._enqueue()
        if self._completion is not None:
            self._waits.check()  # after a failure the stream comes to its end, with results that are not complete
            self._completion.order()
        return self._result

    @property
    def result(self) -> Any:
        """The array that will hold the result; its content counts after `wait`."""
        return self._result


class UnderWay:
    """Seconds in which at least one operation was under way; the clock is read when the first begins, the last ends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # which a signal handler may ask for again
        self._operations, self._since, self._before = 0, 0.0, 0.0

    def began(self) -> None:
        """Note that one more is under way."""
        with self._lock:
            if not self._operations:
                self._since = self._clock()
            self._operations += 1

    def ended(self) -> None:
        """Note that one has ended, well or badly."""
        with self._lock:
            self._operations -= 1
            if not self._operations:
                self._before += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Those until now."""
        with self._lock:
            return self._before + (self._clock() - self._since if self._operations else 0.0)


_served: weakref.WeakSet[Any] = weakref.WeakSet()  # `Waits` that have, or had, a progress thread


def start_serving(waits: Any, more: threading.Event) -> threading.Thread:
    """Start the progress thread of `waits`, which sleeps until `more` is set; return it."""
    weakref.finalize(waits, more.set).atexit = False  # the thread's end
    thread = threading.Thread(target=_serve, args=(weakref.ref(waits), more), name="gpucoll progress", daemon=True)
    thread.start()
    _served.add(waits)
    return thread


def _serve(reference: weakref.ref[Any], more: threading.Event) -> None:
    """Go on with what a communicator has under way, which alone keeps it: one that was dropped ends its thread."""
    is_wanted = True
    while is_wanted:
        more.wait()
        more.clear()
        waits = reference()
        is_wanted = waits is not None and waits.serve()
        del waits


def drain_all() -> None:
    """Complete what is under way before MPI ends: a work that was dropped is still awaited by other ranks."""
    for waits in list(_served):
        waits.drain()


def kind_of(error: BaseException) -> object:
    """Return what is alike in the errors of two threads that meet the same failure."""
    return type(error), getattr(error, "ranks", ())


def raising(error: GpucollError) -> Callable[[], None]:
    """Return a hook that ends every wait by this error."""
    def hook() -> None:
        raise error

    return hook
