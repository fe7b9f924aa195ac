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
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" \
                and not any(word.arg in ("file", None) for word in call.keywords):
            call.args = [_shown(one) for one in call.args]
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


def _shown(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = _shown_value(part.value)
        return node
    return node if isinstance(node, ast.Starred | ast.Constant) else _shown_value(node)


def _shown_value(node: ast.expr) -> ast.expr:
    return _call(shown, node, ast.copy_location(ast.Name("print", ast.Load()), node), node)


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


def shown(function: Any, value: Any) -> Any:
    """Return a value to be printed by ``function(value)``; of several values the first, if the output is dropped."""
    if not isinstance(value, PerRank):
        return value
    while type(function) is functools.partial and not {*function.keywords} - {"end", "flush", "sep"}:
        function = function.func
    is_dropped = function is PRINT and type(sys.stdout) is io.TextIOWrapper and sys.stdout.name == os.devnull
    return value.sample if is_dropped else value


NAMES = {function: f"__gpucoll_{function.__name__}__" for function in (item, converted, shown)}
PRINT = print


def rewritten(source: bytes, path: str) -> Any:
    """Return the code of a module of the program, rewritten."""
    for function, name in NAMES.items():
        setattr(builtins, name, function)
    return compile(ast.fix_missing_locations(Rewriter().visit(ast.parse(source, path))), path, "exec",
                   dont_inherit=True)
