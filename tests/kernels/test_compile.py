"""Every kernel compiles for GPUs and keeps what it works on in registers; needs NVRTC, and neither a GPU nor CuPy.

ptxas reports on each kernel in NVRTC's log. A spill or a stack frame would go through memory, which is what bounds
these kernels.
"""

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from gpucoll.device import nvrtc, sources
from gpucoll.dtypes import DTYPES
from gpucoll.errors import BackendError
from gpucoll.ops import OPS, elementwise_op
from grids import naming

MOST_REGISTERS = 128  # of 65536 on a multiprocessor, for a block of 512 threads
ARCH = "sm_90"  # for which everything is compiled; the others are
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
WIDTHS = (1, 2, 4, 8, 16)
REAL = [row for row in DTYPES.values() if row.kind != "complex"]
SCALES = {"divide": ("float", "complex"), "multiply": ("int", "float", "complex"), "truth": ("bool", "int", "float")}
# Of the user's own: anything that compiles, so that no such kernel is refused for what it needs.
EXPRESSIONS = {"a + b - a*b": REAL, "~(a ^ b)": [row for row in REAL if row.kind in ("bool", "int")],
               "sqrt(a*a + b*b)": [DTYPES["float16"], DTYPES["float32"], DTYPES["float64"]],
               "log(exp(a) + exp(b))": [DTYPES["bfloat16"], DTYPES["float32"], DTYPES["float64"]],
               "max(abs(a), abs(b))": REAL}

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


def check(source, entries, arch):
    _, log = nvrtc.compile_cubin(source, arch)
    with naming(arch):
        assert list(complaints(log, entries)) == []


def check_all(instances, archs):
    """Lists of kernels, each for an architecture, on every core: NVRTC lets go of Python meanwhile."""
    def one(some, arch):
        check(sources.text(*some), {instance.entry for instance in some}, arch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, instances, archs))


# ---------------------------------------------------------------- every kernel


def reductions(dtype):
    return [sources.reduce(op, dtype) for op in OPS.values() if dtype.kind in op.kinds]


def scales(dtype):
    return [sources.scale(what, dtype) for what, kinds in SCALES.items() if dtype.kind in kinds]


def moves():
    return [make(width) for make in (sources.copy, sources.pack, sources.unpack) for width in WIDTHS]


def casts(source):
    return [sources.cast(source, target) for target in REAL]


UNITS = {"moves": moves(), **{f"cast {row.name}": casts(row) for row in REAL},
         **{f"reduce {row.name}": reductions(row) for row in DTYPES.values()},
         "scale": list(itertools.chain.from_iterable(map(scales, DTYPES.values())))}


@pytest.mark.parametrize("units", [pytest.param(list(UNITS)[first::4], marks=pytest.mark.slow if first else ())
                                   for first in range(4)], ids=" ".join)
def test_every_kernel_compiles_without_spills(units):
    check_all([UNITS[unit] for unit in units], [ARCH] * len(units))


def test_nothing_is_left_out():
    """Every op on every dtype on which it is defined, as far as the kernels differ."""
    entries = {instance.entry for unit in UNITS.values() for instance in unit}
    kernels = {(op.cuda, dtype.name) for op in OPS.values() for dtype in DTYPES.values() if dtype.kind in op.kinds}
    assert len([entry for entry in entries if entry.startswith("reduce_")]) == len(kernels)
    assert len([entry for entry in entries if entry.startswith("cast_")]) == len(REAL) ** 2


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_compile(expression):
    kernels = [sources.reduce(elementwise_op(expression), dtype) for dtype in EXPRESSIONS[expression]]
    _, log = nvrtc.compile_cubin(sources.text(*kernels), ARCH)
    assert reports(log).keys() >= {kernel.entry for kernel in kernels}


CORE = [
    *(sources.reduce(OPS[op], DTYPES[dtype]) for op, dtype in (
        ("sum", "float16"), ("sum", "bfloat16"), ("sum", "float32"), ("sum", "float64"), ("sum", "float8_e4m3fn"),
        ("sum", "float8_e5m2"), ("sum", "int8"), ("sum", "int64"), ("prod", "complex64"), ("prod", "complex128"),
        ("max", "bfloat16"), ("min", "float8_e4m3fn"), ("band", "uint8"), ("lor", "bool"))),
    *(sources.cast(DTYPES[source], DTYPES[target]) for source, target in (
        ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float8_e4m3fn"), ("float8_e4m3fn", "float32"),
        ("float32", "float8_e5m2"), ("float8_e5m2", "float32"), ("float64", "float16"))),
    *(sources.scale("divide", DTYPES[dtype]) for dtype in ("float16", "bfloat16", "float32", "float8_e5m2")),
    *moves(),
]


def known(library):
    """The lines of GPUs for which this NVRTC can compile."""
    archs = [arch for arch in ARCHS if int(arch.removeprefix("sm_")) in library]
    assert ARCH in archs
    return archs


def test_core_compiles_for_every_line_of_gpus(library):
    archs = known(library)
    check_all([CORE] * len(archs), archs)


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
