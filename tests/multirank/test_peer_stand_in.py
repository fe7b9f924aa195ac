"""The `peer` executor on a stand-in for CuPy: slabs by CUDA's handles, kernels on streams, captured calls."""

import os
from pathlib import Path

import pytest

from ranks import RankPool

HERE = Path(__file__).parents[1]
STAND_IN = str(HERE / "stand_in")

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
