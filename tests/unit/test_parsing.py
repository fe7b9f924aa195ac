"""CPython's parser is called in one place, by one thread at a time, and once more after a disturbed parse."""

import ast
import gc
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest

from gpucoll import elementwise_op
from gpucoll.arrays.space import combiner
from gpucoll.core import parsing
from gpucoll.core.dtypes import DTYPES

PACKAGE = Path(parsing.__file__).parent
PARSES = {"ast.parse", "ast.literal_eval", "inspect.signature", "numpy.load", "numpy.lib.format.read_array"}
BUILT_IN = {"compile", "eval", "exec"}


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
    combiner(op, DTYPES["int64"])(x, x, [numpy.array([2, 7])])
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


def parses(node):
    """Return whether a call parses: a parsing function of the standard library or NumPy, or a built-in given a text."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).replace("np.", "numpy.")
    if name in BUILT_IN:  # running compiled code does not parse
        code = node.args[0]
        return not ((isinstance(code, ast.Name) and code.id == "code")
                    or (isinstance(code, ast.Call) and ast.unparse(code.func) == "parsing.code_of"))
    return name in PARSES or name.startswith("traceback.")


def found(text):
    return [f"{node.lineno}: {ast.unparse(node)}" for node in ast.walk(ast.parse(text)) if parses(node)]


def imported(text):
    """Return the imports by name from modules with parsing functions: `parses` would not recognise their calls."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.module in ("ast", "inspect", "traceback")]


def test_the_package_parses_in_one_place():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert found(texts.pop("parsing.py"))
    assert {name: found(text) + imported(text) for name, text in texts.items() if found(text) + imported(text)} == {}


@pytest.mark.parametrize("text", [
    "ast.parse(x)", "ast.literal_eval(x)", "compile(x, '', 'eval')", "eval(x, {})", "exec('a = 1')",
    "eval(compile(x, '', 'eval'))", "inspect.signature(f)", "traceback.format_exc()", "np.load(file)"])
def test_calls_that_parse_are_found(text):
    assert found(text)


def test_an_exception_without_words_has_its_place_and_name():
    class Wordless(Exception):
        __notes__ = property(lambda self: 1 / 0)

    try:
        raise Wordless
    except Wordless as error:
        text = parsing.text_of(Wordless, error, error.__traceback__)
    assert "raise Wordless" in text
    assert text.endswith("Wordless, which cannot be shown (ZeroDivisionError)\n")
