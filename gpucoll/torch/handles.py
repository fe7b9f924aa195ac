"""torch's handles of calls under way, and the thread making calls while the program computes."""

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

Callback = Callable[[], None]
NOWHERE = contextlib.nullcontext()


@contextlib.contextmanager
def as_torch_raises() -> Iterator[None]:
    """Turn errors of ranks into DistBackendError; ArgumentError and DtypeError pass unchanged."""
    try:
        yield
    except (ArgumentError, DtypeError):
        raise
    except GpucollError as error:
        late = isinstance(error, CollectiveTimeout)  # torch's own errors contain the word "timeout"
        raise DistBackendError(f"the timeout has passed: {error}" if late else str(error)) from error


class TorchWork(Handle):
    """The handle of a finished call, and the base of the other handles. `outputs` are the result tensors.

    Subclasses define `_ends`, a wait of bounded length, and `_when_ended`, a callback at the end.
    """

    def __init__(self, outputs: Sequence[Any] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._future: Any = None
        self.error: BaseException | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the results and return True; raise the call's error, DistBackendError after `timeout`."""
        if not self._ends(timeout.total_seconds() if timeout else math.inf):
            raise DistBackendError(f"wait: the call has not ended within {timeout}")
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or badly; never waits."""
        return self._ends(0)

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None without an error or before the end."""
        return self.error if self.is_completed() else None

    def result(self) -> list[Any]:
        """Return the result tensors; the contents are valid after `wait`."""
        return self._outputs

    def get_future(self) -> Any:
        """Return the future of `result`."""
        # One future per handle: torch may ask several times, and a future is completed once.
        if self._future is None:
            self._future = self._new_future()
            self._when_ended(self._complete)
        return self._future

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def _ends(self, patience: float) -> bool:
        """Wait at most `patience` seconds and return whether the call has ended; set `error`."""
        return True

    def _when_ended(self, do: Callable[[], None]) -> None:
        """Call `do` when the call has ended, at once if the call has already ended."""
        do()

    def _complete(self) -> None:
        if self.error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self.error)


class CallFuture(torch.futures.Future):
    """The future of a queued call; `at_turn` is `Caller.at_turn`."""

    def __init__(self, at_turn: Callable[[Callback], None]) -> None:
        super().__init__()
        self._at_turn = at_turn

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return the future of ``callback(self)``.

        The callback runs after the calls made before `then`, and before the calls made afterwards. So all ranks make
        the callback's calls at the same place among the other calls, whenever the future is complete.
        """
        result = CallFuture(self._at_turn)

        def run() -> None:
            try:
                result.set_result(callback(self))
            except Exception as error:
                result.set_exception(error)

        self._at_turn(run)
        return result


class QueuedWork(TorchWork):
    """A call queued for the thread of a `Caller`; `at_turn` is `Caller.at_turn`."""

    def __init__(self, outputs: Sequence[Any], call: Callback, at_turn: Callable[[Callback], None]) -> None:
        super().__init__(outputs)
        self._call: Callback | None = call
        self._at_turn = at_turn
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._then: Callable[[], None] | None = None

    def make(self) -> None:
        """Make the call, note the error, and run the callback."""
        call, self._call = self._call, None  # drop the closure: a kept handle must not keep the input arrays alive
        try:
            assert call is not None
            with as_torch_raises():
                call()
        except BaseException as error:
            self.error = error
        # Under the lock `_when_ended` either registers before this point or sees the end: the callback runs once.
        with self._lock:
            self._ended.set()
        if self._then is not None:
            self._then()

    def _new_future(self) -> Any:
        return CallFuture(self._at_turn)

    def _ends(self, patience: float) -> bool:
        return self._ended.wait(None if patience == math.inf else patience)

    def _when_ended(self, do: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._then = do
                return
        do()


class MessageWork(TorchWork):
    """A message between two ranks; on GPU tensors `wait` makes the current stream wait, not the host.

    `begin` returns the communicator's work and the other rank; None while no message is there (receive from any rank).
    Without a message within `timeout` seconds the receive fails.
    """

    def __init__(self, outputs: Sequence[Any], begin: Callable[[], tuple[Any, int] | None], timeout: float) -> None:
        super().__init__(outputs)
        self._device = outputs[0].device if outputs[0].is_cuda else None
        self._begin, self._begun, self._late = begin, begin(), time.monotonic() + timeout

    def _new_future(self) -> Any:
        return torch.futures.Future(devices=[] if self._device is None else [self._device])

    def _has_ended(self) -> bool:
        # A receive from any rank begins when a message is seen; until then look again.
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
        # Nothing completes a message in the background, so the future needs a thread waiting for the message.
        def later() -> None:
            # At completion torch records an event of the current stream: take a stream that waits for the message only.
            with NOWHERE if self._device is None else torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._ends(math.inf)
                do()

        threading.Thread(target=later, name="gpucoll future", daemon=True).start()

    def _source_rank(self) -> int:
        """Return the other rank of the message, -1 if still unknown."""
        return -1 if self._begun is None else self._begun[1]

    source_rank = _source_rank


class StreamWork(TorchWork):
    """A call enqueued on the side stream `stream`: `wait` makes the current stream wait, not the host."""

    def __init__(self, outputs: Sequence[Any], stream: Any) -> None:
        super().__init__(outputs)
        self.stream: Any = stream
        self._event = stream.record_event()

    def _ends(self, patience: float) -> bool:
        if patience == 0:
            return bool(self._event.query())
        # The host never waits, so a timeout has no effect here.
        torch.cuda.current_stream(self.stream.device).wait_event(self._event)
        return True

    def get_future(self) -> Any:
        """Return the future of `result`; waiting on the future makes the current stream wait."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self.stream.device])
            # torch records the current stream's event at completion: complete the future in the side stream.
            with torch.cuda.stream(self.stream):
                self._complete()
        return self._future


EARLY = "a message of a coalescing block begins at the end of the block: wait afterwards"


class DeferredWork(TorchWork):
    """A GPU message of a coalescing block, begun with the other messages at the end of the block.

    From then on `batch` is the handle of all these messages.
    """

    batch: StreamWork | None = None

    def get_future(self) -> Any:
        """Return the future of all messages of the block; only after the block."""
        if self.batch is None:
            raise DistBackendError(EARLY)
        return self.batch.get_future()

    def _ends(self, patience: float) -> bool:
        if self.batch is not None:
            return self.batch._ends(patience)
        if patience > 0:
            raise DistBackendError(EARLY)
        return False


class JoinedWork(TorchWork):
    """Several calls, joined into one handle; the error is the first call's error."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        # The result is the list of all tensors, in the order of the calls.
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def _ends(self, patience: float) -> bool:
        late = time.monotonic() + patience
        # A list, not a generator: `all` must not stop at the first call, because `_ends` also notes each call's error.
        if not all([work._ends(max(0.0, late - time.monotonic())) for work in self._works]):
            return False
        self.error: BaseException | None = next((work.error for work in self._works if work.error is not None), None)
        return True

    _device, _when_ended = None, MessageWork._when_ended


class Caller:
    """A group's calls, made in order: synchronous calls in the caller's thread, others in one background thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the thread making a call
        self._calls: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        # `_open` counts calls queued or being made. Caller and background thread change the count: hence the lock.
        self._counting, self._open = threading.Lock(), 0
        self._thread: threading.Thread | None = None
        self._server: int | None = None  # the number of the background thread

    def make(self, call: Callback, outputs: Sequence[Any], *, at_once: bool) -> TorchWork:
        """Make the call in this thread with `at_once`, or queue the call for the background thread.

        The background thread also runs the callbacks of futures, and makes their calls at once: a callback may wait
        for them.
        """
        if self._server == threading.get_ident():
            nested = QueuedWork(outputs, call, self.at_turn)
            nested.make()
            if at_once:
                nested.wait()
            return nested
        # A synchronous call must not overtake queued calls: all ranks make the calls in one order.
        # `acquire` without blocking: if another thread of the program is in a call, queue behind.
        if at_once and not self._open and self._turn.acquire(blocking=False):
            try:
                with as_torch_raises():
                    call()
            finally:
                self._turn.release()
            return TorchWork(outputs)
        return self._queued(QueuedWork(outputs, call, self.at_turn))

    def at_turn(self, do: Callback) -> None:
        """Run `do` after the calls made so far: at once if there are none under way."""
        if self._open and self._server != threading.get_ident():
            self._queued(QueuedWork((), do, self.at_turn))
        else:
            do()

    def _queued(self, work: QueuedWork) -> QueuedWork:
        with self._counting:
            self._open += 1
            # Groups without asynchronous calls need no thread.
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gpucoll torch", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # the other ranks wait for the queued calls: make all before the exit
        self._calls.put(work)
        return work

    def _serve(self) -> None:
        self._server = threading.get_ident()
        # None, put by `close` after the last call, ends the loop.
        while (work := self._calls.get()) is not None:
            with self._turn:
                work.make()
            # Only after the call: until then a synchronous call has to queue.
            with self._counting:
                self._open -= 1
            del work  # else the arrays stay alive until the next call arrives
        self._server = None  # numbers of threads are used again

    def close(self, *, waits: bool = True) -> None:
        """Make all queued calls, then end the thread; `waits` for that, unless the queued calls are to fail."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._calls.put(None)
            if waits:
                thread.join()
