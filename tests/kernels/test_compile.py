"""Every kernel compiles for GPUs and keeps what it works on in registers; needs NVRTC, and neither a GPU nor CuPy.

ptxas reports on each kernel in NVRTC's log. A spill or a stack frame would go through memory, which is what bounds
these kernels.
"""

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grid
import pytest
from expected import CASES, REAL

from gpucoll.device import nvrtc, sources
from gpucoll.errors import BackendError
from grids import naming
from oracle import DTYPES as NAMES

MOST_REGISTERS = 128  # of 65536 on a multiprocessor, for a block of 512 threads
ARCH = "sm_90"  # for which everything is compiled; the others are
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def library():
    """The architectures that NVRTC knows, where it is installed."""
    try:
        return nvrtc.archs()
    except BackendError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------- ptxas' report


class Report(NamedTuple):
    """What ptxas says of one function: bytes, and the registers of a kernel."""

    stack: int
    stores: int
    loads: int
    registers: int | None


FUNCTION = re.compile(
    r"Function properties for (\w+)\n"
    r"\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r"(?:.*Used (\d+) registers)?"
)


def reports(log):
    """By name, of every function in the log."""
    return {name: Report(*(int(number) if number else None for number in numbers))
            for name, *numbers in FUNCTION.findall(log)}


def complaints(log, entries):
    """What is wrong with these kernels, in words; a kernel without a report is wrong."""
    found = reports(log)
    for name in entries:
        if name not in found or found[name].registers is None:
            yield f"{name}: no report"
    for name, report in found.items():
        if report[:3] != (0, 0, 0):
            yield f"{name}: {report.stack} bytes of stack, {report.stores} and {report.loads} spilled"
        if (report.registers or 0) > MOST_REGISTERS:
            yield f"{name}: {report.registers} registers"


def check(some, arch):
    """These kernels compile for the architecture, and ptxas has nothing to say."""
    _, log = nvrtc.compile_cubin(sources.text(*some), arch)
    with naming(arch):
        assert list(complaints(log, {instance.entry for instance in some})) == []


def check_all(instances, archs):
    """Lists of kernels, each for an architecture, on every core: NVRTC lets go of Python meanwhile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(check, instances, archs))


# ---------------------------------------------------------------- every kernel


UNITS = [grid.MOVES, grid.scales(grid.SCALES), *(grid.casts(itertools.product([name], REAL)) for name in REAL),
         *(grid.reductions([case for case in CASES if case[1] == name]) for name in NAMES)]
FEW = [*grid.reductions([("sum", "float32"), ("sum", "bfloat16")]), sources.copy(16), sources.pack(4),
       *grid.casts([("float32", "float8_e4m3fn")]), *grid.scales([("divide", "float16")])]
# Of each kind, those whose code differs most.
EVERYWHERE = [*grid.MOVES, *grid.reductions(grid.CORE_REDUCE), *grid.casts(grid.BOTH_WAYS),
              *grid.scales(grid.CORE_SCALE)]


def test_a_few_kernels_compile_without_spills():
    check(FEW, ARCH)


@pytest.mark.nightly
def test_every_kernel_compiles_without_spills():
    check_all(UNITS, [ARCH] * len(UNITS))


@pytest.mark.nightly
def test_expressions_compile():
    """Of the user's own whatever compiles will do: no such kernel is refused for what it needs."""
    kernels = grid.reductions([*grid.WRITTEN, *grid.NEAR])
    _, log = nvrtc.compile_cubin(sources.text(*kernels), ARCH)
    assert reports(log).keys() >= {kernel.entry for kernel in kernels}


@pytest.mark.nightly
def test_kernels_compile_for_every_line_of_gpus(library):
    archs = [arch for arch in ARCHS if int(arch.removeprefix("sm_")) in library]  # as far as this NVRTC knows them
    assert ARCH in archs
    check_all([EVERYWHERE] * len(archs), archs)


# ---------------------------------------------------------------- what the check must not let pass

KERNEL = 'extern "C" __global__ void __launch_bounds__({threads}) kernel(float* x) {{ {body} }}'
# So many values are read before the first is written, or an array is indexed by what only the data say.
LIVE = ('float y[{count}]; _Pragma("unroll") for (int i = 0; i < {count}; ++i) y[i] = x[i * 97 + threadIdx.x]; '
        '__syncthreads(); _Pragma("unroll") for (int i = 0; i < {count}; ++i) x[i * 89 + threadIdx.x] = y[i] * y[9];')
INDEXED = ("float y[64]; for (int i = 0; i < 64; ++i) y[i] = x[i]; "
           "for (int i = 0; i < 64; ++i) x[i] = y[int(x[i + 64]) & 63];")
FAULTY = {
    r"kernel: .* [1-9]\d* and [1-9]\d* spilled": KERNEL.format(threads=1024, body=LIVE.format(count=200)),
    r"kernel: 256 bytes of stack, 0 and 0 spilled": KERNEL.format(threads=512, body=INDEXED),
    r"kernel: \d+ registers": KERNEL.format(threads=128, body=LIVE.format(count=200)),
}


@pytest.mark.mutant
@pytest.mark.parametrize("complaint", FAULTY)
def test_faulty_kernels_are_reported(complaint):
    _, log = nvrtc.compile_cubin(FAULTY[complaint], ARCH)
    assert [found for found in complaints(log, ["kernel"]) if re.match(complaint, found)]


@pytest.mark.mutant
def test_missing_report_does_not_pass(monkeypatch):
    source = KERNEL.format(threads=512, body="x[0] = 1;")
    _, log = nvrtc.compile_cubin(source, ARCH)
    assert list(complaints(log, ["kernel"])) == []
    assert list(complaints(log, ["kernel", "other"])) == ["other: no report"]
    monkeypatch.setattr(nvrtc, "OPTIONS", tuple(option for option in nvrtc.OPTIONS if "ptxas" not in option))
    assert list(complaints(nvrtc.compile_cubin(source, ARCH)[1], ["kernel"])) == ["kernel: no report"]


@pytest.mark.mutant
@pytest.mark.parametrize("log", [
    "ptxas info    : Function properties for kernel\n    0 bytes stack frame, 0 bytes spill stores, "
    "4 bytes spill loads\nptxas info    : Used 8 registers, 360 bytes cmem[0]\n",
    "ptxas info    : Function properties for kernel\nptxas         .     0 bytes stack frame, 4 bytes spill stores, "
    "0 bytes spill loads\nptxas info    : Used 8 registers, used 0 barriers\n",
])
def test_both_forms_of_the_report_are_read(log):
    """NVRTC 12's and 13's."""
    assert list(complaints(log, ["kernel"]))
    assert reports(log)["kernel"].registers == 8
    assert not list(complaints(log.replace(" 4 bytes", " 0 bytes"), ["kernel"]))
