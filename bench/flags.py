"""The flags: nccl-tests' letters, long names and defaults, then ours. What they mean together is in `arguments`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from gpucoll.analysis.sizes import byte_size
from gpucoll.arguments import Parser
from gpucoll.errors import ArgumentError

from .cases import TESTS
from .devices import NAMES as DEVICES

PROGRAM = "gpucoll bench"
STEP = 1 << 20  # nccl-tests' default of -i, in bytes


def parser() -> Parser:
    """Return the parser of all flags."""
    found = Parser(PROGRAM, allow_abbrev=False, usage=f"mpiexec -n RANKS {PROGRAM} TEST [-b 8 -e 128M -f 2 ...]",
                   description="Measure collectives; start it under mpiexec. `gpucoll bench regret` judges what auto "
                               "chooses, `gpucoll bench report F.json ...` makes a page of results.",
                   epilog="Sizes are bytes of the larger of input and output; K, M and G are powers of 1024. Ctrl-C "
                          "ends all ranks and keeps what was measured.")
    found.add_argument("test", help=f"{', '.join(TESTS)}; or all")
    for add in (_sizes, _operation, _repeats, _operating, _ours, _others, _output):
        add(found)
    return found


def _sizes(to: Parser) -> None:
    group = to.add_argument_group("sizes, as in nccl-tests")
    group.add_argument("-b", "--minbytes", type=_size, default="32M", help="first size (32M)")
    group.add_argument("-e", "--maxbytes", type=_size, default="32M", help="last size (32M)")
    growth = group.add_mutually_exclusive_group()
    growth.add_argument("-i", "--stepbytes", type=_size, default=STEP, help="bytes from one size to the next (1M)")
    growth.add_argument("-f", "--stepfactor", type=at_least(1), default=1, help="factor from one size to the next")


def _operation(to: Parser) -> None:
    group = to.add_argument_group("operation, as in nccl-tests")
    group.add_argument("-o", "--op", default="sum", help="sum, prod, min, max, avg, band, ..., or all (sum)")
    group.add_argument("-d", "--datatype", default="float", help="float, half, ..., a NumPy name, or all (float)")
    group.add_argument("-r", "--root", default="0", help="the root, where there is one, or all (0)")


def _repeats(to: Parser) -> None:
    group = to.add_argument_group("repetitions, as in nccl-tests")
    group.add_argument("-n", "--iters", type=at_least(1), help="timed repetitions (20, fewer where they take long)")
    group.add_argument("-w", "--warmup_iters", type=at_least(0), default=1, help="repetitions before those (1)")
    group.add_argument("-m", "--agg_iters", type=at_least(1), default=1, help="calls grouped in each repetition (1)")
    group.add_argument("-N", "--run_cycles", type=at_least(0), default=1, help="rounds over all sizes; 0: no end (1)")
    group.add_argument("-c", "--check", type=at_least(0), default=1,
                       help="checked repetitions besides the timed ones, which are checked too; 0: check nothing (1)")
    group.add_argument("-I", "--per_iter_timing", type=_one_of(0, 1), default=0, help="1: columns of the spread")
    group.add_argument("-K", "--per_iter_skip", type=at_least(0), default=0, help="first ones not in the spread (0)")
    group.add_argument("-a", "--average", type=_one_of(0, 1, 2, 3), default=1,
                       help="time of rank 0, or over ranks the mean, least or most: 0 1 2 3 (1)")


def _operating(to: Parser) -> None:
    group = to.add_argument_group("manner, as in nccl-tests")
    group.add_argument("-z", "--blocking", type=_one_of(0, 1, 2, 3), default=0,
                       help="1: wait and barrier after each call, 2: wait only, 3: both after each repetition (0)")
    group.add_argument("-G", "--cudagraph", type=at_least(0), default=0, help="replay a captured graph so often (0)")
    group.add_argument("-C", "--report_cputime", type=_one_of(0, 1), default=0, help="1: time until the call returns")
    group.add_argument("-T", "--timeout", type=at_least(0), default=0, help="seconds for each call (300)")
    group.add_argument("-u", "--unalign", type=at_least(0), default=0, help="elements that all arrays are shifted by")
    group.add_argument("-S", "--report_timestamps", type=_one_of(0, 1), default=0, help="1: the time on each line")
    group.add_argument("-t", "--nthreads", type=_one_of(1), default=1, help="1: start a rank for each GPU")
    group.add_argument("-g", "--ngpus", type=_one_of(1), default=1, help="1: start a rank for each GPU")


def _ours(to: Parser) -> None:
    group = to.add_argument_group("what runs where")
    group.add_argument("--algorithm", default="auto", metavar="A,B", help="names, auto, native; all: every one")
    group.add_argument("--executor", help="run on this executor only")
    group.add_argument("--device", choices=DEVICES, default="cpu", help="where the arrays lie (cpu)")
    group.add_argument("--stream", choices=("own", "null"), default="own", help="the CUDA stream (own)")
    group.add_argument("--memory", choices=("ordinary", "symmetric"), default="ordinary",
                       help="symmetric: memory that all ranks of a node map")
    group.add_argument("--graph", action="store_true", help="-G 1")


def _others(to: Parser) -> None:
    group = to.add_argument_group("comparisons")
    group.add_argument("--against", default="", metavar="PEERS", help="mpi, nccl, gloo, cupyx: measured in turn")
    group.add_argument("--overlap", action="store_true", help="how much hides behind computing")
    group.add_argument("--pairs", action="store_true", help="with sendrecv: every pair of ranks by itself")
    group.add_argument("--compare", metavar="OLD.json", help="print what became slower; exit code 1 where some did")
    group.add_argument("--tolerance", type=positive, default=0.1, help="slower by this share is still alike (0.1)")
    group.add_argument("--min-bw", type=positive, metavar="GB/s", help="exit code 1 below this average busbw")


def _output(to: Parser) -> None:
    group = to.add_argument_group("output")
    group.add_argument("-J", "--output_file", "--json", metavar="F.json", help="nccl-tests' JSON; never overwrites")
    group.add_argument("--csv", metavar="F.csv", help="the same as a table")
    group.add_argument("--plot", metavar="F.svg|png", help="busbw and latency over size")
    group.add_argument("--style", choices=("nccl", "osu"), default="nccl", help="the layout of the lines (nccl)")
    group.add_argument("--progress", choices=("auto", "bar", "lines", "off"), default="auto",
                       help="how far it is, on standard error; auto: a bar on a terminal, else lines")


def _size(text: str) -> int:
    try:
        return byte_size(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least(least: int) -> Callable[[str], int]:
    """Return the reader of whole numbers from `least` on."""

    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _one_of(*numbers: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text not in map(str, numbers):
            raise argparse.ArgumentTypeError(f"{text!r} is not {' or '.join(map(str, numbers))}")
        return int(text)

    return number


def positive(text: str) -> float:
    """Return a number from 0 on, finite; ArgumentTypeError for anything else."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 12.5")
    return float(text)
