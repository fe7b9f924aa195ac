"""Operations, the handle of an asynchronous call, the progress thread, and the time spent with operations under way.

An operation is a generator. Instead of waiting, the generator yields a predicate: true once the operation can go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from gpucoll.errors import GpucollError
from gpucoll.progress.partners import End

T = TypeVar("T")
Pending: TypeAlias = Callable[[], bool]
Operation: TypeAlias = Iterator[Pending]


def keep_for_ever(memory: object) -> None:
    """Keep `memory` alive until the process ends, because MPI may still write there."""
    # A reference in a module would not do: the interpreter drops module contents at exit, possibly before MPI ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def throw(operation: Operation, error: BaseException) -> None:
    """Raise `error` inside an operation, so that the operation cancels its messages or keeps their memory for ever."""
    if isinstance(operation, Generator):
        # The operation raises the error again, or another: the caller raises its own.
        with contextlib.suppress(BaseException):
            operation.throw(error)


def together(*operations: Operation) -> Operation:
    """Run operations side by side: all begin before the first wait, and none waits for another."""
    waiting = {one: next(one, None) for one in operations}
    ready: list[Operation] = []

    def some_go_on() -> bool:
        ready[:] = [one for one, pending in waiting.items() if pending is not None and pending()]
        return bool(ready)

    try:
        while any(waiting.values()):
            yield some_go_on
            waiting.update((one, next(one, None)) for one in ready)
    finally:
        for one in operations:
            if isinstance(one, Generator):
                one.close()


def in_thread(run: Callable[[Operation, str], None], call: Callable[[], T], name: str) -> T:
    """Return the result of `call`, a blocking call without a deadline, made in a helper thread.

    `run` waits for the thread, with a deadline; after a failed wait the daemon thread stays blocked in `call`.
    """
    came: list[tuple[Any, BaseException | None]] = []

    def make() -> None:
        try:
            came.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            came.append((None, error))

    def waiting() -> Operation:
        threading.Thread(target=make, daemon=True).start()
        yield lambda: bool(came)

    run(waiting(), name)
    found, error = came[0]
    if error is not None:
        raise error
    return cast("T", found)


class ProbeResult(NamedTuple):
    """A message that could be received now: sender, tag and length."""

    source: int
    tag: int
    nbytes: int


class Work(Generic[T]):
    """The handle of a collective or a message under way, returned with ``async_op=True``.

    The handle keeps the arrays alive. `wait` and `synchronize` raise the operation's error. In a coroutine, ``await
    work`` lets other tasks run until the operation has ended. A program does not call the class.

    The operation is the host's part of the call; `completion` is the part that follows on a stream.

    Parameters
    ----------
    waits : Progress
        The waits of the communicator.
    operation : generator
        The host's part of the call.
    name : str
        The name of the call.
    result : array or None
        The result of the call.
    completion : gpucoll.communicator.gpu.Completion or None, optional
        The part on a stream.
    pending : callable or None, optional
        What the operation waits for.
    ends : sequence, optional
        The messages between two ranks that the operation waits for; none for a collective.

    Attributes
    ----------
    result : array or None
        The array of the result; its content is valid after `wait`.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> def program(comm):
    ...     work = comm.all_reduce(numpy.array([1, comm.rank]), async_op=True)
    ...     return work.wait()
    >>> gc.run_local(program, 2)[0]
    array([2, 1])
    """

    def __init__(self, waits: Any, operation: Operation, name: str, result: T, completion: Any = None,
                 pending: Pending | None = None, ends: Sequence[End] = ()) -> None:
        self.name: str = name
        self.ends: Sequence[End] = ends
        self.error: GpucollError | None = None
        self._waits, self._completion, self._pending = waits, completion, pending
        self.operation: Operation = operation
        self.result: T = result  # the array; its content is valid after `wait`
        self._deadline: float | None = None
        self._finished = False
        self._hopeless: GpucollError | None = None

    def step(self, late: Callable[[str, Sequence[End]], GpucollError]) -> bool:
        """Advance as far as possible without waiting; return whether the operation has ended.

        Called by the communicator's waits.

        Parameters
        ----------
        late : callable
            Returns the error to raise at the deadline.

        Returns
        -------
        bool
            True after the end.

        Raises
        ------
        GpucollError
            The error of the deadline, or of `give_up`.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> _ = work.wait()
        >>> work.error is None
        True
        >>> comm.close()
        """
        # The deadline counts from the first step: a queued operation must not pay for those before.
        if self._deadline is None:
            self._deadline = time.monotonic() + self._waits.timeout
        # Resume the generator as long as its predicates are true; `None` before the first resumption.
        while self._pending is None or self._pending():
            self._waits.went_on = time.monotonic()
            self._pending = next(self.operation, None)
            if self._pending is None:
                self._finished = True
                return True
        if self._hopeless is not None:
            raise self._hopeless
        if time.monotonic() > self._deadline:
            raise late(self.name, self.ends)
        return False

    def give_up(self, error: GpucollError) -> None:
        """Let the next step raise `error`: the operation is known never to end.

        Called by the communicator's waits.

        Parameters
        ----------
        error : GpucollError
            The error.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> _ = work.wait()
        >>> work.give_up(gc.RevokedError("too late to matter"))
        >>> comm.close()
        """
        self._hopeless = error

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error, on the stream as well.

        Never waits.

        Returns
        -------
        bool
            True after the end.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> _ = work.wait()
        >>> work.is_completed()
        True
        >>> comm.close()
        """
        return self.is_enqueued() and (self.error is not None or self._completion is None or self._completion.done())

    def is_enqueued(self) -> bool:
        """Return whether the host's part has ended.

        The call advances the communicator's operations, but never waits.

        Returns
        -------
        bool
            True after the end of the host's part.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> _ = work.wait()
        >>> work.is_enqueued()
        True
        >>> comm.close()
        """
        # Poll here as well: without a progress thread (single-threaded MPI), nobody else advances the operation.
        if not self._ended():
            self._waits.advance()
        return self._ended()

    def _ended(self) -> bool:
        return self._finished or self.error is not None

    def _enqueue(self) -> None:
        # No deadline here: `step` has the operation's own, which starts when the operation reaches the queue's head.
        try:
            # Most messages end in their first step: a look at the flag costs less than a wait that is over at once.
            if self._ended():
                pass
            elif self.ends:
                self._waits.message_wait.until(self._waits, self)
            else:
                self._waits.until(self.is_enqueued, self.name, float("inf"))
        except GpucollError as error:
            # A hook has found that the operation cannot end: the communicator has failed, as in a blocking call.
            self._waits.broken(error, self.name)
            raise
        if self.error is not None:
            self._waits.note_reported(self.error)
            raise self.error

    def synchronize(self) -> None:
        """Block until the operation has ended, on the stream as well.

        Raises
        ------
        GpucollError
            The operation's error.

        See Also
        --------
        wait : The result.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> work.synchronize()
        >>> comm.close()
        """
        self._enqueue()
        if self._completion is not None:
            self._waits.finish(self._completion.done, self.name, self._deadline, self.ends)

    def wait(self) -> T:
        """Return the result, ready for use.

        On host arrays, block until the operation has ended. On a GPU, make the current stream wait instead.

        Returns
        -------
        array or None
            The result of the call.

        Raises
        ------
        GpucollError
            The operation's error.

        See Also
        --------
        synchronize : Wait on the host, also for a GPU.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> work.wait()
        array([3])
        >>> comm.close()
        """
        self._enqueue()
        if self._completion is not None:
            self._waits.check()  # after an abort the stream completes, but with incomplete results
            self._completion.order()
        return self.result

    def done(self) -> bool:
        """Return `is_completed`, as futures of Python have it.

        Returns
        -------
        bool
            True after the end.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> work = comm.all_reduce(numpy.array([3]), async_op=True)
        >>> _ = work.wait()
        >>> work.done()
        True
        >>> comm.close()
        """
        return self.is_completed()

    def __await__(self) -> Generator[None, None, T]:
        """Let other tasks of the event loop run until the operation has ended; return the result."""
        while not self.is_completed():
            yield
        return self.wait()

    def __repr__(self) -> str:
        state = "under way" if not self._ended() else "ended" if self.error is None else f"failed: {self.error}"
        return f"<Work of {self.name}: {state}>"


_served: weakref.WeakSet[Any] = weakref.WeakSet()  # every `Progress` with a progress thread, now or earlier


def start_serving(waits: Any, more: threading.Event) -> threading.Thread:
    """Start and return the progress thread of `waits`; the thread sleeps until `more` is set."""
    # Wake the thread when `waits` is dropped, so that the thread ends. Not at exit, where daemon threads end anyway.
    weakref.finalize(waits, more.set).atexit = False
    thread = threading.Thread(target=_serve, args=(weakref.ref(waits), more), name="gpucoll progress", daemon=True)
    thread.start()
    _served.add(waits)
    return thread


def _serve(reference: weakref.ref[Any], more: threading.Event) -> None:
    """Serve a communicator's operations until the communicator is closed or dropped: the progress thread's body."""
    # A reference is held only while operations are under way, so that a dropped communicator can be freed.
    is_wanted = True
    while is_wanted:
        more.wait()
        # Clear before serving: work submitted from here on sets the event again and is never missed.
        more.clear()
        waits = reference()
        is_wanted = waits is not None and waits.serve()
        # Drop the reference before sleeping.
        del waits


def all_served() -> list[Any]:
    """Return every `Progress` with a progress thread."""
    return [waits for waits in list(_served) if waits.is_served]


def kind_of(error: BaseException) -> object:
    """Return the part of an error that is equal if two threads detect the same failure: type and ranks."""
    return type(error), getattr(error, "ranks", ())
