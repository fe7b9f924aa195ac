"""The Python environment shared by the scripts: created if missing, completed if incomplete.

README's commands work on a machine with only Python, so this file uses only the standard library. A stamp file in the
environment, written last, records the contents and the origin. If the stamp is current, a start reads only this file.
To repair a broken environment, delete it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import runpy
import shutil
import sys
import tomllib
import types
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 (an older one has to get as far as this, hence the types in quotes)
    sys.exit(f"{sys.argv[0]}: needs Python 3.11 or newer, as in `python3.12 {sys.argv[0]}`; this is {sys.version[:6]}")

from processes import ROOT, followed, output_of, say

LOWEST = ".venv-lowest"  # the environment with the lowest versions
OUR_MPIS = {"mpich", "openmpi"}  # extras of the same names
# The places searched by mpi4py for a site's MPI, in mpi4py's order, without the environment, possibly with our MPI.
SITE_LIBRARIES = os.pathsep.join([f"{sys.base_exec_prefix}/lib", "libmpi.so", "libmpi.so.12", "libmpi.so.40"])
# Imported by path: nothing is installed yet.
launchers, engine = (types.SimpleNamespace(**runpy.run_path(f"{ROOT}/gpucoll/{name}.py"))
                     for name in ("launch/launchers", "executors/engine/digest"))


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outside_mpiexec() -> str:
    """Return the first mpiexec on PATH outside our environments, or ""."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which("mpiexec", path=os.pathsep.join(f for f in folders if not f.startswith(f"{ROOT}/.venv"))) or ""


def vendor_of(version: str) -> str:
    vendor = launchers.vendor_of(version)
    return vendor.name if vendor else ""


def driver_extras(report: str) -> "set[str]":
    """Return the extras for the CUDA version reported by nvidia-smi; empty if none fits."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)", report)  # drivers from 610 on write UMD
    major = min(13, int(found.group(1))) if found else 0
    return {f"cuda{major}", f"cublas{major}"} if major >= 12 else set()


def stamp_file(python: str) -> str:
    return os.path.join(os.path.dirname(os.path.dirname(python)), "gpucoll-stamp.json")


def stamp_of(python: str) -> "dict[str, Any]":
    """Return the record of an environment; empty if unknown or if an installation was interrupted."""
    with contextlib.suppress(OSError, ValueError), open(stamp_file(python)) as file:
        return dict(json.load(file))
    return {}


def origin(python: str) -> "list[str]":
    """Return the facts to stay constant: the checkout's path, the Python behind bin/python, the site's mpiexec."""
    return [ROOT, os.path.realpath(python), outside_mpiexec()]


def digest() -> str:
    """Return a digest of the installation's sources: the project files, and the engine built from kernels/."""
    root = pathlib.Path(ROOT)
    names = "pyproject.toml", "setup.py", "kernels/binding/ucx.cc", "kernels/binding/ucx.h"
    parts = [root.joinpath(name).read_bytes() for name in names]
    return hashlib.sha256(b"".join([engine.digest(root / "kernels").encode(), *parts])).hexdigest()


def ensure(extras: "set[str]", name: str = ".venv") -> str:
    """Return the path of a Python with gpucoll, these extras and an MPI; create or complete the environment if needed.

    `mpich` or `openmpi` among the extras selects the MPI. Otherwise the site's MPI is used if mpi4py can load it, else
    MPICH.
    """
    python = os.path.join(ROOT, name, "bin", "python")

    def is_current() -> bool:
        stamp = stamp_of(python)
        return bool(stamp) and [stamp.get("origin"), stamp["project"]] == [origin(python), digest()] and \
            extras <= set(stamp["extras"]) and os.access(stamp["mpiexec"], os.X_OK)

    if not is_current():
        with open(os.path.join(ROOT, ".venv.lock"), "w") as lock:
            try:  # one script at a time; another script may have finished the work meanwhile
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another script, which is installing in {ROOT} ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_current():
                update(python, extras)
    return python


def update(python: str, extras: "set[str]") -> None:
    """Bring an environment in line with the checkout, the machine and the extras; the stamp comes last."""
    folder, stamp = os.path.dirname(os.path.dirname(python)), stamp_of(python)
    uv = bool(output_of(["uv", "--version"]))  # a name on PATH proves nothing
    if not os.access(python, os.X_OK) or stamp.get("origin", origin(python)) != origin(python):
        tool = ["uv", "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        followed(f"making {os.path.basename(folder)} with Python {sys.version.split()[0]}", *tool, "--clear", folder)
        stamp = {}
    elif not uv and not output_of([python, "-m", "pip", "--version"]):  # created by uv, and uv is gone
        followed("installing pip", python, "-m", "ensurepip")
    with contextlib.suppress(FileNotFoundError):
        os.remove(stamp_file(python))
    wanted = extras | set(stamp.get("extras", ()))
    if not {"cuda12", "cuda13"} & wanted and shutil.which("nvidia-smi"):
        wanted |= driver_extras(output_of(["nvidia-smi"]))
    wanted, launcher, vendor = wanted - OUR_MPIS, outside_mpiexec(), ""
    if launcher and not OUR_MPIS & extras:
        install(python, wanted, uv)  # installs the mpi4py to be asked whether the MPI of this mpiexec can be loaded
        vendor = vendor_of(output_of([launcher, "--version"]))
        library = output_of([python, "-m", "mpi4py", "--mpi-lib-version"], MPI4PY_LIBMPI=SITE_LIBRARIES)
        vendor = vendor if vendor == vendor_of(library) else ""
    if not vendor:
        launcher, ours = os.path.join(folder, "bin", "mpiexec"), min(OUR_MPIS & extras or {"mpich"})
        wanted, vendor = wanted | {ours}, ours
        install(python, wanted, uv)
    stamp = {"origin": origin(python), "project": digest(), "extras": sorted(wanted), "mpiexec": launcher,
             "vendor": vendor}
    pathlib.Path(stamp_file(python)).write_text(json.dumps(stamp, indent=1))


def lowest(extras: "set[str]") -> "list[str]":
    """Return the lowest versions that pyproject.toml accepts for the dependencies and these extras, as constraints."""
    project = tomllib.loads(pathlib.Path(ROOT, "pyproject.toml").read_text())["project"]
    rows = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in sorted(extras))]
    wanted = [one for row in rows for one in row]
    return [re.sub(r">=([\w.]+).*", r"==\1", one) for one in dict.fromkeys(wanted)]


def install(python: str, extras: "set[str]", uv: bool) -> None:
    package = f"[{','.join(sorted(extras))}]"
    pip = ["uv", "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    if LOWEST in python:
        pip += ["--constraint", os.path.join(os.path.dirname(os.path.dirname(python)), "lowest.txt")]
        pathlib.Path(pip[-1]).write_text("\n".join(lowest(extras)))
    followed(f"installing gpucoll{package} in {os.path.relpath(python, ROOT).split(os.sep)[0]}, once",
             *pip, "--editable", ROOT + package)


def mpiexec(python: str, ranks: int) -> "list[str]":
    """Return the command starting `ranks` ranks with the MPI of this Python of `ensure`."""
    stamp = stamp_of(python)
    vendor = next((vendor for vendor in launchers.VENDORS if vendor.name == stamp["vendor"]), None)
    options = launchers.mpiexec_options(vendor, oversubscribe=ranks > cores())
    return [stamp["mpiexec"], "-n", str(ranks), *options]
