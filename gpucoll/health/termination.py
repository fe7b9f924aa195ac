"""What is done when the process is told to end: SIGTERM, which batch systems send some time before SIGKILL."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from gpucoll.errors import UsageError

_saves: list[Callable[[], None]] = []


def on_terminate(save: Callable[[], None]) -> None:
    """Call `save` when this process gets SIGTERM, then end it with status 143; a second signal ends it at once.

    Several are called in the order in which they were given, in the main thread, between two of Python's instructions:
    a call that is under way is broken off, and the other ranks that wait for this one are told. Raises UsageError
    outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("on_terminate: only the main thread may say what a signal does", code="GC-THREAD")
    if not _saves:
        signal.signal(signal.SIGTERM, _terminate)
    _saves.append(save)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for save in _saves:
        save()
    sys.exit(128 + number)
