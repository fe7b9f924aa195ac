"""NVRTC of many versions: the place of the wheels, and a process compiling by one version alone.

    python matrix.py LIBRARY KERNELS ARCH[,ARCH]       # prints ptxas's reports, by architecture
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import filelock
import pytest

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.formats import FORMATS
from gpucoll.core.ops import OPS
from gpucoll.device import nvrtc, sources
from gpucoll.device.store import default_folder
from gpucoll.errors import BackendError
from harness import packages

WHEELS = ("nvidia-cuda-nvrtc-cu12==12.0.76", "nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvrtc==13.0.48",
          "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvrtc==13.1.80", "nvidia-cuda-nvrtc")  # the newest at the end
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
FRESH = 30 * 86400.0  # seconds before the newest version is looked up again
SHORT = ["packets", "ll128", "multimem_share", "multimem_gather", "reduce", "scale", "compress", "pack",
         "unpack", "copy"]  # short to compile


def kernels():
    """Return one kernel of each kind, chosen for many registers."""
    of = {name: (OPS["sum"], DTYPES[name]) for name in DTYPES}
    reducing = {"steps": "bfloat16", "fold_share": "bfloat16", "fold_all": "float8_e4m3fn", "reduce": "float8_e5m2",
                "packets": "float16", "ll128": "float8_e5m2", "multimem_share": "bfloat16"}
    return {**{kernel: sources.reducing(kernel, *of[name]) for kernel, name in reducing.items()},
            "scale": sources.instance("scale", "divide", DTYPES["float64"]),
            "compress": sources.instance("quantise", DTYPES["float64"], FORMATS["nvfp4"]),
            "multimem_gather": sources.instance("multimem_gather", 8),
            "pack": sources.instance("pack", 4), "unpack": sources.instance("unpack", 16),
            "copy": sources.instance("copy", 16)}


def library(wheel):
    """Return the path of the NVRTC in a wheel kept among the user's caches."""
    return only(wheel, r"libnvrtc\.so\.\d+")


def disassembled(cubin):
    """Return the lines of the GPU's own instructions in a cubin, by NVIDIA's nvdisasm."""
    tool = only("nvidia-cuda-nvdisasm", "nvdisasm")
    tool.chmod(0o755)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout.splitlines()


def only(wheel, pattern):
    """Return the path of the wheel's only file with a name of this pattern; skip the test without the wheel."""
    folder = default_folder() / "nvrtc" / wheel.replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.is_dir() or ("==" not in wheel and time.time() - folder.stat().st_mtime > FRESH):
            try:
                install(wheel, folder)
            except packages.NoNetwork as error:
                if not folder.is_dir():
                    pytest.skip(f"{wheel} is not in the cache, and there is no network: {error}")
    (found,) = [path for path in folder.rglob("*") if path.is_file() and re.fullmatch(pattern, path.name)]
    return found


def install(wheel, folder):
    """Install the wheel's files into the folder, all or none."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        packages.install("--no-deps", "--target", f"{draft}/made", wheel)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(f"{draft}/made", folder)
        os.utime(folder)


def compiled(path, kinds, archs):
    """Return the version of the NVRTC at `path` and the reports by architecture, from a process loading no other."""
    variables = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "CUDA_PATH")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    job = subprocess.run([sys.executable, Path(__file__), path, ",".join(kinds), ",".join(archs)],
                         capture_output=True, text=True, env=variables)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout)


def main(path, kinds, archs):
    nvrtc.use(path)
    chosen = [kernel for kind, kernel in kernels().items() if kind in kinds.split(",")]
    reports, errors = {}, {}
    for arch in archs.split(","):
        if int(arch.removeprefix("sm_")) in nvrtc.archs():
            try:
                reports[arch] = nvrtc.compile_cubin(sources.text(*chosen), arch)[1]
            except BackendError as error:
                errors[arch] = str(error)
    print(json.dumps({"version": nvrtc.version(), "entries": [kernel.entry for kernel in chosen], "reports": reports,
                      "errors": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
