"""The package's calls, and the emulation, checked against the real CuPy and NCCL from wheels; without a GPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from gpucoll.device.store import user_store
from harness import packages
from harness.pace import seconds

WHEELS = Path(__file__).with_name("wheels.py")
COMMON = ["numpy", "mpi4py", "platformdirs", "filelock", "ml_dtypes"]
ENVIRONMENTS = {
    "newest": ["cupy-cuda13x", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc>=13,<14", "cuda-bindings>=13,<14"],
    "oldest": ["cupy-cuda12x==14.0.0", "nvidia-nccl-cu12", "nvidia-cuda-nvrtc-cu12", "cuda-bindings>=12.4,<13"],
}


def environment(name):
    """Return the Python of an environment with the named wheels, kept between runs and remade after changes."""
    folder = user_store().folder / f"wheels-{name}"
    stamp = folder / "made-of.json"
    with filelock.FileLock(f"{folder}.lock"):
        if not stamp.exists() or json.loads(stamp.read_text()) != ENVIRONMENTS[name]:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            try:
                packages.install(*ENVIRONMENTS[name], *COMMON, python=folder / "bin" / "python")
            except packages.NoNetwork as error:
                pytest.skip(str(error))
            stamp.write_text(json.dumps(ENVIRONMENTS[name]))
    return folder / "bin" / "python"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["newest", "oldest"])
def test_the_real_ones_have_what_we_call(name):
    job = subprocess.run([environment(name), WHEELS], capture_output=True, text=True, timeout=seconds(300))
    assert job.returncode == 0, job.stderr
    said = json.loads(job.stdout)
    for part in ("calls", "surface", "symbols", "driver"):
        assert said[part][1] == [], part
    assert said["calls"][0] > 300
    assert said["surface"][0] > 40
    assert said["driver"][0] >= 15
