"""CPython's parser behind a lock, with retries, because old versions fail when parses interleave.

CPython before 3.11.8 and 3.12.1 counts the depth of a syntax tree in a variable of the process. The garbage collector
may run during a parse, and a finalizer may let another thread parse. The parser then raises SystemError for a correct
text (gh-106905). The lock keeps the threads of this package apart. The lock covers neither a program's own `ast.parse`
nor a finalizer parsing in the same thread, so `_undisturbed` repeats a parse after a SystemError.
"""

from __future__ import annotations

import ast
import inspect
import io
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy

T = TypeVar("T")
# Reentrant: a finalizer may parse in the thread holding the lock.
_parser = threading.RLock()
# Retries per parse: far more interrupted parses in a row than ever observed.
DISTURBED = 100


def _undisturbed(parse: Callable[[], T]) -> T:
    """Return the result of `parse`, repeated after a SystemError; other errors pass through.

    `parse` must do the same at every call.
    """
    with _parser:
        for _ in range(DISTURBED):
            try:
                return parse()
            except SystemError:
                continue
        return parse()


def tree_of(expression: str) -> ast.Expression:
    """Return the syntax tree of an expression; raise SyntaxError or ValueError.

    >>> type(tree_of("a + b").body).__name__
    'BinOp'
    """
    return _undisturbed(lambda: ast.parse(expression, mode="eval"))


def code_of(source: str | bytes | ast.Expression, file: str, mode: str) -> types.CodeType:
    """Return the code object of a text or a tree, `mode` "eval" or "exec"; raise SyntaxError or ValueError."""
    code: types.CodeType = _undisturbed(lambda: compile(source, file, mode))
    return code


def arrays_of(content: bytes) -> Any:
    """Return the arrays of an npz file, to be read by `array_of`; raise ValueError or zipfile.BadZipFile."""
    return _undisturbed(lambda: numpy.load(io.BytesIO(content)))


def array_of(rows: Mapping[str, Any], name: str) -> Any:
    """Return an array of `arrays_of`; NumPy parses the header, a Python literal."""
    return _undisturbed(lambda: rows[name])


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, parsed from a text for a built-in; raise TypeError or ValueError."""
    return _undisturbed(lambda: inspect.signature(function))


def text_of(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> str:
    """Return an exception with traceback as text; `traceback` parses the source lines to mark the place in each.

    Never raises, whatever the exception's own methods do: the words for an error must not become another error.
    """
    try:
        return _undisturbed(lambda: "".join(traceback.format_exception(kind, error, trace)))
    except Exception as problem:
        places = _undisturbed(lambda: "".join(traceback.format_tb(trace)))
        return f"{places}{kind.__name__}, which cannot be shown ({type(problem).__name__})\n"
