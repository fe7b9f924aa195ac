"""`gpucoll emulate`: run a CuPy program on emulated GPUs, also below mpiexec and torchrun."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import runpy
import sys
import tempfile
import traceback
from typing import Any

from gpucoll.emulation import install
from gpucoll.errors import GpucollError, UsageError


def main(options: Any) -> int:
    """Run the program; return 1 if device code has failed and the program has not noticed."""
    install(options.gpus, options.temper, options.seed)
    _meet_without_mpi()
    script = os.path.abspath(options.script)
    if not os.path.isfile(script):
        raise UsageError(f"{options.script}: no such file", code="GC-EMULATION")
    sys.argv, sys.path[0:0] = [options.script, *options.arguments], [os.path.dirname(script)]
    try:
        runpy.run_path(script, run_name="__main__")
    except GpucollError:  # of the program, not of this command: its line counts
        traceback.print_exc()
        return 1
    machine = sys.modules.get("cupy._machine")
    fault = None if machine is None else machine.MACHINE.fault_at_the_end()
    if fault is not None:
        sys.stderr.write(f"gpucoll emulate: {fault}\n")
    return int(fault is not None)


def _meet_without_mpi() -> None:
    """Let the ranks that torchrun or `gpucoll run --standalone` has started exchange NCCL's messages by a folder."""
    job = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not job[1] or "PMI_RANK" in os.environ \
            or "OMPI_COMM_WORLD_RANK" in os.environ:
        return
    name = hashlib.sha256("\n".join([str(os.getuid()), *job]).encode()).hexdigest()[:16]
    folder = os.path.join(tempfile.gettempdir(), f"gpucoll-emulation-{name}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.stat(folder).st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user", code="GC-EMULATION")
    os.environ["STAND_IN_FOLDER"] = folder
    atexit.register(_leave, folder)


def _leave(folder: str) -> None:
    """Remove the folder, if no other rank has messages there."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
