"""Programs on CuPy arrays in memory shared by the ranks, and planned calls: for any executor, mostly `peer`."""

import contextlib
import functools
import gc as collector
import importlib
import itertools
import os
import re
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, raising, ramp, ranges, refused, same
from gpucoll.calibration import packets
from gpucoll.device import gpus
from gpucoll.device.launch import Kernels
from gpucoll.executors.peer import multicast
from gpucoll.executors.peer.tables import PACKETS, STEPS
from gpucoll.tuner import Tuner

LARGE = 1_100_000  # elements of four bytes: more than the peer executor's staging area


def symmetric(comm):
    """Arrays of `empty` and `zeros`, parts of these, and arrays with the same place on only some ranks."""
    for count, algorithms in ((1000, ("ring", "auto")), (LARGE, ("one_shot", "two_shot"))):
        x, y, other = (comm.zeros(count, "float32", device="cuda") for _ in range(3))
        assert (type(x), x.device.id) == (cupy.ndarray, comm.device)
        assert not x.get().any()
        room = comm.empty(2 * count + 8, "float32", device="cuda")
        for algorithm in algorithms:
            for source, target in ((x, y), (x, x), (x, y if comm.rank else other), (x if comm.rank else other, y),
                                   (x if comm.rank else cupy.empty_like(x), y),
                                   (room[5:5 + count], room[count + 7:][:count])):
                source[...] = ramp(comm, count)
                assert comm.all_reduce(source, target, algorithm=algorithm) is target
                same(target, sum(ranges(comm, count)))


def packets_of_128_bytes(comm):
    """Packets of 128 bytes arrive whole in messages of other data each time, on one GPU without NVLink, too."""
    with comm.split(0) as other:
        device = other._core.gpu("cuda").device
        with patch.object(device, "moves_rows", return_value=True):
            for count in (4097, 16_384, 30_001, 32_768):
                for turn in range(20):
                    result = other.all_reduce(ramp(comm, count) + turn, algorithm="one_shot")
                    same(result, sum(ranges(comm, count)) + comm.size * turn)
        loaded = {getattr(one, "entry", "") for one in device.kernels._loaded}
        assert ("ll128_float32_sum" in loaded) is (comm.size > 1)


def switched(comm, needed=True):
    """Sums and gathers by the NVLink switch, in one or several sections; rank order with deterministic=True.

    Unless `needed`, GPUs without such a switch do.
    """
    for deterministic in (False, True):
        with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, deterministic=deterministic) as other:
            for count in (1, 1001, 70_000, LARGE * 4):
                x = cupy.asarray((numpy.arange(count) % 1024 + comm.rank).astype("float32"))
                out = cupy.empty_like(x)
                for source, target in ((x, out), (x.astype("int32"), None), (x[count // 3:], out[count // 3:])):
                    result = other.all_reduce(source, target, algorithm="two_shot")
                    same(result, comm.all_reduce(source, algorithm="ring").get())
                for given in (x[count // 2:], x[count // 2:].astype("u1"), x[:5] + 1j):
                    same(other.all_gather(given, algorithm="direct"), comm.all_gather(given, algorithm="ring").get())
            if not (needed or other._core.gpus["cuda"].peer.links["reductions_by_switch"]):
                continue
            has_blocks(comm, other._core.gpus["cuda"].peer, 1)
            loaded = {getattr(one, "entry", "") for one in other._core.gpus["cuda"].device.kernels._loaded}
            assert ("multimem_share_float32_sum" in loaded) is not deterministic
            assert {"multimem_share_int32_sum", "multimem_gather_4"} <= loaded


COMBINED = [("sum", "float32", numpy.add), ("sum", "float16", numpy.add), ("max", "int32", numpy.maximum),
            ("bxor", "uint64", numpy.bitwise_xor), ("min", "int64", numpy.minimum), ("sum", "float64", numpy.add),
            ("prod", "float32", numpy.multiply), ("sum", "int16", numpy.add), ("max", "float32", numpy.maximum)]


def switched_arrays(comm, by_fabric=False):
    """The switch reduces arrays of `empty` in place, where it has op and dtype; no other byte changes, all is freed."""
    driver = importlib.import_module("cuda.bindings.driver")
    before = len(driver.open_handles), len(driver._reserved)
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        x, out = (other.zeros(5000, "int64", device="cuda") for _ in range(2))
        peer = other._core.gpus["cuda"].peer
        assert peer._handshake.driver.by_fabric is by_fabric
        assert peer.symmetric.places(x.data.ptr, x.nbytes).group
        for (op, dtype, combine), (count, first, second) in itertools.product(COMBINED, (
                (1, 0, 0), (4990, 0, 8), (2003, 16, 32), (1003, 1, 3))):
            rows = [(numpy.arange(count) * 7 % 23 + rank + 1).astype(dtype) for rank in range(comm.size)]
            for target in (out, x):  # also in place
                place = second if target is out else first
                x[...], out[...] = comm.rank, comm.rank
                expected = target.view(dtype).get()
                x.view(dtype)[first:first + count] = cupy.asarray(rows[comm.rank])
                if target is x:
                    expected = x.view(dtype).get()
                expected[place:place + count] = functools.reduce(combine, rows)
                other.all_reduce(x.view(dtype)[first:first + count], target.view(dtype)[place:place + count], op=op,
                                 algorithm="two_shot")
                same(target.view(dtype), expected)
        with contextlib.ExitStack() as stack:
            called = {name: stack.enter_context(patch.object(driver, name, wraps=getattr(driver, name)))
                      for name in vars(driver) if re.match("cuM.*[a-z]$", name) and callable(getattr(driver, name))}
            kept = other.zeros(1 << 25, "uint8", device="cuda")
        root, others = comm.rank == 0, comm.size - 1
        assert {name: one.call_count for name, one in called.items() if one.called} == {
            name: count for name, count in {
                "cuMemCreate": 1, "cuMulticastCreate": root, "cuMulticastAddDevice": 1, "cuMulticastBindMem": 1,
                "cuMemExportToShareableHandle": 1 + root, "cuMemImportFromShareableHandle": others + (not root),
                "cuMemRelease": others, **dict.fromkeys(("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
                                                        comm.size + 1)}.items() if count}
        kept[:5] = comm.rank
    same(kept[:6], numpy.array([comm.rank] * 5 + [0], numpy.uint8))
    del x, out, kept, other, peer, target
    collector.collect()
    assert (len(driver.open_handles), len(driver._reserved)) == before


def unswitched(comm):
    """No rank uses multicast memory if a rank has none, or sums there are wrong; all memory is given back."""
    driver = importlib.import_module("cuda.bindings.driver")
    before = len(driver.open_handles), len(driver._reserved)
    refuse = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    cases = [(driver, name, lambda *_: refuse) for name in (
        "cuDeviceGetAttribute", "cuMulticastGetGranularity", "cuMemGetAllocationGranularity", "cuMulticastCreate",
        "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMulticastAddDevice", "cuMemCreate",
        "cuMulticastBindMem", "cuMemMap", "cuMemSetAccess")]
    cases += [(driver, "cuMulticastCreate", raising(RuntimeError("the driver has no such function"))),
              (driver, "CUdevice_attribute", None),
              *((multicast, name, raising(OSError())) for name in ("reach", "DescriptorOffer"))]
    for (module, name, refusal), rank in itertools.product(cases, range(2)):
        with patch.object(module, name, refusal if comm.rank == rank else getattr(module, name)):
            _without_switch(comm, has_switch=rank > 0 and name in ROOT_ALONE)
        assert (len(driver.open_handles), len(driver._reserved)) == before, name
    for name in ("cuMemUnmap", "cuMulticastUnbind", "cuMemRelease"):  # an error at the end keeps no rank waiting
        with patch.object(driver, name, lambda *_: refuse if comm.rank else (driver.CUresult.CUDA_SUCCESS,)):
            _without_switch(comm, has_switch=True)
    before = len(driver.open_handles), len(driver._reserved)
    with patch.dict(os.environ, {"EMULATED_SWITCH": "lossy"}):
        _without_switch(comm)
    real, refusal = Kernels.launcher, raising(MemoryError())
    with patch.object(Kernels, "launcher", lambda kernels, one: refusal() if comm.rank and "multimem" in one.entry
                      else real(kernels, one)):
        _without_switch(comm)
    assert (len(driver.open_handles), len(driver._reserved)) == before


# Functions called by rank 0 alone
ROOT_ALONE = ("cuMulticastCreate",)


def on_one_gpu(comm):
    """Ranks sharing a GPU do not use the switch, and meet before they launch; processes have a context each."""
    peer = _without_switch(comm)
    assert (peer._handshake.ranks_share_gpu, peer.minds_blocking) == (True, False)
    has_blocks(comm, peer, comm.size)


def has_blocks(comm, peer, sharing):
    """All kernels that wait for each other have their blocks on the GPU at the same time, at most 32 each."""
    processors = cupy.cuda.Device(comm.device).attributes["MultiProcessorCount"]
    assert peer._handshake.room.channels == max(1, min(32, processors // sharing))


def _without_switch(comm, has_switch=False):
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        same(other.all_reduce(ramp(comm, 1000), algorithm="two_shot"), sum(ranges(comm, 1000)))
        assert other._core.gpus["cuda"].peer.links["reductions_by_switch"] is has_switch
        return other._core.gpus["cuda"].peer


def blocks(comm):
    """A block is used again once all ranks have dropped its array; no rank gets a block that another rank lacks."""
    places = set()
    for number in range(30):
        x = comm.zeros(1 << 18, "float32", device="cuda")
        x += number
        same(comm.all_reduce(x, x), numpy.full(1 << 18, comm.size * number, numpy.float32))
        places.add(x.data.ptr)
        del x
        collector.collect()
    assert len(places) <= 2
    assert refused("GC-DTYPE", comm.empty, 3, "float8_e5m2", device="cuda")
    runtime = cupy.cuda.runtime
    if comm.mpi is not None and comm.size > 1:
        owner, name, full = runtime, "malloc", raising(runtime.CUDARuntimeError(2))
        if comm._core.gpus["cuda"].peer and comm._core.gpus["cuda"].peer._handshake.driver:
            owner, name, full = importlib.import_module("cuda.bindings.driver"), "cuMemCreate", lambda *_: (2, None)
        with patch.object(owner, name, full if comm.rank == 1 else getattr(owner, name)):
            code = "GC-MEMORY" if comm.rank == 1 else "GC-PEER"
            assert refused(code, comm.empty, 1 << 27, "uint8", device="cuda")
    x = comm.empty(1 << 27, "uint8", device="cuda")
    x[...] = 1
    assert comm.all_reduce(x[:5000]).get().max() == comm.size


def planned(comm):
    """Calls of a plan allocate nothing, eagerly and in a graph."""
    for algorithm in ("one_shot", "two_shot", "ring", "tree"):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x, out = ramp(comm, 3000), cupy.empty(3000, numpy.float32)
            plan = comm.plan("all_reduce", x, out, algorithm=algorithm, stream=stream)
            same(plan(), sum(ranges(comm, 3000)))
            device = comm._core.gpus["cuda"].device
            with patch.object(device, "empty", raising(AssertionError("a planned call allocates"))):
                for _ in range(3):
                    x += 1
                    plan()
                stream.begin_capture()
                plan()
                graph = stream.end_capture()
            same(out, sum(one + 3 for one in ranges(comm, 3000)))
            for turn in range(4, 7):
                x += 1
                graph.launch()
                same(out, sum(one + turn for one in ranges(comm, 3000)).astype(numpy.float32))


def executors_named(comm):
    """Return the names of the executors for GPU arrays."""
    comm.all_reduce(cupy.ones(3))
    return [one.name for one in comm._core.gpus["cuda"].executors]


def windows(comm):
    """Arrays of `comm.empty` lie in NCCL's windows, used by collectives on the arrays and on their slices."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, nccl={"windows": True}) as other:
        x, out = (other.zeros(5000, "float32", device="cuda") for _ in range(2))
        x += cupy.asarray(ranges(comm, 5000)[comm.rank])
        for turn in range(5):
            same(other.all_reduce(x, out, algorithm="native"), sum(ranges(comm, 5000)))
            same(other.all_reduce(x[turn:9], out[turn:9], algorithm="native"), sum(ranges(comm, 5000))[turn:9])
        nccl = other._core.gpus["cuda"]._transport
        assert len(nccl._windows) == 1
        if hasattr(nccl._comm, "windows"):  # NCCL itself has no counter
            assert nccl._comm.windows.count == 10
        kept = x
    same(kept, ranges(comm, 5000)[comm.rank])


def lossy(comm):
    """Memory of another rank opens but loses writes: no rank uses this memory, and all ranks name the pair."""
    runtime, held = cupy.cuda.runtime, []
    real, close = runtime.ipcOpenMemHandle, runtime.ipcCloseMemHandle

    def losing(handle, *_):  # the memory of rank 0 is opened first
        if held:
            return real(handle)
        held.append(cupy.zeros(1 << 24, numpy.uint8))
        return held[0].data.ptr

    def closing(pointer):
        if not held or pointer != held[0].data.ptr:
            close(pointer)

    with patch.object(runtime, "ipcOpenMemHandle", losing if comm.rank == 1 else real), \
            patch.object(runtime, "ipcCloseMemHandle", closing), \
            gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        said = refused("GC-ALGO", other.all_reduce, cupy.ones(3), algorithm="ring")
        assert "ranks 0 and 1 exchange" in said, said


def unreachable(comm):
    """CUDA lets one rank map nothing: no rank uses shared memory, and every rank names the rank."""
    runtime = cupy.cuda.runtime
    opened = raising(runtime.CUDARuntimeError(201)) if comm.rank == 1 else runtime.ipcOpenMemHandle
    with patch.object(runtime, "ipcOpenMemHandle", opened), \
            gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        said = refused("GC-ALGO", other.all_reduce, cupy.ones(3), algorithm="ring")
        assert f"{'this rank' if comm.rank == 1 else 'rank 1'} cannot reach" in said, said


def refused_call(comm):
    """Return the words of a refused call, whose arrays are unchanged; "" for a right result."""
    with cupy.cuda.Stream(non_blocking=True):
        out = cupy.full(1000, -7, numpy.float32)
        said = refused("GC-SHARED-GPU", comm.all_reduce, ramp(comm, 1000), out, algorithm="one_shot")
        same(out, numpy.full(1000, -7, numpy.float32) if said else sum(ranges(comm, 1000)))
    return said


def one_at_a_time(comm):
    """Ranks that share a GPU use peer memory in one communicator: others are refused on every rank, until it closes.

    With "auto" the others go another way, and say why.
    """
    make = functools.partial(gc.Communicator.from_mpi, comm.mpi, timeout=PATIENCE)
    first = make(executor="peer")
    assert not refused_call(first)
    part, other = first.split(0), make(executor="peer")
    for one in (part, other, part, other):
        assert "close the other one first" in refused_call(one)
    if comm.rank == 0:
        found = gc.run_local(refused_call, 2, timeout=PATIENCE, executor="peer")
        assert all("close the other one first" in one for one in found), found
    comm.barrier()
    with patch.object(Tuner, "measured", return_value={"peer"}), make() as free:
        same(free.all_reduce(ramp(comm, 1000)), sum(ranges(comm, 1000)))
        assert "close the other one first" in free.explain("all_reduce", 4000, device="cuda").reason
    first.close()
    assert not refused_call(part)
    assert refused_call(other)
    part._core.gpus["cuda"].end()  # as after a failure
    comm.barrier()
    assert not refused_call(other)
    other.close()
    if comm.rank == 0:
        assert gc.run_local(refused_call, 2, timeout=PATIENCE, executor="peer") == ["", ""]


def measured(comm):
    """On a kind of machine with a committed measurement auto runs what won there, and names the file."""
    here = gpus.describe_gpu(comm.device)
    for name, won in (("H200", {"native"}), ("H100 80GB HBM3", {"native", "one_shot"})):
        claimed = here._replace(name=f"NVIDIA {name}", by_mps=True)
        with patch.object(gpus, "describe_gpu", return_value=claimed), \
                gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
            for count in (1000, 1 << 16):
                same(other.all_reduce(ramp(comm, count)), sum(ranges(comm, count)))
            told = [other.explain("all_reduce", 4 * count, device="cuda") for count in (1000, 1 << 16)]
            kernels = {getattr(one, "entry", "") for one in other._core.gpus["cuda"].device.kernels._loaded}
        assert {one.choice for one in told} == won
        assert ("packets_float32_sum" in kernels) is ("one_shot" in won)
        assert all(("bench/results/nvidia-h100" in one["basis"]) is ("one_shot" in won) for one in told)


def spoilt_by(kernel, real):
    """Return `Kernels.launcher` with a fault: what the kernel brings from rank 0 has a wrong bit."""
    def launcher(self, instance):
        launch, (dtype, field) = real(self, instance), (STEPS, "buffers") if kernel == "steps" else (PACKETS, "dst")
        if not instance.entry.startswith(kernel):
            return launch

        def bound(blocks, threads, arguments):
            enqueue = launch(blocks, threads, arguments)
            ends = arguments.view("u1")[:dtype.itemsize].view(dtype)[field].reshape(-1)

            def spoil(stream):
                enqueue(stream)
                memory = cupy.cuda.UnownedMemory(int(ends[min(1, ends.size - 1)]), 8, arguments)
                with stream:
                    word = cupy.ndarray(1, "uint64", cupy.cuda.MemoryPointer(memory, 0))
                    word ^= 1

            return spoil

        return bound

    return launcher


def checked(comm):
    """The check before `gpucoll tune` names the kind of packet and the ranks, and does without its kernels."""
    for kernel, kind, excluded in (
            ("none", "", ()), ("packets", "packets of 16 bytes", ("fold_all",)), ("steps", "pieces", ("",)),
            ("ll128", "packets of 128 bytes", ("fold_all",)),
            ("fold_all", "reads of other ranks", ("fold_all", "fold_share")),
            ("multimem_share", "the switch", ("fold_share", "multimem_gather"))):
        with comm.split(0) as other, patch.object(packets, "PACKET_CHECKS", 2):
            device, told, comms = other._core.gpu("cuda").device, [], {"peer": other}
            with patch.object(device, "moves_rows", return_value=kernel == "ll128"), patch.object(
                    Kernels, "launcher", spoilt_by(kernel, Kernels.launcher) if comm.rank == 1 else Kernels.launcher):
                found = packets.check(comms, told.append)
            if kernel == "multimem_share" and not other._core.gpu("cuda").peer.links["reductions_by_switch"]:
                kind, excluded = "", ()
            assert (found, "peer" in comms) == (excluded, kernel != "steps")
            assert told[:1] == [f"peer: wrong data by {kind}, from rank 0 to 1: auto does without"] * bool(kind)


def one_part_at_a_time(comm):
    """Of two parts with ranks on one GPU, one has peer memory; one with a GPU for each rank counts, too."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, executor="peer") as whole:
        shared = cupy.cuda.runtime.getDeviceCount() == 1
        part = whole.split(comm.rank // 2)
        said = [bool(one) for one in comm.mpi.allgather(refused_call(part))]
        # Two parts with a GPU for each of their ranks fit together, but not with all ranks.
        assert said in ([[False, False, True, True], [True, True, False, False]] if shared else [[False] * 4]), said
        assert "close the other one first" in refused_call(whole)
        part.close()
        comm.barrier()
        if not shared:  # the whole is refused for GPU 0, and takes no place on GPU 1
            with whole.split(comm.rank % 2) as here:
                assert comm.rank % 2 or not refused_call(here)
                comm.barrier()
                assert "close the other one first" in refused_call(whole)
                assert not refused_call(here)
        assert not refused_call(whole)
