"""Ctrl-C: every rank ends within two seconds, and rank 0 keeps what was measured.

The main thread may be inside MPI, waiting for a rank that has gone, and would never see a KeyboardInterrupt. So C code
writes the signal's number to a socket, where a thread waits for it; mpi4py releases Python's lock while it waits. Some
launchers pass on SIGINT, others end their ranks by SIGTERM.
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
GRACE = 1.2  # seconds that the other ranks leave to rank 0: launchers end all with the first that goes
INTERRUPTED = 130  # exit code, as the shell says it


@contextlib.contextmanager
def watched(rank: int, save: Callable[[], object]) -> Iterator[None]:
    """In the main thread's block, a signal lets rank 0 `save`, and then ends the process with exit code 130."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        with reader:
            while heard := reader.recv(1):
                if heard[0] in SIGNALS:
                    try:
                        save() if rank == 0 else time.sleep(GRACE)
                    finally:  # whatever `save` does, and however the main thread is held up
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
        writer.close()  # the thread reads the end, and ends
