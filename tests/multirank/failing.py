"""The job of `guard_job.py`: what its ranks have written, and a process that keeps its survivors."""

import json
from pathlib import Path

from harness.pace import seconds
from multirank import guard_job

JOB = Path(guard_job.__file__)


def came_of(folder):
    return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdecimal()}


def check_all(found, error, culprit, within, closing=float("inf")):
    """Check that every rank has had this error with this culprit, and has closed, each within so many seconds."""
    for lasted, closed_in, *told, words in found.values():
        assert told == [error, [culprit]], words
        assert lasted < seconds(within)
        assert closed_in < seconds(closing)

# A process between the launcher and a rank: without it the launcher would end all ranks after the first death.
KEEPER = """
import os, subprocess, sys, time
subprocess.call([sys.executable, *sys.argv[2:]], close_fds=False)
give_up = time.monotonic() + 60
while sum(map(str.isdecimal, os.listdir(sys.argv[3]))) < int(sys.argv[1]) and time.monotonic() < give_up:
    time.sleep(0.01)
"""
