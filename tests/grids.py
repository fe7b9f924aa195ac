"""Large parameter grids: a sample always runs, the rest is marked slow."""

import random

import pytest


def sampled(cases, keep, seed):
    """The cases as `pytest.param`s, in order, all but `keep` of them marked slow; the same ones in every session.

    The sample holds every value of every parameter as far as `keep` allows, so that no dtype and no size goes untested
    by chance. A case is a tuple of parameters, or the bare value of a single one.

    >>> [bool(case.marks) for case in sampled([(p, "sum") for p in (1, 2, 3, 4)], keep=4, seed=1)]
    [False, False, False, False]
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = drawn(cases, keep, seed)
    return [pytest.param(*case, marks=() if index in kept else pytest.mark.slow) for index, case in enumerate(cases)]


def drawn(cases, keep, seed):
    """The indices of `keep` cases in a seeded random order, those first that show a value not seen before."""
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    chosen = dict.fromkeys([*with_news(cases, order), *order])
    return set(list(chosen)[:keep])


def with_news(cases, order):
    """The indices whose case is the first in this order to have one of its values."""
    seen = set()
    for index in order:
        values = {(position, repr(value)) for position, value in enumerate(cases[index])}
        if not values <= seen:
            yield index
        seen |= values
