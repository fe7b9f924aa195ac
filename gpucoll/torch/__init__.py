"""A backend of torch.distributed: ``import gpucoll.torch``, then ``torch.distributed.init_process_group("gpucoll")``.

    group       a process group of torch's, every method of which is a call of a communicator
    handles     handles of calls under way, and the thread that makes those which nobody waits for yet
    tensors     tensors as the arrays, and torch's ops as the ops, that a communicator takes
    checks      what is wrong with a call's tensors, in PyTorch's words
    membership  how the ranks of a group find each other: by MPI where it has started them, else by torch's store
"""

from __future__ import annotations

import os

import torch.distributed

from gpucoll.executors import INSIDE
from gpucoll.torch.group import TorchProcessGroup
from gpucoll.torch.membership import set_variables

__all__ = ["TorchProcessGroup"]

torch.distributed.Backend.register_backend("gpucoll", TorchProcessGroup, devices=["cpu", "cuda"])
# From 2.15 on torch attaches a recorder to backends in C++, of which a group in Python has none; gpucoll has its own
_recording: set[str] = getattr(torch.distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_recording.add("gpucoll")
set_variables()
INSIDE.append(os.path.dirname(torch.__file__) + os.sep)  # a call is the user's, whatever of torch lies in between
