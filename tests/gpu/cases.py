"""The tests for a GPU as plain functions: called by pytest if pytest is installed, otherwise by scripts/gpu_check.

A case raises `Skipped` with the reason if this host cannot run the case. Cases that may hang run in a separate process.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
for folder in (TESTS, TESTS / "kernels", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

LIMIT = 60.0  # seconds for ranks
SHARED = {"GPUCOLL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0",
          "NCCL_SOCKET_IFNAME": "lo"}
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


class Skipped(Exception):
    """An error of a case unable to run on this host; the text is the reason."""


def missing(*modules):
    """Return the reason why this host can run no case, or "" with CuPy, the modules, a driver and a GPU."""
    for module in ("cupy", *modules):
        try:
            __import__(module)
        except ImportError as error:
            return f"{module} is missing: {error}"
    import cupy

    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no GPU"
    except RuntimeError as error:
        return f"CuPy finds no GPU: {error}"


def gpu_count():
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


@functools.cache
def kernels():
    from gpu import mirror

    return mirror.use()


def check(*calls):
    """Call functions of `checks` by name, with the kernels and the further arguments."""
    import checks

    for name, *arguments in calls:
        getattr(checks, f"check_{name}")(kernels(), *arguments)


def reduces(name):
    from gpucoll.core.ops import OPS
    from oracles.oracle import OPS as NAMES
    from oracles.oracle import legal

    check(*(("reduce", OPS[op], name) for op in NAMES if legal(op, name)), ("misaligned", name))


def expressions():
    import numpy

    from gpucoll.core.ops import elementwise_op

    check(("expression", elementwise_op("a + b - a*b"), "float32", lambda a, b: a + b - a * b),
          ("expression", elementwise_op("max(a + b, b)"), "int8", lambda a, b: numpy.maximum(a + b, b)),
          ("expression", elementwise_op("sqrt(a*a + b*b)"), "float64", lambda a, b: numpy.sqrt(a * a + b * b)))


SCALES = [("scale", what, name) for what in ("divide", "multiply", "truth")
          for name in ("float16", "bfloat16", "float32", "float64", "float8_e5m2", "complex64", "int32")]
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def memcheck(command, seconds, variables=None, start=(), options=()):
    """Run Python under memcheck."""
    program = next(filter(None, map(shutil.which, SANITIZER)), None)
    if program is None:
        raise Skipped("compute-sanitizer is not installed")
    job = run([*start, program, "--tool=memcheck", *options, "--error-exitcode=9", sys.executable, *command], seconds,
              variables)
    if job.returncode not in (0, 9) and "ERROR SUMMARY" not in job.stdout:
        raise Skipped(f"compute-sanitizer does not run here: {reason(job.stdout + job.stderr)}")
    assert job.returncode == 0, (job.stdout + job.stderr)[-4000:]


def sanitized():
    """Run kernels of odd sizes and alignments under memcheck."""
    memcheck(["-c", "import checks; from gpu import cases; from gpucoll.core.ops import OPS; k = cases.kernels(); "
                    "checks.check_misaligned(k, 'int8'); checks.check_reduce(k, OPS['sum'], 'float16'); "
                    "checks.check_pack(k); checks.check_unpack(k)"], 120)


def binding():
    """Every call of NCCL's adapter copies on a single rank, and NCCL's own message is in our error."""
    import cupy
    from cupy.cuda import nccl as library

    from gpu.helpers import refused
    from gpucoll.device import nccl
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.progress.waits import Progress

    device = CudaDevice(0)
    cupy.cuda.Device(0).use()
    own = nccl.joined(0, 1, library.get_unique_id(), device, Progress(LIMIT), {"max_ctas": 8, "name": "own"})
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, out = cupy.arange(1000, dtype="float32"), cupy.zeros(1000, "float32")
        source, target, count, nbytes = x.data.ptr, out.data.ptr, x.size, x.nbytes
        numbers, nbytes = (count, "ncclFloat32"), (nbytes, "ncclUint8")
        calls = [own.collective("all_reduce", source, target, *numbers, nccl.NCCL_OPS["ncclSum"]),
                 own.collective("reduce", source, target, *numbers, nccl.NCCL_OPS["ncclMax"], 0),
                 own.collective("reduce_scatter", source, target, *numbers, nccl.NCCL_OPS["ncclAvg"]),
                 own.collective("broadcast", source, target, *nbytes, 0),
                 own.collective("all_gather", source, target, *nbytes)]
        if nccl.lacks("all_to_all") is None:
            calls += [own.collective("all_to_all", source, target, *nbytes),
                      own.collective("gather", source, target, *nbytes, 0),
                      own.collective("scatter", source, target, *nbytes, 0)]
        for number, call in enumerate(calls):
            assert own.launcher(call) is None, number  # before the ranks have connected
            for enqueue in (lambda call=call: Progress(LIMIT).run(own.call(call, stream), "binding"),
                            lambda call=call: own.launcher(call)(stream)):
                out.fill(0)
                enqueue()
                assert (out.get() == x.get()).all(), number
        own.check()
        wrong = own.collective("broadcast", source, source, *nbytes, 7)
        assert refused("GC-NCCL", lambda: Progress(LIMIT).run(own.call(wrong, stream), "binding"))
    own.close(captured=False)


MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
NATIVE = [*(("native", name) for name in ("all_reduce", "reduce", "reduce_scatter")),
          *(("mirrored", "copies", name, "native") for name in MOVES),
          ("streams", "native"), ("asynchronous", "native")]
GRAPHS = [("launched", "ring"), ("launched", "native"), ("captured", "ring"), ("captured", "native"),
          ("replayed", "ring"), ("lifetimes", "native"),
          ("lifetimes", "ring", "tree"), ("many_calls", "ring"), ("kept_graph", "native"), ("kept_plan", "ring")]
TRAINING = [*(("trained", name) for name in ("data_parallel", "zero1", "zero2", "zero3")), ("compressed",),
            ("packed",), ("block_scaled",), ("laid_out",)]
PEER_GRAPHS = [("captured", name) for name in ("one_shot", "two_shot", "ring")] + [("planned",), ("many_calls", "ring"),
                                                                                  ("lifetimes", "one_shot", "ring")]
ALONE = [("streams", "ring"), ("asynchronous", "ring"), ("points",), ("split",), ("dlpack",), ("refusals",),
         ("mirrored", "carriers", "tree"), ("current_device",), ("streams_refused",)]
TOGETHER = [*ALONE, ("shares", "ring", "memory"), ("missed",), ("without_nccl",), ("float8_below_hopper",),
            ("mirrored", "every_op_and_dtype", "all_reduce", "ring"), ("mirrored", "every_count", "all_reduce", "tree"),
            ("mirrored", "copies", "all_to_all", "auto"),
            ("mirrored", "segmented", "all_reduce", "ring"), ("mirrored", "shapes_and_strides", "tree")]
# Programs of the peer executor: schedules, no collectives of NCCL. Some programs need a null stream for each rank, so
# ranks must be processes: threads share the null stream.
PEER = [("streams", "two_shot"), ("shares", "two_shot", "memory"), ("launched", "two_shot"),
        ("asynchronous", "one_shot"), ("points",), ("dlpack",),
        ("captured", "one_shot"), ("captured", "two_shot"), ("captured", "ring"), ("planned",), ("symmetric",),
        ("blocks",), ("packets_of_128_bytes",),
        *(("mirrored", "every_op_and_dtype", "all_reduce", name) for name in ("one_shot", "two_shot", "ring")),
        *(("mirrored", "every_op_and_dtype", name, "ring") for name in ("reduce_scatter", "reduce_scatter_v")),
        *(("mirrored", "every_count", name, "auto") for name in ("all_reduce", "reduce", "scan", "exscan")),
        *(("mirrored", "copies", name, "auto") for name in (
            "broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_gather_v", "all_to_all_v", "scatter_v")),
        ("mirrored", "segmented", "all_reduce", "two_shot"), ("mirrored", "segmented", "all_reduce", "tree"),
        ("mirrored", "shapes_and_strides", "one_shot"), ("mirrored", "special_values", "ring"),
        ("mirrored", "carriers", "two_shot"), ("mirrored", "digests", "all_reduce", "two_shot", "float32")]
PROCESSES = ("current_device", "missed", "without_nccl", "float8_below_hopper", "shares")  # programs on MPI's ranks
ON_PEER = {"GPUCOLL_EXECUTOR": "peer"}
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # ranks on a GPU: no streams in a common hardware queue
THREADS = [*(program for program in TOGETHER if program[0] not in PROCESSES), ("of_threads",)]


def run(command, seconds, variables=None):
    """Run a command and return its job; after `seconds`, stop the command with all its children."""
    from harness.jobs import JobTimeout, find_launcher, run_job

    path = os.pathsep.join([*map(str, (TESTS, TESTS / "kernels", ROOT)), *filter(None, [os.environ.get("PYTHONPATH")])])
    given, words = {"PYTHONPATH": path, **(variables or {})}, [*map(str, command)]
    try:
        if find_launcher() is None:  # commands without need of a launcher still run
            return subprocess.run(words, env={**os.environ, **given}, timeout=seconds, capture_output=True, text=True,
                                  check=False)
        return run_job(words, seconds, given)
    except (JobTimeout, subprocess.TimeoutExpired) as error:
        raise AssertionError(str(error)[-4000:]) from None


def programs(command, which, seconds, variables=None):
    """Run programs in separate processes; raise the first error."""
    job = run([*command, sys.executable, "-m", "gpu.programs", json.dumps(which)], seconds, variables)
    assert job.returncode == 0, (job.stdout + job.stderr)[-4000:]


def threads():
    """Run ranks as threads on a single GPU, with a stream each."""
    programs([], [("threads", 3, *program) for program in THREADS], 2 * LIMIT, CONNECTIONS)


def peer_threads(ranks):
    """Run the peer executor between ranks as threads on a GPU: by pointers, with a stream each."""
    which = [program for program in PEER if program[0] not in ("streams", "points", "launched")]
    programs([], [("threads", ranks, *program) for program in which], 3 * LIMIT, {**ON_PEER, **CONNECTIONS})


def peer_processes(ranks):
    """Run the peer executor between processes on a GPU, by CUDA's handles; NCCL must accept the ranks for messages."""
    taken(ranks)
    programs(mpiexec(ranks), [("executors_named",), *PEER], 3 * LIMIT, {**SHARED, **ON_PEER, **CONNECTIONS})


def taken(ranks):
    """Raise `Skipped` if NCCL does not accept `ranks` processes on a GPU."""
    try:
        programs(mpiexec(ranks), [("points",)], LIMIT, SHARED)
    except AssertionError as error:
        raise Skipped(f"NCCL does not take {ranks} ranks on one GPU: {reason(str(error))}") from None


def peer_sanitized():
    """Run peer kernels of two processes under memcheck, on arrays inside and outside of symmetric memory.

    memcheck runs the kernels of one process one after the other, so that threads would wait for each other for ever.
    Errors of CUDA's functions do not count: NCCL tries functions until one succeeds.
    """
    taken(2)
    which = json.dumps([("planned",), ("symmetric",)])
    memcheck(["-m", "gpu.programs", which], 240, {**SHARED, **ON_PEER, **CONNECTIONS}, mpiexec(2),
             ["--report-api-errors=no"])


def alone():
    needs("mpi4py")
    programs([], ALONE, 2 * LIMIT)


def shared(ranks):
    """Run ranks as processes on a GPU, if this NCCL accepts the ranks."""
    taken(ranks)
    programs(mpiexec(ranks), TOGETHER, 2 * LIMIT, SHARED)


def late():
    """With a rank of two missing, the watchdog ends the call of the other rank, with NaN and an error."""
    taken(2)
    programs(mpiexec(2), [("missing", "native"), ("missing", "ring")], LIMIT, SHARED)


def killed():
    """With a rank of two killed, the other rank gets an error, at its deadline at the latest, and ends."""
    needs("mpi4py")
    from harness.ranks import find_launcher

    taken(2)
    launcher = find_launcher()
    # A shell in between: the launcher must not end the other rank, nor signal the rank as MPICH's launcher does
    alone = ["sh", "-c", 'trap "" USR1; "$0" "$@"; exit 0', sys.executable]
    first, *others = launcher.command(2, [*alone, "-m", "gpu.programs", '[["killed"]]'])
    job = run([first, *launcher.vendor.keep_survivors, *others], LIMIT, SHARED)
    assert "rank 0 was told" in job.stdout, (job.stdout + job.stderr)[-4000:]


def torch_tensors():
    """Run programs on PyTorch's tensors: tensors requiring grad, float8, and side streams of PyTorch."""
    needs("torch")
    programs([], [("torch_tensors",)], LIMIT)


def torch_backend():
    """Run PyTorch's calls on GPU tensors by the backend "gpucoll": a rank on every GPU, or two on a single GPU."""
    needs("torch")
    ranks, variables = gpu_count(), {}
    if ranks < 2:
        taken(2)
        ranks, variables = 2, SHARED
    job = run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               "-m", "gpu.torch_job"], LIMIT, variables)
    assert job.stdout.count("all right") == ranks, (job.stdout + job.stderr)[-4000:]


def with_nccl(which, ranks):
    """Run NCCL's collectives on arrays in windows of NCCL, or on parts with the resources of their parent."""
    taken(ranks)
    programs(mpiexec(ranks), [which], LIMIT, SHARED)


def across(which, minutes, variables=None):
    if gpu_count() < 2:
        raise Skipped("there is one GPU")
    programs(mpiexec(gpu_count()), which, minutes * LIMIT, variables)


def mpiexec(ranks):
    """Return the command line for starting `ranks` ranks."""
    needs("mpi4py")
    from harness.ranks import find_launcher

    launcher = find_launcher()
    if launcher is None:
        raise Skipped("there is no mpiexec beside this Python or on the PATH")
    return launcher.command(ranks, [])


def needs(module):
    try:
        __import__(module)
    except ImportError as error:
        raise Skipped(f"{module} is missing: {error}") from None


def reason(text):
    """Return the most telling line about a failed job."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "GC-" in line or "NCCL" in line]
    return (telling or lines or ["it did not say why"])[-1][:300]


DTYPES = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
          "complex128 float8_e4m3fn float8_e5m2").split()
KERNELS = {
    **{f"reduce {name}": functools.partial(reduces, name) for name in DTYPES},
    "reduce by expressions": expressions,
    "copy, pack, unpack": functools.partial(check, ("copy",), ("pack",), ("unpack",)),
    "scale": functools.partial(check, *SCALES, *(("conversions", name) for name in NARROW)),
}
PARTS = {
    "kernels": KERNELS,
    "NCCL": {"NCCL's binding": binding,
             "native, a rank on every GPU": functools.partial(across, NATIVE, 2),
             "native, one rank": functools.partial(programs, [], NATIVE, LIMIT),
             "windows and parts, a rank on every GPU": functools.partial(across, [("windows",), ("parts",)], 1),
             "windows, 2 processes on one GPU": functools.partial(with_nccl, ("windows",), 2),
             "parts, 3 processes on one GPU": functools.partial(with_nccl, ("parts",), 3)},
    "schedules": {"a rank on every GPU": functools.partial(across, TOGETHER, 2),
                  "one rank": alone,
                  **{f"{ranks} processes on one GPU": functools.partial(shared, ranks) for ranks in (2, 4)}},
    "peer": {"peer, a rank on every GPU": functools.partial(across, [*PEER, ("switched", False)], 3, ON_PEER),
             **{f"peer, {ranks} processes on one GPU": functools.partial(peer_processes, ranks) for ranks in (2, 4)}},
    "graphs": {"graphs, a rank on every GPU": functools.partial(across, GRAPHS, 3),
               "graphs, peer, a rank on every GPU": functools.partial(across, PEER_GRAPHS, 3, ON_PEER),
               "graphs, one rank": functools.partial(programs, [], GRAPHS, LIMIT)},
    "threads": {"threads on one GPU": threads,
                **{f"peer, {ranks} threads on one GPU": functools.partial(peer_threads, ranks) for ranks in (2, 4, 8)}},
    "strategies": {"training, a rank on every GPU": functools.partial(across, TRAINING, 2),
                   "training, peer, a rank on every GPU": functools.partial(across, TRAINING, 2, ON_PEER),
                   "training, one rank": functools.partial(programs, [], TRAINING, LIMIT)},
    "two communicators": {"two communicators, a rank on every GPU": functools.partial(across, [("two",)], 1),
                          "two communicators, one rank": functools.partial(programs, [], [("two",)], LIMIT)},
    "a killed rank": {"a rank that does not come": late, "a killed rank": killed},
    "PyTorch": {"PyTorch's tensors": torch_tensors, "PyTorch's backend": torch_backend},
    "compute-sanitizer": {"memcheck": sanitized, "peer, memcheck": peer_sanitized},
}
CASES = {name: case for part in PARTS.values() for name, case in part.items()}
