"""The tests that depend on the MPI, marked `other_mpi`: `scripts/test --all` repeats them with the other MPI.

Most tests of this folder use MPI only to start their ranks and to exchange small facts. The engine, emulated
GPUs, UCX, PyTorch, jobs without MPI and the commands do the same with either MPI, so they run twice only in the night.
A row of `DEPENDS` names a file, or some tests of a file.
"""

import pytest

from multirank.elastic_group import group_in

DEPENDS = {
    # MPI's own collectives and messages
    "test_executors.py": ["test_every_collective[mpi-3]", "test_every_collective[native-3]",
                          "test_random_programs[5-mpi]", "test_native_collectives_on_all_ops_and_dtypes",
                          "test_several_nodes"],
    "test_native.py": [""],
    "test_mpi.py": [""],
    "test_points.py": ["test_messages_over_mpi", "test_points_between_processes[3]"],
    "test_wildcards.py": ["test_between_processes[mpi]", "test_constants_of_mpi4py"],
    "test_disagreements.py": ["test_ranks_that_differ_are_told[mpi", "test_ranks_that_differ_are_told[native",
                              "test_a_call_by_messages_that_differs_is_over"],
    "test_arguments.py": ["test_between_processes"],
    # the launcher, MPI's start and end, ranks that die
    "test_bootstrap.py": [""],
    "test_starting.py": [""],
    "test_run.py": [""],
    "test_failures.py": [""],
    "test_catalogue.py": ["test_rows", "test_what_one_rank_is_denied[init]"],
    "test_deaths.py": ["test_a_killed_rank_is_named", "test_who_goes_on_after_a_death", "test_who_interrupts",
                       "test_who_does_not_come_to_init", "test_a_rank_that_crashes"],
    "test_guard.py": ["test_a_rank_that_exits_is_named", "test_an_exception_that_nobody_catches"],
    "test_second_deaths.py": ["test_under_survive"],
    "test_newcomers.py": ["test_a_training_under_mpiexec", "test_ranks_under_mpiexec"],
    "test_pool.py": ["test_ranks_that_wait_in_vain"],
    # a program of each kind
    "test_seed_programs.py": [""],
    "test_distributed_groups.py": ["test_start_and_end", "test_program[in_groups-3]"],
    "test_doctor.py": ["test_launched_it_speaks_once"],
    "test_bench.py": ["test_the_table_against_mpi"],
}


def depends_on_mpi(file, name):
    return any(name.startswith(beginning) for beginning in DEPENDS.get(file, ()))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "multirank" and depends_on_mpi(item.path.name, item.name):
            item.add_marker("other_mpi")


@pytest.fixture
def group(tmp_path):
    """Yield a group of ranks that may change."""
    with group_in(tmp_path) as group:
        yield group
