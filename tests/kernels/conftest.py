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
