"""Ctrl-C: every rank ends within two seconds, and rank 0 saves the measurements.

The main thread may be inside MPI, waiting for an ended rank, and would never get a KeyboardInterrupt. Therefore
Python's C code writes the signal's number to a socket, and a thread waits at the other end; mpi4py releases the GIL
while waiting. Both SIGINT and SIGTERM are handled: launchers differ in the signal sent to their ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.2  # seconds the other ranks give rank 0 to save: launchers kill all ranks once the first has ended
INTERRUPTED = 130  # exit code, by the convention of shells


@contextlib.contextmanager
def watched(rank: int, save: Callable[[], object]) -> Iterator[None]:
    """Inside the block of the main thread, a signal makes rank 0 `save` and then ends the process with code 130."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        with reader:
            while heard := reader.recv(1):
                if heard[0] in SIGNALS:
                    try:
                        save() if rank == 0 else time.sleep(GRACE)
                    finally:  # even if `save` fails, and even if the main thread hangs
                        os._exit(INTERRUPTED)

    handlers = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="gpucoll bench Ctrl-C", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()  # the thread reads the end of the stream, and ends
