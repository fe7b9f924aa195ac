"""The device path on CuPy arrays, on a stand-in for CuPy and NCCL: whole programs, streams, refusals, failures."""

import json
import os
import sys
from pathlib import Path

import pytest

from grids import in_pairs, sampled
from programs import MOVEMENTS, REDUCTIONS, SHARES, algorithms, grid, share_of
from ranks import RankPool, launch, run_job

HERE = Path(__file__).parents[1]
STAND_IN = str(HERE / "stand_in")
TRAIN = HERE.parent / "scripts" / "train.py"
SIZE = 4


def environment(**variables):
    """What makes CuPy the stand-in, on a host with a GPU for each of eight ranks."""
    places = [STAND_IN, str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"STAND_IN_GPUS": "8", "PYTHONPATH": os.pathsep.join(places), **variables}


@pytest.fixture(scope="module")
def pool(launcher, emulated_kernels):
    with pytest.MonkeyPatch.context() as patch, RankPool() as pool:
        patch.syspath_prepend(STAND_IN)
        for name, value in environment().items():
            patch.setenv(name, value)
        yield pool


@pytest.fixture(scope="module")
def gpus(pool):
    """`gpus(name, size, *args)` runs a program of `gpu_programs` on ranks that have a GPU each."""
    def run(name, size, *arguments, timeout=60, **options):
        return pool.run(on_mpi, size, name, *arguments, timeout=timeout, **options)

    return run


def on_mpi(mpi, name, *arguments):
    """Run by ranks only: the process of the tests must not meet the stand-in, which other tests would take for CuPy."""
    import gpu_programs

    return gpu_programs.on_mpi(mpi, name, *arguments)


def everywhere(collectives):
    return [(collective, algorithm) for collective in collectives for algorithm in algorithms(collective)
            if algorithm != "native"]


# The programs of the host


@pytest.mark.parametrize(("collective", "algorithm"), sampled(everywhere(REDUCTIONS), keep=24, seed=8))
def test_every_reduction(gpus, collective, algorithm):
    """Of the ops and dtypes one algorithm of a collective has one third, the next one another."""
    share = algorithms(collective).index(algorithm) % SHARES
    gpus("mirrored", SIZE, "every_op_and_dtype", collective, algorithm, share, timeout=120)
    gpus("mirrored", 3, "every_count", collective, algorithm, timeout=120)


@pytest.mark.parametrize(("collective", "algorithm"), sampled(everywhere(MOVEMENTS), keep=24, seed=9))
def test_every_movement(gpus, collective, algorithm):
    gpus("mirrored", 3, "copies", collective, algorithm, timeout=120)


# By NCCL's documentation: four ops of six integers, three of six floats (its min and max need not let NaN win), sums
# and averages of two complex dtypes, and of bool what a byte can be in the place of.
SERVED = 6 * 4 + 6 * 3 + 2 * 2 + 8


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_native_reductions(gpus, collective):
    assert gpus("native", SIZE, collective, timeout=120) == [SERVED] * SIZE


@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "gather", "scatter", "all_to_all"])
def test_native_movements(gpus, collective):
    gpus("mirrored", SIZE, "copies", collective, "native", timeout=120)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(
    in_pairs([case for case in grid(REDUCTIONS) if case[1] != "native"], 7), keep=3, seed=7))
def test_other_sizes(gpus, collective, algorithm, size):
    gpus("mirrored", size, "every_op_and_dtype", collective, algorithm, share_of(size), timeout=120)


@pytest.mark.parametrize("algorithm", [name for name in algorithms("all_reduce") if name != "native"])
def test_shapes_values_and_carriers(gpus, algorithm):
    gpus("many", 3, ("shapes_and_strides", "special_values", "carriers", "in_place_here_and_there"), algorithm)
    gpus("mirrored", 3, "shapes_of_the_others")


@pytest.mark.parametrize("algorithm", ["tree", "ring", "star"])
def test_pipelined(gpus, algorithm):
    gpus("mirrored", SIZE, "segmented", "all_reduce", algorithm)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_the_same_bits_on_every_rank_and_in_every_run(gpus, collective):
    for name in ("float32", "bfloat16"):
        found = gpus("mirrored", SIZE, "digests", collective, "ring", name)
        assert len({digest for one in found for digest in one}) == 1, name


# Programs on CuPy arrays, also run by threads that share a GPU


ANYWHERE = [("streams", "ring"), ("streams", "tree"), ("many_streams",), ("asynchronous", "ring"), ("points",),
            ("ragged",), ("split",), ("dlpack",), ("refusals",), ("elementwise",), ("unknown_dtypes", "tree")]
WITH_NCCL = [("streams", "native"), ("asynchronous", "native"), ("captured", "ring"), ("captured", "native"),
             ("captured", "auto"), ("unknown_dtypes", "native"), ("aborted",), ("broken",),
             ("kept_from_the_collector",)]


@pytest.mark.parametrize("program", [one for one in (*ANYWHERE, *WITH_NCCL) if one != ("split",)], ids="-".join)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_arrays_of_cupy(gpus, program, size):
    gpus(program[0], size, *program[1:])


def test_parts_of_a_communicator(gpus):
    gpus("split", 4)


@pytest.mark.mutant
def test_results_are_wrong_where_streams_do_not_wait_for_each_other(gpus):
    assert gpus("unordered", 3, "streamQuery") == [12] * 3
    assert min(gpus("unordered", 3, "streamWaitEvent")) < 12


@pytest.mark.parametrize("algorithm", ["ring", "tree", "star"])
def test_calls_that_repeat_become_graphs(gpus, algorithm):
    assert min(gpus("replayed", 3, algorithm)) >= 3


# Jobs of their own


def job(ranks, code, timeout=60, **variables):
    """What ranks that run these lines print."""
    result = launch(ranks, sys.executable, "-c", code, env=environment(**variables), timeout=timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(result.stdout.split())


def test_torchs_calls_on_cupy_arrays(mpiexec, emulated_kernels):
    said = job(2, "import gpu_programs; print(gpu_programs.torch_like())")
    assert "".join(said) == "nccl" * 2  # lines may run together


def test_the_oldest_cupy_that_is_taken(mpiexec, emulated_kernels):
    """Its ids of NCCL are tuples, its streams have no protocol, and it has no bfloat16."""
    which = [("streams", "ring"), ("mirrored", "carriers", "tree"), ("points",), ("replayed", "ring")]
    code = (f"import gpu_programs; from mpi4py import MPI\nfor program in {which!r}:\n"
            "    gpu_programs.on_mpi(MPI.COMM_WORLD, *program)")
    assert job(2, code, STAND_IN_CUPY="13.6.0") == []


CLAIM = """
import sys, cupy, gpucoll as gc
comm = gc.init(timeout=20)
try:
    said = f"{(comm.all_reduce(cupy.ones(3), algorithm='ring').get() == comm.size).all()}\\n"
except gc.GpucollError as error:
    said = f"{' '.join([error.code, *map(str, error.ranks)])}\\n"
sys.stdout.write(said)
comm.close()
"""


@pytest.mark.parametrize(("variables", "said"), [
    ({"STAND_IN_GPUS": "1"}, ["0"] * 2 + ["1"] * 2 + ["GC-SHARED-GPU"] * 2),
    ({"STAND_IN_GPUS": "1", "GPUCOLL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ["True"] * 2),
    ({"STAND_IN_GPUS": "1", "GPUCOLL_SHARE_GPU": "1"}, ["GC-NCCL"] * 2),
])
def test_two_ranks_on_one_gpu(mpiexec, emulated_kernels, variables, said):
    assert job(2, CLAIM, **variables) == said


def test_messages_and_collectives_do_not_wait_for_each_other(mpiexec, emulated_kernels):
    assert job(2, "import gpu_programs; gpu_programs.crossed()") == []


def test_training_on_gpus(mpiexec, emulated_kernels, tmp_path):
    pytest.importorskip("sklearn", reason="pip install gpucoll[train]")
    losses = {}
    for device, variables in (("cpu", {}), ("cuda", environment())):
        log = tmp_path / f"{device}.jsonl"
        result = launch(2, sys.executable, TRAIN, f"--device={device}", "--epochs=1", "--batch=256", "--dtype=float64",
                        f"--log={log}", f"--save={tmp_path / device}.npz", env=variables, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        losses[device] = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-12)
    assert len(losses["cuda"]) == 6


def test_training_without_gpus(mpiexec, emulated_kernels):
    result = launch(2, sys.executable, TRAIN, "--device=cuda", env=environment(STAND_IN_GPUS="0"), timeout=60)
    assert result.returncode == 2
    assert "--device cuda" in result.stderr


# Threads that share one GPU


@pytest.mark.parametrize("gpus", [1, 3])
def test_threads(emulated_kernels, gpus):
    """One process runs all programs, and names the one that fails."""
    programs = [*ANYWHERE, ("mirrored", "every_op_and_dtype", "all_reduce", "ring"),
                ("mirrored", "copies", "all_to_all", "auto")]
    which = json.dumps([("threads", 3, *program) for program in programs])
    result = run_job([sys.executable, HERE / "gpu" / "runner.py", which], 200, environment(STAND_IN_GPUS=str(gpus)))
    assert result.returncode == 0, result.stdout + result.stderr
