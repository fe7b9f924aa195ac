"""The command line: letters, long names and defaults of nccl-tests, then our own; checked before MPI starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.algorithms import find, names_of
from gpucoll.arrays import check_op
from gpucoll.cli.arguments import Parser, at_least, refuse
from gpucoll.core.dtypes import DTYPES, numpy_dtype
from gpucoll.core.ops import NOT_IN, OPS, op_of
from gpucoll.errors import ArgumentError, GpucollError, nearest
from gpucoll.lab.sizes import byte_size
from gpucoll.launch.bootstrap import options as communicator_options
from gpucoll.msccl.files import named

from .cases import TESTS, UNDERSTOOD, sizes
from .records import read

BENCH_COMMAND = "gpucoll bench"
PEER_NAMES = ("mpi", "nccl", "gloo", "cupyx", "unchecked", "deterministic", "exact")
ANY = ("all", "auto", "native")  # valid for every collective, besides the collective's algorithms
POINT_TESTS = ("sendrecv", "hypercube")  # tests by messages, without schedules
NCCL_TESTS_NAMES = {"alltoall": "all_to_all", "alltoallv": "all_to_all_v"}  # spellings of nccl-tests
MIN_BW = "NCCL_TESTS_MIN_BW"
LARGE = 32 << 20  # bytes: default of the first and the last size, as in nccl-tests
# Flags of nccl-tests. FLAG_COUNTS: letter, name, least value, default, meaning. FLAG_CHOICES: letter, name, choices,
# default, meaning.
FLAG_COUNTS = (("-w", "warmup_iters", 0, 1, "repetitions before those"),
               ("-m", "agg_iters", 1, 1, "calls grouped in each repetition"),
               ("-N", "run_cycles", 0, 1, "rounds over all sizes; 0: no end"),
               ("-c", "check", 0, 1, "checked repetitions besides the timed ones; 0: check nothing"),
               ("-K", "per_iter_skip", 0, 0, "first ones not in the spread"),
               ("-G", "cudagraph", 0, 0, "replay a captured graph so often"),
               ("-T", "timeout", 0, 0, "seconds for each call, 0: 300"),
               ("-u", "unalign", 0, 0, "elements that all arrays are shifted by"))
FLAG_CHOICES = (("-a", "average", range(4), 1, "time of rank 0, or over ranks the mean, least or most: 0 to 3 (1)"),
                ("-z", "blocking", range(4), 0, "1: wait and barrier after each call, 2: wait, 3: after repetitions"),
                ("-I", "per_iter_timing", range(2), 0, "1: columns of the spread"),
                ("-C", "report_cputime", range(2), 0, "1: time until the call returns"),
                ("-S", "report_timestamps", range(2), 0, "1: the time on each line"),
                ("-t", "nthreads", range(1, 2), 1, "1: start a rank for each GPU"),
                ("-g", "ngpus", range(1, 2), 1, "1: start a rank for each GPU"))
FLAG_WORDS = (("device", ("cpu", "cuda", "emulated"), "where the arrays lie"),
              ("stream", ("own", "null"), "the CUDA stream"),
              ("memory", ("ordinary", "symmetric"), "symmetric: memory that all ranks of a node map"),
              ("progress", ("auto", "bar", "lines", "off"), "how far it is; auto: a line that changes on a terminal"))


class Settings(NamedTuple):
    """The parsed options.

    `iterations` is None if the benchmark may choose the number; `roots` is None for all roots. `floor` is the least
    average bandwidth, None if any bandwidth is accepted. `flags` has all other options.
    """

    tests: tuple[str, ...]
    sizes: Sequence[int]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    roots: tuple[int, ...] | None
    iterations: int | None
    algorithms: tuple[str, ...]
    against: tuple[str, ...]
    launches: int
    floor: float | None
    baseline: list[dict[str, Any]]
    flags: argparse.Namespace

    def ops_of(self, test: str, dtype: str) -> tuple[str, ...]:
        """Return the requested ops defined for the dtype; a single op if the test does not reduce."""
        if not TESTS[test].reduces:
            return self.ops[:1]
        return tuple(op for op in self.ops if _holds(_check_reduction, test, op, dtype))

    def roots_of(self, test: str, ranks: int) -> Sequence[int]:
        """Return the roots to measure; raise ArgumentError for a root beyond the ranks."""
        if not TESTS[test].rooted:
            return (0,)
        wrong = [root for root in self.roots or () if root >= ranks]
        if wrong:
            raise ArgumentError(f"-r/--root {wrong[0]} is not in 0..{ranks - 1}", code="GC-ROOT")
        return range(ranks) if self.roots is None else self.roots


def parser() -> Parser:
    """Return the parser of all flags."""
    flags = Parser(BENCH_COMMAND, allow_abbrev=False, usage=f"mpiexec -n RANKS {BENCH_COMMAND} TEST [-b 8 -e 9M ...]",
                   description="Measure collectives; start it under mpiexec. `gpucoll bench report F.json ...` makes "
                               "a page of results.",
                   epilog="Sizes are bytes of the larger of input and output; K, M and G are powers of 1024. Ctrl-C "
                          "ends all ranks and keeps what was measured.")
    flags.add_argument("test", help=f"{', '.join(TESTS)}; or all")
    group = flags.add_argument_group("as in nccl-tests")
    add = group.add_argument
    add("-b", "--minbytes", type=size, help="first size (32M, or the last size if smaller)")
    add("-e", "--maxbytes", type=size, help="last size (32M, or the first size if larger)")
    growth = group.add_mutually_exclusive_group()
    growth.add_argument("-i", "--stepbytes", type=size, default=1 << 20, help="bytes from one size to the next (1M)")
    growth.add_argument("-f", "--stepfactor", type=at_least(1), default=1, help="factor from one size to the next")
    add("-o", "--op", default="sum", help="sum, prod, min, max, avg, band, ..., or all (sum)")
    add("-d", "--datatype", default="float", help="float, half, ..., a NumPy name, or all (float)")
    add("-r", "--root", default="0", help="root, for collectives with a root, or all (0)")
    add("-n", "--iters", type=at_least(1), help="timed repetitions (20, or fewer if they take long)")
    add("-J", "--output_file", "--json", metavar="F.json", help="nccl-tests' JSON; never overwrites")
    for letter, name, least, default, said in FLAG_COUNTS:
        add(letter, f"--{name}", type=at_least(least), default=default, help=f"{said} ({default})")
    for letter, name, choices, default, said in FLAG_CHOICES:
        add(letter, f"--{name}", type=int, choices=choices, default=default, help=said)

    add = flags.add_argument_group("ours").add_argument
    add("--algorithm", default="auto", metavar="A,B", help="names, auto, native, file.py:name, .xml files, or all")
    add("--executor", help="run on this executor only")
    for name, words, said in FLAG_WORDS:
        add(f"--{name}", choices=words, default=words[0], help=f"{said} ({words[0]})")
    add("--graph", action="store_true", help="-G 1")
    add("--against", default="", metavar="PEERS", 
        help="mpi, nccl, gloo, cupyx; gpucoll with check=off (unchecked), deterministic=True (deterministic) or "
             '"exact" (exact): measured in turn')
    add("--compare", metavar="OLD.json", help="print slower results; exit code 1 if there are any")
    add("--tolerance", type=positive, default=0.1, help="with --compare: accepted slowdown (0.1)")
    add("--min-bw", type=positive, metavar="GB/s", help="exit code 1 below this average busbw")
    add("--csv", metavar="F.csv", help="results as a table")
    add("--plot", metavar="F.svg|png", help="busbw and latency over size; needs matplotlib")
    return flags


def size(text: str) -> int:
    """Return a number of bytes; raise ArgumentTypeError for any other text."""
    try:
        return byte_size(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str, where: str = "") -> float:
    """Return a finite number not below 0; raise ArgumentTypeError, with the prefix `where`, for any other text."""
    if not re.fullmatch(r"\d{1,18}(\.\d{0,18})?|\.\d{1,18}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{where}{text!r} is no number such as 12.5")
    return float(text)


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the options; errors end the process with exit code 2 and one line from rank 0."""
    given = parser().parse_args(list(arguments))
    if given.minbytes is None:
        given.minbytes = LARGE if given.maxbytes is None else min(LARGE, given.maxbytes)
    if given.maxbytes is None:
        given.maxbytes = max(LARGE, given.minbytes)
    try:
        if given.stepbytes < 1:
            raise ArgumentError("-i/--stepbytes must be at least 1", code="GC-SIZE")
        test, floor = given.test.removesuffix("_perf"), given.min_bw
        if floor is None and environment.get(MIN_BW):
            floor = 0.9 * positive(environment[MIN_BW], f"{MIN_BW}: ")  # the same tolerance as in nccl-tests
        dtypes = tuple(name for name in DTYPES if _holds(numpy_dtype, name))  # some dtypes need ml_dtypes
        tests = tuple(TESTS) if test == "all" else (
            _known("collective", "GC-COLLECTIVE", NCCL_TESTS_NAMES.get(test, test), TESTS),)
        options = Settings(
            tests=tests,
            sizes=sizes(given.minbytes, given.maxbytes, step=given.stepbytes, factor=given.stepfactor),
            dtypes=dtypes if given.datatype == "all" else (UNDERSTOOD.get(given.datatype) or _known(
                "datatype", "GC-DTYPE", given.datatype, (*UNDERSTOOD, *DTYPES)),),
            ops=tuple(OPS) if given.op == "all" else (op_of(given.op).name,),
            roots=None if given.root == "all" else (at_least(0)(given.root),),
            iterations=given.iters, algorithms=tuple(dict.fromkeys(names_of(named(given.algorithm, *tests)))),
            against=tuple(names_of(given.against)) if given.against else (), launches=max(given.cudagraph, given.graph),
            floor=floor, baseline=read(given.compare) if given.compare else [], flags=given)
        _check(options)
        return options
    except (GpucollError, argparse.ArgumentTypeError) as error:
        refuse(BENCH_COMMAND, str(error))


def _known(what: str, code: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else raise ArgumentError."""
    if name not in known:
        raise ArgumentError(f"no {what} is named {name!r}{nearest(name, known)}", code=code)
    return name


def _holds(check: Callable[..., object], *arguments: Any) -> bool:
    """Return whether `check` raises no GpucollError."""
    try:
        check(*arguments)
    except GpucollError:
        return False
    return True


def _check_reduction(test: str, op: str, dtype: str) -> None:
    """Raise ArgumentError or DtypeError if the library has no such reduction."""
    if op in NOT_IN.get(test, ()):
        raise ArgumentError(f"{test}: op {op} is not defined for a prefix over ranks", code="GC-OP")
    check_op(test, op_of(op), DTYPES[dtype])


def _check(options: Settings) -> None:
    """Raise GpucollError if two options contradict each other, or if the library refuses a value."""
    flags, test = options.flags, options.tests[0]
    for dtype in options.dtypes:
        numpy_dtype(dtype)
    communicator_options({"executor": flags.executor})
    for peer in options.against:
        _known("peer", "GC-USAGE", peer, PEER_NAMES)
    for name in (name for name in options.algorithms if name not in ANY):
        if test in POINT_TESTS:
            raise ArgumentError(f"{test} is made of messages and has no algorithm {name!r}", code="GC-ALGO")
        if len(options.tests) == 1:
            find(test, name)
        elif not any(_holds(find, test, name) for test in options.tests if test not in POINT_TESTS):
            raise ArgumentError(f"no collective has an algorithm {name!r}", code="GC-ALGO")
    if not any(options.ops_of(test, dtype) for test in options.tests for dtype in options.dtypes):
        _check_reduction(test, options.ops[0], options.dtypes[0])
    for is_wrong, message, code in (
            (flags.device != "cuda" and (options.launches or flags.stream == "null"),
             "-G/--cudagraph, --graph and --stream null need --device cuda", "GC-DEVICE"),
            (options.launches and (flags.per_iter_timing or flags.blocking == 3),
             "-G/--cudagraph does not go with -I or with -z 3", "GC-USAGE"),
            (flags.per_iter_skip and flags.per_iter_skip >= (options.iterations or 1),
             "-K/--per_iter_skip must be less than -n/--iters, which has to be given", "GC-USAGE")):
        if is_wrong:
            raise ArgumentError(message, code=code)
    if flags.plot:
        from .plot import check as check_plot

        check_plot(flags.plot)
