"""A backend of torch.distributed: ``import gpucoll.torch``, then ``torch.distributed.init_process_group("gpucoll")``.

    group      a process group of torch's, every method of which is a call of a communicator
    work       handles of calls under way, and the thread that makes those which nobody waits for yet
    tensors    tensors as the arrays, and torch's ops as the ops, that a communicator takes
    meeting    how the ranks of a group find each other: by MPI where it has started them, else by torch's store
"""

from __future__ import annotations

import os

import torch.distributed

from gpucoll.executors import INSIDE
from gpucoll.torch.group import TorchProcessGroup
from gpucoll.torch.meeting import set_variables

__all__ = ["TorchProcessGroup"]

torch.distributed.Backend.register_backend("gpucoll", TorchProcessGroup, devices=["cpu", "cuda"])
set_variables()
INSIDE.append(os.path.dirname(torch.__file__) + os.sep)  # a call is the user's, whatever of torch lies in between
