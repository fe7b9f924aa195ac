"""Fixtures of the kernels' tests; the default tier's kernels are compiled at once, on every core."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def device():
    import emulation
    import grid

    emulation.libraries(emulation.text(*unit) for unit in grid.CORE)
    return emulation.device(grid.UNITS)


@pytest.fixture(params=["grid", "alone", "numpy"])
def way(request, monkeypatch):
    """Choose the place of computing: the emulated grid, one CPU thread, or NumPy."""
    import emulation

    from gpucoll.device import array_kernels, sources

    if request.param == "alone":
        assert array_kernels._on_host() is not None
    else:
        kernels = emulation.device(sources.compressing_families()) if request.param == "grid" else None
        monkeypatch.setattr(array_kernels, "_on_host", lambda: kernels)
    return request.param
