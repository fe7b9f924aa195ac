"""Parts of scripts/gpu_check with a rank on every GPU: `mpiexec -n RANKS python gpu_nodes.py PART ARGUMENT`.

Rank 0 prints the findings, as `gpu_parts` does.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_parts
from gpu_parts import FAILED, MISSING, PASSED, PATIENCE, REPEATS, Finding, finding

CALLS = 8  # copies timed together
LONGEST = 0.3  # seconds per pair: over PCIe there are fewer repeats
MOST = 64  # MiB moved by a pair


def contexts(_: str) -> Iterator[Finding]:
    """Return the GPUs with a context of each process, according to NVML, after calls by NCCL and by the peer executor.

    A context on another rank's GPU takes hundreds of MB there, and fails if this GPU is in exclusive mode.
    """
    import cupy

    import gpucoll as gc

    with gc.init(timeout=PATIENCE) as comm, gc.Communicator.from_mpi(comm.mpi, executor="peer") as other:
        cupy.cuda.Device(comm.device).use()
        x = cupy.ones(1000, "float32")
        comm.all_reduce(x, algorithm="native")
        comm.sendrecv(x, cupy.empty_like(x), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        other.all_reduce(x, algorithm="two_shot")
        cupy.cuda.Device(comm.device).synchronize()
        processes = comm.mpi.allgather(os.getpid())
        if comm.rank == 0:
            yield _contexts(processes, _processes_of_gpus())
        comm.mpi.Barrier()  # keeps the contexts of all processes alive until here


def _contexts(processes: Sequence[int], of_gpus: Sequence[set[int]]) -> Finding:
    """Return the number of GPUs with a context of each rank's process: one, if all is well."""
    counts = [sum(process in there for there in of_gpus) for process in processes]
    if not any(counts):
        return finding("contexts", MISSING, reason="NVML lists no process of this job, as in another PID namespace")
    return finding("contexts", PASSED if set(counts) == {1} else FAILED, value=counts)


def _processes_of_gpus() -> list[set[int]]:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [{one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} for handle in handles]


def pairs(megabytes: str) -> Iterator[Finding]:
    """Write from each rank into the memory of each rank, pair by pair; report correctness and speed.

    A row has the GB/s of one rank's kernel into the memory of all ranks, in order of ranks, its own memory included.
    """
    import cupy

    import gpucoll as gc
    from gpucoll import internal

    with gc.init(timeout=PATIENCE, executor="peer") as comm:
        cupy.cuda.Device(comm.device).use()
        count = min(int(megabytes), MOST) << 18
        mine = comm.zeros(count, "uint32", device="cuda")
        peer = internal.gpu_of(comm, "cuda").peer
        assert peer is not None, "the communicator asks for the peer executor"
        if peer.symmetric is None:
            if comm.rank == 0:
                yield finding("peer memory", FAILED, reason=peer.unavailable_reason)
            return
        if comm.rank == 0:
            yield finding("NVLink", PASSED, **peer.links)
        places = peer.symmetric.places(mine.data.ptr, mine.nbytes).addresses
        kernels, stream = internal.gpu_of(comm, "cuda").device.kernels, cupy.cuda.Stream(non_blocking=True)
        given = cupy.arange(count, dtype="uint32")
        given += comm.rank << 20
        cupy.cuda.Device(comm.device).synchronize()
        rates, arrived = [], []
        for writer in range(comm.size):
            for owner in range(comm.size):
                if comm.rank == writer:
                    copy = functools.partial(kernels.copy, given.data.ptr, places[owner], count, 4, stream)
                    rates.append(_rate(copy, given.nbytes, stream))
                comm.mpi.Barrier()
                if comm.rank == owner:
                    arrived.append(bool((mine == cupy.arange(count, dtype="uint32") + (writer << 20)).all()))
                    mine[...] = 0
                    cupy.cuda.Device(comm.device).synchronize()
                comm.mpi.Barrier()
        rows, columns = comm.mpi.gather(rates), comm.mpi.gather(arrived)
        for rank in range(comm.size if comm.rank == 0 else 0):
            lost = [owner for owner in range(comm.size) if not columns[owner][rank]]
            yield finding(f"rank {rank} writes", FAILED if lost else PASSED, gigabytes_per_second=rows[rank],
                          **({"reason": f"lost on ranks {lost}"} if lost else {}))


def _rate(copy: Callable[[], Any], nbytes: int, stream: Any) -> float:
    """Return the GB/s of a copy enqueued on `stream`."""
    import cupy

    taken: list[float] = []
    deadline = time.monotonic() + LONGEST
    while len(taken) < REPEATS and (not taken or time.monotonic() < deadline):
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(stream)
        for _ in range(CALLS):
            copy()
        last.record(stream)
        last.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(first, last) / CALLS)
    return round(nbytes / statistics.median(taken) / 1e6, 1)


gpu_parts.PARTS |= {"contexts": contexts, "pairs": pairs}

if __name__ == "__main__":
    gpu_parts.main(*sys.argv[1:])
