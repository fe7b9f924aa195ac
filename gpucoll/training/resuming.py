"""Training after ranks were lost or have joined: a rank with the newest state sends parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucoll import Communicator, internal
from gpucoll.internal import check_alike
from gpucoll.training.optimizers import Optimizer, check_optimizer
from gpucoll.training.parameters import opened


def resume(parameters: Mapping[str, Any], optimizer: Optimizer, comm: Communicator) -> int:
    """Give all ranks the newest parameters and optimizer state, in place; return the number of steps made so far.

    A collective call, for a communicator of `Communicator.replace`, `grow`, `shrink` or `gpucoll.join`, before a new
    `DataParallel` is made. `parameters` and the whole `optimizer` are the same on all ranks, as in data-parallel
    training. A failure in the middle of a step may leave some ranks a step ahead: the lowest rank with the most steps
    sends its state. At the start of a training only the parameters are sent, from rank 0.

    Raises ArgumentError and DtypeError for wrong arguments of this rank, PeerError for another rank's, and
    MismatchError if the parameters or the kinds of optimizers differ between ranks.
    """
    arrays = opened("resume", parameters, comm, lambda: check_optimizer("resume", optimizer))
    everyone = internal.all_gather_metadata(comm, {"steps": optimizer.steps, "optimizer": optimizer.kind}, "resume")
    check_alike("resume", everyone, "optimizer", "GC-OPTIMIZER")
    steps = [one["steps"] for one in everyone]
    newest = max(steps)
    root = steps.index(newest)
    with internal.current_stream(comm, arrays.values()):
        for name, array in arrays.items():
            comm.broadcast(array, root)
            if newest:  # before the first step the state is zeros on every rank
                for state in optimizer.state_of(name, array).values():
                    comm.broadcast(state, root)
    optimizer.steps = newest
    return newest
