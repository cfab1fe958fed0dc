"""Finds the definitions of a Python module in its syntax tree."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

NamedNode: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_STATEMENT_LISTS: Final = ("body", "handlers", "orelse", "finalbody", "cases")
"""The fields of syntax nodes that contain statements, or clauses with statements."""


def parse_module(source: str) -> ast.Module | None:
    """Return the syntax tree of a module, or None if the source does not parse."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def named_nodes(tree: ast.Module) -> list[NamedNode]:
    """Return the classes and functions of a module in the order of their lines."""
    return sorted(_search(tree), key=lambda node: node.lineno)


def _search(tree: ast.Module) -> Iterator[NamedNode]:
    """Yield the classes and functions of a module, outer ones before inner ones.

    The search skips expressions, which contain most nodes but no definition.
    """
    waiting: deque[ast.AST] = deque((tree,))
    while waiting:
        node = waiting.popleft()
        if isinstance(node, NamedNode):
            yield node
        for name in _STATEMENT_LISTS:
            waiting.extend(getattr(node, name, ()))
