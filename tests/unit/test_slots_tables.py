"""What Python and C++ both say of slots is the same, and the tuner prices just what they do."""

import re

from gpucoll.communicator.times import LAST
from gpucoll.device.sources import inlined
from gpucoll.executors.shared import slots
from gpucoll.tuner.model import SLOTS

SOURCE = inlined("slots.cc", set())
TYPES = {"float": "float32", "double": "float64", "int32_t": "int32", "int64_t": "int64", "uint32_t": "uint32",
         "uint64_t": "uint64"}
NAMES = {"Sum": "sum", "Product": "prod", "Least": "min", "Greatest": "max"}


def constant(name):
    return int(re.search(rf"\b{name} = (\d+)[,;]", SOURCE)[1])


def test_the_tuner_prices_what_slots_do():
    assert set(SLOTS) == set(slots.WHATS)


def test_numbers_of_calls():
    words = re.search(r"enum What \{ (.*) \};", SOURCE)[1].lower().split(", ")
    numbers = {collective if collective != "all_reduce" else algorithm: number
               for (collective, algorithm), number in slots.WHATS.items()} | {"copy": slots.COPY}
    assert {word: number for number, word in enumerate(words)} == numbers


def test_places_of_dtypes_and_ops():
    cases = re.findall(r"case (\d): return combine_of<(\w+)>\(op\);", SOURCE)
    assert [(int(number), TYPES[name]) for number, name in cases] == list(enumerate(slots.KINDS))
    assert tuple(NAMES[name] for name in re.findall(r"combine<T, (\w+)>", SOURCE)) == slots.OPS


def test_lengths():
    assert (constant("LINE"), constant("LAST")) == (slots.LINE, LAST)
