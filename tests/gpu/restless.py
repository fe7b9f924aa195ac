"""Programs of a user making another device current before every call; the calls must leave it current.

Active with the rule `device_changes` of the stand-in, on hosts with several GPUs; otherwise calls are unchanged.
"""

import itertools
import os
import random

import cupy

from gpucoll.communicator import Communicator

runtime = cupy.cuda.runtime
_turns = itertools.count(int(os.environ.get("STAND_IN_SEED", "0")))


def restless(comm):
    """Return `comm`, with any device current in every call, also in calls of the returned objects."""
    hostile = getattr(cupy, "hostile", None)  # CuPy has no such module
    if hostile is None or not hostile.on("device_changes") or not isinstance(comm, Communicator):
        return comm
    seed = f"{next(_turns)}-{comm.rank}"
    print(f"device changes by seed {seed}")
    return _Restless(comm, random.Random(seed))


class _Restless:
    def __init__(self, target, chance):
        self._target, self._chance = target, chance

    def __getattr__(self, name):
        found = getattr(self._target, name)
        return self._moved(name, found) if callable(found) and not name.startswith("_") else found

    def _moved(self, name, call):
        def called(*arguments, **options):
            before, other = runtime.getDevice(), self._chance.randrange(runtime.getDeviceCount())
            runtime.setDevice(other)
            try:
                found = call(*arguments, **options)
                now = runtime.getDevice()
                assert now == other, f"{name} has made GPU {now} current, where {other} was"
            finally:
                runtime.setDevice(before)
            is_plain = isinstance(found, dict | tuple | BaseException)
            is_ours = type(found).__module__.startswith("gpucoll") and not is_plain
            return _Restless(found, self._chance) if is_ours or hasattr(found, "__exit__") else found

        return called

    def __call__(self, *arguments, **options):
        return self._moved("the call", self._target)(*arguments, **options)

    def __enter__(self):
        self._moved("__enter__", self._target.__enter__)()
        return self

    def __exit__(self, *error):
        return self._moved("__exit__", self._target.__exit__)(*error)
