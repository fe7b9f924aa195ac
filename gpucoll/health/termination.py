"""Callbacks for SIGTERM, sent by batch systems some time before SIGKILL."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from gpucoll.core.output import say, settle
from gpucoll.core.parsing import text_of
from gpucoll.errors import UsageError

_saves: list[Callable[[], None]] = []


def on_terminate(save: Callable[[], None]) -> None:
    """Call `save` when this process receives SIGTERM, then end the process with status 143.

    Batch systems send SIGTERM some time before SIGKILL. Several callbacks run in the order of registration, in the main
    thread, between two Python instructions: a call under way is broken off, and the ranks waiting for this rank are
    told. A second signal ends the process at once. An exception of a callback is printed, and the next callback runs.

    Parameters
    ----------
    save : callable
        Called without arguments.

    Raises
    ------
    UsageError
        The call is made outside the main thread (GC-THREAD).

    Examples
    --------
    >>> import gpucoll as gc
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor() as pool:
    ...     print(type(pool.submit(gc.on_terminate, print).exception()).__name__)  # not the main thread
    UsageError
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("on_terminate: only the main thread may set the effect of a signal", code="GC-THREAD")
    if not _saves:
        signal.signal(signal.SIGTERM, _terminate)
    _saves.append(save)


def _terminate(number: int, frame: FrameType | None) -> None:
    # Restore the default first: a second SIGTERM must end the process even if a callback hangs.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for save in _saves:
        try:
            save()
        except BaseException as error:  # also SystemExit: the other callbacks have their own data to save
            say("on_terminate: a callback has failed:\n" + text_of(type(error), error, error.__traceback__))
    settle()
    sys.exit(128 + number)
