"""The job of `guard_job.py`: what its ranks have written."""

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
