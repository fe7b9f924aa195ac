"""A script, run by virtual ranks; the command ``gpucoll precheck``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError
from gpucoll.precheck.findings import UNSUPPORTED, Finding
from gpucoll.precheck.program import Precheck
from gpucoll.precheck.turns import VirtualRank


def check_script(path: str, arguments: Sequence[str], size: int) -> list[Finding]:
    """Return the findings for a script run as ``python path arguments`` by each rank; the output is dropped."""
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
        # Output is dropped: each of a thousand ranks may print the same.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            if b"mpi4py" in source or b"gpucoll.mpi" in source:
                # Before the ranks run: COMM_WORLD is replaced for all modules that import it from here on.
                with contextlib.suppress(ImportError, RuntimeError):
                    importlib.import_module("mpi4py.MPI")
            if "torch" in sys.modules:
                importlib.import_module("gpucoll.torch")
            return checked.run(program)
    finally:
        sys.argv = before
        sys.path.pop(0)


def main(options: Any) -> int:
    """Run the command: print the findings, or one line if there are none; return the exit code."""
    found = check_script(options.script, options.arguments, options.ranks)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{one['kind']}: {one['message']}" for one in found)
              or f"{options.script}: the calls of {options.ranks} ranks agree")
    return 2 if any(one["kind"] == UNSUPPORTED for one in found) else int(bool(found))
