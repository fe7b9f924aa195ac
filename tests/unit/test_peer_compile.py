"""The peer kernels compile for GPUs and keep what they work on in registers; needs NVRTC, and no GPU."""

import importlib

import pytest

import peer_world
from gpucoll.device import nvrtc, sources
from gpucoll.dtypes import DTYPES
from gpucoll.errors import BackendError
from gpucoll.ops import OPS
from grids import sampled

gate = importlib.import_module("test_compile")  # beside the kernels' other tests, to which peer_world has made a way
pytestmark = pytest.mark.kernel

CASES = [(op.name, dtype.name) for op in OPS.values() for dtype in DTYPES.values() if dtype.kind in op.kinds]
MAKERS = {
    "packets": sources.packets,
    "one_shot": lambda op, dtype: sources.shots("one_shot", op, dtype),
    "two_shot": lambda op, dtype: sources.shots("two_shot", op, dtype),
    "steps": sources.steps,
}
CORE = [MAKERS[kernel](OPS["sum"], DTYPES[name]) for kernel, name in (
    ("packets", "float32"), ("packets", "bfloat16"), ("one_shot", "float16"), ("two_shot", "float8_e4m3fn"),
    ("two_shot", "complex128"), ("steps", "bfloat16"), ("steps", "float8_e5m2"))]
WIDTHS = [sources.steps(None, DTYPES[name]) for name in ("int8", "int16", "float32", "float64", "complex128")]


@pytest.fixture(scope="module", autouse=True)
def library():
    """The architectures that NVRTC knows, where it is installed."""
    assert peer_world.GRAIN
    try:
        return nvrtc.archs()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", gate.ARCHS)
def test_the_core_compiles_for_every_line_of_gpus(arch, library):
    if int(arch.removeprefix("sm_")) not in library:
        pytest.skip(f"this NVRTC does not know {arch}")
    gate.check(sources.text(*CORE), {instance.entry for instance in CORE}, arch)


def test_copies_compile():
    gate.check(sources.text(*WIDTHS), {instance.entry for instance in WIDTHS}, gate.ARCH)


@pytest.mark.parametrize(("op", "name"), sampled(CASES, keep=10, seed=2))
def test_every_op_and_dtype_compiles(op, name):
    made = [make(OPS[op], DTYPES[name]) for make in MAKERS.values()]
    gate.check(sources.text(*made), {instance.entry for instance in made}, gate.ARCH)
