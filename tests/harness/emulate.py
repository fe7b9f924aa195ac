"""CuPy programs of tests, run by `gpucoll emulate`."""

import subprocess
import sys

from harness.pace import seconds

HEAD = """
import numpy, cupy
def same(x, expected):
    assert isinstance(x, cupy.ndarray), type(x)
    numpy.testing.assert_array_equal(x.get(), expected)
    assert x.dtype == numpy.asarray(expected).dtype, (x.dtype, numpy.asarray(expected).dtype)
"""


def emulate(folder, text, *options):
    """Run a program with the function `same` in a folder."""
    program = folder / "program.py"
    program.write_text(HEAD + text)
    return subprocess.run([sys.executable, "-m", "gpucoll", "emulate", *options, str(program)], text=True,
                          capture_output=True, timeout=seconds(120), cwd=folder)
