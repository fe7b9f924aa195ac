"""The `peer` executor on the emulated device, between threads: every schedule, calls that come again, failures."""

import itertools
import threading

import numpy
import peer_schedules
import pytest
from peer_schedules import Case

import peer_made
from gpucoll.algorithms import algorithms
from gpucoll.collectives import COLLECTIVES
from gpucoll.device.emulated import EmulatedDevice
from gpucoll.errors import CollectiveTimeout, GpucollError
from gpucoll.executors.peer import PeerExecutor
from gpucoll.links import LocalLink
from gpucoll.waits import Waits
from grids import sampled
from thread_ranks import all_on_threads

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]


class Order:
    """One stream needs no order."""

    def follow(self, stream):
        pass


class Rank:
    """What a communicator of threads has of one rank."""

    def __init__(self, link, timeout=120.0):
        self.rank, self.link = link.place.rank, link
        self.device = EmulatedDevice(seed=self.rank)
        self.stream = self.device.stream(None)
        self.executor = PeerExecutor(self.device, Order(), link, timeout)
        self.waits = Waits(timeout)

    def enqueue(self, task):
        assert self.executor.serves(task) is None
        assert list(self.executor.run(task)) == []

    def settle(self):
        self.waits.run(self.device.settle(self.stream), "settle")

    def run(self, case):
        """One task; True where its output is right."""
        task = case.task(self.rank, self.stream)
        self.enqueue(task)
        self.settle()
        check(task, case, self.rank)


def check(task, case, rank):
    expected = case.output(rank)
    assert expected is None or peer_schedules.same(task.output, expected, case), (case.row.name, case.algorithm, rank)


def on_threads(size, program, **options):
    """Run `program(rank)` on a thread for each; its results, or the first error."""
    def whole(link):
        rank = Rank(link, **options)
        found = program(rank)
        rank.executor.close()
        return found

    return all_on_threads(LocalLink.all(size), whole)


ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_schedule(size):
    """All of them by the same executors, one after the other; with two blocks, and with one."""
    cases = [Case(collective, algorithm, size, count, root=size // 2, segments=2)
             for (collective, algorithm), count in itertools.product(ALIKE, (50, 30_000 if size < 4 else 1))]

    def program(rank):
        for case in cases:
            rank.run(case)

    on_threads(size, program)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "recursive_doubling"])
def test_all_reduce_of_every_length(algorithm, in_place):
    def program(rank):
        for count in (0, 1, 2, 3, 4, 1000, 16384, 16385, 100_000, 1_100_000):
            rank.run(Case("all_reduce", algorithm, 3, count, in_place=in_place))

    on_threads(3, program)


RAGGED = [(row.name, name) for row in COLLECTIVES.values() if row.ragged for name in algorithms(row.name)]


@pytest.mark.parametrize(("collective", "algorithm"), RAGGED)
def test_blocks_that_are_not_alike(collective, algorithm):
    def program(rank):
        for scale in (0, 1, 3000):
            case = Case(collective, algorithm, 4, 0, ragged=lambda i, j, scale=scale: (3 * i + j) % 5 * scale)
            rank.run(case)

    on_threads(4, program)


@pytest.mark.parametrize(("op", "name"), sampled(peer_made.PAIRS, keep=8, seed=17))
def test_ops_and_dtypes(op, name):
    def program(rank):
        for algorithm in ("one_shot", "two_shot", "ring"):
            for count in (101, 20_000):
                rank.run(Case("all_reduce", algorithm, 2, count, op=op, name=name))

    on_threads(2, program)


def test_copies_of_complex_numbers_that_are_aligned_as_reals_only():
    def program(rank):
        case = Case("all_gather", "ring", 2, 333, name="complex64")
        task = case.task(rank.rank, rank.stream)
        whole = numpy.zeros(2 * task.output.size + 1, numpy.float32)
        task.output = whole[1:].view(numpy.complex64)
        rank.enqueue(task)
        rank.settle()
        check(task, case, rank.rank)

    on_threads(2, program)


def test_many_calls_before_the_first_one_has_begun():
    """The host enqueues and returns; operations follow each other in the order of the stream."""
    def program(rank):
        cases = [Case(*kind, 3, count) for count in (10, 20_000) for kind in
                 (("all_reduce", "one_shot"), ("broadcast", "chain"), ("all_reduce", "ring"), ("all_to_all", "direct"))]
        tasks = [case.task(rank.rank, rank.stream) for case in cases]
        for task in tasks:
            rank.enqueue(task)
        rank.settle()
        for task, case in zip(tasks, cases, strict=True):
            check(task, case, rank.rank)

    on_threads(3, program)


def test_a_call_that_comes_again_allocates_nothing():
    def program(rank):
        case = Case("all_reduce", "ring", 2, 5000)
        task = case.task(rank.rank, rank.stream)
        rank.enqueue(task)
        rank.settle()
        made = rank.executor._binder.bind(task)
        rank.device.empty = None
        for _ in range(3):
            task.output[:] = 0
            rank.enqueue(task)
            rank.settle()
            check(task, case, rank.rank)
        assert rank.executor._binder.bind(task) is made

    on_threads(2, program)


def test_a_captured_call_is_launched_again_and_again():
    """What one launch leaves in the slabs, the next one begins with."""
    def program(rank):
        cases = [Case("all_reduce", algorithm, 2, 700) for algorithm in ("one_shot", "two_shot", "ring")]
        tasks = [case.task(rank.rank, rank.stream) for case in cases]
        rank.stream.begin_capture()
        for task in tasks:
            rank.enqueue(task)
        graph = rank.stream.end_capture()
        for _ in range(3):
            for task in tasks:
                task.output[:] = 0
            graph.launch(rank.stream)
            rank.run(Case("broadcast", "linear", 2, 100))
            for task, case in zip(tasks, cases, strict=True):
                check(task, case, rank.rank)

    on_threads(2, program)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_rank_that_never_comes_is_a_timeout(algorithm):
    def program(rank):
        if rank.rank == 1:
            return "absent"
        case = Case("all_reduce", algorithm, 2, 30_000)
        rank.enqueue(case.task(rank.rank, rank.stream))
        rank.waits.timeout = 20.0
        with pytest.raises(CollectiveTimeout, match="from rank 1") as late:
            rank.settle()
        rank.device.abandon()
        rank.executor._meeting.close = lambda: None  # the other rank does not come to close
        with pytest.raises(CollectiveTimeout):
            rank.executor.check()
        return late.value.ranks

    links = LocalLink.all(2)
    ranks, threads = {}, []
    for link in links:
        threads.append(threading.Thread(target=lambda link=link: ranks.update({link.place.rank: Rank(link, 0.3)})))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert program(ranks[0]) == (1,)


def test_an_abort_ends_what_is_under_way():
    links = LocalLink.all(2)
    ranks = {}
    threads = [threading.Thread(target=lambda link=link: ranks.update({link.place.rank: Rank(link)})) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = ranks[0]
    one.enqueue(Case("all_reduce", "ring", 2, 30_000).task(0, one.stream))
    waiting = iter(one.device.settle(one.stream))
    next(waiting)
    one.executor.abort()
    assert list(waiting) == []


@pytest.mark.mutant
def test_a_plan_that_sticks_is_refused():
    """Rank 0 waits for what nobody sends."""
    def program(rank):
        case = Case("broadcast", "linear", 2, 100, root=1)
        task = case.task(rank.rank, rank.stream)
        missing = case.schedule
        plan = task.plan._replace(schedules=lambda other: missing(0))
        task.plan = plan
        with pytest.raises(GpucollError, match="never sends"):
            rank.executor.run(task)

    on_threads(2, program)


def symmetric(rank, told, met, shape, dtype):
    """An array of symmetric memory, the ranks' slabs made known to each other as a communicator does it."""
    memory = rank.executor.symmetric
    if memory.heap.must_grow(shape, dtype):
        slab = memory.heap.grow(shape, dtype)
        told[rank.rank] = slab.told()
        met.wait()
        memory.reach(slab.key, [told[other] for other in range(rank.link.place.size)])
        met.wait()
    return memory.heap.allocate(shape, dtype)


def staged(rank):
    """What was ever staged in this rank's slab."""
    meeting = rank.executor._meeting
    first = meeting.room.offsets["staging"]
    return meeting.memory.slab.row[first:first + meeting.room.staging]


@pytest.mark.parametrize("kind", ["all alike", "elsewhere on one", "not on one"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("in_place", [False, True])
def test_symmetric_arrays_are_read_where_they_are(algorithm, in_place, kind):
    """If all ranks pass the same ones, which no rank knows of the others; else they are staged, in sections."""
    told, met = {}, threading.Barrier(3)

    def program(rank):
        case = Case("all_reduce", algorithm, 3, 1_200_000, in_place=in_place)
        task = case.task(rank.rank, rank.stream)
        source, target, other = (symmetric(rank, told, met, task.output.shape, task.output.dtype) for _ in range(3))
        if kind == "elsewhere on one" and rank.rank == 1:
            source = target = other
        elif kind == "not on one" and rank.rank == 2:
            source, target = (numpy.empty_like(target) for _ in range(2))
        target = source if in_place else target
        source[:] = task.input
        task.input, task.output = source, target
        rank.enqueue(task)
        rank.settle()
        check(task, case, rank.rank)
        assert len(rank.executor._binder.bind(task).calls) == 1
        in_one_piece = kind == "all alike" and not (in_place and algorithm == "one_shot")
        assert staged(rank).any() != in_one_piece

    on_threads(3, program)


def test_a_slab_that_one_rank_cannot_reach_is_read_by_none():
    told, met = {}, threading.Barrier(2)

    def program(rank):
        if rank.rank == 1:
            def refuse(words):
                raise OSError("not permitted")

            rank.executor._meeting.memory.reach = refuse
        case = Case("all_reduce", "two_shot", 2, 50_000)
        task = case.task(rank.rank, rank.stream)
        for name in ("input", "output"):
            array = symmetric(rank, told, met, task.output.shape, task.output.dtype)
            array[:] = getattr(task, name)
            setattr(task, name, array)
        rank.enqueue(task)
        rank.settle()
        check(task, case, rank.rank)
        assert staged(rank).any()

    on_threads(2, program)
