"""The peer kernels compile for GPUs and keep what they work on in registers; needs NVRTC, and no GPU."""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import peer_world
from gpucoll.device import nvrtc, sources
from gpucoll.dtypes import DTYPES
from gpucoll.errors import BackendError
from gpucoll.ops import OPS
from grids import naming, sampled

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


def check(instances, arch):
    with naming((arch, [instance.entry for instance in instances])):
        gate.check(sources.text(*instances), {instance.entry for instance in instances}, arch)


def test_every_kernel_compiles_for_every_line_of_gpus(library):
    known = [arch for arch in gate.ARCHS if int(arch.removeprefix("sm_")) in library]
    assert gate.ARCH in known
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of Python meanwhile
        list(pool.map(check, map(core, range(len(known))), known))


def test_copies_compile():
    gate.check(sources.text(*WIDTHS), {instance.entry for instance in WIDTHS}, gate.ARCH)


@pytest.mark.parametrize(("kernel", "op", "name"), sampled(CASES, keep=20, seed=2))
def test_every_op_and_dtype_compiles(kernel, op, name):
    check([MAKERS[kernel](OPS[op], DTYPES[name])], gate.ARCH)
