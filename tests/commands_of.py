"""A verb run in this process."""

import json

from gpucoll.cli import main


def run(capsys, *words):
    """What it prints: an object with --json, else the text; it must end well."""
    assert main([*words]) == 0
    text = capsys.readouterr().out
    return json.loads(text) if "--json" in words else text
