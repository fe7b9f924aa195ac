"""scripts/gpu_check: on a stand-in for CuPy, without any CuPy, and where parts hang, fail or run out of time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LATER = ("training", "benchmark", "bandwidth", "host time", "peer bandwidth", "peer latency")  # after the tests
SCRIPTS, STAND_IN = str(ROOT / "scripts"), str(ROOT / "tests" / "stand_in")
if SCRIPTS not in sys.path:
    sys.path.insert(0, SCRIPTS)

import gpu_check  # noqa: E402 (the path comes first)
import gpu_parts  # noqa: E402


def check(folder, *options, **variables):
    """The exit code, what was printed, and what was written, by part and name."""
    job = subprocess.run([sys.executable, SCRIPTS + "/gpu_check", "--output", str(folder), *options],
                         capture_output=True, text=True, timeout=400, env={**os.environ, **variables})
    (path,) = folder.iterdir()
    document = json.loads(path.read_text())
    found = {part: {one["name"]: one for one in more["findings"]} for part, more in document["parts"].items()}
    return job.returncode, job.stdout, found, path


@pytest.fixture
def stand_in(emulated_kernels):
    return {"PYTHONPATH": STAND_IN, "STAND_IN_GPUS": "1"}


def statuses(part):
    return {name: one["status"] for name, one in part.items()}


@pytest.mark.skipif(gpu_check._own_module("cupy") is not None, reason="CuPy is installed here")
def test_without_cupy_it_says_what_is_missing(tmp_path):
    code, printed, found, path = check(tmp_path)
    assert code == 1
    assert path.name.startswith("no-gpu-")
    assert "there is no GPU that CuPy can use" in printed
    assert set(found) == {"facts", "tests", *LATER}
    assert found["facts"]["CuPy"]["reason"] == "ModuleNotFoundError: No module named 'cupy'"
    for part in ("tests", *LATER):
        assert set(statuses(found[part]).values()) == {"missing"}, part
    assert all("cupy" in one["reason"] for one in found["tests"].values())


def test_facts_and_files_name_no_people_and_no_folders(tmp_path, stand_in):
    _, _, found, path = check(tmp_path, "--only", "none", **stand_in)
    assert found["facts"]["GPUs"]["value"] == ["stand-in, sm_90, 1 GiB, 2 SMs"]
    assert path.name.startswith("stand-in-20")
    text = path.read_text()
    assert str(ROOT) not in text
    assert str(Path.home()) not in text.replace("\\/", "/")


def test_kernels_and_host_are_measured(tmp_path, stand_in):
    code, printed, found, _ = check(tmp_path, "--only", "bandwidth,host time", "--megabytes", "1", **stand_in)
    assert set(found["bandwidth"]) == {"device copy", "copy", "reduce", "pack", "cast", "scale"}
    assert all(one["gigabytes_per_second"] > 0 for one in found["bandwidth"].values())
    assert set(found["host time"]) == {"all_reduce, native", "all_reduce, ring"}
    everything = [one for part in ("bandwidth", "host time") for one in found[part].values()]
    slow = [one for one in everything if one["status"] == "below target"]
    assert code == (1 if slow else 0)
    assert f"{len(slow)} below target" in printed


def test_the_peer_executor_is_measured(stand_in):
    """Less of it than on a GPU: here every CUDA thread is a fiber."""
    code = ("import json, gpu_peer\n"
            "gpu_peer.RANKS, gpu_peer.SMALL, gpu_peer.REPEATS, gpu_peer.GRAPH = (2,), (8,), 1, 2\n"
            "print(json.dumps([*gpu_peer.peer_bandwidth(1), *gpu_peer.peer_latency()]))")
    path = os.pathsep.join([SCRIPTS, stand_in["PYTHONPATH"], str(ROOT)])
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                         env={**os.environ, **stand_in, "PYTHONPATH": path})
    assert job.returncode == 0, job.stderr
    found = {one["name"]: one for one in json.loads(job.stdout)}
    assert set(found) == {f"2 ranks, {name}" for name in ("device copy", "one_shot", "two_shot", "8 bytes")}
    assert found["2 ranks, two_shot"]["share_of_copy"] > 0
    assert found["2 ranks, 8 bytes"]["microseconds"] > 0


def test_tests_and_benchmark_run(tmp_path, stand_in, launcher):
    code, printed, found, _ = check(tmp_path, "--only", "tests,benchmark", "--megabytes", "1", "-k", "NCCL", **stand_in)
    assert statuses(found["tests"]) == {"NCCL's binding": "passed", "NCCL's refusals": "passed"}
    assert {name.split(",")[0] for name in found["benchmark"]} == {"ring", "tree", "native"}
    assert all(one["ranks"] == 2 for one in found["benchmark"].values())  # on one GPU
    assert code == 0, printed


@pytest.mark.slow
def test_everything(tmp_path, stand_in, launcher):
    """But for the cases of tests/gpu and the parts of the peer executor, which have tests of their own."""
    parts = ["tests", *(part for part in LATER if not part.startswith("peer"))]
    code, _, found, _ = check(tmp_path, "--only", ",".join(parts), "--megabytes", "1", "-k", "NCCL", **stand_in)
    assert set(statuses(found["tests"]).values()) == {"passed"}
    assert found["training"]["train.py"]["accuracy"] > 80
    assert code == 1  # no processor copies as fast as it copies by one call


def test_what_fails_is_named_with_its_reason(tmp_path, stand_in):
    broken = {**stand_in, "CXX": "false", "GPUCOLL_CACHE": str(tmp_path / "empty")}
    (tmp_path / "found").mkdir()
    code, printed, found, _ = check(tmp_path / "found", "--only", "tests,bandwidth", "-k", "scale", **broken)
    assert code == 1
    assert found["tests"]["scale"]["status"] == "failed"
    assert "CompileError" in found["tests"]["scale"]["reason"]
    assert found["bandwidth"]["bandwidth"]["status"] == "failed"
    assert "2 failed" in printed


def test_when_time_is_up_the_rest_is_missing(tmp_path, stand_in):
    code, _, found, _ = check(tmp_path, "--minutes", "0.1", **stand_in)
    late = [one.get("reason") for part in LATER for one in found[part].values()]
    assert late == ["time is up"] * len(LATER)
    assert code in (0, 1)


def test_a_part_that_hangs_is_stopped():
    job = gpu_check.run([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"], 6.0)
    assert job.late
    assert job.output == "begun\n"
    assert gpu_check._broken("part", job)[0]["status"] == "failed"


def test_without_pytest_it_runs_the_cases_itself(monkeypatch, stand_in):
    for name, value in stand_in.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_check, "_own_module", lambda name: None)
    found = gpu_check.tests(100.0, "NCCL")
    assert [(one["name"], one["status"]) for one in found] == [("NCCL's binding", "passed"),
                                                              ("NCCL's refusals", "passed")]


def test_private_words_are_left_out(monkeypatch):
    monkeypatch.setattr(gpu_check.getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(gpu_check.socket, "gethostname", lambda: "janes-laptop")
    text = f"{ROOT}/bench on janes-laptop, in /scratch/jane/x.so and 3/4 of 10 GB/s"
    assert gpu_check._clean(text) == "./bench on this host, in .../x.so and 3/4 of 10 GB/s"


def test_a_result_below_its_target_counts():
    options = gpu_check._options([])
    one = gpu_check.Check(options)
    one.part("bandwidth", 60, lambda left: [gpu_parts.finding("copy", gpu_parts.PASSED)])
    assert not one.failed()
    one.part("more", 60, lambda left: [gpu_parts.finding("cast", gpu_parts.SHORT)])
    assert one.failed()
