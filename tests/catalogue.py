"""The catalogue of faults: possible mistakes and failures, and the tests for each, or the reason for having no test.

A test is named by file (below tests/) and function, or by pytest's id. A planted fault caught by a row's own tests
names the row in planted.diff; `python tests/mutation.py --rows` checks these faults. tests/unit/test_planted.py checks
all names, and that each row has a fault.
"""

from typing import NamedTuple

ARGUMENTS = "multirank/test_arguments.py::test_a_wrong_argument_is_refused_before_data_moves"
DIFFER = "multirank/test_disagreements.py::test_ranks_that_differ_are_told"
EIGHT = "multirank/test_disagreements.py::test_eight_ranks_that_differ_are_told"
ENGINE = "multirank/test_engine_failures.py::test_failures"
DENIED = "multirank/test_edges.py::test_what_one_rank_is_denied_all_are_told"
VALUES = "contract/test_contract.py::test_other_arrays"
SPECIAL = "contract/test_contract.py::test_special_values"
GRID = "contract/test_contract.py::test_every_algorithm"
KILLED = "multirank/test_deaths.py::test_a_killed_rank_is_named"
KILLED_IN = "multirank/test_deaths.py::test_whenever_a_rank_is_killed_nobody_waits"
CRASHES = "multirank/test_deaths.py::test_a_rank_that_crashes_shows_where_and_its_file_which_call"
ELSEWHERE = "multirank/test_deaths.py::test_who_dies_on_another_host_is_named"
NOT_COME_ELSEWHERE = "multirank/test_deaths.py::test_who_does_not_come_on_another_host_is_named"
NOT_COME_TO_INIT = "multirank/test_deaths.py::test_who_does_not_come_to_init_is_named"
NOT_COME_TO_START = "multirank/test_starting.py::test_who_does_not_come_to_mpis_start_is_named"
THREADS = "multirank/test_disagreements.py::test_threads_that_differ_are_told_without_the_engine_too"
NOT_COME = "multirank/test_deaths.py::test_a_rank_that_does_not_come_is_named_at_the_deadline"
UNCAUGHT = "multirank/test_guard.py::test_an_exception_that_nobody_catches_ends_the_job"
EXITS = "multirank/test_guard.py::test_a_rank_that_exits_is_named"
CLOSED = "multirank/test_edges.py::test_what_is_closed_is_gone"
LONE = "multirank/test_bootstrap.py::test_a_lone_process_is_a_world_of_one_and_another_launcher_one_clear_error"
GPU = "multirank/test_gpus.py::test_programs"
LIFETIMES = "multirank/test_gpus.py::test_programs[usual-lifetimes-native]"
TRAINING = "contract/test_training.py::test_gradients"
SWEPT = "unit/test_store.py::test_what_killed_processes_have_left_is_swept"


def alone(body):
    """Return the test of a program used only by one row."""
    return f"multirank/test_catalogue.py::test_rows[{body}]"


class Row(NamedTuple):
    """A case; `tests` cover the case, `open` names parts without a test."""

    case: str
    tests: tuple[str, ...] = ()
    open: str = ""


ROWS = {
    1: Row("shapes differ", (DIFFER, EIGHT)),
    2: Row("as many elements in another shape", (DIFFER, EIGHT)),
    3: Row("dtypes differ", (DIFFER, EIGHT, "multirank/test_points.py::test_points_between_processes"),
        "of messages between GPU arrays: NCCL's carry none"),
    4: Row("ops differ", (DIFFER, EIGHT, "multirank/test_disagreements.py::test_words_that_come_late_are_waited_for")),
    5: Row("roots differ", (DIFFER, EIGHT)),
    6: Row("another collective", (DIFFER, EIGHT, THREADS)),
    7: Row("two calls in another order", (DIFFER, EIGHT)),
    8: Row("a rank skips a call and ends", (EXITS, KILLED)),
    9: Row("a call that the others never make", (NOT_COME, NOT_COME_TO_INIT, NOT_COME_TO_START,
        "contract/test_uses.py::test_a_rank_that_never_comes_is_a_timeout")),
    10: Row("the order crossed over two groups", (alone("crossed-2"),)),
    11: Row("counts that do not sum, or differ", (ARGUMENTS, DENIED)),
    12: Row("a rank that is not in the group calls", ("multirank/test_distributed_groups.py::test_program",)),
    13: Row("one rank has a bad argument", (DIFFER, EIGHT, DENIED)),
    14: Row("a root out of range, or no number", (ARGUMENTS, "multirank/test_edges.py::test_odd_arrays_on_the_host")),
    15: Row("an unknown op", (ARGUMENTS,)),
    16: Row("an op that the dtype does not have", (ARGUMENTS,)),
    17: Row("a dtype that is not supported", (ARGUMENTS,)),
    18: Row("the other byte order", (ARGUMENTS,)),
    19: Row("bfloat16 and float8", (GRID, VALUES)),
    20: Row("arrays that are not contiguous", (VALUES, ARGUMENTS)),
    21: Row("Fortran order, strides below and of zero", (VALUES, ARGUMENTS)),
    22: Row("no elements", (GRID,)),
    23: Row("no elements on some ranks", (alone("nothing_on_one-8"),)),
    24: Row("0-d arrays, Python's numbers", (VALUES, ARGUMENTS)),
    25: Row("more than 2**31 bytes", ("multirank/test_edges.py::test_arrays_over_two_gibibytes",)),
    26: Row("a read-only output", (ARGUMENTS, "multirank/test_edges.py::test_odd_arrays_on_the_host")),
    27: Row("input and output overlap", (ARGUMENTS,)),
    28: Row("an output of another size", (ARGUMENTS,)),
    29: Row("an array of the host for a GPU's, and the reverse", (GPU, ARGUMENTS)),
    30: Row("an array on another device", (GPU,), "with two emulated devices only"),
    31: Row("a device array that is freed while its call runs", (LIFETIMES,)),
    32: Row("a kernel still writes the input on another stream", (GPU,)),
    33: Row("two ranks on one GPU", ("multirank/test_bootstrap.py::test_two_ranks_on_one_gpu_are_named",
        "multirank/test_gpus.py::test_two_ranks_on_one_gpu")),
    34: Row("NaN and infinities", (SPECIAL, "multirank/test_guard.py::test_numerics_are_checked")),
    35: Row("integers overflow", (SPECIAL,)),
    36: Row("float16 overflows; subnormal numbers", (SPECIAL,)),
    37: Row("the mean of integers, products with zeros", (ARGUMENTS, GRID)),
    38: Row("the same bits on all ranks in all runs",
        ("contract/test_contract.py::test_the_same_bits_on_every_rank_and_in_every_run",)),
    39: Row("deterministic on one node and on two", ("multirank/test_bits_of_processes.py::test_drawn_cases",)),
    40: Row("SIGKILL before, in and after a call", (KILLED, KILLED_IN, ELSEWHERE)),
    41: Row("SIGSEGV", (CRASHES,)),
    42: Row("a rank has no more memory", (UNCAUGHT, KILLED, alone("taken_out-3")),
        "nothing tells the system's SIGKILL from others"),
    43: Row("SIGSTOP", (NOT_COME, NOT_COME_ELSEWHERE, NOT_COME_TO_INIT, NOT_COME_TO_START)),
    44: Row("SIGCONT after the others gave up", ("multirank/test_deaths.py::test_a_rank_that_goes_on_too_late_is_told",
        "multirank/test_failures.py::test_a_late_rank_writes_nowhere_and_all_end_in_order")),
    45: Row("a slow rank", (alone("waited_for-3"),)),
    46: Row("an exception that nobody catches", (UNCAUGHT,)),
    47: Row("sys.exit, os._exit", (EXITS, "multirank/test_deaths.py::test_a_rank_that_exits_in_a_long_call_is_named")),
    48: Row("Ctrl-C", ("multirank/test_deaths.py::test_who_interrupts_the_launcher_ends_the_job", UNCAUGHT, ENGINE,
        alone("taken_out-3"))),
    49: Row("SIGTERM", ("multirank/test_guard.py::test_who_is_told_to_end_saves_first",)),
    50: Row("an exception between collectives", (UNCAUGHT,
        "multirank/test_guard.py::test_a_rank_that_leaves_by_an_error_is_named_at_once")),
    51: Row("two threads in one communicator", ("multirank/test_edges.py::test_a_second_thread_in_a_call_is_refused",)),
    52: Row("two threads, two communicators, crosswise", (alone("crosswise-2"),)),
    53: Row("a collective inside another", (ENGINE,)),
    54: Row("handles waited for twice, by another thread, or never", ("contract/test_uses.py::test_beside_collectives",
        alone("crosswise-2"), "multirank/test_failures.py::test_a_work_dropped_at_the_end_is_completed")),
    55: Row("calls after close, close twice or alone", ("multirank/test_failures.py::test_one_of_the_ranks",)),
    56: Row("exit with open communicators after a failure",
        ("multirank/test_deaths.py::test_who_goes_on_after_a_death_comes_to_its_end",
        "multirank/test_failures.py::test_a_late_rank_writes_nowhere_and_all_end_in_order", KILLED)),
    57: Row("many communicators", (CLOSED, "multirank/test_edges.py::test_what_threads_close_is_gone")),
    58: Row("groups of odd ranks", ("multirank/test_distributed_groups.py::test_program",)),
    59: Row("fork and spawn", ("multirank/test_edges.py::test_a_forks_child_has_no_part",
        "unit/test_api.py::test_import_starts_neither_mpi_nor_cupy_and_proofs_need_neither")),
    60: Row("a stale NCCL id", ("multirank/test_bootstrap.py::test_without_nccl_on_rank_0_every_rank_is_told",),
        "an id is passed on by MPI, within the job: none can be stale"),
    61: Row("two jobs at once", ("multirank/test_deaths.py::test_two_jobs_beside_each_other",)),
    62: Row("shared memory of crashed jobs", (KILLED, KILLED_IN, SWEPT),
        "none has a name; MPI's own is not ours to sweep"),
    63: Row("no memory to share, no more files", (DENIED, "multirank/test_catalogue.py::test_what_one_rank_is_denied")),
    64: Row("garbage on the wire", ("unit/test_connections.py::test_strangers_are_sent_away",
        "unit/test_network.py::test_a_hub_that_does_not_know_the_token_is_no_hub",
        "unit/test_rank_store.py::test_garbage_is_a_typed_error_and_the_store_goes_on",
        "unit/test_connections.py::test_strangers_at_the_watch_of_several_hosts",
        "unit/test_connections.py::test_strangers_at_the_store"), "MPI's own wire, and PyTorch's store, are theirs"),
    65: Row("a connection breaks", (KILLED_IN, "unit/test_network.py::test_a_connection_that_breaks_off_is_a_death"),
        "MPI's; what it raises is told, and who has died behind it"),
    66: Row("another MPI's launcher", (LONE,)),
    67: Row("versions or options unlike on ranks", (alone("unlike_versions-3"),
        "multirank/test_edges.py::test_options_unlike_on_ranks_are_refused_by_all")),
    68: Row("a lone process", (LONE,)),
    69: Row("NCCL fails, or CUDA", ("multirank/test_gpus.py::test_programs[usual-fault]",
        "multirank/test_gpus.py::test_a_fault_is_told")),
    70: Row("a gradient does not come, or parameters differ", (TRAINING,)),
    71: Row("ZeRO on other ranks, a corrupt shard", ("contract/test_training.py::test_zero_is_training_on_one_rank",
        "contract/test_checkpoint.py::test_a_damaged_file_is_named_on_every_rank")),
    72: Row("a server or a worker dies", ("contract/test_training.py::test_a_worker_may_be_lost",
        "multirank/test_catalogue.py::test_a_server_that_is_lost_is_told")),
    73: Row("a checkpoint is interrupted", ("contract/test_checkpoint.py::test_an_interrupted_checkpoint",
        "contract/test_checkpoint.py::test_a_checkpoint_interrupted_anywhere")),
    74: Row("the clock jumps", (alone("waited_for-3"),)),
    75: Row("random programs that are valid", ("contract/test_contract.py::test_random_programs", GRID),
        "some thousand calls a run; 10**5 by python tests/mixture.py"),
}
