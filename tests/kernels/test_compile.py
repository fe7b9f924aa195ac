"""Every kernel compiles for GPUs and keeps working data in registers; needs NVRTC, and neither a GPU nor CuPy.

ptxas reports on each kernel in NVRTC's log. A spill or a stack frame would go through memory, and memory bandwidth
bounds these kernels.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import grid
import pytest
from expected import CASES

from gpucoll.device import nvrtc, sources
from harness.grids import naming
from oracles.oracle import DTYPES as NAMES

MOST_REGISTERS = 128  # of 65536 on a multiprocessor, for a block of 512 threads
ARCH = "sm_90"  # every kernel compiles for ARCH, a selection for ARCHS
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FUNCTION = re.compile(  # ptxas's words on one function: bytes, and the registers of a kernel
    r"Function properties for (\w+)\n"
    r"\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r"(?:.*Used (\d+) registers)?"
)

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("nvrtc_release")]


def complaints(log, entries):
    """Yield the faults of these kernels, in words; a missing report is a fault."""
    found = FUNCTION.findall(log)
    for name in {*entries} - {name for name, *_, registers in found if registers}:
        yield f"{name}: no report"
    for name, stack, stores, loads, registers in found:
        if {stack, stores, loads} != {"0"}:
            yield f"{name}: {stack} bytes of stack, {stores} and {loads} spilled"
        if int(registers or 0) > MOST_REGISTERS:
            yield f"{name}: {registers} registers"


def check(some, arch):
    _, log = nvrtc.compile_cubin(sources.text(*some), arch)
    with naming(arch):
        assert list(complaints(log, [instance.entry for instance in some])) == []


def test_a_few_kernels_compile_without_spills():
    check([*grid.reductions([("sum", "float32"), ("sum", "bfloat16")]), sources.instance("copy", 16),
           sources.instance("pack", 4), *grid.scales([("divide", "float16"), ("multiply", "float8_e4m3fn")])], ARCH)


@pytest.mark.nightly
def test_every_kernel_compiles_and_some_for_every_line_of_gpus():
    units = [grid.MOVES, grid.scales(grid.SCALES),
             *(grid.reductions([case for case in CASES if case[1] == name]) for name in NAMES)]
    everywhere = [*grid.MOVES, *grid.reductions(grid.CORE_REDUCE),
                  *grid.scales(grid.CORE_SCALE)]  # of each kind, the kernels with the most different code
    archs = [arch for arch in ARCHS if int(arch.removeprefix("sm_")) in nvrtc.archs()]  # known by this NVRTC
    assert ARCH in archs
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # ctypes releases Python's lock during NVRTC's work
        list(pool.map(check, [*units, *[everywhere] * len(archs)], [*[ARCH] * len(units), *archs]))


@pytest.mark.nightly
def test_expressions_compile():
    """Users' own expressions only have to compile: no kernel is refused for its needs."""
    kernels = grid.reductions([*grid.WRITTEN, *grid.NEAR])
    _, log = nvrtc.compile_cubin(sources.text(*kernels), ARCH)
    assert {name for name, *_ in FUNCTION.findall(log)} >= {kernel.entry for kernel in kernels}
