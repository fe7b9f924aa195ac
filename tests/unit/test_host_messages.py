"""Host messages: metadata in JSON, and what is no metadata."""

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator.metadata import checked_rows, row_with

METADATA = {"shape": [2, 3], "dtype": "float32", "gpu": False}


def test_metadata_come_back():
    rows = numpy.stack([row_with(METADATA, 2), row_with({**METADATA, "shape": []}, 2)])
    assert checked_rows(rows, "gather", None) == [METADATA, {**METADATA, "shape": []}]


def test_an_error_of_a_rank_is_raised_on_all_ranks():
    """The text of the error is cut to fit the message."""
    rows = numpy.stack([row_with(METADATA, 2), row_with({"error": "\N{SNOWMAN}" * 5000}, 2)])
    with pytest.raises(gc.PeerError, match=r"gather: rank 1 refused its arguments: \u2603+$") as found:
        checked_rows(rows, "gather", None)
    assert found.value.ranks == (1,)


@pytest.mark.parametrize("data", [numpy.ones(300), numpy.zeros(300), numpy.arange(300), numpy.full(300, b"1")],
                         ids=["ones", "zeros", "integers", "a number"])
def test_an_array_of_another_call_is_a_mismatch(data):
    row = row_with(METADATA, 2)
    row[:] = numpy.resize(data.view(numpy.uint8), row.size)
    with pytest.raises(gc.MismatchError, match=r"gather: .* different calls"):
        checked_rows(row[None], "gather", None)
