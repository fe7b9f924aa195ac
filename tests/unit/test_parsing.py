"""CPython's parser is called by one thread at a time, and once more after a disturbed parse."""

import ast
import gc
import sys
import threading
from contextlib import contextmanager

import numpy

from gpucoll import elementwise_op
from gpucoll.core import parsing
from gpucoll.core.dtypes import DTYPES
from gpucoll.executors.engine.instructions import combine


@contextmanager
def inside_a_parse(act):
    """Call `act` at every garbage collection while CPython makes a syntax tree, as a finalizer may run then."""
    acting, thread = False, threading.get_ident()

    def look(phase, info):
        nonlocal acting
        caller = sys._getframe(1).f_code
        if phase == "start" and not acting and threading.get_ident() == thread and caller is ast.parse.__code__:
            acting = True
            act()
            acting = False

    threshold = gc.get_threshold()
    gc.callbacks.append(look)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)


def test_a_finalizer_that_parses_does_no_harm():
    disturbed = []

    def parse():
        if len(disturbed) < 30:
            disturbed.append(ast.parse("a"))

    with inside_a_parse(parse):
        op = elementwise_op("a + b - a*b")
    assert len(disturbed) == 30
    assert op.cuda == "subtract(add(a, b), multiply(a, b))"
    x = numpy.array([3, 5])
    combine(op, DTYPES["int64"], x, (x, numpy.array([2, 7])))
    assert list(x) == [3 + 2 - 3 * 2, 5 + 7 - 5 * 7]


def test_threads_parse_one_after_another():
    free = []

    def ask():
        other = threading.Thread(target=lambda: free.append(parsing._parser.acquire(blocking=False)))
        other.start()
        other.join()

    with inside_a_parse(ask):
        elementwise_op("a + b - a*b")
    assert set(free) == {False}


def test_an_exception_without_words_has_its_place_and_name():
    class Wordless(Exception):
        __notes__ = property(lambda self: 1 / 0)

    try:
        raise Wordless
    except Wordless as error:
        text = parsing.text_of(Wordless, error, error.__traceback__)
    assert "raise Wordless" in text
    assert text.endswith("Wordless, which cannot be shown (ZeroDivisionError)\n")
