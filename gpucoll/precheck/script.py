"""A script, run by virtual ranks; the command ``gpucoll precheck``.

The command runs the script in a process of its own, which the script may end, and again in others with other hash
seeds: the ranks of a job are processes too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, UsageError
from gpucoll.internal import end_with
from gpucoll.precheck.findings import UNCHECKED, Finding, of_process, unsupported, with_refusals
from gpucoll.precheck.program import Precheck
from gpucoll.precheck.records import unlike
from gpucoll.precheck.turns import VirtualRank

INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
MOST_RUNS, RUN_SECONDS = 8, 4  # runs of a program: two, and more while all but the first take less than so many seconds


def check_script(path: str, arguments: Sequence[str], size: int) -> tuple[list[Finding], list[Any]]:
    """Return the findings for a script run as ``python path arguments`` by each rank, and all calls."""
    try:
        source = Path(path).read_bytes()
        code = compile(source, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ArgumentError(f"precheck: {path} cannot be run: {error}", code="GC-FILE") from None
    checked = Precheck(size, is_program=True)

    def program(rank: VirtualRank) -> None:
        module = checked.state.mains[rank.number]
        vars(module).update(__file__=path, __builtins__=__builtins__)
        exec(code, vars(module))

    before, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        if b"mpi4py" in source or b"gpucoll.mpi" in source:
            # Before the ranks run: COMM_WORLD is replaced for all modules that import it from here on.
            with contextlib.suppress(ImportError, RuntimeError):
                importlib.import_module("mpi4py.MPI")
        return checked.run(program), checked.turns.records.as_json()
    finally:
        sys.argv = before
        sys.path.pop(0)


def main(options: Any) -> int:
    """Run the command: print the findings, or one line if there are none; return the exit code."""
    found = _findings(options)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{one['kind']}: {one['message']}" for one in found)
              or f"{options.script}: the calls of {options.ranks} ranks agree")
    return 2 if any(one["kind"] in UNCHECKED for one in found) else int(bool(found))


def _findings(options: Any) -> list[Finding]:
    """Return the findings of two runs or more; the runs after the first cost as much as the first, or little."""
    (found, calls), began = _run(options, 1), _seconds()
    for number in range(2, MOST_RUNS + 1):
        if found or (number > 2 and (_seconds() - began) * (number - 1) / (number - 2) > RUN_SECONDS):
            break
        found, others = _run(options, number)
        if any(one["kind"] in ("raised", "exit") for one in found):
            return [unsupported(f"run 1 of the program has no finding, but run {number} has: {found[0]['message']}; "
                                "let the program run again beside its own files")]
        found = found or of_process(unlike(calls, others))
    return found


def _seconds() -> float:
    """Return the seconds of processors used by all runs that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _run(options: Any, number: int) -> tuple[list[Finding], list[Any]]:
    """Run the program in a process of its own; return the findings and the calls."""
    with tempfile.TemporaryFile() as file:  # without a name: whatever ends this process leaves nothing
        result = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        for _ in range(number):  # each run's number of its process is to differ, also in its lowest bits
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        words = [sys.executable, "-c", "from gpucoll.precheck.script import run_here; run_here()", result, os.getpid(),
                 options.ranks, options.script, *options.arguments]
        # Output is dropped: each of a thousand ranks may print the same.
        status = subprocess.run([*map(str, words)], stdout=subprocess.DEVNULL, check=False, close_fds=False,
                                env={"PYTHONHASHSEED": str(number), **os.environ}).returncode
        if not file.seek(0, os.SEEK_END):
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
            return [unsupported(f"the program has ended the process of the check {how}: its calls are not known")], []
        error, found, calls = json.loads(result.read_text())
    if error:
        raise UsageError(error)
    return found, calls


def run_here() -> None:
    """Run the program in this process, and write the result after all functions called at the exit."""
    result, parent, size, path, *arguments = sys.argv[1:]
    end_with(int(parent))
    sys.path[:] = filter(None, sys.path)  # without the entry of ``python -c``
    mine, error, found, calls = os.getpid(), "", list[Finding](), list[Any]()

    def write() -> None:
        if os.getpid() == mine:
            Path(result).write_text(json.dumps([error, with_refusals(found), calls]))

    atexit.register(write)
    try:
        found, calls = check_script(path, arguments, int(size))
    except KeyboardInterrupt:  # the command says so
        os._exit(INTERRUPTED)
    except (ArgumentError, UsageError) as failure:
        error = str(failure.args[0])
