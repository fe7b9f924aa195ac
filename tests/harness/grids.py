"""Large parameter grids: a sample always runs, the rest is nightly; many small cases make one test.

The sample follows from GPUCOLL_TEST_SEED. By default the seed is fixed, so two runs of one commit are the same. The
nightly run draws a new seed each time (`scripts/test`). The header of a run prints the seed.
"""

import contextlib
import os
import random
import zlib

import pytest

SEED = os.environ.setdefault("GPUCOLL_TEST_SEED", "1")  # inherited by workers and ranks
SHARE = "GPUCOLL_TEST_SHARE"  # environment variable: the share of a night


def generator(number):
    """Return the random generator of a grid in this run; `number` distinguishes the grids."""
    return random.Random(f"{SEED}/{number}")


def sampled(cases, keep, seed, *always):
    """Return the cases as `pytest.param`s, in order, all but `keep` marked nightly; `seed` numbers the grid.

    The cases `always` are never marked: a planted fault that only these show must not depend on the draw.

    The sample has every value of every parameter, as far as `keep` allows, so that no dtype and no size goes untested
    by chance. A case is a tuple of parameters, or the bare value of a single parameter.

    >>> [bool(case.marks) for case in sampled([(p, "sum") for p in (1, 2, 3, 4)], keep=4, seed=1)]
    [False, False, False, False]
    >>> grid = [(number, letter) for number in range(8) for letter in "abc"]
    >>> kept = [case.values for case in sampled(grid, keep=9, seed=1) if not case.marks]
    >>> len(kept), [len({*values}) for values in zip(*kept)]
    (9, [8, 3])
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = {*drawn(cases, keep, seed), *map(cases.index, always)}
    return [pytest.param(*case, marks=() if index in kept else pytest.mark.nightly) for index, case in enumerate(cases)]


def is_in_share(name, share=None):
    """Return whether a test or a planted fault belongs to a share such as "2/3", by default to this run's share.

    The share of a name depends on the name alone. The shares of a night may run on several machines, or one by one.

    >>> [is_in_share("a test", f"{number}/3") for number in (1, 2, 3)]
    [False, False, True]
    """
    number, _, shares = (share or os.environ.get(SHARE) or "1/1").partition("/")
    return zlib.crc32(name.encode()) % int(shares) == int(number) - 1


def often(cases, *chosen):
    """Return the cases as `pytest.param`s, in order: the chosen cases always run, the others are marked slow.

    >>> [bool(case.marks) for case in often([1, 2, 3], 2)]
    [True, False, True]
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=() if case in chosen else pytest.mark.slow)
            for case, value in zip(cases, values, strict=True)]


def drawn(cases, keep, seed):
    """Return the indices of `keep` cases in a seeded random order; cases with a value not seen before come first."""
    order = generator(seed).sample(range(len(cases)), len(cases))
    chosen = dict.fromkeys([*with_news(cases, order), *order])
    return set(list(chosen)[:keep])


def with_news(cases, order):
    """Yield the indices of cases with a value not seen before in this order."""
    seen = set()
    for index in order:
        values = {(position, repr(value)) for position, value in enumerate(cases[index])}
        if not values <= seen:
            yield index
        seen |= values


def batches(cases, size, keep, seed):
    """Return lists of up to `size` cases, a test each: `keep` cases always run, lists of the others are nightly.

    >>> [(len(case.values[0]), bool(case.marks)) for case in batches("abcde", 2, keep=3, seed=2)]
    [(2, False), (1, False), (2, True)]
    """
    kept = drawn(cases, keep, seed)
    often = [case for index, case in enumerate(cases) if index in kept]
    seldom = [case for index, case in enumerate(cases) if index not in kept]
    return [*listed(often, size, "often", ()), *listed(seldom, size, "seldom", pytest.mark.nightly)]


def listed(cases, size, name, marks):
    return [pytest.param(cases[first:first + size], id=f"{name}{first // size}", marks=marks)
            for first in range(0, len(cases), size)]


@contextlib.contextmanager
def naming(case):
    """Add the case to an error raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in case {case!r}")
        raise
