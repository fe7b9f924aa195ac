"""Words that must not stop an action: output on streams that may be closed, broken, full, or read by nobody.

What ends a job, or tells other ranks of an error, speaks by `say`: no failure of the output reaches the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of an output without room, or without a terminal
OUTPUT_TIMEOUT = 5.0  # seconds for a stream to take its content: a reader may have stopped to read without an end


def attempt(act: Callable[[], object], patience: float = OUTPUT_TIMEOUT) -> bool:
    """Call `act`, for at most `patience` seconds; return whether it has ended without an error. Never raises."""
    went_well = False

    def body() -> None:
        nonlocal went_well
        with contextlib.suppress(BaseException):
            act()
            went_well = True

    # In a thread, because a write to a full pipe cannot be broken off.
    thread = threading.Thread(target=body, name="gpucoll output", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: the system's limit, or the end of the interpreter
        body()
    else:
        thread.join(patience)
    return went_well


def say(text: str, stream: Any = None) -> bool:
    """Write on standard error, or on `stream`, and return whether that succeeded. Never raises, never waits for long.

    Nothing stays in the buffer of the stream: a rest would change the exit status at the end of the interpreter.
    """
    if _takes_at_once(stream or sys.stderr, text):
        return True
    return attempt(lambda: _write(stream or sys.stderr, text))


def _takes_at_once(stream: Any, text: str) -> bool:
    """Write a text that fits into a pipe, without a thread: a process without memory cannot start one."""
    with contextlib.suppress(Exception):
        ready = select.poll()
        ready.register(stream.fileno(), select.POLLOUT)
        # A pipe that is ready takes this many bytes, and no write of a half can fail.
        if 2 * len(text) < select.PIPE_BUF and text.isascii() and ready.poll(0) == [(stream.fileno(), select.POLLOUT)]:
            _write(stream, text)
            return True
    return False


def _write(stream: Any, text: str) -> None:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # a stream of Python's alone
        stream.write(text)
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    write_all(number, text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace"))


def write_all(number: int, content: bytes) -> None:
    """Write all of `content` to a file descriptor; raise OSError."""
    while content:
        content = content[os.write(number, content):]


def settle() -> bool:
    """Empty standard output and error; return whether both took all. The null device takes the place of a broken one.

    The end of the interpreter would otherwise complain, and end with status 120 in place of the program's.
    """
    fine = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if not attempt(stream.flush):
            fine = False
            with contextlib.suppress(AttributeError, OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return fine


def code_without_output(error: OSError) -> int | None:
    """Return the exit code of a command whose output had no room or no reader; None for another error."""
    if not isinstance(error, BrokenPipeError) and error.errno not in FULL:
        return None
    settle()
    if isinstance(error, BrokenPipeError):
        return 141  # 128 + SIGPIPE, the exit code that shells give to other tools
    say(f"gpucoll: {error}\n")
    return 1


def open_closed() -> None:
    """Open the null device for each standard stream that is closed.

    The next pipe or file would otherwise take the number of the stream, and with it the output of all child processes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (open to the end)
