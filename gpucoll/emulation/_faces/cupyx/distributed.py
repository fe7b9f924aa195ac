"""`cupyx.distributed`: a process group whose ranks meet at a TCP server of rank 0, or by MPI, and exchange by NCCL."""

import contextlib
import os
import threading
import time
from multiprocessing.connection import Client, Listener

from cupy._source import no_counterpart
from cupy.cuda import get_current_stream, nccl

HOST, PORT = "127.0.0.1", 13333
PATIENCE = 25.0  # seconds for rank 0 to begin to serve
DTYPES = dict(zip("bBiIlLqQefdFD", (
    nccl.NCCL_INT8, nccl.NCCL_UINT8, nccl.NCCL_INT32, nccl.NCCL_UINT32, *2 * (nccl.NCCL_INT64, nccl.NCCL_UINT64),
    nccl.NCCL_FLOAT16, *2 * (nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64)), strict=True)) if nccl.available else {}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}


def _serve(listener, size, unique_id):
    """Give the id to who asks, and let barriers go, until told to stop."""
    waiting = {}
    while True:
        client = listener.accept()
        asked, rank = client.recv()
        if asked == "barrier":
            waiting[rank] = client
            if len(waiting) == size:
                # Rank 0 last: its process may end at once, and this thread with it.
                for one in sorted(waiting, reverse=True):
                    waiting.pop(one).send(None)
            continue
        client.send(unique_id)
        if asked == "stop":
            return listener.close()


def _asked(address, *what):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError), Client(address) as server:
            server.send(what)
            return server.recv()
        time.sleep(0.05)
    raise RuntimeError("TCPStore is not available")


class NCCLBackend:
    def __init__(self, n_devices, rank, host=HOST, port=PORT, use_mpi=False):
        self._n_devices, self.rank, self._address, self._mpi = n_devices, rank, (host, port), None
        if use_mpi:
            from mpi4py import MPI
            self._mpi = MPI.COMM_WORLD
            name = self._mpi.bcast(nccl.get_unique_id() if self._mpi.rank == 0 else None)
        elif rank == 0:
            name = nccl.get_unique_id()
            threading.Thread(target=_serve, args=(Listener(self._address, backlog=n_devices), n_devices, name),
                             daemon=True).start()
        else:
            name = _asked(self._address, "id", rank)
        self._comm = nccl.NcclCommunicator(n_devices, name, rank)

    def stop(self):
        if self.rank == 0 and self._mpi is None:
            _asked(self._address, "stop", 0)

    def barrier(self):
        if self._mpi is not None:
            self._mpi.Barrier()
        else:
            _asked(self._address, "barrier", self.rank)

    def _call(self, name, arrays, *rest, count=None, op=None, stream=None):
        """Call a method of the communicator on arrays: addresses, elements, dtype, op, other arguments, stream."""
        for array in arrays:
            if not hasattr(array, "data") or hasattr(array, "nnz") or isinstance(array, list | tuple):
                raise no_counterpart("cupyx.distributed on sparse matrices")
            if not array.flags.c_contiguous and not array.flags.f_contiguous:
                raise RuntimeError("NCCL requires arrays to be either c- or f-contiguous")
        kind, count = arrays[0].dtype.char, arrays[0].size if count is None else count
        if kind not in DTYPES:
            raise TypeError(f"Unknown dtype {arrays[0].dtype} for NCCL")
        if op is not None and op not in OPS:
            raise RuntimeError(f"Unknown op {op} for NCCL")
        if kind in "FD" and op not in (None, "sum"):
            raise ValueError("Only nccl.SUM is supported for complex arrays")
        stream = get_current_stream() if stream is None else stream
        getattr(self._comm, name)(*[array.data.ptr for array in arrays], count * (2 if kind in "FD" else 1),
                                  DTYPES[kind], *([OPS[op]] if op else ()), *rest, stream.ptr)

    def all_reduce(self, in_array, out_array, op="sum", stream=None):
        self._call("allReduce", (in_array, out_array), op=op, stream=stream)

    def reduce(self, in_array, out_array, root=0, op="sum", stream=None):
        self._call("reduce", (in_array, out_array if self.rank == root else in_array), root, op=op, stream=stream)

    def broadcast(self, in_out_array, root=0, stream=None):
        self._call("broadcast", (in_out_array, in_out_array), root, stream=stream)

    def reduce_scatter(self, in_array, out_array, count, op="sum", stream=None):
        self._call("reduceScatter", (in_array, out_array), count=count, op=op, stream=stream)

    def all_gather(self, in_array, out_array, count, stream=None):
        self._call("allGather", (in_array, out_array), count=count, stream=stream)

    def send(self, array, peer, stream=None):
        self._call("send", (array,), peer, stream=stream)

    def recv(self, out_array, peer, stream=None):
        self._call("recv", (out_array,), peer, stream=stream)

    def _grouped(self, sends, receives, stream):
        """Send and receive pairs of array and peer, all together."""
        nccl.groupStart()
        try:
            for array, peer in sends:
                self.send(array, peer, stream)
            for array, peer in receives:
                self.recv(array, peer, stream)
        finally:
            nccl.groupEnd()

    def _rows(self, array):
        if array.shape[0] != self._n_devices:
            raise RuntimeError(f"the array must have {self._n_devices} elements in its first dimension, found "
                               f"{array.shape}")
        return [(array[peer], peer) for peer in range(self._n_devices)]

    def send_recv(self, in_array, out_array, peer, stream=None):
        self._grouped([(in_array, peer)], [(out_array, peer)], stream)

    def scatter(self, in_array, out_array, root=0, stream=None):
        rows = self._rows(in_array)
        self._grouped(rows if self.rank == root else [], [(out_array, root)], stream)

    def gather(self, in_array, out_array, root=0, stream=None):
        rows = self._rows(out_array)
        self._grouped([(in_array, root)], rows if self.rank == root else [], stream)

    def all_to_all(self, in_array, out_array, stream=None):
        self._grouped(self._rows(in_array), self._rows(out_array), stream)


def init_process_group(n_devices, rank, *, backend="nccl", host=None, port=None, use_mpi=False):
    """Return the communicator of this rank; rank 0 serves the meeting at `host` and `port`."""
    if n_devices <= 0:
        raise ValueError(f"Invalid number of devices {n_devices}")
    if not 0 <= rank < n_devices:
        raise ValueError(f"Invalid number of rank {rank} {n_devices}")
    if backend != "nccl":
        raise ValueError(f"{backend} is not supported")
    if not nccl.available:
        raise RuntimeError("NCCL is not available")
    return NCCLBackend(n_devices, rank, host or os.environ.get("CUPYX_DISTRIBUTED_HOST", HOST),
                       int(port or os.environ.get("CUPYX_DISTRIBUTED_PORT", PORT)), use_mpi)
