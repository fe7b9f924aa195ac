"""Code of a program, rewritten so that equal ranks stay together for longer.

Three places would need a single value of a `PerRank`, and get none after the change: the subscript of a list, because
elements may be equal for different ranks; ``int(text)`` of a variable of the environment; and the arguments of a
`print` statement, because the output is dropped. The lines stay the same.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable
from typing import Any

from gpucoll.rehearsal.per_rank import PLAIN, PerRank, lift, per_rank, value_of


class Rewriter(ast.NodeTransformer):
    """Replaces these expressions by calls of the functions below."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or isinstance(node.slice, ast.Constant | ast.Slice | ast.Tuple):
            return node
        return _call(item, node, node.value, node.slice)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "int" and len(node.args) == 1 and not node.keywords \
                and not isinstance(node.args[0], ast.Starred):
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
                part.value = _call(shown, part.value, part.value)
        return node
    return node if isinstance(node, ast.Starred | ast.Constant) else _call(shown, node, node)


def item(container: Any, index: Any) -> Any:
    """Return ``container[index]``; ranks with equal elements stay together."""
    if type(index) is PerRank and type(container) in (list, tuple, dict, range, str):
        ranks = index._ranks
        try:
            values = {number: value_of(container[index.of(number)], number) for number in ranks.numbers}
        except (LookupError, TypeError):  # of some ranks
            return container[index.one]
        is_plain = all(isinstance(one, PLAIN) for one in values.values())
        return per_rank(ranks, values) if is_plain else ranks.choose(values)
    return container[index]


def converted(kind: Any, value: Any) -> Any:
    """Return ``kind(value)``."""
    return lift(int, value) if kind is int else kind(value)


def shown(value: Any) -> Any:
    """Return a value to be printed; of several values the first, if the output is dropped."""
    return value.sample if type(value) is PerRank and getattr(sys.stdout, "name", "") == "/dev/null" else value


NAMES = {function: f"__gpucoll_{function.__name__}__" for function in (item, converted, shown)}


def rewritten(source: bytes, path: str) -> Any:
    """Return the code of a module of the program, rewritten."""
    for function, name in NAMES.items():
        setattr(builtins, name, function)
    return compile(ast.fix_missing_locations(Rewriter().visit(ast.parse(source, path))), path, "exec",
                   dont_inherit=True)
