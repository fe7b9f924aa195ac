"""Whom gpucoll is measured against: MPI itself, NCCL itself, PyTorch's Gloo, and cupyx.distributed.

A peer is made once for a run and then asked for its call of each case: the blocking call that a program without
gpucoll would use. What a peer lacks raises LeftOut with the reason, and the run goes on without it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeAlias

from mpi4py import MPI

from gpucoll import Communicator
from gpucoll.bootstrap import nccl_id
from gpucoll.dtypes import DTYPES, EXTENDED
from gpucoll.ops import op_of

from .cases import Case
from .devices import Device

Call: TypeAlias = Callable[..., Any]
Peer: TypeAlias = Callable[[Case], Call]
MPI_CALLS = {"all_reduce": "Allreduce", "reduce": "Reduce", "broadcast": "Bcast", "all_gather": "Allgather",
             "hypercube": "Allgather", "gather": "Gather", "scatter": "Scatter", "all_to_all": "Alltoall",
             "reduce_scatter": "Reduce_scatter_block", "scan": "Scan", "exscan": "Exscan", "barrier": "Barrier",
             "sendrecv": "Sendrecv"}
NCCL_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "reduce_scatter", "sendrecv")
GLOO_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "barrier")
GLOO_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}


class LeftOut(Exception):
    """A peer does not take part; the text says why."""


def _require(name: str, case: Case, tests: Any, *, reduces: bool, moves: bool = True) -> None:
    """Raise LeftOut for a test, a reduction or a dtype that the peer does not have."""
    if case.row.ragged:
        raise LeftOut(f"{case.test}: its call is told the counts that gpucoll's finds out by itself")
    if case.test not in tests:
        raise LeftOut(f"{name} has no {case.test}")
    if case.row.reduces and not reduces:
        raise LeftOut(f"{name} has no reduction by {case.op} of {case.dtype}")
    if not moves:
        raise LeftOut(f"{name} is not called with arrays of {case.dtype}")


def _mpi(comm: Communicator, device: Device) -> Peer:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def peer(case: Case) -> Call:
        in_bytes = DTYPES[case.dtype].mpi is None  # what MPI has no name for, such as bfloat16
        _require("MPI itself", case, MPI_CALLS, reduces=case.op != "avg" and not in_bytes)
        options: dict[str, Any] = {"op": getattr(MPI, op_of(case.op).mpi)} if case.row.reduces else {}
        if case.row.rooted:
            options["root"] = case.root

        def on_host(*arrays: Any) -> None:
            given = [array.view("u1") if in_bytes and array is not None else array for array in arrays]
            if len(arrays) == 2 and arrays[0] is arrays[1] and arrays[0] is not None:
                given[0] = MPI.IN_PLACE
            if case.test == "sendrecv":
                comm.mpi.Sendrecv(given[0], right, recvbuf=given[1], source=left)
            else:
                getattr(comm.mpi, MPI_CALLS[case.test])(*given, **options)

        def through_host(*arrays: Any) -> None:
            """What an MPI that knows nothing of GPUs needs: copies to the host and back."""
            held = {id(array): device.read(array, case.dtype).copy() for array in arrays if array is not None}
            on_host(*(None if array is None else held[id(array)] for array in arrays))
            if arrays and arrays[-1] is not None:
                device.write(arrays[-1], held[id(arrays[-1])])

        return through_host if device.name == "cuda" else on_host

    return peer


def _nccl(comm: Communicator, device: Any) -> Peer:
    if device.name != "cuda":
        raise LeftOut("NCCL works on GPU memory: needs --device cuda")
    try:
        from cupy.cuda import nccl

        library = nccl.NcclCommunicator(comm.size, nccl_id(comm.mpi), comm.rank)
    except (ImportError, RuntimeError) as error:  # CuPy's NCCL errors are RuntimeErrors
        raise LeftOut(f"NCCL: {error}") from error

    def constant(name: str | None) -> Any:
        return getattr(nccl, f"NCCL_{name.removeprefix('nccl').upper()}", None) if name else None

    def peer(case: Case) -> Call:
        kind, op = constant(DTYPES[case.dtype].nccl), constant(op_of(case.op).nccl)
        _require("NCCL", case, NCCL_TESTS, reduces=kind is not None and op is not None, moves=kind is not None)

        def call(x: Any, out: Any = None) -> None:
            source, target = (0 if array is None else array.data.ptr for array in (x, out))
            stream, count = device.stream.ptr, x.size
            match case.test:
                case "all_reduce":
                    library.allReduce(source, target, count, kind, op, stream)
                case "reduce":
                    library.reduce(source, target or source, count, kind, op, case.root, stream)
                case "broadcast":
                    library.broadcast(source, source, count, kind, case.root, stream)
                case "reduce_scatter":
                    library.reduceScatter(source, target, out.size, kind, op, stream)
                case "sendrecv":
                    nccl.groupStart()
                    library.send(source, count, kind, (comm.rank + 1) % comm.size, stream)
                    library.recv(target, count, kind, (comm.rank - 1) % comm.size, stream)
                    nccl.groupEnd()
                case _:
                    library.allGather(source, target, count, kind, stream)

        return call

    return peer


def _gloo(comm: Communicator, device: Device) -> Peer:
    if device.name == "cuda":
        raise LeftOut("Gloo is measured on host memory: needs --device cpu")
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise LeftOut("PyTorch is not installed: pip install torch") from error
    if not dist.is_initialized():
        host = "127.0.0.1" if comm.nodes == 1 else socket.gethostname()
        with socket.socket() as probe:  # an address of rank 0's host where nobody listens yet
            probe.bind((host, 0))
            where = comm.mpi.bcast(f"{host}:{probe.getsockname()[1]}")
        dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=comm.rank, world_size=comm.size)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name

    def peer(case: Case) -> Call:
        _require("Gloo", case, GLOO_TESTS, reduces=case.op in GLOO_OPS, moves=case.dtype not in EXTENDED and (
            case.dtype == "uint8" or not case.dtype.startswith("uint")))
        op = getattr(dist.ReduceOp, GLOO_OPS.get(case.op, "SUM"))

        def call(*arrays: Any) -> None:
            """PyTorch reduces in place: where the result goes elsewhere, a program copies its input there first."""
            if case.test == "barrier":
                dist.barrier()
                return
            x, out = arrays[0], arrays[-1] if arrays[-1] is not None else arrays[0].copy()
            if case.test in ("all_gather", "hypercube"):
                all_gather(torch.from_numpy(out).view(-1), torch.from_numpy(x))
                return
            if out is not x:
                out[...] = x
            given = {"broadcast": (case.root,), "reduce": (case.root, op), "all_reduce": (op,)}[case.test]
            getattr(dist, case.test)(torch.from_numpy(out), *given)

        return call

    return peer


def _cupyx(comm: Communicator, device: Device) -> Peer:
    if device.name != "cuda":
        raise LeftOut("cupyx.distributed works on CuPy arrays: needs --device cuda")
    try:
        import cupyx.distributed

        library = cupyx.distributed.init_process_group(comm.size, comm.rank, use_mpi=True)
    except Exception as error:  # NCCL, MPI and sockets each have errors of their own
        raise LeftOut(f"cupyx.distributed: {error}") from error
    calls: dict[str, Callable[..., Call]] = {  # of the case, then of the arrays
        "barrier": lambda case: library.barrier, "all_to_all": lambda case: library.all_to_all,
        "broadcast": lambda case: lambda x: library.broadcast(x, case.root),
        "all_reduce": lambda case: lambda x, out: library.all_reduce(x, out, case.op),
        "reduce": lambda case: lambda x, out: library.reduce(x, x if out is None else out, case.root, case.op),
        "reduce_scatter": lambda case: lambda x, out: library.reduce_scatter(x, out, out.size, case.op),
        **dict.fromkeys(("all_gather", "hypercube"), lambda case: lambda x, out: library.all_gather(x, out, x.size)),
    }

    def peer(case: Case) -> Call:
        _require("cupyx.distributed", case, calls, reduces=case.op in ("sum", "prod", "min", "max"),
                 moves=case.dtype not in EXTENDED)
        return calls[case.test](case)

    return peer


PEERS: dict[str, Callable[[Communicator, Device], Peer]] = {
    "mpi": _mpi, "nccl": _nccl, "gloo": _gloo, "cupyx": _cupyx,
}
