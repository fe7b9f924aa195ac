"""Host messages: an array of another call is no metadata; multirank/test_metadata.py exchanges metadata."""

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator.metadata import checked_rows, row_with


@pytest.mark.parametrize("data", [numpy.ones(300), numpy.zeros(300), numpy.arange(300), numpy.full(300, b"1")],
                         ids=["ones", "zeros", "integers", "a number"])
def test_an_array_of_another_call_is_a_mismatch(data):
    row = row_with({"shape": [2, 3], "dtype": "float32", "gpu": False}, 2)
    row[:] = numpy.resize(data.view(numpy.uint8), row.size)
    with pytest.raises(gc.MismatchError, match=r"gather: .* different calls"):
        checked_rows(row[None], "gather", None)
