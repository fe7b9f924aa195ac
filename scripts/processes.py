"""Programs run by the scripts: output, exit codes, and the end of all programs together with the script."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMED_OUT, INTERRUPTED = 124, 130  # exit codes of `timeout` and of the shell


def say(text: str) -> None:
    """Print one line of progress on standard error: a script's own output stays clean."""
    print(text, file=sys.stderr, flush=True)


def refuse(text: str, code: int = 2) -> NoReturn:
    say(f"{os.path.relpath(sys.argv[0], ROOT)}: {text}")
    sys.exit(code)


def output_of(command: "list[str]", limit: float = 60.0, **variables: str) -> str:
    """Return the output of a program; "" if the program is missing, fails or takes longer than `limit` seconds."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        job = subprocess.run(command, timeout=limit, env={**os.environ, **variables}, capture_output=True, text=True)
        return job.stdout if job.returncode == 0 else ""
    return ""


def followed(step: str, *command: str, every: float = 10.0) -> None:
    """Run a program of possibly several minutes: show the step and its seconds, and the output only after a failure.

    Meanwhile the last printed line is shown: on a terminal in a line rewritten every second, in a log as a new line
    every 10 seconds, so that a waiting user sees progress.
    """
    began, lines, on_terminal = time.monotonic(), list[str](), sys.stderr.isatty()

    def show(text: str, end: str = "\n") -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}" if on_terminal else text, end=end, file=sys.stderr, flush=True)

    show(f"{step} ...", "" if on_terminal else "\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as child:
        output = child.stdout or ()
        reader = threading.Thread(target=lambda: lines.extend(output))
        reader.start()
        reader.join(min(every, 1.0) if on_terminal else every)
        while reader.is_alive():
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            show(f"{step} ... {time.monotonic() - began:.0f} s: {last[:100]}", "" if on_terminal else "\n")
            reader.join(min(every, 1.0) if on_terminal else every)
    show(f"{step}: {time.monotonic() - began:.0f} s")
    if child.returncode:
        refuse(f"this failed: {' '.join(command)}\n{''.join(lines).rstrip()}", code=1)


def run(command: "list[str]", stop: int, limit: "float | None" = None, **options: Any) -> int:
    """Run a program until the end, the time limit in seconds, or the end of this process; return the exit code.

    The program has a new session, so Ctrl-C reaches only this process. This process passes on the signal `stop`;
    SIGINT goes to all processes of the session. After 20 s, or a second Ctrl-C, the session is killed.
    """
    handlers = {number: signal.signal(number, lambda number, frame: sys.exit(128 + number))
                for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell makes background programs ignore Ctrl-C; restore the default.
    child = subprocess.Popen(command, start_new_session=True, **options,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        code = child.wait(limit)
        return code if code >= 0 else 128 - code
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        if child.poll() is None:
            (os.killpg if stop == signal.SIGINT else os.kill)(child.pid, stop)
            try:
                child.wait(20)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(child.pid, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def start(main: "Callable[[], int]") -> NoReturn:
    """Run a script's main function; Ctrl-C ends the script without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
