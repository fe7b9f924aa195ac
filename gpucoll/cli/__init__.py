"""The command `gpucoll VERB`; each verb imports its module only when used."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpucoll.core.output import open_closed
from gpucoll.errors import ArgumentError, BackendError, DtypeError, UsageError, nearest
from gpucoll.launch.arguments import Parser, at_least, refuse, size_range
from gpucoll.launch.ctrl_c import ended_well
from gpucoll.launch.launchers import launched
from gpucoll.version import __version__


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
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        _complete()
    _check_launcher(*given[:2])
    if given[:1] == ["bench"]:  # bench parses nccl-tests' flags itself
        from gpucoll.bench.__main__ import main as bench

        return bench(given[1:])
    if given[:1] == ["run"]:  # arguments after the script belong to the script
        from gpucoll.launch.jobs import main as launch

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


def _check_launcher(verb: str = "", part: str = "") -> None:
    """Refuse the verbs working by MPI (bench, tune, doctor) without MPI.

    Without MPI means: ranks meeting by a store (see `gpucoll.launch.bootstrap.store_place`), or, except for doctor, no
    mpi4py. `bench report` needs no MPI.
    """
    if verb not in ("bench", "tune", "doctor") or part == "report":
        return
    from gpucoll.launch.bootstrap import store_place

    try:
        by_store = store_place() is not None
    except UsageError:
        by_store = True
    if by_store or (verb != "doctor" and importlib.util.find_spec("mpi4py") is None):
        refuse(f"gpucoll {verb}",
               f"this command needs MPI: pip install mpi4py 'gpucoll[mpich]', then mpiexec -n 4 gpucoll {verb}")


def _parser(run: Sequence[Parser] = (), bench: Sequence[Parser] = ()) -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser and the parsers of the verbs.

    `run` and `bench` hold the parsers of these two verbs for completion; otherwise the two verbs parse by themselves.
    """
    parser = Parser("gpucoll", description="Collective communication for NumPy and CuPy programs, with MPI or without.")
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(dest="verb", parser_class=Parser)
    verbs.add_parser("run", help="launch a program on several ranks, by mpiexec or without MPI", add_help=False,
                     parents=run)
    verbs.add_parser("bench", help="measure collectives (under mpiexec); report: make a page",
                     add_help=False, parents=bench)
    _add_schedules(verbs)
    _add_times(verbs)
    _add_graphs(verbs)
    _add_machines(verbs)
    return parser, verbs.choices


def _complete() -> None:
    """Print completions for the shell by argcomplete, then exit; includes names of collectives and algorithms."""
    import argcomplete

    from gpucoll.algorithms import registry
    from gpucoll.bench import arguments
    from gpucoll.core.collectives import COLLECTIVES
    from gpucoll.launch import jobs

    def algorithms(prefix: str, parsed_args: Any, **_: Any) -> Iterable[str]:
        kind, before = getattr(parsed_args, "collective", None), prefix[:prefix.rfind(",") + 1]  # after a comma
        return {before + name for collective, name in registry() if kind in (None, collective)}

    parser, verbs = _parser([jobs.parser()], [arguments.parser()])
    completers: dict[str, Callable[..., Iterable[str]]] = {
        "algorithm": algorithms, "collective": lambda **_: [*COLLECTIVES], "test": lambda **_: [*arguments.TESTS]}
    for action in (action for verb in verbs.values() for action in verb._actions if action.dest in completers):
        action.completer = completers[action.dest]  # type: ignore[attr-defined] # read by argcomplete
    argcomplete.autocomplete(parser)


def _add_verb(verbs: Any, name: str, run: Callable[[Any], int], *, json: bool = True, **texts: str) -> Any:
    verb = verbs.add_parser(name, **texts)
    verb.set_defaults(run=run)
    if json:
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    return verb


def _add_schedules(verbs: Any) -> None:
    verify = _add_verb(verbs, "verify", _from("gpucoll.lab.verbs", "verify"),
                       help="prove all schedules, or those of the named algorithms")
    verify.add_argument("files", nargs="*", metavar="ALGORITHM", help="a name, file.py:name or a .xml file of MSCCL")
    verify.add_argument("--ranks", type=size_range, default="1..64", metavar="1..64", help="numbers of ranks (1..64)")
    verify.add_argument("--collective", help="only this collective")
    verify.add_argument("--algorithm", help="only this algorithm")
    verify.add_argument("--segments", type=size_range, default="1,3", metavar="1,3", help="numbers of segments (1,3)")
    verify.add_argument("--plans", action="store_true", help="also prove the executors' plans, for up to 16 ranks")
    draw = _add_verb(verbs, "draw", _from("gpucoll.lab.verbs", "draw"), json=False,
                     help="draw a schedule, round by round")
    convert = _add_verb(verbs, "convert", _from("gpucoll.lab.verbs", "convert"), json=False,
                        help="write a schedule as MSCCL's XML")
    for verb in (draw, convert):
        verb.add_argument("algorithm", help="a name such as ring or hierarchical(ring,tree), file.py:name or a .xml")
        verb.add_argument("--collective", help="all_reduce, broadcast, ... (that of the file, or all_reduce)")
        verb.add_argument("--ranks", type=at_least(1), metavar="N", help="number of ranks (the .xml file's, or 8)")
        verb.add_argument("--segments", type=at_least(1), default=1, help="number of segments (1)")
    draw.add_argument("--root", type=at_least(0), default=0, help="root, for collectives with a root (0)")
    draw.add_argument("--topology", metavar="GRAPH", help="draw the loads of a graph's links: a TOML file or a name")
    draw.add_argument("-o", "--output", metavar="F.html", help="the file: an .html page with steps, or an .svg picture")
    convert.add_argument("-o", "--output", metavar="OUT.xml", help="the file")


def _add_times(verbs: Any) -> None:
    simulate = _add_verb(verbs, "simulate", _from("gpucoll.lab.verbs", "simulate"),
                         help="predict the time of a collective on a topology")
    simulate.add_argument("collective", help="all_reduce, broadcast, ...")
    simulate.add_argument("size", nargs="?", default="1M", metavar="64M",
                          help="bytes of the larger of input and output, one size or a list such as 8,64K,64M (1M)")
    simulate.add_argument("--ranks", type=size_range, metavar="8,64,65536",
                          help="numbers of ranks (8, or that of a graph)")
    simulate.add_argument("--algorithm", metavar="A,B",
                          help="only these: names, file.py:name or .xml files (all)")
    simulate.add_argument("--topology", default="switch", metavar="F", help="a TOML file, or a name such as fat_tree, "
                          "nvlink_node or torus_2d, or a graph of links such as dgx_a100(2) (switch: one switch of "
                          "equal links)")
    simulate.add_argument("--root", type=at_least(0), default=0, help="root, for collectives with a root (0)")
    simulate.add_argument("--segments", type=at_least(1), help="number of segments (as chosen by a call)")
    explain = _add_verb(verbs, "explain", _from("gpucoll.calibration.commands", "explain"),
                        help="show the choice of auto, and the reason (under mpiexec: for these ranks)")
    explain.add_argument("collective", help="all_reduce, broadcast, ...")
    explain.add_argument("size", nargs="?", default="1M", metavar="1M",
                         help="bytes of the larger of input and output (1M)")
    explain.add_argument("--ranks", type=at_least(1), metavar="N", help="number of ranks, on a topology (8)")
    explain.add_argument("--topology", metavar="F", help="a TOML file or a name, as for simulate (switch)")
    explain.add_argument("--dtype", default="float32", help="under mpiexec: dtype of the elements (float32)")
    explain.add_argument("--device", help="under mpiexec: cpu, cuda or emulated")
    tune = _add_verb(verbs, "tune", _from("gpucoll.calibration.commands", "tune"),
                     help="measure this machine for auto (under mpiexec), in seconds")
    tune.add_argument("--sweep", action="store_true", help="also measure every algorithm at every size, in minutes")
    tune.add_argument("--collective", metavar="A,B", help="only these collectives")
    tune.add_argument("--max-bytes", default="64M", metavar="64M", help="the largest size of the sweep (64M)")
    tune.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the arrays (cpu)")


def _add_graphs(verbs: Any) -> None:
    bound = _add_verb(verbs, "bound", _from("gpucoll.lab.graphs.bounds"),
                      help="compute the best bandwidth of any algorithm on a graph of links")
    synthesize = _add_verb(verbs, "synthesize", _from("gpucoll.lab.synthesize"),
                           help="make an algorithm of this bandwidth, prove it and write it to a file")
    for verb in (bound, synthesize):
        verb.add_argument("graph", help="a TOML file, or a name such as dgx1, dgx_a100(2) or torus(4x4)")
        verb.add_argument("collective", help="all_gather, all_reduce, ...")
    bound.add_argument("--root", type=at_least(0), default=0, help="root, for collectives with a root (0)")
    bound.add_argument("-o", "--output", metavar="F.svg", help="the file: the graph with the limiting links")
    synthesize.add_argument("--size", default="256M", metavar="256M", help="bytes of the larger of input and output")
    synthesize.add_argument("--time-limit", type=at_least(0), metavar="S", help="give up after S seconds")
    synthesize.add_argument("-o", "--output", metavar="F.py", help="the .py file, or MSCCL's .xml (GRAPH_KIND.py)")


def _add_machines(verbs: Any) -> None:
    kernels = _add_verb(verbs, "kernels", _from("gpucoll.device.command"),
                        help="compile the GPU kernels ahead of time, into the user's cache folder",
                        description="Compile kernels into the user's cache folder for later programs on a GPU. Needs "
                        "NVRTC, but no GPU, and so runs on a login node.")
    kernels.add_argument("--arch", metavar="sm_80,sm_90", help="architectures (those of this machine's GPUs, "
                         "or without a GPU sm_90)")
    kernels.add_argument("--nvrtc", metavar="LIB|VERSION", help="the compiler: 12, 13 or the path of a libnvrtc (that "
                         "of CuPy's CUDA, or without CuPy the newest)")
    kernels.add_argument("--all", action="store_true", help="every op on every dtype: CPU minutes per architecture "
                         "(sums of float32, float16 and bfloat16, casts, copies)")
    kernels.add_argument("-j", "--jobs", type=at_least(1), metavar="N", help="number of processes (one per core)")
    report = _add_verb(verbs, "report", _from("gpucoll.health.report"),
                       help="show the last calls of each rank, from the files in GPUCOLL_DUMP_DIR")
    report.add_argument("folder", metavar="DIR", help="the folder of the flight recorder's files")
    report.add_argument("--stragglers", action="store_true",
                        help="name the rank that delays the others, its call site, and since when")
    report.add_argument("--trace", metavar="F.json", help="write all calls as a timeline for Chrome and Perfetto")
    precheck = _add_verb(verbs, "precheck", _from("gpucoll.precheck.script"), json=False,
                         help="check before a run that the calls of all ranks of a program agree")
    precheck.add_argument("-n", "--ranks", type=at_least(1), required=True, metavar="N", help="the number of ranks")
    precheck.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    precheck.add_argument("script", help="a program for gpucoll, unchanged")
    precheck.add_argument("arguments", nargs="...", help="the program's own arguments")
    emulate = _add_verb(verbs, "emulate", _from("gpucoll.emulation.command"), json=False,
                        help="run a CuPy program on GPUs emulated on this host, also under mpiexec and torchrun")
    emulate.add_argument("--gpus", type=at_least(1), default=1, metavar="N", help="number of GPUs of this host (1)")
    emulate.add_argument("--temper", choices=("strict", "quick"), default="strict",
                         help="strict: late, in a random order, an error for accesses without order; quick: at once "
                         "(strict)")
    emulate.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="seed of the random order (0)")
    emulate.add_argument("script", help="a program for CuPy, unchanged")
    emulate.add_argument("arguments", nargs="...", help="the program's own arguments")
    doctor = _add_verb(verbs, "doctor", _from("gpucoll.doctor"),
                       help="examine this machine, and under mpiexec this job")
    doctor.add_argument("--topology", metavar="F.toml", help="write the graph of the ranks' links, for bound, "
                        "synthesize and simulate")


def _from(module: str, name: str = "main") -> Callable[[Any], int]:
    """Return a function running a verb: import `module`, then call the module's function `name`."""
    return lambda options: int(getattr(importlib.import_module(module), name)(options))
