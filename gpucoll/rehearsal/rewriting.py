"""Code of a program, rewritten so that equal ranks stay together for longer. The lines stay the same.

Three places would need a single value of a `PerRank`, and get none after the change: the subscript of a list, because
elements may be equal for different ranks; ``int(text)`` of a variable of the environment; and the arguments of a
`print` statement, because the output is dropped. A fourth place, ``type(value)``, would see the class `PerRank`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from gpucoll.rehearsal.per_rank import PerRank, lift, per_rank, value_of


class Rewriter(ast.NodeTransformer):
    """Replaces these expressions by calls of the functions below."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or isinstance(node.slice, ast.Constant | ast.Slice | ast.Tuple):
            return node
        return _call(item, node, node.value, node.slice)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("int", "type") and len(node.args) == 1 \
                and not (node.keywords or isinstance(node.args[0], ast.Starred)):
            return _call(converted, node, node.func, node.args[0])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print":
            words = {word.arg: word.value for word in call.keywords}
            stream = words.get("file", ast.Constant(None))
            if None not in words and ast.unparse(stream) in ("None", "sys.stderr"):
                call.args = [_shown(one, stream) for one in call.args]
        return node

    # Annotations may be read as text.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node


def _call(function: Callable[..., Any], node: ast.AST, *arguments: ast.expr) -> ast.Call:
    name = ast.Name(NAMES[function], ast.Load())
    return ast.copy_location(ast.Call(ast.copy_location(name, node), [*arguments], []), node)


def _shown(node: ast.expr, stream: ast.expr) -> ast.expr:
    """Return an argument of `print`, its values replaced by those to be shown on `stream`."""
    def value(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Starred | ast.Constant):
            return node
        return _call(shown, node, ast.copy_location(ast.Name("print", ast.Load()), node), stream, node)

    match node:
        case ast.JoinedStr():
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    part.value = value(part.value)
        case ast.BinOp(ast.Constant(str()), ast.Mod(), ast.Tuple() as values):
            values.elts = [*map(value, values.elts)]
        case ast.BinOp(ast.Constant(str()), ast.Mod(), right):
            node.right = value(right)
        case ast.Call(ast.Attribute(ast.Constant(str()), "format")):
            node.args = [*map(value, node.args)]
            for word in node.keywords:
                word.value = value(word.value)
        case _:
            return value(node)
    return node


def item(container: Any, index: Any) -> Any:
    """Return ``container[index]``; ranks with equal elements stay together."""
    if isinstance(index, PerRank) and type(container) in (list, tuple, dict, range, str):
        ranks = index._ranks
        try:
            values = {number: value_of(container[index.of(number)], number) for number in ranks.numbers}
        except (LookupError, TypeError):  # of some ranks
            return container[index.one]
        return per_rank(ranks, values)
    return container[index]


def converted(kind: Any, value: Any) -> Any:
    """Return ``kind(value)``."""
    if kind is type and isinstance(value, PerRank):
        return value.__class__
    return lift(int, value) if kind is int else kind(value)


def shown(function: Any, stream: Any, value: Any) -> Any:
    """Return a value to be printed by ``function(value)``; of several values the first, if the output is dropped.

    `stream` is None, for the standard output, or the standard error, which is always dropped here.
    """
    if not isinstance(value, PerRank):
        return value
    while type(function) is functools.partial and not {*function.keywords} - {"end", "flush", "sep"}:
        function = function.func
    stream = sys.stdout if stream is None else stream
    is_dropped = stream is sys.__stderr__ or (type(stream) is io.TextIOWrapper and stream.name == os.devnull)
    return value.sample if function is PRINT and is_dropped else value


NAMES = {function: f"__gpucoll_{function.__name__}__" for function in (item, converted, shown)}
PRINT = print


def rewritten(source: bytes, path: str) -> Any:
    """Return the code of a module of the program, rewritten."""
    for function, name in NAMES.items():
        setattr(builtins, name, function)
    return compile(ast.fix_missing_locations(Rewriter().visit(ast.parse(source, path))), path, "exec",
                   dont_inherit=True)
