"""CPython's parser, as the package calls it: by one thread at a time, and once more where others disturbed it.

CPython before 3.11.8 and 3.12.1 counts the depth of a syntax tree in one variable of the process. The garbage
collector may run while a tree is made, and a finalizer may let another thread make one. The parser then raises
SystemError for a text that is right (gh-106905). The lock keeps the threads of this package apart. It cannot stop a
program's own `ast.parse`, or a finalizer that parses in the same thread: a parse that they disturbed is done again.
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
_parser = threading.RLock()  # a finalizer that parses runs in the thread that holds it
DISTURBED = 100  # times in a row that a parse may be disturbed: far more than were ever seen


def _undisturbed(parse: Callable[[], T]) -> T:
    """Return what `parse` returns, a function that does the same each time; raise what it raises of itself."""
    with _parser:
        for _ in range(DISTURBED):
            try:
                return parse()
            except SystemError:
                continue
        return parse()


def tree_of(expression: str) -> ast.Expression:
    """Return the syntax tree of an expression; SyntaxError, ValueError.

    >>> type(tree_of("a + b").body).__name__
    'BinOp'
    """
    return _undisturbed(lambda: ast.parse(expression, mode="eval"))


def code_of(source: str | bytes | ast.Expression, file: str, mode: str) -> types.CodeType:
    """Return the code of a text or a tree, `mode` "eval" or "exec"; SyntaxError, ValueError."""
    code: types.CodeType = _undisturbed(lambda: compile(source, file, mode))
    return code


def arrays_of(content: bytes) -> Any:
    """Return the arrays of an npz file, a context manager; `array_of` reads each. ValueError, zipfile.BadZipFile."""
    return _undisturbed(lambda: numpy.load(io.BytesIO(content)))


def array_of(rows: Mapping[str, Any], name: str) -> Any:
    """Return an array of `arrays_of`; its header is a literal, which NumPy parses."""
    return _undisturbed(lambda: rows[name])


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return how a function is called; that of a built-in is a text. TypeError, ValueError."""
    return _undisturbed(lambda: inspect.signature(function))


def text_of(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> str:
    """Return an exception with its traceback; the lines are parsed to mark the place in each."""
    return _undisturbed(lambda: "".join(traceback.format_exception(kind, error, trace)))
