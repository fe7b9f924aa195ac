"""pytest's option `--emulate-gpus N`: tests of CuPy programs on emulated GPUs."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add the options `--emulate-gpus` and `--emulate-temper`."""
    group = parser.getgroup("gpucoll")
    group.addoption("--emulate-gpus", type=int, metavar="N", help="import cupy finds N emulated GPUs")
    group.addoption("--emulate-temper", default="strict", help="strict or quick (strict)")


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Install the emulation before any test or conftest is imported."""
    options = early_config.known_args_namespace
    if options.emulate_gpus is not None:
        from gpucoll.emulation import install

        install(options.emulate_gpus, options.emulate_temper)
