"""Shells complete the command: verbs, options, and the names of collectives and algorithms."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Each program prints the possible next words in $LINE, a word on each line; zsh's own listing needs a terminal.
SHELLS = {
    "bash": """eval "$(register-python-argcomplete gpucoll)"
               COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
               _python_argcomplete gpucoll && printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """autoload -U is-at-least compinit && compinit -u -D
              eval "$(register-python-argcomplete gpucoll)"
              _describe() { print -l -- ${(P)2} }
              words=(gpucoll) BUFFER=$LINE CURSOR=${#LINE}
              _python_argcomplete""",
    "fish": "register-python-argcomplete --shell fish gpucoll | source; complete -C $LINE",
}
LINES = {
    "gpucoll explain all_g": {"all_gather", "all_gather_v"},
    "gpucoll run --st": {"--standalone"},
    "gpucoll verify --collective all_gather --algorithm br": {"bruck"},
    "gpucoll simulate all_reduce 1M --algorithm ring,tre": {"ring,tree"},
    "gpucoll bench all_r": {"all_reduce"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete(shell, tmp_path):
    pytest.importorskip("argcomplete", reason="pip install gpucoll[test]")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line, words in list(LINES.items())[:None if shell == "bash" else 2]:
        job = subprocess.run([shell, "-c", SHELLS[shell]], capture_output=True, text=True,
                             env={**os.environ, "PATH": path, "HOME": str(tmp_path), "LINE": line})
        found = {word.split("\t")[0].split(":")[0].strip() for word in job.stdout.splitlines()}
        assert found == words, (line, job.stdout, job.stderr)
