"""The command `gpucoll VERB`; `verbs.toml` has the verbs, and each imports its module only when used."""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpucoll.cli.arguments import Parser, at_least, refuse, size_range
from gpucoll.cli.ctrl_c import ended_well
from gpucoll.core.output import open_closed
from gpucoll.errors import ArgumentError, BackendError, DtypeError, UsageError, nearest
from gpucoll.launch.launchers import launched
from gpucoll.version import __version__

# By the names in verbs.toml.
ARGUMENT_TYPES: dict[str, Callable[[str], Any]] = {"ranks": size_range, "count": at_least(1), "number": at_least(0)}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, 1 if the verb found faults; exit with 2 for wrong arguments.

    If the reader of the output has ended, like `head` after its lines, the command ends without an error. Ctrl-C ends
    it at once, with one line and code 130.
    """
    open_closed()
    given = sys.argv[1:] if arguments is None else arguments
    # The launcher ends ranks itself, and its exit code is the job's.
    return _run(given) if given[:1] == ["run"] else ended_well(lambda: _run(given), " ".join(["gpucoll", *given[:1]]))


def _run(given: list[str]) -> int:
    if given[:1] == ["bench"]:  # bench parses nccl-tests' flags itself
        from gpucoll.bench.__main__ import main as bench

        return bench(given[1:])
    if given[:1] == ["run"]:  # arguments after the script belong to the script
        from gpucoll.cli.jobs import main as launch

        return launch(given[1:])
    parser, verbs = _parser()
    if given and not given[0].startswith("-") and given[0] not in verbs:
        refuse("gpucoll", f"there is no command {given[0]!r}{nearest(given[0], verbs)}")
    options = parser.parse_args(given)
    if options.verb is None:
        if not options.version:
            parser.print_help()
        elif launched()[1] == 0:
            print(f"gpucoll {__version__}")
        return 0
    try:
        return options.run(options)
    except (ArgumentError, DtypeError, UsageError, BackendError) as error:  # raised on every rank
        # An error of a function names the function, often called like the verb.
        refuse(f"gpucoll {options.verb}", str(error.args[0]).removeprefix(f"{options.verb}: "))


def _parser() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser and the parsers of the verbs; `run` and `bench` parse by themselves, and are here for help."""
    parser = Parser("gpucoll", description="Collective communication for NumPy and CuPy programs, with MPI or without.")
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(dest="verb", parser_class=Parser)
    verbs.add_parser("run", help="launch a program on several ranks, by mpiexec or without MPI")
    verbs.add_parser("bench", help="measure collectives on several ranks; report: make a page")
    for name, row in tomllib.loads(Path(__file__).with_name("verbs.toml").read_text()).items():
        verb = verbs.add_parser(name, help=row["help"], description=row.get("description"))
        verb.set_defaults(run=functools.partial(_call, row["call"]))
        for argument, options in row["arguments"].items():
            kind = {"type": ARGUMENT_TYPES[options["type"]]} if "type" in options else {}
            verb.add_argument(*argument.split(), **options | kind)
    return parser, verbs.choices


def _call(function: str, options: Any) -> int:
    """Import the module of a function "module:name", then run the verb by the function."""
    module, _, name = function.partition(":")
    return int(getattr(importlib.import_module(module), name)(options))
