"""Helpers for Python syntax trees and spans of source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

Block = list[ast.stmt]


class Source:
    """Text of a script, with its syntax tree.

    Raises:
        SyntaxError: if it is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of(self, node: ast.AST) -> str:
        """Return the text of a node.

        Args:
            node: an expression or statement of this script.
        """
        return ast.get_source_segment(self.text, node) or ""

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes."""
        first = self._starts[node.lineno - 1] + node.col_offset
        last = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return first, last

    def lines(self, statement: ast.stmt) -> tuple[int, int]:
        """Return where the whole lines of a statement begin and end, in bytes."""
        return self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0]

    def line_of(self, statement: ast.stmt) -> str:
        """Return the text of the whole lines of a statement."""
        first, last = self.lines(statement)
        return self._bytes[first:last].decode()

    def edited(self, edits: list[Edit]) -> str:
        """Return the text after edits that do not overlap.

        Args:
            edits: in any order; those at one place apply in the order of the list.
        """
        parts, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.first, edit.last)):
            parts += [self._bytes[at : edit.first], edit.text.encode()]
            at = max(at, edit.last)
        return b"".join((*parts, self._bytes[at:])).decode()


class Edit(NamedTuple):
    """Replacement of the bytes from `first` to before `last` by `text`."""

    first: int
    last: int
    text: str


def blocks(tree: ast.AST) -> Iterator[Block]:
    """Yield every list of statements, outer ones first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def called(node: ast.AST | None) -> str:
    """Return the dotted name of a call, as `torch.optim.SGD`; empty for anything else."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def dotted(node: ast.AST) -> str:
    """Return a name with its dots; empty for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST | None) -> str:
    """Return the last part of the name of a call: `SGD` of `torch.optim.SGD(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return called(node)


def assigned(statement: ast.stmt) -> str:
    """Return the one name that a statement assigns to; empty if there is none."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return dotted(statement.targets[0])
    return dotted(statement.target) if isinstance(statement, ast.AnnAssign) else ""


def value_of(statement: ast.stmt) -> ast.expr | None:
    """Return the expression that a statement assigns or consists of."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        return statement.value
    return None


def loads(node: ast.AST) -> set[str]:
    """Return the names that are read in a node."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def stores(node: ast.AST) -> set[str]:
    """Return the names that are bound in a node, by assignments, loops and definitions."""
    found = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        found.add(node.name)
    return found


def keyword(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument of a call; None if it is not given.

    Args:
        place: among the positional arguments, from 0; None: keyword only.
    """
    for found in call.keywords:
        if found.arg == name:
            return found.value
    if place is not None and len(call.args) > place:
        return call.args[place]
    return None
