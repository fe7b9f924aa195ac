"""The peer kernels compile for GPUs and keep what they work on in registers; needs NVRTC, and no GPU."""

import importlib

import pytest

import peer_world
from gpucoll.device import nvrtc, sources
from gpucoll.dtypes import DTYPES
from gpucoll.errors import BackendError
from gpucoll.ops import OPS
from grids import batches

gate = importlib.import_module("test_compile")  # beside the kernels' other tests, to which peer_world has made a way
pytestmark = pytest.mark.kernel

MAKERS = {
    "packets": sources.packets,
    "one_shot": lambda op, dtype: sources.shots("one_shot", op, dtype),
    "two_shot": lambda op, dtype: sources.shots("two_shot", op, dtype),
    "steps": sources.steps,
}
# One kernel of each pair of op and dtype; they take turns, so that every op and nearly every dtype has each of them.
CASES = [(list(MAKERS)[(row + column) % len(MAKERS)], op.name, dtype.name)
         for row, op in enumerate(OPS.values()) for column, dtype in enumerate(DTYPES.values())
         if dtype.kind in op.kinds]
NAMES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "complex128", "float8_e5m2", "int8")
WIDTHS = [sources.steps(None, DTYPES[name]) for name in ("int8", "int16", "float32", "float64", "complex128")]


@pytest.fixture(scope="module", autouse=True)
def library():
    """The architectures that NVRTC knows, where it is installed."""
    assert peer_world.GRAIN
    try:
        return nvrtc.archs()
    except BackendError as error:
        pytest.skip(str(error))


def core(number):
    """Every kernel, each of another dtype for another number."""
    return [make(OPS["sum"], DTYPES[NAMES[(number + place) % len(NAMES)]])
            for place, make in enumerate(MAKERS.values())]


def test_every_kernel_compiles_for_every_line_of_gpus(library):
    archs = gate.known(library)
    gate.check_all(map(core, range(len(archs))), archs)


def test_copies_compile():
    gate.check(sources.text(*WIDTHS), {instance.entry for instance in WIDTHS}, gate.ARCH)


@pytest.mark.parametrize("cases", batches(CASES, 25, keep=20, seed=2))
def test_every_op_and_dtype_compiles(cases):
    made = [[MAKERS[kernel](OPS[op], DTYPES[name])] for kernel, op, name in cases]
    gate.check_all(made, [gate.ARCH] * len(made))
