"""The GPU's own instructions of the peer kernels: loads under way, fences, and no load that may be stale.

Other GPUs' memory is far away: a kernel is fast only if many loads are issued before the first use of a result. Nothing
but the instructions shows this without a GPU.
"""

import functools
import re

import matrix
import pytest

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import nvrtc, sources

pytestmark = [pytest.mark.kernel, pytest.mark.nightly, pytest.mark.usefixtures("nvrtc_release")]

ARCH = "sm_90"
FLOAT = OPS["sum"], DTYPES["float32"]
WIDE_LOAD = re.compile(r"(?:LDG\S*\.128\S*|LDGMC\S*x4\S*|LDGMC\S*x8\S*) R(\d+),")
REGISTER = re.compile(r"\bR(\d+)\b")


@functools.cache
def instructions(kernel, planted=("", "")):
    """Return the instructions of a peer kernel, compiled from the source with a text replaced."""
    source = sources.text(sources.reducing(kernel, *FLOAT))
    assert planted[0] in source
    return matrix.disassembled(nvrtc.compile_cubin(source.replace(*planted), ARCH)[0])


def under_way(lines):
    """Return the most loads of 16 bytes issued one after the other, before a branch or a use of a loaded register."""
    most, loaded, count = 0, set(), 0
    for line in lines:
        load = WIDE_LOAD.search(line)
        used = {int(number) for number in REGISTER.findall(line[load.end():] if load else line)}
        if re.search(r"\bBRA\b|^\.L_x", line) or used & loaded:
            loaded, count = set(), 0
        if load:
            first, count = int(load[1]), count + 1
            loaded |= set(range(first, first + 4))
        most = max(most, count)
    return most


@pytest.mark.parametrize(("kernel", "loads"), [("packets", 8), ("ll128", 8), ("fold_all", 16), ("fold_share", 16),
                                               ("multimem_share", 16)])
def test_many_loads_are_under_way(kernel, loads):
    lines = instructions(kernel)
    assert under_way(lines) >= loads
    assert not [line for line in lines if "LDG" in line and "CONSTANT" in line]  # a load that may be stale


def test_the_switch_loads_16_bytes_at_once():
    loads = [line for line in instructions("multimem_share") if "LDGMC" in line]
    assert loads
    assert all("F32x4" in line for line in loads)


@pytest.mark.mutant
def test_polls_one_after_the_other_are_seen():
    assert under_way(instructions("packets", ("constexpr u32 AT_ONCE = 4;", "constexpr u32 AT_ONCE = 1;"))) < 8


def fences(planted=("", "")):
    """Return the number of fences between two ways to the same memory, in the sum by the switch."""
    return sum("MEMBAR.SC.SYS" in line for line in instructions("multimem_share", planted))


def test_multicast_and_ordinary_accesses_are_fenced():
    """After staging (three places in the code), before and after a reduction, and before the results are copied."""
    assert fences() == 6
    assert not [line for line in instructions("fold_share") if "MEMBAR.SC.SYS" in line]


@pytest.mark.mutant
@pytest.mark.parametrize("left_out", ["        between();\n        reduce_share",
                                      "        if (section.results) return;\n        between();"])
def test_a_missing_fence_is_seen(left_out):
    assert fences((left_out, left_out.replace("between();", ";"))) == 5
