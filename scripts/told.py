#!/usr/bin/env python3
"""Print the page docs/guide/told.md: what each rank is told by each class of error, from a run of three ranks.

    scripts/told.py > docs/guide/told.md

Each case is a program of three ranks without MPI (``gpucoll run --standalone --survive``). File names and process
numbers are replaced, so that two runs print the same page.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAD = """# What each rank is told

This page shows programmers the errors of all ranks for each kind of mistake. `scripts/told.py` has written the page by
running the programs on three ranks, each after one common `all_reduce`. A rank without a row has no error.
"""
PROGRAM = """
import json, os, signal, sys, time
import numpy
import gpucoll as gc

comm = gc.init(timeout={timeout})
rank, x = comm.rank, numpy.ones(4)
comm.all_reduce(x)
try:
{body}
except gc.GpucollError as error:
    os.write(1, ("TOLD " + json.dumps([rank, type(error).__name__, error.ranks, str(error)]) + "\\n").encode())
time.sleep(0 if rank == 1 else 0.5)
os._exit(0)
"""
# By title: the deadline, the program after one common call, and perhaps variables.
CASES: "dict[str, tuple[Any, ...]]" = {
    "Rank 1 refuses its argument: ArgumentError there, PeerError elsewhere": (60, """
comm.all_reduce(x, algorithm="rng" if rank == 1 else "ring")"""),
    "Rank 1 has a dtype that no collective takes: DtypeError": (60, """
comm.all_reduce(numpy.array(["a"]) if rank == 1 else x)"""),
    "Rank 1 makes another call: MismatchError": (60, """
comm.barrier() if rank == 1 else comm.all_reduce(x)"""),
    "Rank 1 has another shape: MismatchError": (60, """
comm.all_reduce(x[:3] if rank == 1 else x)"""),
    "Rank 1 has one batch fewer, and closes: RankFailedError": (60, """
for batch in range(2 if rank == 1 else 3):
    comm.all_reduce(x)
comm.close()"""),
    "Rank 1 leaves its `with` block by an exception: RankFailedError": (60, """
if rank == 1:
    try:
        with comm:
            raise ValueError("bad data in batch 20")
    except ValueError:
        pass
else:
    comm.all_reduce(x)"""),
    "Rank 1 is killed: RankFailedError": (60, """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_reduce(x)"""),
    "A call fails on rank 1, here by GPUCOLL_FAULT: BackendError there, RankFailedError elsewhere": (60, """
comm.all_reduce(x)""", {"GPUCOLL_FAULT": "rank:1,seq:2,phase:before,do:raise"}),
    "Rank 1 computes until after the deadline: CollectiveTimeout": (1, """
if rank == 1:
    time.sleep(4)
else:
    comm.all_reduce(x)"""),
    "Rank 1 never sends: CollectiveTimeout of a message": (1, """
if rank == 0:
    comm.recv(x, 1)
elif rank == 1:
    time.sleep(4)"""),
    "Each rank sends before it receives: UsageError": (60, """
long = numpy.ones(200_000)
comm.send(long, (rank + 1) % comm.size)
comm.recv(long, (rank - 1) % comm.size)"""),
    "A call after a failure: RevokedError": (60, """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(x)
except gc.RankFailedError:
    comm.all_reduce(x)"""),
    "A call after `close`: ClosedError": (60, """
comm.close()
comm.all_reduce(x)"""),
}


def told(timeout: int, body: str, variables: "dict[str, str] | None" = None) -> "list[tuple[int, str, list[int], str]]":
    """Run a program; return rank, class, ranks named and text of each error, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        program.write_text(PROGRAM.format(timeout=timeout, body=lines))
        job = subprocess.run([sys.executable, "-m", "gpucoll", "run", "--standalone", "--survive", "-n", "3", program],
                             capture_output=True, text=True, timeout=120, check=False,
                             env={**os.environ, **(variables or {})})
        found = [json.loads(line.removeprefix("TOLD ")) for line in job.stdout.splitlines() if line.startswith("TOLD ")]
        return sorted((rank, kind, ranks, plain(text, folder)) for rank, kind, ranks, text in found)


def plain(text: str, folder: str) -> str:
    """Return an error's text without what differs from run to run.

    >>> plain("rank 1 (process 77) computes since its call 3 (/tmp/x/train.py:7), 4 s ago", "/tmp/x")
    'rank 1 (process N) computes since its call 3 (train.py:7), N s ago'
    """
    text = re.sub(r"process \d+", "process N", text.replace(f"{folder}/", ""))
    return re.sub(r"\d+ s ago", "N s ago", text)


def main() -> None:
    """Print the page."""
    sys.stdout.write(HEAD)
    for title, (timeout, body, *more) in CASES.items():
        sys.stdout.write(f"\n## {title}\n\n```text\n{body.strip()}\n```\n\n| rank | error | `.ranks` | text |\n"
                         "|---|---|---|---|\n")
        for rank, kind, ranks, text in told(timeout, body, *more):
            words = text.replace("|", "\\|").replace("<", "&lt;")
            sys.stdout.write(f"| {rank} | {kind} | {tuple(ranks)} | {words} |\n")


if __name__ == "__main__":
    main()
