"""NVLink by NVML: the conditions for packets of 128 bytes."""

import sys
import types

import pytest

from gpucoll.device.gpus import moves_rows

PCI = {0x3B00: "00000000:3B:00.0", 0x1_0000_8600: "00010000:86:00.0", 0xAF01: "00000000:AF:01.0"}
ONE, TWO, THREE = PCI


class NVMLError(Exception):
    pass


@pytest.fixture
def library(monkeypatch):
    """Return a substitute for pynvml: GPUs `ONE` and `TWO` are joined by NVLink, `THREE` is behind PCI Express."""
    made = types.ModuleType("pynvml")
    made.NVMLError, made.nvmlInit, made.nvmlShutdown = NVMLError, lambda: None, lambda: None
    made.nvmlDeviceGetHandleByPciBusId = lambda pci: {text: number for number, text in PCI.items()}[pci]
    made.nvmlDeviceGetP2PStatus = lambda one, two, index: int(index != 2 or {one, two} != {ONE, TWO})
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def gpus(*numbers, capability=90):
    return [(number, capability) for number in numbers]


def test_pairs_of_gpus_on_nvlink_move_rows_as_in_nccl(library):
    assert moves_rows(gpus(ONE, TWO))
    assert moves_rows(gpus(TWO, ONE, capability=70))
    assert moves_rows(gpus(ONE, TWO, capability=86))  # a bridge of NVLink
    assert moves_rows([(ONE, 90), (TWO, 103)])
    assert not moves_rows(gpus(ONE, TWO, THREE))  # one pair of three has no NVLink
    assert not moves_rows(gpus(ONE, THREE))


def test_other_gpus_do_not(library):
    assert not moves_rows(gpus(ONE, ONE))  # two ranks on one GPU
    assert not moves_rows(gpus(ONE, TWO, capability=61))
    assert not moves_rows([(ONE, 80), (TWO, 90)])


def refuse(*_):
    raise NVMLError


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetP2PStatus"])
def test_without_an_answer_of_nvml_rows_are_not_used(library, monkeypatch, name):
    monkeypatch.setattr(library, name, refuse)
    assert not moves_rows(gpus(ONE, TWO))


def test_without_pynvml_rows_are_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not moves_rows(gpus(ONE, TWO))
