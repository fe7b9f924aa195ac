"""Signatures of calls: encoded and decoded, cut, described, and host messages."""

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator.metadata import checked_rows, row_with
from gpucoll.core.signature import Signature, code_of_difference, counts_text, described, is_refusal
from gpucoll.executors import lack_lengths, shortened

CALLS = [Signature("all_reduce", 24, "float32", 0, "", "", "", (2, 3), "torus(4x2)", "sum"),
         Signature("broadcast", 1120, "uint8", 1, "", "scatter", "", (1120,), "linear"), Signature("barrier"),
         Signature("gather", 0, "bool", 2, "on devices", "", "5d1c", (), "native"),
         Signature("scatter", dtype="int8", shape=(0,), refusal="x has shape (3,): no\x1fblocks")]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_encoded_is_decoded(call):
    assert Signature.decode(call.encode()) == call
    shown = f"{call.encode()}\nprogram.py:3"
    assert (is_refusal(shown), described(shown)) == (bool(call.refusal), call.describe())
    for cut in range(len(call.encode())):  # cut at a limit, or in a damaged file
        assert described(call.encode()[:cut]) == Signature.decode(call.encode()[:cut]).describe()
        assert isinstance(described(call.encode()[:cut] + "?" + call.encode()[cut + 1:]), str)


def test_long_ones_are_cut_and_still_differ():
    calls = [CALLS[0]._replace(op=f"a * {'b + ' * 100}{number}") for number in range(2)]
    first, second = (Signature.decode(shortened(call.encode(), 200)) for call in calls)
    assert first[:-2] == second[:-2] == calls[0][:-2]
    assert code_of_difference([first, second]) == "GC-OP"
    shown = shortened(f"{calls[0].encode()}\n/{'folder/' * 100}train.py:57", 200)
    assert len(shown.encode()) <= 200
    assert shown.endswith("/folder/train.py:57")


@pytest.mark.parametrize(("unlike", "code"), [
    ({"collective": "reduce"}, "GC-COLLECTIVE"), ({"dtype": "int8"}, "GC-DTYPE"), ({"shape": (6,)}, "GC-SHAPE"),
    ({"op": "max"}, "GC-OP"), ({"root": 1}, "GC-ROOT"), ({"nbytes": 25}, "GC-COUNTS"),
    ({"algorithm": "ring"}, "GC-ALGO"), ({"header": "split"}, "GC-MISMATCH"), ({"lengths": "5d1c"}, "GC-COUNTS"),
    ({"root": 1, "algorithm": "ring"}, "GC-ROOT")])
def test_the_first_unlike_field_has_the_code(unlike, code):
    assert code_of_difference([CALLS[0], CALLS[0]._replace(**unlike)]) == code


def test_only_calls_with_lengths_of_earlier_calls_lack_lengths():
    """Calls of one v-variant, by earlier lengths or exchanges of lengths, lack lengths; no other unlike calls do."""
    known, other = (Signature("all_gather_v", 8, "f4", lengths=one, algorithm="ring") for one in ("5d1c", "77aa"))
    header = Signature("all_gather", 1072, "uint8", header="all_gather_v", algorithm="direct")
    agreed, given = known._replace(lengths=""), known._replace(lengths=counts_text([1, 2]))

    def lack(*calls):
        return lack_lengths([call.encode() for call in calls])

    assert lack(known, header)
    assert lack(known, other)
    assert lack(header, other, known)
    assert not lack(known, known._replace(op="max"))
    assert not lack(known, agreed)
    assert not lack(known, given)
    assert not lack(given, *(given._replace(lengths=counts_text(range(count))) for count in (98, 99)))
    assert code_of_difference([header, given]) == "GC-COUNTS"
    assert not lack(header, agreed)
    assert not lack(known, Signature("barrier"))
    assert not lack(known, header._replace(header="gather_v"))
    assert not lack(known, Signature("", refusal="no array"))


@pytest.mark.parametrize("data", [numpy.ones(300), numpy.zeros(300), numpy.arange(300), numpy.full(300, b"1")],
                         ids=["ones", "zeros", "integers", "a number"])
def test_an_array_of_another_call_is_a_mismatch(data):
    row = row_with({"shape": [2, 3], "dtype": "float32", "gpu": False}, 2)
    row[:] = numpy.resize(data.view(numpy.uint8), row.size)
    with pytest.raises(gc.MismatchError, match=r"gather: .* different calls"):
        checked_rows(row[None], "gather", None)
