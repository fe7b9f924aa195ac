"""A backend of torch.distributed: ``import gpucoll.torch``, then ``torch.distributed.init_process_group("gpucoll")``.

    group       a torch process group; every method is a call of a communicator
    handles     handles of calls under way, and the thread making asynchronous calls
    tensors     tensors as a communicator's arrays, torch's ops as a communicator's ops
    checks      checks of a call's tensors, with errors in PyTorch's words
    membership  how the ranks of a group meet: by MPI if MPI started the ranks, else by torch's store
"""

from __future__ import annotations

import os

import torch.distributed

from gpucoll.executors import INSIDE
from gpucoll.torch.group import TorchProcessGroup
from gpucoll.torch.membership import set_variables

__all__ = ["TorchProcessGroup"]

torch.distributed.Backend.register_backend("gpucoll", TorchProcessGroup, devices=["cpu", "cuda"])
# From PyTorch 2.15 on torch attaches a flight recorder to a group's C++ backend. A group written in Python has no C++
# backend, and gpucoll has a recorder already: add gpucoll to torch's set of backends recording by themselves.
_recording: set[str] = getattr(torch.distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_recording.add("gpucoll")
set_variables()
# Call sites in messages are the innermost frame outside of the folders in `INSIDE`: skip torch's frames as well.
INSIDE.append(os.path.dirname(torch.__file__) + os.sep)
