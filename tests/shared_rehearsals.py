"""Programs run by processes of equal ranks; run as a command, because the processes fork.

``python shared_rehearsals.py CHECK`` prints a JSON list: the name of each program of the check, and the reason against
a proof of agreement, or null.
"""

import json
import logging
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import numpy

import gpucoll as gc
import mixture
import programs_with_effects
from faulty_programs import PROGRAMS
from gpucoll.communicator import internal
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.rehearsal.equal_world import reason_against
from gpucoll.rehearsal.per_rank import lift
from multirank.disagreements import cases, made

SIZE = 6
counting, counted = os.pipe()


def reason(function, size=SIZE):
    """Return the reason against ``function(comm)`` on `size` ranks."""
    def run(rehearsal):
        def program(rank, world):
            comm = world()
            internal.set_world(comm)
            function(comm)

        rehearsal.run(program)

    return reason_against(run, size)


def began():
    """Count a process."""
    os.write(counted, b".")


# ---------------------------------------------------------------- programs whose ranks agree


def every_rank_has_its_result(comm):
    """The results of all collectives, against arithmetic."""
    rank, size = comm.rank, comm.size
    x = numpy.full(3, rank + 1.0)
    assert comm.all_reduce(x).tolist() == [size * (size + 1) / 2] * 3
    assert comm.all_gather(x)[:, 0].tolist() == [one + 1.0 for one in range(size)]
    assert comm.scan(x)[0] == sum(range(1, rank + 2))
    assert comm.exscan(x)[0] == sum(range(1, rank + 1))
    table = numpy.arange(float(size * size)).reshape(size, size)
    assert comm.scatter(table if rank == 1 else None, root=1).tolist() == table[rank].tolist()
    assert comm.reduce_scatter(table).tolist() == (size * table[rank]).tolist()
    assert comm.all_to_all(numpy.full((size, 2), float(rank)))[:, 1].tolist() == [*map(float, range(size))]
    assert comm.broadcast_object({"from": rank}, root=2) == {"from": 2}
    assert comm.all_gather_object(rank) == [*range(size)]
    total = comm.reduce(x, root=3)
    assert total is None or total[0] == size * (size + 1) / 2


def groups_and_calls_under_way(comm):
    rank = comm.rank
    numbers = internal.all_gather_metadata(comm, {"rank": rank}, "a test")
    assert [one["rank"] for one in numbers] == [0, 1, 2, 3, 4, 5]
    half = comm.split(rank // 3)
    assert half.size == 3
    assert half.rank == rank % 3
    assert half.all_reduce(numpy.full(2, float(rank)))[0] == (3.0 if rank < 3 else 12.0)
    assert comm.split(None if rank == 0 else 0, key=-rank) is None or rank > 0
    work = comm.all_reduce(numpy.full(2, 1.0 + rank), async_op=True)
    while not work.is_completed():
        pass
    assert work.wait()[0] == 21.0
    with comm.group():
        first, second = comm.all_reduce(numpy.ones(1)), comm.all_gather(numpy.full(1, rank))
    assert first[0] == 6.0
    assert second.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def long_calls_under_way(comm):
    """Each process sends more than a socket holds before it receives."""
    comms = comm, comm.split(0), comm.split(0)
    rows = [numpy.full(1 << 18, comm.rank + 1.0) for _ in comms]
    works = [one.all_reduce(row, async_op=True) for one, row in zip(comms, rows, strict=True)]
    assert [work.wait()[-1] for work in works] == [21.0] * 3


def an_answer_before_a_fork(comm):
    """The answer to a call under way arrives, unread, before the process forks."""
    if comm.rank == 0:
        work = comm.all_reduce(numpy.ones(1), async_op=True)
    else:
        work = comm.all_reduce(numpy.ones(1), async_op=True)
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass
    if comm.rank < 3:
        began()
    assert work.wait()[0] == 6


def results_that_are_left_out(comm):
    """Many long arrays are only matched; a result apart from the input is zero, as among threads."""
    out = numpy.ones(1 << 17)
    assert not comm.all_reduce(numpy.ones(1 << 17), out).any()


def memory_of_a_rank_is_its_own(comm):
    """Also memory that real ranks map."""
    x = comm.empty(4, "f8")
    x[:] = 1
    if comm.rank == 2:
        x[:] = 5
        comm.barrier()
    else:
        comm.barrier()
        assert x[0] == 1
    assert comm.all_reduce(x)[0] == 10


def seeds_are_equal_and_drawn_once(comm):
    random.seed(4)
    numpy.random.seed(4)
    expected = random.Random(4).random(), numpy.random.RandomState(4).rand()
    if comm.rank == 1:
        comm.barrier()
    else:
        comm.barrier()
    assert (random.random(), numpy.random.rand()) == expected


def a_file_is_read_by_each_rank(comm):
    with open(__file__, "rb", buffering=0) as file:
        first = file.read(10)
        if comm.rank % 2:
            comm.barrier()
        else:
            comm.barrier()
        assert file.read(10) == pathlib.Path(__file__).read_bytes()[len(first):20]


def arithmetic_on_the_rank(comm):
    """The rank's number means the same as an int everywhere."""
    rank = comm.rank
    assert isinstance(rank, int)
    assert [*range(10)][rank] == rank
    assert {0: "a"}.get(rank, "b") == ("a" if rank == 0 else "b")
    assert f"{rank:03d}" == format(int(rank), "03d")
    assert "%d" % rank == str(rank)  # noqa: UP031 # the way is meant
    assert numpy.float32(2) * rank == 2 * int(rank)
    assert (numpy.ones(2, "f4") * rank).dtype == "f4"
    assert divmod(rank + 7, 4) == divmod(int(rank) + 7, 4)
    assert 10 // (rank + 1) == 10 // (int(rank) + 1)
    assert [0] * rank == [0] * int(rank)
    comm.barrier()


def values_of_libraries(comm):
    """Code in C takes the rank's number for an int."""
    rank = comm.rank
    text = os.environ["USER_RANK"] = lift(str, rank)
    found = [numpy.sqrt(rank), numpy.add(numpy.ones(2), rank).sum(), numpy.power(2.0, rank), round(rank / 3, 1),
             math.floor(rank / 2), math.trunc(rank), pow(rank, 2, 5), json.dumps({"rank": rank}), len(text), [*text],
             numpy.random.default_rng([3, rank]).random(), numpy.random.RandomState(rank).rand()]
    random.seed(rank - 3)
    found.append(random.random())
    one = int(rank)
    assert found == [
        numpy.sqrt(one), numpy.add(numpy.ones(2), one).sum(), numpy.power(2.0, one), round(one / 3, 1), one // 2, one,
        pow(one, 2, 5), json.dumps({"rank": one}), len(str(one)), [str(one)],
        numpy.random.default_rng([3, one]).random(), numpy.random.RandomState(one).rand(),
        random.Random(one - 3).random()]
    comm.barrier()


def forks_during_calls(comm):
    """The answer of a call comes to each part of a process once."""
    works = [comm.scan(numpy.ones(3), async_op=True) for _ in range(20)]
    for bit in range(3):
        if comm.rank >> bit & 1:
            works.append(comm.all_reduce(numpy.ones(2), async_op=True))
        else:
            works.append(comm.all_reduce(numpy.ones(2), async_op=True))
    assert [work.wait()[0] for work in works] == [comm.rank + 1] * 20 + [SIZE] * 3


def times_and_ranks_are_shown(comm):
    began = time.perf_counter()
    time.sleep(1000)
    spent = [time.perf_counter() - began, time.perf_counter() - began]
    assert f"{statistics.median(spent):.0f} {round(spent[0])}"
    comm.all_gather_object(spent)
    note = logging.Logger("a program")
    note.addHandler(logging.StreamHandler())
    note.warning("rank %d", comm.rank)


def equal_ranks_run_once(comm):
    """Three processes: the first rank, the ranks below 4, and the ranks from 4 on."""
    began()
    if comm.rank == 0:
        comm.barrier()
    elif comm.rank < 4:
        began()
        comm.barrier()
    else:
        began()
        comm.barrier()


AGREEING = (every_rank_has_its_result, groups_and_calls_under_way, long_calls_under_way, an_answer_before_a_fork,
            results_that_are_left_out, memory_of_a_rank_is_its_own, seeds_are_equal_and_drawn_once,
            a_file_is_read_by_each_rank, arithmetic_on_the_rank, values_of_libraries, forks_during_calls,
            times_and_ranks_are_shown)

# ---------------------------------------------------------------- checks


def of_agreeing():
    return [[one.__name__, reason(one, 160 if one is results_that_are_left_out else SIZE)] for one in AGREEING]


def of_equal_ranks():
    found = reason(equal_ranks_run_once)
    os.set_blocking(counting, False)
    return [[found, len(os.read(counting, 100))]]


def of_others():
    found = [[one.__name__, why, reason(one)] for one, why in programs_with_effects.REASONS.items()]
    return found + [[name, "nothing is left", None] for name in os.listdir(programs_with_effects.folder)]


def of_faults():
    return [[one.function.__name__, reason(one.function, one.size)] for one in PROGRAMS]


def of_disagreements():
    found = []
    for collective in COLLECTIVES:
        names = ["auto", *gc.algorithms(collective, size=4, op="sum", dtype="f8")][:3]
        for case in cases(collective, names):
            other = names[(names.index(case.algorithm) + 1) % len(names)]
            found.append([str(case), case.code, reason(lambda comm: made(comm, case, 12, other), 4)])  # noqa: B023
    return found


def of_random_programs():
    found = []
    for number in range(40):
        chances = random.Random(number)
        size = chances.choice((1, 2, 3, 4, 5, 8))
        steps = mixture.draw(chances, size, steps=chances.randint(1, 5))
        found.append([number, reason(lambda comm: mixture.run(comm, steps), size)])  # noqa: B023
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as programs_with_effects.folder:
        print(json.dumps(globals()[f"of_{sys.argv[1]}"]()))
