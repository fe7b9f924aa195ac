"""The device path on CuPy arrays, on emulated GPUs with NCCL: streams, graphs, refusals, failures.

tests/contract covers every schedule, op and dtype on the emulated device; this file runs a sample on CuPy arrays.
"""

import json
import os
import sys

import numpy
import pytest

from gpu.emulated import FACES, environment
from gpucoll.algorithms import algorithms, find
from harness.pace import seconds
from harness.ranks import RankPool, launch, run_job

SIZE = 3
PEER = {"GPUCOLL_EXECUTOR": "peer"}
SHARE = {"GPUCOLL_SHARE_GPU": "1"}
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
HOSTILE = {"EMULATED_RULES": "hostile"}  # see gpucoll/emulation/_faces/cupy/hostile.py

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]


@pytest.fixture(scope="module")
def gpus(launcher, emulated_kernels):
    """Yield `gpus(name, size, *args)`, a function to run a program of `gpu.programs` on ranks with a GPU each."""
    with pytest.MonkeyPatch.context() as patch, RankPool() as pool:
        patch.syspath_prepend(FACES)
        for name, value in environment().items():
            patch.setenv(name, value)
        yield lambda name, size, *arguments, **options: pool.run(on_mpi, size, name, *arguments,
                                                                 timeout=seconds(120), **options)


def on_mpi(mpi, name, *arguments):
    """Run a program on a rank. The test process must not import this CuPy: other tests would take it for a GPU's."""
    from gpu import programs

    return programs.on_mpi(mpi, name, *arguments)


def named(programs, slow="", machine="usual", sample=()):
    """Return programs as parameters. Names beginning as in `slow` are marked slow; on the hostile machine all programs
    but a sample are marked nightly."""
    variables, later = ({}, tuple(slow.split())) if machine == "usual" else (HOSTILE, ())
    usual = [() if machine == "usual" or one in sample else NIGHTLY for one in programs]
    names = ["-".join(one) for one in programs]
    return [pytest.param(one, variables, id=f"{machine}-{name}", marks=SLOW if name.startswith(later) else mark)
            for one, name, mark in zip(programs, names, usual, strict=True)]


def on_both(programs, slow, sample):
    return [*named(programs, slow), *named(programs, machine="hostile", sample=sample)]


ANYWHERE = [("streams", "ring"), ("shares", "ring", "memory"), ("shares", "ring", "messages"), ("asynchronous", "ring"),
            ("points",), ("dlpack",), ("refusals",),
            ("mirrored", "shapes_and_strides", "ring"), ("mirrored", "segmented", "all_reduce", "tree"),
            ("mirrored", "special_values", "tree"), ("mirrored", "carriers", "star"),
            ("mirrored", "copies", "all_to_all", "auto"), ("mirrored", "copies", "scatter_v", "auto"),
            ("tensors", "streams"), ("many_calls", "ring")]
WITH_NCCL = [("missing", "native"), ("missing", "ring"),
             ("mirrored", "large_averages", "native"), ("lifetimes", "native"),
             ("lifetimes", "ring", "tree", "auto"), ("current_device",), ("finalized",), ("fault",),
             ("float8_below_hopper",), ("host_against_device", ""), ("host_against_device", "deferred"),
             ("host_against_device", "full"),
             ("streams", "native"), ("shares", "native", "memory"), ("asynchronous", "native"), ("captured", "ring"),
             ("captured", "native"), ("captured", "auto"), ("aborted",), ("broken",), ("blocking",), ("selected",),
             ("elsewhere", "auto"), ("elsewhere", "ring", "tree"), ("repeated_elsewhere", "ring"), ("reused", "native"),
             ("same_objects", "native"), ("on_both_sides",),
             ("reused", "ring"), ("reused_windows",), ("freed_windows",), ("dropped_in_capture",),
             *(("mirrored", "copies", name, "native") for name in ("broadcast", "gather", "scatter", "all_to_all"))]
ON_PEER = [("shares", "two_shot", "memory"), ("missing", "two_shot"), ("missing", "one_shot"), ("missing", "ring"),
           ("current_device",), ("streams", "two_shot"), ("points",), ("asynchronous", "one_shot"),
           ("captured", "ring"), ("captured", "one_shot"), ("captured", "two_shot"), ("dlpack",), ("symmetric",),
           ("planned",), ("blocks",), ("packets_of_128_bytes",), ("unreachable",), ("lossy",), ("many_calls", "ring"),
           ("lifetimes", "ring", "one_shot", "two_shot"), ("fault",), ("mirrored", "every_count", "all_reduce", "ring"),
           ("elsewhere", "two_shot", "ring"), ("repeated_elsewhere", "two_shot"), ("same_objects", "two_shot"),
           ("reused", "two_shot"),
           ("reused", "one_shot", "ring"), ("let_go",), ("dropped_in_capture",), ("checked",)]


@pytest.mark.parametrize(("program", "machine"), on_both(
    [*ANYWHERE, *WITH_NCCL],
    slow="missing-ring lifetimes many_calls aborted asynchronous mirrored-copies "
         "captured-auto captured-ring host_against_device-deferred mirrored-segmented mirrored-special "
         "mirrored-carriers shares-native broken finalized current_device mirrored-large elsewhere-ring reused-ring "
         "reused_windows",
    sample=[("streams", "ring"), ("shares", "native", "memory")]))
def test_programs(gpus, program, machine):
    gpus(program[0], SIZE, *program[1:], env=machine)


@pytest.mark.parametrize(("program", "machine"), on_both(
    ON_PEER, slow="missing current_device blocks asynchronous points lifetimes "
                  "many_calls symmetric fault captured-ring mirrored elsewhere reused-one checked",
    sample=[("captured", "two_shot")]))
def test_programs_by_the_peer_executor(gpus, program, machine):
    gpus(program[0], SIZE, *program[1:], env={**PEER, **machine})


@pytest.mark.parametrize(("executor", "first"), [("nccl", 0), ("peer", 2)])
def test_the_page_tells_how_a_call_goes(gpus, executor, first):
    gpus("walks", 4, first, first + 1, env={"GPUCOLL_EXECUTOR": executor})


TRAINING = [*(("trained", name) for name in ("data_parallel", "zero1", "zero2", "zero3")), ("compressed",),
            ("packed",), ("block_scaled",), ("laid_out",)]


@pytest.mark.parametrize(("program", "machine"), on_both(
    TRAINING, slow="trained-zero1 trained-zero2 compressed laid_out", sample=[("trained", "zero3")]))
def test_training_programs(gpus, program, machine):
    gpus(program[0], SIZE, *program[1:], env=machine)


# Programs for behaviour that only the hostile machine shows
FOR_HOSTILE = [("streams_refused",), ("kept_graph", "ring"), ("kept_graph", "native"), ("kept_plan", "ring"),
               ("missed",), ("captured_alone",), ("in_turn",), ("without_nccl",), ("mirrored", "carriers", "auto"),
               ("tensors", "weights"), ("tensors", "float8")]


@pytest.mark.parametrize(("program", "machine"), named(
    FOR_HOSTILE, machine="hostile",
    sample=[("missed",), ("without_nccl",), ("kept_graph", "native")]))
def test_programs_for_a_hostile_machine(gpus, program, machine):
    gpus(program[0], SIZE, *program[1:], env=machine)


ON_MACHINES = pytest.mark.parametrize("machine", [
    pytest.param({}, id="usual"), pytest.param(HOSTILE, id="hostile", marks=NIGHTLY)])


@pytest.mark.slow
@ON_MACHINES
@pytest.mark.parametrize("program", ["switched", "unswitched", "symmetric", "blocks", "reused-two_shot", "let_go",
                                     "checked"])
def test_the_nvlink_switch(gpus, program, machine):
    name, *arguments = program.split("-")
    gpus(name, 3, *arguments, env={**PEER, "EMULATED_SWITCH": "1", **machine})


@ON_MACHINES
@pytest.mark.parametrize(("switch", "by_fabric"), [("1", False), ("fabric", True), ("unplugged", False)])
def test_the_switch_works_on_arrays_in_place(gpus, switch, by_fabric, machine):
    """The handles are of the fabric where the driver opens them, and else file descriptors."""
    gpus("switched_arrays", 3, by_fabric, env={**PEER, "EMULATED_SWITCH": switch, **machine})


@ON_MACHINES
def test_alone_in_fours_and_in_parts(gpus, machine):
    gpus("many", 1, [("streams", "ring"), ("captured", "ring"), ("dlpack",)], env=machine)
    gpus("many", 1, [("streams", "ring"), ("captured", "one_shot"), ("symmetric",)], env={**PEER, **machine})
    gpus("split", 4, env=machine)
    assert gpus("executors_named", 2, env={**PEER, **machine}) == [["peer", "nccl", "native"]] * 2


@pytest.mark.parametrize("executor", ["nccl", "peer"])
def test_groups_kernels_and_bytes(gpus, executor):
    """Each algorithm is one peer kernel; with NCCL, a group for each round of the cost formula, and its bytes."""
    names = algorithms("all_reduce", size=4, device="cuda")
    found = numpy.max(gpus("enqueued", 4, *names, env={"GPUCOLL_EXECUTOR": executor}), axis=0).tolist()
    costs = [find("all_reduce", name).price(4, 1.0, 1, (0,) * 4) for name in names]
    if executor == "peer":
        assert found == [[0, 1, 0]] * len(names)
        return
    kernels = {name: one.pop(1) for name, one in zip(names, found, strict=True)}
    assert found == [[cost["rounds"], cost["sent"]] for cost in costs]
    assert (kernels["ring"], kernels["tree"]) == (3, 1)


@ON_MACHINES
@pytest.mark.parametrize("algorithm", ["ring", pytest.param("tree", marks=SLOW)])
def test_calls_that_repeat_become_graphs(gpus, algorithm, machine):
    assert min(gpus("replayed", SIZE, algorithm, env=machine)) == 2


@ON_MACHINES
@pytest.mark.parametrize(("algorithm", "executor"), [("ring", {}), ("native", {}), ("two_shot", PEER)])
def test_calls_on_the_same_arrays_take_one_launch(gpus, algorithm, executor, machine):
    assert all(map(all, gpus("launched", SIZE, algorithm, env={**executor, **machine})))


@pytest.mark.parametrize(("algorithm", "executor"), [("ring", {}), ("native", {}), ("two_shot", PEER), ("ring", PEER)])
def test_repeated_calls_pass_few_lines_of_python(gpus, algorithm, executor):
    """The limits are for files and lines, beside those of waits; the last two for a call with its stream named."""
    for found in gpus("passes", SIZE, algorithm, env=executor):
        assert (numpy.array(found) <= [(5, 60), (5, 60), (6, 110), (6, 110)]).all(), found


@ON_MACHINES
def test_arrays_in_windows_of_nccl(gpus, machine):
    gpus("windows", SIZE, env=machine)


@pytest.mark.slow
@ON_MACHINES
def test_parts_with_the_resources_of_their_parent(gpus, machine):
    gpus("parts", 4, env=machine)
    gpus("failed_part", SIZE, env=machine)
    gpus("turns", 1, env=machine)


def test_graphs_of_memory_that_other_ranks_map_are_not_kept_by_address(gpus):
    assert not any(gpus("kept_by_address", SIZE, env={"NCCL_LEGACY_CUDA_REGISTER": "1"}))


# By NCCL's documentation: four ops of six integers, three ops of six floats (NCCL's min and max need not let NaN win),
# sums and averages of two complex dtypes, and the ops of bool that a byte can stand in for.
SERVED = 6 * 4 + 6 * 3 + 2 * 2 + 8
FLOAT8 = 2 * 3  # part of SERVED; by NCCL's enqueue.cc only from compute capability 9.0 on


@ON_MACHINES
@pytest.mark.parametrize("collective", ["all_reduce", pytest.param("reduce", marks=SLOW), "reduce_scatter"])
def test_native_reductions(gpus, collective, machine):
    assert gpus("native", SIZE, collective, env=machine) == [SERVED - FLOAT8 * (machine == HOSTILE)] * SIZE


@NIGHTLY
def test_a_fault_is_told(mpiexec, emulated_kernels):
    code = "from gpu import programs; from mpi4py import MPI; programs.on_mpi(MPI.COMM_WORLD, 'faulted')"
    assert job(1, code, EMULATED_RULES="hostile") == ""


def job(ranks, code, **variables):
    """Run these lines on ranks; return the printed words, sorted and joined, since output of ranks may run together."""
    result = launch(ranks, sys.executable, "-c", code, env=environment(**variables), timeout=seconds(60))
    assert result.returncode == 0, result.stdout + result.stderr
    return "".join(sorted(result.stdout.split()))


CLAIM = """
import sys, cupy, gpucoll as gc
comm = gc.init(timeout=60)
try:
    said = f"{(comm.all_reduce(cupy.ones(3), algorithm='ring').get() == comm.size).all()}\\n"
except gc.GpucollError as error:
    said = f"{' '.join([error.code, *map(str, error.ranks)])}\\n"
sys.stdout.write(said)
comm.close()
"""


@pytest.mark.parametrize(("variables", "said"), [
    ({"EMULATED_GPUS": "1"}, "0011" + "GC-SHARED-GPU" * 2),
    pytest.param({"EMULATED_GPUS": "1", **SHARE, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "True" * 2, marks=SLOW),
    pytest.param({"EMULATED_GPUS": "1", **SHARE}, "GC-NCCL" * 2, marks=SLOW),
])
def test_two_ranks_on_one_gpu(mpiexec, emulated_kernels, variables, said):
    assert job(2, CLAIM, **variables) == said


@pytest.mark.slow
def test_two_ranks_on_one_gpu_have_no_switch(mpiexec, emulated_kernels):
    result = launch(2, sys.executable, "-m", "gpu.programs", '[["on_one_gpu"]]', timeout=seconds(120),
                    env=environment(**PEER, **SHARE, EMULATED_GPUS="1", EMULATED_SWITCH="1",
                                    NCCL_MULTI_RANK_GPU_ENABLE="1"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("ranks", "gpus", "program"), [
    (2, "1", "one_at_a_time"), (2, "1", "measured"), (4, "1", "one_part_at_a_time"),
    pytest.param(4, "2", "one_part_at_a_time", marks=SLOW)])
def test_a_shared_gpu_has_the_peer_kernels_of_one_communicator(mpiexec, emulated_kernels, ranks, gpus, program):
    result = launch(ranks, sys.executable, "-m", "gpu.programs", json.dumps([[program]]), timeout=seconds(120),
                    env=environment(**SHARE, EMULATED_GPUS=gpus, NCCL_MULTI_RANK_GPU_ENABLE="1"))
    assert result.returncode == 0, result.stdout + result.stderr


ON_OWN_GPU = """
import cupy, gpucoll as gc
with gc.init(timeout=60) as comm:
    cupy.cuda.Device(comm.device).use()
    found = [comm.all_reduce(cupy.ones(3), algorithm=algorithm) for algorithm in ("native", "ring", "auto")]
    work = comm.all_reduce(cupy.ones(3), async_op=True)
    work.wait()
    assert all((one.get() == comm.size).all() for one in found)
    print(comm.device, end="", flush=True)
"""


@pytest.mark.parametrize("executor", [{}, pytest.param(PEER, marks=SLOW)])
def test_gpus_in_exclusive_mode(mpiexec, emulated_kernels, executor):
    said = job(4, ON_OWN_GPU.replace('"native"', '"tree"') if executor else ON_OWN_GPU, **executor, EMULATED_GPUS="4",
               EMULATED_EXCLUSIVE=str(os.getpid()))
    assert sorted(said) == ["0", "1", "2", "3"]


PARTS = """
import sys, cupy, gpucoll as gc
with gc.init(timeout=60) as comm:
    part = comm.split(comm.rank // 2)
    assert comm.device == part.device
    if comm.mpi is not None:  # the emulated NCCL needs MPI
        cupy.cuda.Device(part.device).use()
        total = part.all_reduce(cupy.full(3, comm.rank))
        assert int(total[0]) == (1, 5)[comm.rank // 2]
    sys.stdout.write(f"{comm.rank - comm.device} ")
    part.close()
"""


UNNUMBERED = ["env", "-u", "MPI_LOCALRANKID", "-u", "OMPI_COMM_WORLD_LOCAL_RANK"]
NAMED = ["sh", "-c", 'GPUCOLL_DEVICE=$((3 - ${PMI_RANK:-$OMPI_COMM_WORLD_RANK})) exec "$@"', "sh"]


@pytest.mark.parametrize(("words", "differences"), [
    pytest.param(UNNUMBERED, [0, 0, 0, 0], id="the launcher numbers no ranks of a host"),
    pytest.param(NAMED, [-3, -1, 1, 3], id="named", marks=SLOW)])
def test_a_part_keeps_the_gpus_of_its_ranks(mpiexec, emulated_kernels, words, differences):
    result = launch(4, *words, sys.executable, "-c", PARTS, env=environment(EMULATED_GPUS="4"), timeout=seconds(60))
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(map(int, result.stdout.split())) == differences


COMMANDS = [pytest.param("doctor", "self-test   cuda: ", marks=SLOW),
            pytest.param("tune --device cuda --collective all_reduce,barrier", "all_reduce         16777216 bytes",
                         marks=NIGHTLY),
            pytest.param("tune --device cuda --collective all_gather --sweep --max-bytes 1K", "all_gather ",
                         marks=NIGHTLY),
            pytest.param("explain all_reduce 1M --device cuda", "native", marks=NIGHTLY),
            pytest.param("bench all --device cuda -e 1K -n 2", "# Out of bounds values : 0 OK", marks=NIGHTLY)]


@pytest.mark.parametrize(("words", "said"), COMMANDS)
def test_commands_with_four_gpus(mpiexec, emulated_kernels, tmp_path, words, said):
    result = launch(4, sys.executable, "-m", "gpucoll", *words.split(), timeout=seconds(200),
                    env=environment(EMULATED_GPUS="4", GPUCOLL_TIMEOUT="60", GPUCOLL_CACHE=str(tmp_path)))
    printed = result.stdout + result.stderr
    assert (result.returncode, said in printed) == (0, True), printed


def test_the_first_message_of_two_ranks(gpus):
    gpus("first_messages", SIZE, env=HOSTILE)


def test_collectives_have_one_nccl_communicator_and_each_pair_has_one_from_its_first_message_on(gpus):
    assert gpus("nccl_communicators", SIZE) == [[1, 1, 3, 3, 4, 4, 6, 6]] * SIZE


# Ranks that are threads do not compare calls on devices, so they exchange no times.
THREADS = [*(program for program in ANYWHERE if program[0] != "shares"), ("split",), ("of_threads",)]
PEER_THREADS = [("asynchronous", "one_shot"), ("dlpack",), ("symmetric",), ("planned",), ("captured", "ring"),
                ("blocks",), ("packets_of_128_bytes",), ("kernels_of_threads",)]


# The hostile machine is slow with 16 blocks per rank, and programs that allocate while a stream is held would hang.
PEER_HOSTILE = [("dlpack",), ("planned",), ("captured", "ring"), ("kernels_of_threads",)]


@pytest.mark.parametrize(("programs", "gpus", "variables"), [
    pytest.param(THREADS, 3, {}, id="GPUs", marks=SLOW), pytest.param(THREADS, 1, {}, id="one GPU", marks=SLOW),
    pytest.param(PEER_THREADS, 1, PEER, id="peer", marks=NIGHTLY),
    pytest.param(THREADS, 3, HOSTILE, id="GPUs, hostile", marks=NIGHTLY),
    pytest.param(THREADS, 1, HOSTILE, id="one GPU, hostile", marks=NIGHTLY),
    pytest.param(PEER_HOSTILE, 1, {**PEER, **HOSTILE, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, id="peer, hostile",
                 marks=NIGHTLY)])
def test_threads(emulated_kernels, programs, gpus, variables):
    which = json.dumps([("threads", 3, *program) for program in programs])
    result = run_job([sys.executable, "-m", "gpu.programs", which], seconds(200),
                     environment(EMULATED_GPUS=str(gpus), **variables))
    assert result.returncode == 0, result.stdout + result.stderr
