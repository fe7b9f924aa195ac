"""A backend of torch.distributed: ``import gpucoll.torch``, then ``torch.distributed.init_process_group("gpucoll")``.

    group       a torch process group; every method is a call of a communicator
    names       the names and capabilities that torch requires of a group
    handles     handles of running calls, and the thread that makes asynchronous calls
    tensors     tensors as a communicator's arrays, torch's ops as a communicator's ops
    checks      checks of a call's tensors, with PyTorch's error messages
    membership  how the ranks of a group connect: by MPI if MPI started the ranks, otherwise by torch's store
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed

from gpucoll.executors import INSIDE
from gpucoll.launch import bootstrap
from gpucoll.torch.group import TorchProcessGroup
from gpucoll.torch.membership import set_variables

__all__ = ["TorchProcessGroup"]

_batch = torch.distributed.batch_isend_irecv


@functools.wraps(_batch)
def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
    # torch starts the messages of a batch together only for groups written in C++. On a GPU, messages started singly
    # run one after the other, so that two ranks sending to each other would wait for ever.
    ops = [one for one in p2p_op_list if isinstance(one, torch.distributed.P2POp)]
    if any(one.tensor.is_cuda for one in ops):
        group = ops[0].group or torch.distributed.group.WORLD
        if isinstance(group, TorchProcessGroup):
            return [group.batch(functools.partial(_batch, p2p_op_list))]
    return list(_batch(p2p_op_list))


torch.distributed.batch_isend_irecv = torch.distributed.distributed_c10d.batch_isend_irecv = batch_isend_irecv
torch.distributed.Backend.register_backend("gpucoll", TorchProcessGroup, devices=["cpu", "cuda"])
# From PyTorch 2.15 on torch attaches a flight recorder to a group's C++ backend. A group written in Python has no C++
# backend, and gpucoll has a recorder already: add gpucoll to torch's set of backends recording by themselves.
_recording: set[str] = getattr(torch.distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_recording.add("gpucoll")
if bootstrap.default_transport is None:  # else the launcher's numbers are not those of the ranks
    set_variables()
# Call sites in messages are the innermost frame outside of the folders in `INSIDE`: skip torch's frames as well.
INSIDE.append(os.path.dirname(torch.__file__) + os.sep)
