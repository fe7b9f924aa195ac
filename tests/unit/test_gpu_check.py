"""scripts/gpu_check: on an emulated GPU, without CuPy, and with parts hanging, failing or running out of time."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import gpu_check
from gpucoll.transport.rendezvous import becomes
from harness.jobs import python
from harness.pace import seconds
from harness.sources import ROOT

SCRIPTS, FACES = ROOT / "scripts", ROOT / "gpucoll" / "emulation" / "_faces"
ON_EMULATED_GPU = {"PYTHONPATH": str(FACES), "EMULATED_GPUS": "1"}
PARTS = [part.name for part in gpu_check.PARTS]


def check(folder, *options, **variables):
    """Return the exit code, the printed text, and the written findings by part and name."""
    job = python(SCRIPTS / "gpu_check", "--output", folder, *options, timeout=600, env=variables)
    (path,) = folder.glob("*.json")
    parts = json.loads(path.read_text())["parts"]
    return job.returncode, job.stdout, {part: {one["name"]: one for one in more["findings"]}
                                        for part, more in parts.items()}


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_without_cupy_it_says_what_is_missing(tmp_path):
    code, printed, found = check(tmp_path)
    assert (code, list(found)) == (1, PARTS)
    assert "there is no GPU that CuPy can use" in printed
    assert "cupy is not installed" in found["facts"]["GPUs"]["reason"]
    assert {one["status"] for part in PARTS[1:] for one in found[part].values()} == {"missing"}


def test_facts_and_files_name_no_people_and_no_folders(tmp_path, monkeypatch):
    *_, found = check(tmp_path, "--only", "none", **ON_EMULATED_GPU)
    assert found["facts"]["GPUs"]["value"] == ["emulated, sm_90, 64 GiB, 2 SMs"]
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("emulated-20")
    assert str(ROOT) not in path.read_text()
    monkeypatch.setattr(gpu_check.getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(gpu_check.socket, "gethostname", lambda: "janes-laptop")
    text = f"{ROOT}/bench on janes-laptop, in /scratch/jane/x.so and 3/4 of 10 GB/s"
    assert gpu_check._clean([text, 1]) == ["./bench on this host, in .../x.so and 3/4 of 10 GB/s", 1]


def test_a_part_that_hangs_is_stopped():
    assert "it did not end in its time" in gpu_check.run(["sleep", "600"], 1.0)[1]
    assert "exit code 3: " in gpu_check.run([sys.executable, "-c", "raise SystemExit(3)"], 600.0)[1]


def test_in_twelve_minutes_what_is_unproven_comes_first():
    short = gpu_check.parts(12)
    assert sum(part.seconds for part in short) <= 12 * 60
    assert [part.name for part in short][:4] == ["facts", "waits", "a killed rank", "PyTorch"]
    assert {part.name for part in short} <= {*PARTS} == {part.name for part in gpu_check.parts(60)}


@pytest.mark.parametrize(("program", "said"), [
    (None, ["nvidia-smi is missing"]), ('echo "$1"', [*gpu_check.OBSERVED]),
    ("echo the GPU is lost; exit 15", ["exit code 15: the GPU is lost"] * 2),
    ('case $1 in *event_reasons*) echo Field "$1" is not a valid field to query.; exit 2;; esac; echo "$1"',
     [gpu_check.OBSERVED[0].replace("event_reasons", "throttle_reasons"), gpu_check.OBSERVED[1]])],
    ids=["missing", "there", "lost", "driver 530"])
def test_after_each_part_nvidia_smi_is_asked(tmp_path, monkeypatch, program, said):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(gpu_check, "_of_driver", lambda name: program and str(tmp_path / name))
    (checked := gpu_check.Check(gpu_check._options([]))).part(gpu_check.PARTS[0], lambda left: [])
    assert checked.parts["facts"]["nvidia-smi"] == said


@pytest.mark.parametrize(("program", "said"), [
    ("echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "ERR_NVGPUCTRPERM"), ("cat $0.csv", {"copy_16": ("97.5", "22")})])
def test_ncus_figures_are_those_of_the_last_launch_of_a_kernel(tmp_path, monkeypatch, program, said):
    (tmp_path / "ncu").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "ncu").chmod(0o755)
    (tmp_path / "ncu.csv").write_text("==PROF== x\n" + "".join(
        f'"{turn}","1","python","host","copy_16","1","7","(256)","(9)","0","9.0","s","{name}","%","{value}"\n'
        for turn, values in enumerate([("12", "22"), ("97.5", "22")])
        for name, value in zip(gpu_check.OF_KERNELS, values, strict=True)))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_check, "_need", lambda gpus: None)
    if isinstance(said, str):
        with pytest.raises(gpu_check.Absent, match=said):
            gpu_check.profiled(60.0, 1)
    else:
        assert {one["name"]: (one["dram"], one["launch"]) for one in gpu_check.profiled(60.0, 1)} == said


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["ended", "killed"])
def test_the_mps_daemon_ends_with_the_run(tmp_path, end):
    program, told = tmp_path / "nvidia-cuda-mps-control", tmp_path / "told"
    program.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo began >> {told} || cat >> {told}\n')
    program.chmod(0o755)
    run = f"import os, signal, gpu_check\nwith gpu_check.side_by_side(1) as found:\n    assert found\n    {end}"
    subprocess.run([sys.executable, "-c", run], timeout=seconds(60), check=end == "pass", env={
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{SCRIPTS}:{ROOT}"})
    assert becomes(lambda: told.read_text() == "began\nquit\n", seconds(30), 0.05)


@pytest.mark.slow
def test_what_runs_is_measured(tmp_path, emulated_kernels, launcher):
    """Every part measures, with few kernels: every CUDA thread is a slow fiber."""
    only = "kernels,NCCL,bandwidth,waits,training,a killed rank,two communicators,PyTorch,benchmark,host time"
    code, printed, found = check(tmp_path, "--only", only, "--megabytes", "1", "-k", "bool", **ON_EMULATED_GPU)
    assert found["NCCL"]["NCCL's binding"]["status"] == "passed"
    assert found["training"]["train.py"]["accuracy"] > 80
    assert {name.rpartition(",")[0] for name in found["benchmark"]} == {
        *(f"all_reduce, {name}" for name in ("ring", "tree", "native")),
        *(f"peer all_reduce, {name}" for name in ("one_shot", "two_shot", "ring")),
        "peer in a graph all_reduce, one_shot"}
    assert all(one["ranks"] == 2 for one in found["benchmark"].values())  # 2 ranks share the one GPU
    assert set(found["bandwidth"]) == {"device copy", "copy", "reduce", "pack", "scale"}
    assert all(one["gigabytes_per_second"] > 0 for one in found["bandwidth"].values())
    assert {"event query", "ncclCommAbort"} <= {name for name, one in found["waits"].items() if one["microseconds"]}
    assert set(found["host time"]) == {f"all_reduce, {name}, {ranks}" for name in ("native", "ring")
                                       for ranks in ("a lone rank", "2 ranks")}
    # The exit code is 1 for low bandwidth: kernels on a CPU are slower than one copying call.
    assert (code, " 0 failed" in printed) == (1, True), printed
