"""Programs that the scripts run: what they print, how they end, and that none of them outlives its script."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMED_OUT, INTERRUPTED = 124, 130  # exit codes, as `timeout` and the shell say them


def say(text: str) -> None:
    """Print one line of progress, on standard error so that a script's own output stays clean."""
    print(text, file=sys.stderr, flush=True)


def refuse(text: str, code: int = 2) -> NoReturn:
    say(f"{os.path.relpath(sys.argv[0], ROOT)}: {text}")
    sys.exit(code)


def output_of(command: "list[str]", **variables: str) -> str:
    """What a program prints; empty where it is missing, fails or takes longer than a minute."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        job = subprocess.run(command, timeout=60, env={**os.environ, **variables}, capture_output=True, text=True)
        return job.stdout if job.returncode == 0 else ""
    return ""


def quietly(*command: str) -> None:
    """Run a program whose output matters only when it fails."""
    job = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if job.returncode:
        refuse(f"this failed: {' '.join(command)}\n{job.stdout.rstrip()}", code=1)


def run(command: "list[str]", stop: int, limit: "float | None" = None, **options: Any) -> int:
    """Run a program until it ends by itself, its time in seconds is over, or this process is to end; the exit code.

    The program has a session of its own: Ctrl-C reaches this process only, which passes on the signal `stop` instead,
    SIGINT to all of the session; what does not obey it within 20 s, or until a second Ctrl-C, is killed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # A shell lets what it runs in the background ignore Ctrl-C.
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


def start(main: "Callable[[], int]") -> NoReturn:
    """Run a script's main function; Ctrl-C ends it without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
