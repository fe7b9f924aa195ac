"""Handles of calls under way, as torch's, and the thread that makes calls beside the computation."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import DistBackendError
from torch.distributed import Work as Handle  # type: ignore[attr-defined, unused-ignore]

from gpucoll.errors import ArgumentError, CollectiveTimeout, DtypeError, GpucollError
from gpucoll.transport.rendezvous import becomes

Call = Callable[[], None]


@contextlib.contextmanager
def as_torch_raises() -> Iterator[None]:
    """Raise DistBackendError for what is wrong with ranks; what is wrong with arguments has the right class."""
    try:
        yield
    except (ArgumentError, DtypeError):
        raise
    except GpucollError as error:
        late = isinstance(error, CollectiveTimeout)  # of which torch's own errors have the word
        raise DistBackendError(f"the timeout has passed: {error}" if late else str(error)) from error


class TorchWork(Handle):
    """A call that has ended; those below are under way. `outputs` are the tensors that have its results."""

    def __init__(self, outputs: Sequence[Any] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._future: Any = None
        self.error: BaseException | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return True when the results may be used; raise the call's error, DistBackendError after `timeout`."""
        if not self._ends(timeout.total_seconds() if timeout else math.inf):
            raise DistBackendError(f"wait: the call has not ended within {timeout}")
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Wait for the end of the call."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or badly; never waits."""
        return self._ends(0)

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error that the call has ended with, if it has."""
        return self.error if self.is_completed() else None

    def result(self) -> list[Any]:
        """Return the tensors of the call; their contents count after `wait`."""
        return self._outputs

    def get_future(self) -> Any:
        """Return the future of `result`."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._when_ended(self._complete)
        return self._future

    def _ends(self, patience: float) -> bool:
        """Return whether the call ends within so many seconds."""
        return True

    def _when_ended(self, do: Callable[[], None]) -> None:
        """Do it once the call has ended."""
        do()

    def _complete(self) -> None:
        if self.error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self.error)


class QueuedWork(TorchWork):
    """A call that a `Caller` makes."""

    def __init__(self, outputs: Sequence[Any], call: Call) -> None:
        super().__init__(outputs)
        self._call: Call | None = call
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._then: Callable[[], None] | None = None

    def make(self) -> None:
        """Make the call."""
        call, self._call = self._call, None  # which has the arrays
        try:
            assert call is not None
            with as_torch_raises():
                call()
        except BaseException as error:
            self.error = error
        with self._lock:
            self._ended.set()
        if self._then is not None:
            self._then()

    def _ends(self, patience: float) -> bool:
        return self._ended.wait(None if patience == math.inf else patience)

    def _when_ended(self, do: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._then = do
                return
        do()


class MessageWork(TorchWork):
    """A message between two ranks. `begin` returns the communicator's work once it can, with the other rank."""

    def __init__(self, outputs: Sequence[Any], begin: Callable[[], tuple[Any, int] | None], timeout: float) -> None:
        super().__init__(outputs)
        self._begin, self._begun, self._late = begin, begin(), time.monotonic() + timeout

    def _has_ended(self) -> bool:
        self._begun = self._begun or self._begin()
        if self._begun is None:
            if time.monotonic() > self._late:
                raise CollectiveTimeout("recv: no rank has sent a message")
            return False
        return self._begun[0].is_completed()

    def _ends(self, patience: float) -> bool:
        try:
            with as_torch_raises():
                if self._begun is not None and patience == math.inf:
                    self._begun[0].wait()
                elif not becomes(self._has_ended, patience):
                    return False
                elif self._begun is not None and self._begun[0].error is not None:
                    raise self._begun[0].error
        except Exception as error:
            self.error = error
        return True

    def _when_ended(self, do: Callable[[], None]) -> None:
        def later() -> None:
            self._ends(math.inf)
            do()

        threading.Thread(target=later, name="gpucoll future", daemon=True).start()

    def _source_rank(self) -> int:
        """Return the rank of the group that the message is from."""
        return -1 if self._begun is None else self._begun[1]

    source_rank = _source_rank


class StreamWork(TorchWork):
    """A call enqueued on `stream`: waiting for it makes the current stream wait."""

    def __init__(self, outputs: Sequence[Any], stream: Any) -> None:
        super().__init__(outputs)
        self._stream, self._event = stream, stream.record_event()

    def _ends(self, patience: float) -> bool:
        if patience == 0:
            return bool(self._event.query())
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return True

    def get_future(self) -> Any:
        """Return the future of `result`: who waits for it makes the current stream wait."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._stream.device])
            with torch.cuda.stream(self._stream):
                self._complete()
        return self._future


class JoinedWork(TorchWork):
    """Several calls as one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def _ends(self, patience: float) -> bool:
        late = time.monotonic() + patience
        if not all([work._ends(max(0.0, late - time.monotonic())) for work in self._works]):
            return False
        self.error = next((work.error for work in self._works if work.error is not None), None)
        return True

    _when_ended = MessageWork._when_ended


class Caller:
    """Makes the calls of a group in their order: in the thread that waits for them, else in one of its own."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of the thread that is in a call
        self._calls: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._counting, self._open = threading.Lock(), 0  # calls queued or being made
        self._thread: threading.Thread | None = None

    def make(self, call: Call, outputs: Sequence[Any], *, at_once: bool) -> TorchWork:
        """Make a call, `at_once` if that is asked for and no other one comes first."""
        if at_once and not self._open and self._turn.acquire(blocking=False):
            try:
                with as_torch_raises():
                    call()
            finally:
                self._turn.release()
            return TorchWork(outputs)
        work = QueuedWork(outputs, call)
        with self._counting:
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gpucoll torch", daemon=True)
                self._thread.start()
                atexit.register(self.close)
        self._calls.put(work)
        return work

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            with self._turn:
                work.make()
            with self._counting:
                self._open -= 1
            del work  # and with it the arrays

    def close(self) -> None:
        """Make what is left, and no further calls."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._calls.put(None)
            thread.join()
