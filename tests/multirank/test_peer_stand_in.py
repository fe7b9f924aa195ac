"""The `peer` executor on a stand-in for CuPy: slabs by CUDA's handles, kernels on streams, captured calls."""

import os
import sys
from pathlib import Path

import pytest

from ranks import RankPool, run_job

HERE = Path(__file__).parents[1]
STAND_IN = str(HERE / "stand_in")

PEER = {"GPUCOLL_EXECUTOR": "peer"}
# Of `gpu_programs` and of the files beside it.
WITH_A_GPU_EACH = [("streams", "ring"), ("streams", "two_shot"), ("points",)]  # where the null stream is a rank's own
ANYWHERE = [("many_streams",), ("asynchronous", "one_shot"), ("captured", "ring"), ("captured", "one_shot"),
            ("captured", "two_shot"), ("ragged",), ("dlpack",), ("elementwise",), ("unknown_dtypes", "two_shot"),
            ("symmetric",), ("planned",), ("mirrored", "every_count", "all_reduce", "two_shot"),
            ("mirrored", "copies", "all_to_all", "auto")]

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]


@pytest.fixture(scope="module")
def pool(launcher, emulated_kernels):
    places = [STAND_IN, str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch, RankPool() as pool:
        patch.syspath_prepend(STAND_IN)
        patch.setenv("STAND_IN_GPUS", "8")
        patch.setenv("PYTHONPATH", os.pathsep.join(places))
        yield pool


def on_ranks(mpi, name, *arguments):
    """Run by ranks only: the process of the tests must not meet the stand-in."""
    import peer_programs

    return getattr(peer_programs, name)(mpi, *arguments)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_schedules(pool, size):
    pool.run(on_ranks, size, "schedules", (0, 1, 700, 30_000), timeout=120)


def test_memory_that_one_rank_cannot_map_is_used_by_none(pool):
    reasons = pool.run(on_ranks, 3, "refused", timeout=60)
    assert "rank 1 cannot reach" in reasons[0]
    assert reasons[2] == reasons[0]
    assert "this rank cannot reach" in reasons[1]


def test_graphs(pool):
    pool.run(on_ranks, 2, "graphs", timeout=60)


# ---------------------------------------------------------------- by the communicator


def on_mpi(mpi, name, *arguments):
    import gpu_programs

    return gpu_programs.on_mpi(mpi, name, *arguments)


def test_communicators_have_it(pool):
    assert pool.run(on_mpi, 2, "executors_named", env=PEER) == [["peer", "nccl", "native"]] * 2


@pytest.mark.parametrize("program", [*WITH_A_GPU_EACH, *ANYWHERE, ("blocks",)], ids="-".join)
def test_arrays_of_cupy(pool, program):
    pool.run(on_mpi, 3, *program, timeout=120, env=PEER)


@pytest.mark.parametrize("size", [1, 4])
def test_symmetric_memory(pool, size):
    pool.run(on_mpi, size, "symmetric", timeout=120, env=PEER)


def test_symmetric_memory_of_other_executors(pool):
    pool.run(on_mpi, 3, "unshared", timeout=60)
    pool.run(on_mpi, 3, "symmetric", timeout=120)


SLOW = ("many_streams", "blocks", "captured", "mirrored")  # kernels of all ranks on one thread


@pytest.mark.parametrize("program", [pytest.param(one, marks=pytest.mark.slow if one[0] in SLOW else (),
                                                  id="-".join(one)) for one in (*ANYWHERE, ("split",), ("blocks",))])
def test_threads(emulated_kernels, program):
    """Ranks that share one GPU."""
    code = f"import gpu_programs; gpu_programs.threads(3, *{program!r})"
    places = [STAND_IN, str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = run_job([sys.executable, "-c", code], 120, {**PEER, "PYTHONPATH": os.pathsep.join(places)})
    assert result.returncode == 0, result.stdout + result.stderr
