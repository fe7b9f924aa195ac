"""ZeRO with copies on partner ranks: after a loss the training has the bits of a training without the loss."""

import types

import numpy
import pytest

import gpucoll as gc
from gpucoll import internal, training
from gpucoll.training import partner
from harness.thread_ranks import on_threads
from oracles import learning

STEPS = 5


def trained(comm, stage, copy, optimizer, steps, compression=None, seed=None):
    """Train up to this number of steps; return the parameters in full."""
    zero = training.ZeRO(learning.parameters(comm.rank if seed is None else seed), comm, optimizer, stage, compression,
                         partner=copy)
    while optimizer.steps < steps:
        _, found = learning.gradients(whole(zero), *learning.samples(optimizer.steps, comm.rank))
        for name, gradient in found.items():
            zero.ready(name, gradient)
        zero.step()
    return whole(zero)


def whole(zero):
    with zero.layer(learning.SHAPES) as weights:
        return {name: array.copy() for name, array in weights.items()}


def check_equal(found, wanted):
    assert all((found[name] == array).all() for name, array in wanted.items())


def replaced(comm, stage):
    """Ranks forget everything, as newcomers; then the others alone go on, in another stage, as after `shrink`."""
    wanted = trained(comm, stage, None, training.AdamW(0.01), STEPS)
    copy, optimizer = training.PartnerCopy(), training.AdamW(0.01)
    trained(comm, stage, copy, optimizer, 2)
    if comm.rank % 2:
        copy, optimizer = training.PartnerCopy(), training.AdamW(0.01)
    check_equal(trained(comm, stage, copy, optimizer, STEPS, seed=100), wanted)
    assert optimizer.steps == STEPS
    rest = comm.split(comm.rank % 2, comm.rank)
    if comm.rank % 2 == 0:  # the ranks left have no shard of the others except as copies
        check_equal(trained(rest, 4 - stage, copy, optimizer, 0, seed=100), wanted)
    rest.close()


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (4, 2), (4, 3), (6, 1)])
def test_a_training_goes_on(executor, size, stage):
    executor.run(size, replaced, stage)


class Stops(training.PartnerCopy):
    """A copy whose rank stops before or after its own step number `at`, once, and then once before it has resumed."""

    def __init__(self, at, *, after):
        super().__init__()
        self.at, self.after, self.resumes = at, after, True

    def _step(self, optimizer):
        stops = self._divisions[-1].steps == self.at
        if not stops or self.after:
            super()._step(optimizer)
        if stops:
            self.at, self.resumes = None, False
            raise gc.RevokedError("the test ends the step here")

    def _complete(self, division, comm, optimizer):
        resumes, self.resumes = self.resumes, True
        if not resumes:
            raise gc.RevokedError("the test ends the constructor here")
        return super()._complete(division, comm, optimizer)


def stopped(comm, stage, ahead, kind):
    """Ranks stop in the middle of a step, some of them after taking the step: no step is lost or taken twice."""
    ways = [None if kind is None else kind() for _ in range(2)]
    wanted = trained(comm, stage, None, training.Adam(), STEPS, ways[0])
    copy, optimizer = Stops(2, after=comm.rank in ahead), training.Adam()
    with pytest.raises(gc.RevokedError, match="the step"):
        trained(comm, stage, copy, optimizer, STEPS, ways[1])
    assert optimizer.steps == (3 if comm.rank in ahead else 2)
    optimizer.lr = 0.5  # a number of a later step: a step that is completed has the numbers of its beginning
    with pytest.raises(gc.RevokedError, match="the constructor"):
        trained(comm, stage, copy, optimizer, STEPS, ways[1])
    optimizer.lr = 1e-3
    check_equal(trained(comm, stage, copy, optimizer, STEPS, ways[1], seed=100), wanted)


@pytest.mark.parametrize("kind", [None, training.TopK], ids=["exact", "top k"])
@pytest.mark.parametrize(("stage", "ahead"), [(1, ()), (2, (0,)), (3, (1, 2)), (1, (0, 1, 2))])
def test_a_step_is_completed_or_taken_again(stage, ahead, kind):
    """All ranks have the gradients at the stop: one rank ahead is enough to complete the step on all."""
    on_threads(3, stopped, stage, ahead, kind, deterministic=True)


def aborted(comm):
    """A step that is refused is taken again from the residuals before."""
    ways = [training.TopK(), training.TopK()]
    wanted = trained(comm, 1, None, training.Adam(), 3, ways[0])
    copy, optimizer = training.PartnerCopy(), training.Adam()
    trained(comm, 1, copy, optimizer, 2, ways[1])
    zero = training.ZeRO(learning.parameters(), comm, optimizer, 1, ways[1], partner=copy)
    _, found = learning.gradients(whole(zero), *learning.samples(7, comm.rank))
    for name, gradient in found.items():
        if name != "scale" or comm.rank != 1:
            zero.ready(name, gradient)
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match="gradients of scale are missing"):
        zero.step()
    check_equal(trained(comm, 1, copy, optimizer, 3, ways[1]), wanted)


def test_a_refused_step_leaves_no_trace():
    on_threads(3, aborted, deterministic=True)


def lost(comm, folder):
    """A rank and its copy are lost: an error on each rank, nothing overwritten; a checkpoint helps."""
    copy, optimizer = training.PartnerCopy(), training.SGD(0.1, 0.9)
    zero = training.ZeRO(learning.parameters(), comm, optimizer, 1, partner=copy)
    for name, weight in learning.parameters(1).items():
        zero.ready(name, weight)
    zero.step()
    zero.save(folder)
    wanted = whole(zero)
    if comm.rank in (1, 2):
        copy, optimizer = training.PartnerCopy(), training.SGD(0.1, 0.9)
    weights = {name: numpy.full(shape, 7.0) for name, shape in learning.SHAPES.items()}
    with pytest.raises(gc.BackendError, match=r"GC-PARTNER.*the shards of ranks 1 of 4 are lost, and so are"):
        training.ZeRO(weights, comm, optimizer, 1, partner=copy)
    assert all((weight == 7).all() for weight in weights.values())
    zero = training.ZeRO.load(folder, comm, optimizer, 2, partner=copy)
    check_equal(whole(zero), wanted)
    # The loaded state has been copied too, the optimizer's as well.
    copy, optimizer = (training.PartnerCopy(), training.SGD(0.1, 0.9)) if comm.rank == 3 else (copy, optimizer)
    check_equal(trained(comm, 1, copy, optimizer, 0), wanted)
    state = comm.all_gather_v(numpy.concatenate([row["momentum"] for row in optimizer.state.values()]))
    expected = comm.all_gather_v(numpy.concatenate([row["momentum"] for row in zero.optimizer.state.values()]))
    assert all((one == other).all() for one, other in zip(state, expected, strict=True))
    assert all(one.any() for one in state)


def test_a_rank_is_lost_with_its_copy(executor, tmp_path):
    executor.run(4, lost, tmp_path)


def step_of_ones(zero):
    for name, shape in learning.SHAPES.items():
        zero.ready(name, numpy.ones(shape))
    zero.step()


def overwritten(comm):
    """A program fills its arrays before it resumes: the copies count, not the arrays."""
    copy, optimizer, weights = training.PartnerCopy(), training.Adam(), learning.parameters()
    zero = training.ZeRO(weights, comm, optimizer, 1, partner=copy)
    step_of_ones(zero)
    wanted = whole(zero)
    for weight in weights.values():
        weight.fill(7)
    check_equal(whole(training.ZeRO(weights, comm, optimizer, 2, partner=copy)), wanted)
    with pytest.raises(gc.UsageError, match="a later ZeRO uses the state"):
        zero.step()


def started_again(comm):
    """The start is broken off before all ranks have the state: nothing counts as lost."""
    class Unfinished(training.PartnerCopy):
        def _complete(self, division, comm, optimizer):
            self._divisions.append(division)

    copy = Unfinished()
    copy._resume(learning.parameters(comm.rank), comm, training.SGD(1), training.Exact(), copies=False)
    if comm.rank in (1, 2):
        copy = training.PartnerCopy()
    copy.__class__ = training.PartnerCopy
    check_equal(whole(training.ZeRO(learning.parameters(comm.rank), comm, training.SGD(1), partner=copy)),
                learning.parameters(0))


def refused(comm, folder):
    """What does not fit the state is refused on every rank, and the state stays."""
    copy, optimizer = training.PartnerCopy(), training.SGD(0.1)
    wanted = trained(comm, 1, copy, optimizer, 2)
    for wrong, arguments in [(gc.ArgumentError, ({"w": numpy.ones(4)}, comm, optimizer)),
                             (gc.ArgumentError, (learning.parameters(), comm, training.Adam()))]:
        with pytest.raises(wrong, match="the PartnerCopy has a training with"):
            training.ZeRO(*arguments, partner=copy)
    with pytest.raises(gc.BackendError, match="no rank has a copy of the state"):
        training.ZeRO(learning.parameters(), comm, optimizer, partner=training.PartnerCopy())
    training.ZeRO({"v": numpy.ones(3)}, comm, training.SGD(1)).save(folder)
    with pytest.raises(gc.ArgumentError, match="saved with other parameters"):
        training.ZeRO.load(folder, comm, training.SGD(1), parameters=learning.parameters(), partner=copy)
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match="partner True is not a PartnerCopy"):
        training.ZeRO.load(folder, comm, training.SGD(1), partner=True if comm.rank == 1 else copy)
    comm.barrier()
    for file in folder.glob("*.npz"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    comm.barrier()
    with pytest.raises(gc.BackendError, match=r"rank-\d"):
        training.ZeRO.load(folder, comm, training.SGD(1), partner=copy)
    check_equal(trained(comm, 1, copy, optimizer, 0), wanted)


def loaded_in_vain(comm, folder):
    """A load into the training's own arrays breaks off, and a rank is lost: the training goes on from its own state."""
    class Broken(training.PartnerCopy):
        breaks = False

        def _complete(self, division, comm, optimizer):
            if self.breaks:
                raise gc.RevokedError("the test ends the load here")
            return super()._complete(division, comm, optimizer)

    copy, optimizer, weights = Broken(), training.Adam(), learning.parameters()
    zero = training.ZeRO(weights, comm, optimizer, 1, partner=copy)
    step_of_ones(zero)
    zero.save(folder)
    step_of_ones(zero)
    wanted, state = whole(zero), {name: row["square"].copy() for name, row in optimizer.state.items()}
    copy.breaks = True
    with pytest.raises(gc.RevokedError):
        training.ZeRO.load(folder, comm, optimizer, 1, parameters=weights, partner=copy)
    copy.breaks = False
    assert optimizer.steps == 2
    assert all((optimizer.state[name]["square"] == row).all() for name, row in state.items())
    if comm.rank == 1:
        copy, optimizer = training.PartnerCopy(), training.Adam()
    check_equal(whole(training.ZeRO(weights, comm, optimizer, 2, partner=copy)), wanted)


def test_a_load_that_breaks_off_changes_nothing(tmp_path):
    on_threads(3, loaded_in_vain, tmp_path)


@pytest.mark.parametrize("program", [overwritten, started_again], ids=lambda program: program.__name__)
def test_the_state_that_counts(program):
    on_threads(4, program)


def test_nothing_that_is_refused_changes_the_state(tmp_path):
    on_threads(3, refused, tmp_path)


def wrong(comm):
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match="True is not a PartnerCopy"):
        training.ZeRO(learning.parameters(), comm, training.SGD(1), partner=True if comm.rank == 1 else None)
    copy = training.PartnerCopy()
    assert copy.nbytes == 0
    with pytest.raises(gc.MismatchError, match="optimizer"):
        training.ZeRO(learning.parameters(), comm, training.Adam() if comm.rank else training.SGD(1), partner=copy)
    training.ZeRO(learning.parameters(), comm, training.Adam(), partner=copy)
    shards = [8 * -(-weight.size // comm.size) for weight in learning.parameters().values()]
    assert 3 * (sum(shards) - 16 * len(shards)) <= copy.nbytes <= 3 * sum(shards)  # with two moments


def test_wrong_arguments_and_bytes(executor):
    executor.run(3, wrong)


@pytest.mark.parametrize("nodes", [
    [0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 2], [0, 0, 1, 2], [0, 1, 1, 0, 2], [0, 0, 0, 1, 1, 2], [2, 0, 1, 0, 1, 0, 2]])
def test_the_copy_is_on_another_node(monkeypatch, nodes):
    """No node has more than half of the ranks but in the first two cases; every rank has one copy and one partner."""
    link = types.SimpleNamespace(place=types.SimpleNamespace(nodes=nodes))
    monkeypatch.setattr(internal, "link_of", lambda comm: link)
    pairs = [partner._neighbours(types.SimpleNamespace(rank=rank)) for rank in range(len(nodes))]
    assert all(pairs[copied][1] == rank and pairs[holder][0] == rank for rank, (copied, holder) in enumerate(pairs))
    assert sorted(copied for copied, _ in pairs) == [*range(len(nodes))]
    assert all(holder != rank for rank, (_, holder) in enumerate(pairs)) or len(nodes) == 1
    if len({*nodes}) > 1:
        assert all(nodes[holder] != nodes[rank] for rank, (_, holder) in enumerate(pairs))
