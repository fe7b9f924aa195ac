"""Run a verb of the command line in this process."""

import json

from gpucoll.cli import main


def run(capsys, *words):
    """Return the output: an object with --json, otherwise the text; the exit code must be 0."""
    assert main([*words]) == 0
    text = capsys.readouterr().out
    return json.loads(text) if "--json" in words else text
