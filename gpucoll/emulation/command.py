"""`gpucoll emulate`: run a CuPy program on emulated GPUs, also below mpiexec and torchrun."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import Any

from gpucoll.emulation import install
from gpucoll.errors import GpucollError, UsageError


def main(options: Any) -> int:
    """Run the program; return 1 if device code has failed and the program has not noticed."""
    install(options.gpus, options.temper, options.seed)
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
