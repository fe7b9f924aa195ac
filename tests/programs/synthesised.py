"""Synthesised schedules: their proof, and exact results on threads."""

import functools

import numpy

from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Schedule
from gpucoll.verify.symbolic import prove
from harness.thread_ranks import on_threads
from oracles import oracle


def proved(collective, size, chunks, rounds):
    """Return the proof of the schedules made of `rounds(rank)`, and the schedules."""
    schedules = [Schedule(collective, "made", rank, size, chunks, functools.partial(rounds, rank))
                 for rank in range(size)]
    return prove(collective, schedules, chunks=chunks), schedules


def data_of(name, ranks):
    """Return input and output of every rank; rank r gives r + 1 times 7 i, and in blocks 1000 times the block more."""
    numbers = numpy.arange(60) * 7
    if COLLECTIVES[name].input.blocks:
        numbers = numpy.stack([numbers + 1000 * block for block in range(ranks)])
    given = [None if name == "scatter" and rank else numbers * (rank + 1) for rank in range(ranks)]
    return given, [oracle.outcome(name, given, rank) for rank in range(ranks)]


def check_on_threads(name, ranks, algorithm):
    """Compare the results of a collective by this algorithm on threads."""
    given, results = data_of(name, ranks)

    def program(comm):
        mine, want = given[comm.rank], results[comm.rank]
        result = getattr(comm, name)(mine if mine is None else mine.copy(), algorithm=algorithm)
        assert (result is None and want is None) or numpy.array_equal(result, want)

    on_threads(ranks, program)
