"""Hostile content of files and messages, drawn by hypothesis: damaged bytes, and values of other types."""

import functools
import json
import warnings

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import gpucoll as gc
from gpucoll.transport.connections import LENGTHS, MOST_JSON
from harness.grids import SEED

NUMBERS = st.one_of(st.integers(-3, 70), st.sampled_from((1 << 31, 1 << 64, -(1 << 63), 10**400, 1e308, 5e-324)),
                    st.floats())
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8),
                   st.sampled_from(("../../x", "\0", "a" * 7000)))
VALUES = st.recursive(LEAVES, lambda some: st.one_of(st.lists(some, max_size=4), st.dictionaries(
    st.text(max_size=8), some, max_size=4)), max_leaves=8)
DEEP = st.sampled_from((b"[" * 100000, b'{"a":' * 50000, b"a = " + b"[" * 5000, b"a" + b".a" * 5000 + b" = 1",
                        b"[" + b"[1]," * 5000, b"1" * 10000, b"a = " + b"9" * 10000, b""))


@st.composite
def damaged(draw, whole):
    """Draw the bytes of `whole()` with some parts replaced, removed or inserted."""
    found = bytearray(whole())
    for _ in range(draw(st.integers(1, 6))):
        place, length = draw(st.integers(0, len(found))), draw(st.sampled_from((0, 1, 1, 2, 8, 300)))
        found[place:place + length] = draw(st.one_of(st.binary(max_size=8), st.sampled_from(
            (b"", b"-1", b"1e999", b"nan", b"[]", b"{}", b'""', b"9" * 400, b"null", b"true"))))
    return bytes(found)


@st.composite
def exchanged(draw, document):
    """Draw the document of `document()` with some values replaced or missing."""
    document = json.loads(json.dumps(document()))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
                place = place[key]
                continue
            if draw(st.integers(0, 5)):
                place[key] = draw(NUMBERS | VALUES)
            else:
                del place[key]
            break
    return document


def any_content(*whole):
    return st.one_of(st.binary(max_size=300), DEEP, *(damaged(functools.partial(bytes, one)) for one in whole))


def greetings(recorded):
    """Return what processes without the token may say to a port of the ranks; `recorded` are greetings of ranks."""
    def frame(text, length=None, count=0):
        return LENGTHS.pack(len(text) if length is None else length, count) + text

    replayed = st.sampled_from(recorded)
    heads = st.one_of(replayed.flatmap(lambda one: exchanged(lambda: one)), replayed, st.sampled_from((
        {"bye": True}, {"call": "delete", "key": "key"}, {"waits": 1}, {"ask": 1})))
    said = heads.map(lambda head: frame(json.dumps(head).encode()))
    lengths = st.sampled_from((0, 1, 7, MOST_JSON, MOST_JSON + 1, 1 << 31, (1 << 32) - 1))
    return st.one_of(any_content(b"GET / HTTP/1.1\r\n\r\n", frame(json.dumps(recorded[0]).encode())), said,
                     DEEP.map(frame), st.lists(said, min_size=2, max_size=5).map(b"".join),
                     st.builds(frame, st.just(b'{"name": 1}'), lengths, lengths))


def holds(content, body, count):
    """Assert for `count` examples: `body(content)` raises only typed errors."""
    @seed(SEED)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(content)
    def every(drawn):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of numbers too large
                body(drawn)
        except gc.GpucollError:
            pass

    every()
