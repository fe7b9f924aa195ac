"""The command line: nccl-tests' letters, names and defaults, checked as far as can be before MPI starts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gpucoll.algorithms import find
from gpucoll.arguments import Parser, refuse
from gpucoll.arrays import check_op
from gpucoll.bootstrap import options as communicator_options
from gpucoll.collectives import COLLECTIVES
from gpucoll.dtypes import DTYPES, numpy_dtype
from gpucoll.errors import ArgumentError, GpucollError, nearest
from gpucoll.ops import op_of

from .cases import COLLECTIVE_NAMES, UNDERSTOOD, Case, size_of, sizes

PROGRAM = "gpucoll bench"
PEERS = ("mpi",)
ANY = ("all", "auto", "native")  # for every collective, besides its algorithms
STEP = 1 << 20  # nccl-tests' default of -i, in bytes


class Options(NamedTuple):
    """What was asked for; `iterations` is None where the bench may choose, `step` is how the sizes grow."""

    collective: str
    sizes: Sequence[int]
    bounds: tuple[int, int]
    step: str
    dtype: str
    op: str
    root: int
    iterations: int | None
    warmups: int
    checks: int
    algorithms: tuple[str, ...]
    against: tuple[str, ...]
    executor: str | None

    def case(self, ranks: int) -> Case:
        """Return what is measured on `ranks` ranks; raise ArgumentError where there is no such root."""
        if self.root >= ranks:
            raise ArgumentError(f"-r/--root {self.root} is not in 0..{ranks - 1}", code="GC-ROOT")
        return Case(self.collective, self.dtype, self.op, self.root, ranks)


def parse(arguments: Sequence[str]) -> Options:
    """Return the options; what is wrong ends the process with exit code 2 and one line from rank 0."""
    given = _parser().parse_args(arguments)
    try:
        return _checked(given)
    except GpucollError as error:
        refuse(PROGRAM, str(error))


def _parser() -> Parser:
    parser = Parser(PROGRAM, allow_abbrev=False, description="Measure a collective; start it under mpiexec.",
                    epilog="Sizes are bytes of the larger of input and output; K, M and G are powers of 1024.")
    parser.add_argument("collective", help=", ".join(COLLECTIVE_NAMES))
    _add_sizes(parser)
    _add_reduction(parser)
    _add_repeats(parser)
    parser.add_argument("--algorithm", default="auto", metavar="A,B", help="names, auto, native; all: every one")
    parser.add_argument("--executor", help="run on this executor only")
    parser.add_argument("--against", default="", metavar="PEER", help=f"measure a peer in turn: {', '.join(PEERS)}")
    return parser


def _add_sizes(parser: Parser) -> None:
    parser.add_argument("-b", "--minbytes", type=_size, default="32M", help="first size (32M)")
    parser.add_argument("-e", "--maxbytes", type=_size, default="32M", help="last size (32M)")
    growth = parser.add_mutually_exclusive_group()
    growth.add_argument("-i", "--stepbytes", type=_size, default=STEP, help="bytes from one size to the next (1M)")
    growth.add_argument("-f", "--stepfactor", type=_at_least(1), default=1, help="factor from one size to the next")


def _add_reduction(parser: Parser) -> None:
    parser.add_argument("-o", "--op", default="sum", help="sum, prod, min, max, avg, band, ... (sum)")
    parser.add_argument("-d", "--datatype", default="float", help="float, half, ..., or a NumPy name (float)")
    parser.add_argument("-r", "--root", type=_at_least(0), default=0, help="the root, where there is one (0)")


def _add_repeats(parser: Parser) -> None:
    parser.add_argument("-n", "--iters", type=_at_least(1), help="timed repetitions (20, fewer where they take long)")
    parser.add_argument("-w", "--warmup_iters", type=_at_least(0), default=1, help="repetitions before those (1)")
    parser.add_argument("-c", "--check", type=_at_least(0), default=1, help="checked, untimed repetitions (1)")


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _checked(given: Any) -> Options:
    """Return the options; raise GpucollError for what cannot be measured."""
    if given.stepbytes < 1:
        raise ArgumentError("-i/--stepbytes must be at least 1", code="GC-SIZE")
    options = Options(
        collective=_known("collective", given.collective, COLLECTIVE_NAMES),
        sizes=sizes(given.minbytes, given.maxbytes, step=given.stepbytes, factor=given.stepfactor),
        bounds=(given.minbytes, given.maxbytes),
        step=f"{given.stepfactor}(factor)" if given.stepfactor > 1 else f"{given.stepbytes}(bytes)",
        dtype=UNDERSTOOD.get(given.datatype) or _known("datatype", given.datatype, (*UNDERSTOOD, *DTYPES)),
        op=op_of(given.op).name, root=given.root,
        iterations=given.iters, warmups=given.warmup_iters, checks=given.check,
        algorithms=names(given.algorithm), against=names(given.against) if given.against else (),
        executor=given.executor)
    _check_together(options)
    return options


def _known(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else raise ArgumentError."""
    if name not in known:
        raise ArgumentError(f"no {what} is named {name!r}{nearest(name, known)}", code=f"GC-{what.upper()}")
    return name


def names(text: str) -> tuple[str, ...]:
    """Return the names of a list, each once; a comma inside parentheses belongs to a name.

    >>> names("ring,hierarchical(ring,tree),ring")
    ('ring', 'hierarchical(ring,tree)')
    """
    return tuple(dict.fromkeys(re.split(r",(?![^()]*\))", text)))


def _check_together(options: Options) -> None:
    """Raise GpucollError where one option does not go with another, or is known only to the library."""
    numpy_dtype(options.dtype)
    communicator_options({"executor": options.executor})
    row = COLLECTIVES[options.collective]
    if row.reduces:
        check_op(row.name, op_of(options.op), DTYPES[options.dtype])
    for name in options.algorithms:
        if name not in ANY:
            find(options.collective, name)
    for peer in options.against:
        _known("peer", peer, PEERS)
        if row.reduces:
            _check_mpi(options)


def _check_mpi(options: Options) -> None:
    if options.op == "avg" or DTYPES[options.dtype].mpi is None:
        raise ArgumentError(f"--against mpi: MPI itself has no reduction by {options.op} of {options.dtype}",
                            code="GC-PEER-OP")
