"""The peer kernels of all ranks in a single world: ranks are fibers of a thread, run in turns or in random order."""

import ctypes
import os
import sys
from pathlib import Path

import numpy

from gpucoll.device import sources
from gpucoll.executors.peer.tables import CONTROL, Multicast, PeerHeap

KERNELS = str(Path(__file__).parents[1] / "kernels")
if KERNELS not in sys.path:
    sys.path.append(KERNELS)

import expected  # noqa: E402, F401 (the path comes first; others take these from here)
from emulation import Fault, library  # noqa: E402
from emulation import run as run_kernel  # noqa: E402, F401

PATIENCE = 2e-1  # seconds of a simulated clock: a turn takes 100 ns
ALL = 1 << 30  # for `residency`: no limit
LINE = 128


def watched(source):
    """Return the scheduler and the kernels compiled apart, so that ThreadSanitizer watches only the kernels."""
    scheduler = library(sources.text(sources.Instance("", "emulation/fibers.h", "")), "-DGC_ALONE")
    ctypes.CDLL(scheduler._name, mode=os.RTLD_GLOBAL)
    return scheduler, library(f"#define GC_SCHEDULER_ELSEWHERE\n{source}", "-fsanitize=thread", "-g")


class World:
    """`room.ranks` ranks with a slab each; launched kernels begin in `run`.

    `seed` 0: fibers run in turns, otherwise in random order. `residency`: number of blocks of a rank under way at once.
    """

    def __init__(self, room, libraries, *, seed=0, residency=ALL, patience=PATIENCE):
        self.room = room
        self._scheduler, self._kernels = libraries
        self._scheduler.gc_world.restype = ctypes.c_void_p
        self._scheduler.gc_complaint.restype = ctypes.c_char_p
        self._world = ctypes.c_void_p(self._scheduler.gc_world(ctypes.c_uint64(seed), residency, 1))
        self.slabs = [zeros(room.offsets["end"]) for _ in range(room.ranks)]
        self.controls = [numpy.zeros((), CONTROL) for _ in range(room.ranks)]
        addresses = [slab.ctypes.data for slab in self.slabs]
        self.heaps = [PeerHeap(room, rank, addresses, control.ctypes.data, patience)
                      for rank, control in enumerate(self.controls)]
        staged = [zeros(2 * room.staging) for _ in range(room.ranks)]
        table = numpy.array([room.ranks, *(one.ctypes.data for one in staged)], numpy.uint64)
        self.multicasts = [Multicast(one.ctypes.data, table.ctypes.data) for one in staged]
        self._kept = [staged, table]

    def launch(self, rank, entry, arguments, blocks, threads):
        self._kept.append(arguments)
        self._scheduler.gc_launch(self._world, rank, getattr(self._kernels, f"{entry}_thread"),
                                  ctypes.c_void_p(arguments.ctypes.data), blocks, threads)

    def run(self):
        """Run all launched kernels to their ends; raise the first fault."""
        assert self._scheduler.gc_advance(self._world, 1) == 0
        complaint = self._scheduler.gc_complaint(self._world)
        complaint = complaint and complaint.decode()
        self._scheduler.gc_end(self._world)
        self._world = None
        if complaint:
            raise Fault(complaint)
        for rank, control in enumerate(self.controls):
            if control["aborted"]:
                raise Fault(f"rank {rank} gave up: " + ", ".join(f"{k} {int(control[k])}" for k in CONTROL.names))


def zeros(nbytes):
    """Return zero bytes at the start of a cache line."""
    room = numpy.zeros(nbytes + LINE, numpy.uint8)
    start = -room.ctypes.data % LINE
    return room[start:start + nbytes]


def placed(values, misaligned=0):
    """Return a copy at `misaligned` bytes after a multiple of 16."""
    room = zeros(values.nbytes + 16)
    array = room[misaligned:misaligned + values.nbytes].view(values.dtype)
    array[:] = values
    return array
