"""Every rule of the stand-in's hostile machine has an effect; without the rule the same lines run as usual."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def machine():
    """Yield `machine(name, **variables)`, returning the findings of a function of `stand_in_rules`."""
    places = [HERE / "stand_in", HERE, HERE.parent]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "STAND_IN_GPUS": "2",
                 "OPENBLAS_NUM_THREADS": "1"}
    variables.pop("GPUCOLL_STAND_IN", None)
    with subprocess.Popen([sys.executable, Path(__file__).with_name("stand_in_rules.py")], env=variables, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        def ask(name, **variables):
            process.stdin.write(json.dumps({"name": name, "variables": variables}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer["found"]

        yield ask
        process.stdin.close()


# rule: the findings on the usual machine, and under the rule
RULES = {
    "connect": ([False, [0]], [True, [3]]),
    "graphs_alive": ([False, 0], [True, 1]),
    "float8": ([0, 0], [4, 0]),
    "rounding": ([2050.0] * 3, [2050.0, 2048.0, 2048.0]),
    "synchronising": ([False] * 4, [True] * 4),
    "queues": ([2, 1], [1, 2]),
    "null_stream": ([2, 2], [1, 2]),
    "handles": ([False, False], [True, True]),
    "codes": ([907, 907, 719], [907, 0, 700]),
    "capture_modes": ([[[0, 0]] * 6, 0], [[[900, 901]] * 3 + [[0, 0]] * 3, 906]),
    "capability": (["90", 2], ["80", 108]),
    "memory": ([True, False, 100, 0], [True, True, 512, 3]),
}
VARIABLES = {"queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "float8": {"STAND_IN_CAPABILITY": "80"}}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule(machine, rule):
    usual, hostile = RULES[rule]
    given = VARIABLES.get(rule, {})
    assert machine(rule, **given) == usual
    assert machine(rule, GPUCOLL_STAND_IN=rule, **given) == hostile
    assert machine(rule, GPUCOLL_STAND_IN=f"hostile,-{rule}", **given) == usual


def test_late_work_of_a_destroyed_stream_spares_the_memorys_next_array(machine):
    assert machine("memory_of_a_destroyed_stream", GPUCOLL_STAND_IN="hostile") == [True, True, 7]


def test_connections_as_nccl_makes_them(machine):
    """Grouped calls connect; ungrouped sends around a ring deadlock; a group against calls in turn is truncated."""
    assert machine("protocol") == [[""], ["deadlock"], ["Message truncated"]]


def test_float8_by_version_and_capability(machine):
    given = {"GPUCOLL_STAND_IN": "float8"}
    assert machine("float8", **given, STAND_IN_CAPABILITY="90") == [0, 0]
    assert machine("float8", **given, STAND_IN_CAPABILITY="90", STAND_IN_NCCL="22304") == [4, 4]


def test_devices_are_found_as_they_were(machine):
    assert machine("device_changes") == [["rude"], 0]


def test_a_finalizer_in_the_thread_of_the_gpu_waits_for_no_kernel(machine):
    assert machine("finalizers", GPUCOLL_STAND_IN="synchronising") == [True, False]


def test_tensors(machine):
    assert machine("torch") == [["RuntimeError", "KeyError"], True]


def test_cupy_without_nccl(machine):
    assert machine("without_nccl", STAND_IN_NCCL="absent") == [False, False]


def test_an_unknown_rule(machine):
    with pytest.raises(AssertionError, match="known are hostile, connect"):
        machine("codes", GPUCOLL_STAND_IN="conect")
