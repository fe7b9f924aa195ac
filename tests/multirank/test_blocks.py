"""Blocks in both layouts between processes, by MPI's own collectives and by reading the memory of other processes."""

import pytest

import blocks
from pace import seconds


@pytest.mark.parametrize("name", [None, "native", "mpi"])
def test_blocks(ranks, name):
    algorithm = name if name == "native" else "auto"
    for collective in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"):
        ranks(blocks.either_layout, 3, collective, algorithm, env={"GPUCOLL_EXECUTOR": name}, timeout=seconds(60))
    for collective in ("all_gather", "gather"):
        ranks(blocks.gathered_in_place, 3, collective, algorithm, env={"GPUCOLL_EXECUTOR": name}, timeout=seconds(60))
