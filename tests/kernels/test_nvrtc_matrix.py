"""Every kind of kernel compiles by every NVRTC of users, loaded by path, for every line of GPUs.

Users' toolkits are of many versions, and CUDA_PATH names one by path. Each version compiles in a process of its own,
without help by LD_LIBRARY_PATH. No kernel may spill, or take more registers than a block of 512 threads has.
"""

import importlib
import re

import matrix
import pytest

from gpucoll.device import command, nvrtc
from harness.grids import naming

gate = importlib.import_module("test_compile")

pytestmark = pytest.mark.kernel


def check(found):
    """Assert no refusal and no spill; print the registers for the record."""
    assert found["errors"] == {}
    for arch, log in found["reports"].items():
        registers, spills = command.usage(log)
        print(f"NVRTC {found['version']} {arch}: at most {registers} registers, {spills} bytes spilled")
        with naming((found["version"], arch)):
            assert list(gate.complaints(log, found["entries"])) == []


def test_the_environments_own_compiles_what_takes_little_time(nvrtc_release):
    found = matrix.compiled(nvrtc._library(None)._name, matrix.SHORT, ["sm_90"])
    assert (found["version"], len(found["entries"]), [*found["reports"]]) == (
        [*nvrtc_release], len(matrix.SHORT), ["sm_90"])
    check(found)


def test_the_matrix_has_every_kind():
    assert [*matrix.kernels()] == [*command.instances(everything=True)]


@pytest.mark.nightly
@pytest.mark.parametrize("wheel", matrix.WHEELS)
def test_every_kind_by_every_version(wheel):
    found = matrix.compiled(matrix.library(wheel), matrix.kernels(), matrix.ARCHS)
    version = re.search(r"==(\d+)\.(\d+)", wheel)
    assert version is None or found["version"] == [int(number) for number in version.groups()]
    assert {"sm_75", "sm_80", "sm_90"} <= {*found["reports"]} <= {*matrix.ARCHS}
    assert {"sm_100", "sm_120"} <= {*found["reports"]} or found["version"] < [12, 8]
    check(found)
