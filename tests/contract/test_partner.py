"""ZeRO with copies on partner ranks: after a loss the training has the bits of a training without the loss."""

import types

import numpy
import pytest

import gpucoll as gc
import learning
from gpucoll import training
from gpucoll.communicator import internal
from gpucoll.training import partner
from thread_ranks import on_threads

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
    """A copy whose rank stops before or after its own step number `at`, once."""

    def __init__(self, at, *, after):
        super().__init__()
        self.at, self.after = at, after

    def _step(self, optimizer, residuals):
        stops = self._divisions[-1].steps == self.at
        if not stops or self.after:
            super()._step(optimizer, residuals)
        if stops:
            self.at = None
            raise gc.RevokedError("the test ends the step here")


def stopped(comm, stage, ahead, kind):
    """Ranks stop in the middle of a step, some of them after taking the step: no step is lost or taken twice."""
    ways = [None if kind is None else kind() for _ in range(2)]
    wanted = trained(comm, stage, None, training.Adam(), STEPS, ways[0])
    copy, optimizer = Stops(2, after=comm.rank in ahead), training.Adam()
    with pytest.raises(gc.RevokedError):
        trained(comm, stage, copy, optimizer, STEPS, ways[1])
    assert optimizer.steps == 3 if comm.rank in ahead else 2
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
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match="gradients of scale have not come"):
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
    with pytest.raises(gc.BackendError, match=r"the shards of ranks 1 of 4 are lost, and so are") as found:
        training.ZeRO(weights, comm, optimizer, 1, partner=copy)
    assert found.value.code == "GC-PARTNER"
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


def wrong(comm):
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match=r"partner True is no PartnerCopy"):
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


@pytest.mark.parametrize(("nodes", "pairs"), [
    ([0, 0, 0], {0: (2, 1), 1: (0, 2), 2: (1, 0)}), ([0], {0: (0, 0)}),
    ([0, 0, 1, 1], {0: (3, 2), 2: (0, 1), 1: (2, 3), 3: (1, 0)}),
    ([0, 1, 1, 0, 2], {0: (2, 1), 1: (0, 4), 4: (1, 3), 3: (4, 2), 2: (3, 0)})])
def test_the_copy_is_on_another_node(monkeypatch, nodes, pairs):
    """The ring visits the nodes in turn; expected: the rank before and the rank after each rank."""
    link = types.SimpleNamespace(place=types.SimpleNamespace(nodes=nodes))
    monkeypatch.setattr(internal, "link_of", lambda comm: link)
    assert {rank: partner._neighbours(types.SimpleNamespace(rank=rank)) for rank in range(len(nodes))} == pairs
