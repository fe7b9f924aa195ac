"""Ctrl-C ends a command at once, also during a long call of the main thread.

The main thread may be inside a long call of C, or of MPI and waiting for an ended rank, and would get the
KeyboardInterrupt late or never. Therefore Python's C code writes the signal's number to a socket, and a thread waits at
the other end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpucoll.core.output import attempt, code_without_output, say
from gpucoll.launch.launchers import launched

INTERRUPTED = 130  # exit code, by the convention of shells
SHOWS = 0.3  # seconds for the output made until now
# Seconds that the other ranks give rank 0 to print: launchers kill all ranks once the first has ended.
YIELDS = 0.5


@contextlib.contextmanager
def watched(end: Callable[[], object], signals: Sequence[int]) -> Iterator[None]:
    """Inside the block, of the main thread, one of `signals` calls `end` and ends the process with code 130."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        with reader:
            while heard := reader.recv(1):
                if heard[0] in signals:
                    try:
                        end()
                    finally:  # even if `end` fails, and even if the main thread hangs
                        os._exit(INTERRUPTED)

    watcher = threading.Thread(target=watch, name="gpucoll Ctrl-C", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # The main thread stops here: else it goes on meanwhile, and tells of child processes ended by the same signal.
    handlers = {number: signal.signal(number, lambda number, frame: watcher.join()) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        writer.close()  # the thread reads the end of the stream, and ends


def ends_at_once(program: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which Ctrl-C ends the process with code 130 and one line, printed by rank 0.

    Without effect outside the main thread, and where SIGINT is ignored or handled already.
    """
    is_ours = threading.current_thread() is threading.main_thread() and \
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return watched(lambda: _end(program), [signal.SIGINT]) if is_ours else contextlib.nullcontext()


def ended_well(run: Callable[[], int], program: str) -> int:
    """Return the exit code of the command `run`, also if the output has lost its reader or its room."""
    try:
        with ends_at_once(program):
            try:
                return run()
            finally:
                sys.stdout.flush()  # here, and not at the end of the process, where Python would print the error
    except OSError as error:
        if (code := code_without_output(error)) is None:
            raise
        return code


def _end(program: str) -> None:
    attempt(sys.stdout.flush, SHOWS)
    if launched()[1] == 0:
        say(f"{program}: interrupted\n")
    else:
        time.sleep(YIELDS)
    # Helper processes do not always see the parent's end. The main thread must not complain of the helpers' end.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for child in _children():
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    """Return the child processes, without the process of `multiprocessing` for the removal of leftovers."""
    numbers: list[int] = []
    with contextlib.suppress(OSError):  # a system without /proc
        for thread in os.listdir("/proc/self/task"):
            numbers += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
        return [one for one in numbers if b"resource_tracker" not in Path(f"/proc/{one}/cmdline").read_bytes()]
    return numbers
