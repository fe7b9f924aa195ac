"""A check of a program before a run: calls are matched instead of sent.

All ranks are threads of one process.

    turns       one thread runs at a time, so that a deadlock is found exactly
    matching    the calls of all ranks on every communicator, and messages between two ranks
    ranks       communicators of virtual ranks: the library above transports and executors; results, by NumPy
    state       environment, random numbers and world of each rank
    findings    causes and call sites, from the state in which no rank can continue
    torch_world torch.distributed for virtual ranks; torch_threads, torch_tensors: its threads and tensors
    gpu_arrays  calls on arrays of emulated GPUs
    program     a program run by all ranks; the check of a function
    script      the check of a script; the command
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def precheck(function: Callable[[Any], object], size: int) -> list[dict[str, Any]]:
    """Run ``function(comm)`` on `size` virtual ranks, and return a list of what keeps the ranks from agreeing.

    No data is sent and no rank is started: the ranks are threads of this process, and one runs at a time.

    Parameters
    ----------
    function : callable
        The program of a rank; its argument is a communicator.
    size : int
        The number of ranks.

    Returns
    -------
    list of dict
        Empty if all calls agree. Each finding has `kind`, a word such as "collective", "root", "shape", "ended",
        "unmatched send" or "deadlock"; `ranks`, the culprits; `places`, the lines as "file:line", those of the culprits
        first; `call`, the name of the call; `message`, a sentence; `agreed`, the lines of the last call that agreed;
        `calls`, what each group of ranks does.

    Raises
    ------
    ArgumentError
        A wrong `size` (GC-SIZE).
    UsageError
        The call is made inside a precheck (GC-PRECHECK).

    See Also
    --------
    run_local : Threads as ranks, with data.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> found = gc.precheck(lambda comm: comm.broadcast(numpy.zeros(3), root=comm.rank // 3), 4)
    >>> [(one["kind"], one["ranks"], one["call"]) for one in found]
    [('root', [3], 'broadcast')]
    """
    from gpucoll.precheck.program import check_function  # here, because few programs check others

    return check_function(function, size)


class _Function(ModuleType):
    """The package `gpucoll.precheck`, which is also the public function of that name.

    The import system binds the package to ``gpucoll.precheck`` when a module of the package is imported first, however
    the function was bound. So the package itself must be callable, whatever comes first.
    """

    __call__ = staticmethod(precheck)


sys.modules[__name__].__class__ = _Function
