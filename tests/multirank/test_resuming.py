"""A data parallel training that loses a rank, gets a newcomer, and goes on with the same bits."""

import json

import pytest

import gpucoll as gc
import kills
from elastic_group import BEGIN, group_in
from grids import generator
from pace import seconds


@pytest.fixture
def group(tmp_path):
    with group_in(tmp_path) as group:
        yield group


TRAINS = """
from gpucoll.training import Adam, DataParallel, resume

def trained(comm, steps, victim, moment, replaced):
    parameters = {"v": numpy.zeros(4), "w": numpy.zeros((4, 3), numpy.float32)}
    optimizer, losses, calls = Adam(0.05), {}, 0
    def maybe():
        nonlocal calls
        calls += 1
        if comm.rank == victim and calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            begin = resume(parameters, optimizer, comm)
            training = DataParallel(parameters, comm, bucket_bytes=40)
            for step in range(begin, steps):
                x = numpy.random.default_rng([step, comm.rank]).standard_normal((8, 4))
                error = x @ parameters["w"] - x[:, :3]
                maybe()
                training.ready("w", (x.T @ error).astype(numpy.float32))
                maybe()
                training.ready("v", x.T @ (x @ parameters["v"] - x.sum(1)))
                losses[step] = float(comm.all_reduce(numpy.square(error).sum(keepdims=True).sum(1))[0]).hex()
                training.finish()
                maybe()
                optimizer.step(parameters, training.gradients)
                maybe()
            return comm, losses
        except (gc.RankFailedError, gc.RevokedError):
            comm = comm.replace(replaced)
"""

LEARNS = TRAINS + """
victim, moment = json.loads(how[0])
comm = gc.join(place, timeout) if rank < 0 else gc.init(store=place, rank=rank, size=size, timeout=timeout,
                                                      deterministic=True)
comm, losses = trained(comm, 12, victim if rank >= 0 else None, moment, timeout)
say(rank=comm.rank, losses=losses)
comm.close()
"""


@pytest.mark.parametrize(("victim", "moment"), [(1, 22), (0, 21), *(
    pytest.param(victim, moment, marks=pytest.mark.slow) for victim in range(3) for moment in (1, 12, 23, 32, 45))])
def test_a_training_goes_on_bit_for_bit(group, victim, moment):
    """The losses equal those of undisturbed threads, on every rank, and on the newcomer from its first step on."""
    program = {}
    exec(BEGIN.partition("place, rank")[0] + TRAINS, program)
    undisturbed = gc.run_local(lambda comm: program["trained"](comm, 12, None, 0, 0)[1], 3, timeout=seconds(60),
                               deterministic=True)
    assert undisturbed[0] == undisturbed[1] == undisturbed[2]
    for rank in (0, 1, 2, -1):
        group.start(LEARNS, rank, 3, json.dumps([victim, moment]))
    said = group.said()
    assert sorted(one["rank"] for one in said) == [0, 1, 2]
    for one in said:
        losses = {int(step): loss for step, loss in one["losses"].items()}
        assert losses == {step: undisturbed[0][step] for step in losses}
        if one["rank"] == victim:
            assert [*losses] == [*range(min(losses), 12)]
            assert abs(min(losses) - (moment - 1) // 4) <= 1
        else:
            assert [*losses] == [*range(12)]


@pytest.mark.nightly
def test_a_training_survives_many_kills():
    *_, told, wrong = kills.run(20, generator("kills").getrandbits(32))
    assert told
    assert wrong == []
