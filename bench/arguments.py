"""The command line, checked as far as can be before MPI starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.algorithms import find
from gpucoll.arguments import refuse
from gpucoll.arrays import check_op
from gpucoll.bootstrap import options as communicator_options
from gpucoll.dtypes import DTYPES, numpy_dtype
from gpucoll.errors import ArgumentError, DtypeError, GpucollError, nearest
from gpucoll.ops import NOT_IN, OPS, op_of

from .cases import TESTS, UNDERSTOOD, sizes
from .flags import PROGRAM, at_least, parser, positive
from .records import read

PEERS = ("mpi", "nccl", "gloo", "cupyx")
ANY = ("all", "auto", "native")  # for every collective, besides its algorithms
POINTS = ("sendrecv", "hypercube")  # made of messages, not of schedules
ALIASES = {"alltoall": "all_to_all", "alltoallv": "all_to_all_v"}  # nccl-tests' spellings
MIN_BW = "NCCL_TESTS_MIN_BW"


class Options(NamedTuple):
    """What was asked for; `iterations` is None where the bench may choose, `roots` None for all, `flags` is the rest.

    `floor` is the least average bus bandwidth, None where any will do.
    """

    tests: tuple[str, ...]
    sizes: Sequence[int]
    bounds: tuple[int, int]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    roots: tuple[int, ...] | None
    iterations: int | None
    algorithms: tuple[str, ...]
    against: tuple[str, ...]
    executor: str | None
    device: str
    launches: int
    floor: float | None
    baseline: list[dict[str, Any]]
    flags: argparse.Namespace

    def ops_of(self, test: str, dtype: str) -> tuple[str, ...]:
        """Return the ops to measure: those that the dtype has; one of no meaning where nothing is reduced."""
        if not TESTS[test].reduces:
            return self.ops[:1]
        return tuple(op for op in self.ops if _is_defined(test, op, dtype))

    def roots_of(self, test: str, ranks: int) -> Sequence[int]:
        """Return the roots to measure; raise ArgumentError where there is no such root."""
        if not TESTS[test].rooted:
            return (0,)
        for root in self.roots or ():
            if root >= ranks:
                raise ArgumentError(f"-r/--root {root} is not in 0..{ranks - 1}", code="GC-ROOT")
        return range(ranks) if self.roots is None else self.roots


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Return the options; what is wrong ends the process with exit code 2 and one line from rank 0."""
    given = parser().parse_args(list(arguments))
    try:
        options = _checked(given, environment)
        _check_together(options)
        return options
    except (GpucollError, argparse.ArgumentTypeError) as error:
        refuse(PROGRAM, str(error))


def _checked(given: Any, environment: Mapping[str, str]) -> Options:
    """Return the options, each checked by itself; raise GpucollError."""
    if given.stepbytes < 1:
        raise ArgumentError("-i/--stepbytes must be at least 1", code="GC-SIZE")
    return Options(
        tests=tuple(TESTS) if given.test == "all" else (_test(given.test),),
        sizes=sizes(given.minbytes, given.maxbytes, step=given.stepbytes, factor=given.stepfactor),
        bounds=(given.minbytes, given.maxbytes),
        dtypes=_every_dtype() if given.datatype == "all" else (_dtype(given.datatype),),
        ops=tuple(OPS) if given.op == "all" else (op_of(given.op).name,),
        roots=None if given.root == "all" else (at_least(0)(given.root),),
        iterations=given.iters, algorithms=names(given.algorithm),
        against=names(given.against) if given.against else (),
        executor=given.executor, device=given.device, launches=max(given.cudagraph, given.graph),
        floor=_floor(given.min_bw, environment),
        baseline=read(given.compare) if given.compare else [], flags=given)


def _test(name: str) -> str:
    plain = name.removesuffix("_perf")
    return _known("collective", ALIASES.get(plain, plain), TESTS)


def _dtype(name: str) -> str:
    return UNDERSTOOD.get(name) or _known("datatype", name, (*UNDERSTOOD, *DTYPES))


def _every_dtype() -> tuple[str, ...]:
    """Return the dtypes that this Python has: some need ml_dtypes."""
    return tuple(name for name in DTYPES if _exists(name))


def _exists(dtype: str) -> bool:
    try:
        return numpy_dtype(dtype) is not None
    except DtypeError:
        return False


def _floor(given: float | None, environment: Mapping[str, str]) -> float | None:
    """Return the least average bandwidth: what is asked for, or as nccl-tests has it nine tenths of its variable."""
    if given is not None or not environment.get(MIN_BW):
        return given
    try:
        return 0.9 * positive(environment[MIN_BW])
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"{MIN_BW}: {error}", code="GC-BANDWIDTH") from None


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


def _is_defined(test: str, op: str, dtype: str) -> bool:
    try:
        _check_reduction(test, op, dtype)
    except GpucollError:
        return False
    return True


def _check_reduction(test: str, op: str, dtype: str) -> None:
    """Raise ArgumentError or DtypeError where the library has no such reduction."""
    if op in NOT_IN.get(test, ()):
        raise ArgumentError(f"{test}: op {op} is not defined for a prefix over ranks", code="GC-OP")
    check_op(test, op_of(op), DTYPES[dtype])


def _check_together(options: Options) -> None:
    """Raise GpucollError where one option does not go with another, or is known only to the library."""
    for dtype in options.dtypes:
        numpy_dtype(dtype)
    communicator_options({"executor": options.executor})
    for peer in options.against:
        _known("peer", peer, PEERS)
    _check_algorithms(options)
    if not any(options.ops_of(test, dtype) for test in options.tests for dtype in options.dtypes):
        _check_reduction(options.tests[0], options.ops[0], options.dtypes[0])
    _check_device(options)
    _check_manner(options)


def _check_algorithms(options: Options) -> None:
    """Raise ArgumentError for a name that no test of the run has."""
    for name in options.algorithms:
        if name in ANY:
            continue
        if options.tests[0] in POINTS:
            raise ArgumentError(f"{options.tests[0]} is made of messages and has no algorithm {name!r}", code="GC-ALGO")
        if len(options.tests) == 1:
            find(options.tests[0], name)
        elif not any(_has(test, name) for test in options.tests if test not in POINTS):
            raise ArgumentError(f"no collective has an algorithm {name!r}", code="GC-ALGO")


def _has(test: str, algorithm: str) -> bool:
    try:
        return find(test, algorithm) is not None
    except GpucollError:
        return False


def _check_device(options: Options) -> None:
    if options.device != "cuda" and (options.launches or options.flags.stream == "null"):
        raise ArgumentError("-G/--cudagraph, --graph and --stream null need --device cuda", code="GC-DEVICE")
    if options.launches and (options.flags.per_iter_timing or options.flags.blocking == 3):
        raise ArgumentError("-G/--cudagraph does not go with -I or with -z 3", code="GC-GRAPH")


def _check_manner(options: Options) -> None:
    flags = options.flags
    if flags.pairs and (options.tests != ("sendrecv",) or options.against):
        raise ArgumentError("--pairs goes with sendrecv alone, without --against", code="GC-PAIRS")
    if flags.overlap and (flags.pairs or options.against):
        raise ArgumentError("--overlap goes neither with --pairs nor with --against", code="GC-OVERLAP")
    if flags.plot:
        _check_plot(flags)
    if flags.per_iter_skip and flags.per_iter_skip >= (options.iterations or 1):
        raise ArgumentError("-K/--per_iter_skip must be less than -n/--iters, which has to be given", code="GC-ITERS")


def _check_plot(flags: argparse.Namespace) -> None:
    """Raise GpucollError for a picture that could not be made once everything is measured."""
    from .plot import check  # with all that draws

    check(flags.plot)
    if flags.overlap:
        raise ArgumentError("--plot has no picture of --overlap", code="GC-PLOT")
