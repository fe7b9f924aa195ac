"""`gpucoll kernels`: the printed report, failures, and compiled kernels found by a GPU's device."""

import json
import os
import subprocess
import sys

import pytest

from gpucoll.cli import main
from gpucoll.core.dtypes import DTYPES
from gpucoll.device import command, sources
from gpucoll.device.store import Store
from gpucoll.transport.rendezvous import becomes
from harness.jobs import JOB_MARK, marked, python
from harness.pace import seconds
from harness.sources import ROOT

FEW = {"scale": [sources.instance("scale", "divide", DTYPES["float16"])],
       "copy": [sources.instance("copy", 1), sources.instance("copy", 16)]}


@pytest.fixture(autouse=True)
def release(nvrtc_release):
    return ".".join(map(str, nvrtc_release))


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Give the command an empty cache, three kernels, and no CuPy, since CuPy would find the GPUs here."""
    kept = Store(tmp_path)
    monkeypatch.setattr(command, "user_store", lambda: kept)
    monkeypatch.setattr(command, "instances", lambda everything: FEW)
    monkeypatch.setitem(sys.modules, "cupy", None)
    return kept


def printed(capsys, *words):
    """Return the exit code and the printed lines."""
    code = main(["kernels", *words])
    return code, capsys.readouterr().out.splitlines()


def test_what_is_compiled_is_cached_with_its_registers(capsys, release, store):
    code, lines = printed(capsys, "--arch", "sm_80,sm_90", "-j", "1")
    first = [line.split() for line in lines]
    assert code == 0
    assert first[0] == ["arch", "kernels", "count", "cached", "CPU", "s", "registers", "spills"]
    assert [row[:4] for row in first[1:5]] == [["sm_80", "scale", "1", "0"], ["sm_90", "scale", "1", "0"],
                                               ["sm_80", "copy", "2", "0"], ["sm_90", "copy", "2", "0"]]
    assert {row[-1] for row in first[1:5]} == {"0"}
    assert all(20 < int(row[-2]) <= 128 for row in first[1:5])
    assert lines[5].startswith(f"6 kernels by NVRTC {release} in ")
    assert lines[5].endswith(f"1 process: 6 compiled, 0 cached, none failed; {store.folder}")
    code, lines = printed(capsys, "--arch", "sm_80,sm_90", "-j", "1")
    assert [(row.split()[3], row.split()[-2:]) for row in lines[1:5]] == [(row[2], row[-2:]) for row in first[1:5]]
    assert "0 compiled, 6 cached, none failed" in lines[5]


def test_a_failure_names_kernel_compiler_and_line(capsys, monkeypatch, release):
    text = sources.text
    monkeypatch.setattr(sources, "text", lambda one: text(one) + "\n  unknown x;" * (one.entry != "copy_1"))
    code, lines = printed(capsys, "--arch", "sm_90", "-j", "1")
    row = text(FEW["scale"][0]).count("\n") + 2
    assert code == 1
    assert lines[3:5] == [f"scale_divide_float16 for sm_90 by NVRTC {release}: NVRTC at kernels.cu:{row}: identifier "
                          '"unknown" is undefined', "    unknown x;"]
    assert lines[5].startswith(f"copy_16 for sm_90 by NVRTC {release}: NVRTC at kernels.cu:")
    assert "1 compiled, 0 cached, 2 failed" in lines[-1]
    assert main(["kernels", "--arch", "sm_90", "-j", "1", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["nvrtc"], record["failed"]) == (release, 2)
    first = record["kernels"][0]
    assert (first["line"], first["registers"], first["spills"]) == ("unknown x;", None, None)


# The emulation compiles GPU code by g++; the cache key of the result is formed as for NVRTC.
PROGRAM = """
import cupy
from gpucoll.cli import main
from gpucoll.device import command, cuda, sources
command.instances = lambda everything: {"copy": [sources.instance("copy", 1)]}
command.nvrtc.version = lambda major: (13, 0)
command.nvrtc.check_arch = lambda arch, major: None
assert main(["kernels", "-j", "1"]) == 0  # for the emulated GPU
def refuse(*arguments, **options): raise SystemExit("compiled once more")
cuda.compile_cubin = refuse
cuda.CudaDevice(0).kernels.launcher(sources.instance("copy", 1))
print("found")
"""


@pytest.mark.kernel
def test_a_device_finds_what_was_compiled_ahead(tmp_path):
    places = [str(ROOT / "gpucoll" / "emulation" / "_faces"), str(ROOT)]
    job = python("-c", PROGRAM, timeout=300, env={
        "GPUCOLL_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(places), "EMULATED_GPUS": "1"})
    lines = job.stdout.splitlines()
    assert (job.returncode, lines[-1:]) == (0, ["found"]), job.stderr
    assert lines[1].split()[:4] == ["sm_90", "copy", "1", "0"]


def test_a_killed_command_leaves_no_process(tmp_path):
    variables = {"GPUCOLL_CACHE": str(tmp_path), JOB_MARK: str(tmp_path)}
    command = subprocess.Popen([sys.executable, "-m", "gpucoll", "kernels", "--all", "--arch", "sm_90", "-j", "2"],
                               env={**os.environ, **variables}, stdout=subprocess.DEVNULL)

    def processes():
        handles = marked(JOB_MARK, str(tmp_path))
        for handle in handles:
            os.close(handle)
        return len(handles)

    assert becomes(lambda: processes() == 4, seconds(60))  # two workers, and the tracker of resources
    command.kill()
    command.wait()
    assert becomes(lambda: not processes(), seconds(60))
