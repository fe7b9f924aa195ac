"""CuPy programs of tests, run by `gpucoll emulate`."""

from harness.jobs import python

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
    return python("-m", "gpucoll", "emulate", *options, program, timeout=120, cwd=folder)
