"""A training, data parallel or ZeRO, that loses a rank, gets a newcomer, and goes on with the same bits."""

import pytest

from gpucoll.transport import ucx
from harness.grids import generator
from multirank import kills

LEARNS = kills.TRAINS + """
stage, fault = int(how[0]), how[1]
if rank >= 0:
    os.environ["GPUCOLL_FAULT"] = fault
comm = gc.join(place, timeout) if rank < 0 else gc.init(store=place, rank=rank, size=size, timeout=timeout,
                                                      deterministic=True)
os.environ.pop("GPUCOLL_FAULT", "")  # of the first communicator: ranks have other numbers in a later one
losses = {}
def tell(step, loss):
    assert losses.setdefault(step, loss) == loss  # a step that is taken again has the same loss
comm = trained(comm, stage, lambda comm, step: step == 6, tell, timeout)
say(rank=comm.rank, losses=losses)
comm.close()
"""
# Collectives of six steps on a rank, by the stage of ZeRO. Not the last call, if the victim is lost after its data are
# shown: the other ranks then complete the call and end, and accept no newcomer.
CALLS = {0: 36, 1: 41, 2: 41, 3: 41}


def assert_alike(said, size, undisturbed, lost):
    """Assert that all ranks end with the losses of the undisturbed training, newcomers from their first step on."""
    assert sorted(one["rank"] for one in said) == [*range(size)]
    for one in said:
        losses = {int(step): loss for step, loss in one["losses"].items()}
        assert losses == {step: undisturbed[step] for step in losses}
        assert [*losses] == [*range(min(losses, default=6) if one["rank"] in lost else 0, 6)]


@pytest.mark.parametrize(("stage", "victim", "call", "phase"), [
    (0, 1, 22, "before"), (1, 0, 31, "after"), (3, 2, 40, "after_send"),
    *(pytest.param(stage, call % 3, call, ("before", "after", "after_send")[call // 3 % 3], marks=pytest.mark.nightly)
      for stage, calls in CALLS.items() for call in range(1, calls + 1))])
def test_a_training_goes_on_bit_for_bit(group, stage, victim, call, phase):
    """The losses equal those of undisturbed threads, on every rank, and on the newcomer from its first step on."""
    undisturbed = kills.undisturbed(6, stage, ranks=3)
    assert [*undisturbed] == [*range(6)]
    for rank in (0, 1, 2, -1):
        group.start(LEARNS, rank, 3, stage, f"rank:{victim},seq:{call},phase:{phase},do:sigkill")
    assert_alike(group.said(), 3, undisturbed, [victim])


AGAIN = """
from gpucoll.communicator import Communicator
from gpucoll.training import partner
def dying(call, now):
    calls = []
    def instead(*given, **named):
        calls.append(1)
        if len(calls) == 2 and now:  # the first call starts the training, the second follows a loss
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*given, **named)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    return instead
moment = how.pop(0)
if rank == 3:
    if moment == "collecting":
        partner.PartnerCopy._collect = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    else:
        Communicator.barrier = dying(Communicator.barrier, moment == "before the end")
"""


@pytest.mark.parametrize("moment", ["collecting", "before the end", pytest.param("after the end",
                                                                                 marks=pytest.mark.slow)])
def test_another_rank_is_lost_while_the_shards_are_collected(group, moment):
    """The survivors of both losses and two newcomers go on with the same bits."""
    undisturbed = kills.undisturbed(6, 1, ranks=4)
    for rank in (0, 1, 2, 3, -1, -1):
        group.start(AGAIN + LEARNS, rank, 4, moment, 1, "rank:1,seq:24,phase:before,do:sigkill")
    assert_alike(group.said(), 4, undisturbed, [1, 3])


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.skipif(
    ucx.library()[0] is None, reason=f"UCX is not installed: {ucx.library()[1]}"))])
@pytest.mark.parametrize("stage", range(4))
def test_a_training_survives_many_kills(monkeypatch, stage, hosts):
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # UCX would detect that these hosts share memory
    told, wrong = kills.run(10, generator(f"kills {stage} {hosts}").getrandbits(32), stage, hosts)
    assert told
    assert wrong == []
