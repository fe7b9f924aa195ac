"""A script, run by virtual ranks; the command ``gpucoll precheck``."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Iterator, Sequence
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

    def program(rank: VirtualRank, _: Any) -> None:
        module = checked.state.mains[rank.number]
        vars(module).update(__file__=path, __builtins__=__builtins__)
        exec(code, vars(module))

    before, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        # Output is dropped: each of a thousand ranks may print the same.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), _compiled_once():
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


@contextlib.contextmanager
def _compiled_once() -> Iterator[None]:
    """Compile, or read, a module once for all ranks: each rank imports the program's modules for itself.

    The import of torch, by the program or by a library, also lets virtual ranks use torch.distributed: real ranks would
    wait for ever.
    """
    loader: Any = importlib.machinery.SourceFileLoader
    known: dict[tuple[str, str], Any] = {}

    def get_code(self: Any, fullname: str) -> Any:
        key = self.path, fullname
        if key not in known:
            known[key] = super(loader, self).get_code(fullname)
        return known[key]

    def exec_module(self: Any, module: Any) -> None:
        super(loader, self).exec_module(module)
        if module.__name__ == "torch":
            with contextlib.suppress(ImportError):
                importlib.import_module("gpucoll.torch")

    loader.get_code, loader.exec_module = get_code, exec_module
    try:
        yield
    finally:
        del loader.get_code, loader.exec_module


def main(options: Any) -> int:
    """Run the command: print the findings, or one line if there are none; return the exit code."""
    found = check_script(options.script, options.arguments, options.ranks)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{one['kind']}: {one['message']}" for one in found)
              or f"{options.script}: the calls of {options.ranks} ranks agree")
    return 2 if any(one["kind"] == UNSUPPORTED for one in found) else int(bool(found))
