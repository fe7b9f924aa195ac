"""What waits for what in the `shared` executor: every algorithm, in many interleavings, against its messages."""

import itertools

import pytest

from gpucoll.algorithms import algorithms, registry
from gpucoll.chunks import Layout
from gpucoll.executors import Layouts, resolve
from gpucoll.executors.shared.order import Arranger
from grids import generator, naming
from shared_world import World, agrees

SIZES = (2, 3, 4, 5, 7, 8)
SAME_SHAPE = ("all_reduce", "reduce", "all_to_all", "scan", "exscan", "broadcast")
CASES = [(collective, name, size) for collective, name in registry() for size in SIZES
         if name in algorithms(collective, size=size)]


def drawn(number, keep, cases=CASES):
    """So many cases at a time; all of them is nightly."""
    return pytest.mark.parametrize("cases", [
        pytest.param(generator(number).sample(cases, keep), id="few"),
        pytest.param(cases, id="all", marks=pytest.mark.nightly)])


def check(*case, **options):
    with naming((*case, options)):
        assert agrees(World(*case, **options))


@drawn(7, 60)
def test_the_ranks_do_what_the_messages_do(cases):
    for collective, algorithm, size in cases:
        for segments, root in itertools.product((1, 3), {0, size - 1}):
            check(collective, algorithm, size, root=root, segments=segments)


@drawn(8, 40, [case for case in CASES if case[0] in SAME_SHAPE])
def test_in_place_on_all_ranks_and_on_some(cases):
    """On those whose schedule never reads input where it has written output: the others work on a copy."""
    for case in cases:
        world = World(*case, segments=2)
        cut = Layouts(Layout(64, world.schedules[0].chunks), Layout(64, world.schedules[0].chunks))
        able = [rank for rank, rounds in enumerate(world.schedules) if world.row.input.exists(rank, world.root)
                and world.row.output.exists(rank, world.root) and not resolve(rounds, cut, in_place=True).copy_input]
        for aliases in (able, able[::2], able[1::2]):
            check(*case, segments=2, aliases=aliases)


def test_all_reduce_in_one_pass():
    for size in SIZES:
        for aliases in ((), range(size), range(0, size, 2)):
            check("all_reduce", "two_shot", size, aliases=aliases, fused=True)


class NoWaitForSenders(Arranger):
    def _operand(self, result, step):
        super()._operand(result, step)
        result.waits = []


class NoWaitForReaders(Arranger):
    def _readers_of(self, dst):
        return iter(())


class NoEnd(Arranger):
    def order(self):
        return super().order()._replace(readers={})


MUTANTS = [(NoWaitForSenders, "all_reduce", "ring"), (NoWaitForReaders, "all_to_all", "bruck"),
           (NoEnd, "all_gather", "direct")]


@pytest.mark.mutant
@pytest.mark.parametrize(("mutant", "collective", "algorithm"), MUTANTS)
def test_a_wait_left_out_is_found(mutant, collective, algorithm):
    assert not agrees(World(collective, algorithm, 4, arranger=mutant), seeds=10)
