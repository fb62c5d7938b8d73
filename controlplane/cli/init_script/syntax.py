"""Helpers for syntax trees and source text, and numbers that are known without running a script."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

Block = list[ast.stmt]
OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Edit(NamedTuple):
    """Replacement of the bytes from `first` to `last` (exclusive) with `text`."""

    first: int
    last: int
    text: str


class Source:
    """Text of a script, with its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        lines = self._bytes.splitlines(keepends=True)
        self._starts = [*accumulate(map(len, lines), initial=0)]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Calls in the script."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Functions and methods by name; the last one counts if a name occurs several times."""
        return {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}

    def reached(self, node: ast.AST) -> list[ast.AST]:
        """Return a node, and the functions of this script that the node calls by name."""
        called_ones = {called(n) for n in ast.walk(node)} & self.functions.keys()
        return [node, *(self.functions[name] for name in called_ones)]

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return the start and the end of a node, as byte offsets."""
        first = self._starts[node.lineno - 1] + node.col_offset
        last = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return first, last

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of an expression or statement of this script."""
        first, last = self.span(node)
        return self._bytes[first:last].decode()

    def lines(self, statement: ast.stmt) -> tuple[int, int]:
        """Return the byte offsets of the start and the end of all lines of a statement."""
        return self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0]

    def line_of(self, statement: ast.stmt) -> str:
        """Return the text of all lines of a statement."""
        first, last = self.lines(statement)
        return self._bytes[first:last].decode()

    def on_one_line(self, node: ast.expr) -> str:
        """Return the text of an expression; rewrite it on one line if it has several."""
        text = self.of(node)
        return ast.unparse(node) if "\n" in text else text

    def replace(self, node: ast.expr, text: str) -> Edit:
        """Return the edit that replaces an expression with `text`."""
        return Edit(*self.span(node), text)

    def edited(self, edits: list[Edit]) -> str:
        """Return the text after edits that do not overlap; edits at one place apply in order."""
        parts, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.first, edit.last)):
            parts += [self._bytes[at : edit.first], edit.text.encode()]
            at = max(at, edit.last)
        return b"".join((*parts, self._bytes[at:])).decode()


def blocks(tree: ast.AST) -> Iterator[Block]:
    """Yield every list of statements, outer ones first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def called(node: ast.AST | None) -> str:
    """Return the dotted name of a called function, as `torch.optim.SGD`, or "" for other nodes."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def dotted(node: ast.AST) -> str:
    """Return a name with its attributes, such as `torch.optim`, or "" for other nodes."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST | None) -> str:
    """Return the last part of the name of a called function: `SGD` for `torch.optim.SGD(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return called(node)


def calls_any(node: ast.AST, *names: str) -> bool:
    """True if a node contains a call with one of `names` as its `last_name`."""
    return any(last_name(inner) in names for inner in ast.walk(node))


def assigned(statement: ast.AST) -> str:
    """Return the single name that a statement assigns to, or "" for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return dotted(statement.targets[0])
    return dotted(statement.target) if isinstance(statement, ast.AnnAssign) else ""


def value_of(statement: ast.AST) -> ast.expr | None:
    """Return the expression that a statement assigns or consists of, or None for other kinds."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        return statement.value
    return None


def loads(node: ast.AST) -> set[str]:
    """Return the names that are read in a node."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def stores(node: ast.AST) -> set[str]:
    """Return the names that a node binds by assignments, by loops, or as a definition."""
    own = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    return own | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def keyword(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument of a call, or None if the argument is not given.

    `place` is the index of the argument if it is positional, or None if it must be a keyword.
    """
    for found in call.keywords:
        if found.arg == name:
            return found.value
    return call.args[place] if place is not None and len(call.args) > place else None


def options(source: Source) -> dict[str, Any]:
    """Return the options of argparse with their defaults, keyed by attribute name."""
    found: dict[str, Any] = {}
    for call in source.calls:
        if last_name(call) != "add_argument":
            continue
        names = [str(n.value) for n in call.args if isinstance(n, ast.Constant)]
        longest = max(names, key=len, default="")
        dest = keyword(call, "dest")
        name = str(dest.value) if isinstance(dest, ast.Constant) else longest.lstrip("-")
        if name and longest.startswith("--"):
            found[name.replace("-", "_")] = literal(keyword(call, "default"))
    return found


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the literals of names that are bound only once, including fields and parameters."""
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and (name := assigned(node)):
            found.setdefault(name, []).append(literal(node.value))
        if isinstance(node, ast.FunctionDef):
            places = [*node.args.posonlyargs, *node.args.args]
            pairs = zip(reversed(places), reversed(node.args.defaults), strict=False)
            for argument, default in pairs:
                found.setdefault(argument.arg, []).append(literal(default))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, or None for other expressions."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Numbers:
    """Numbers that can be computed from literals, constants and options."""

    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def of(self, node: ast.expr | None) -> float | int | None:
        """Return the number of an expression, or None if it is only known at run time."""
        value: Any = None
        match node:
            case ast.BinOp():
                left, right = self.of(node.left), self.of(node.right)
                if left is not None and right is not None and type(node.op) in OPERATORS:
                    value = OPERATORS[type(node.op)](left, right)
            case ast.Name():
                value = self.constants.get(node.id)
            case ast.Attribute():
                value = self.options.get(node.attr, self.constants.get(node.attr))
            case _:
                value = literal(node)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, node: ast.expr | None) -> int | None:
        """Return the number of an expression, truncated to an integer."""
        value = self.of(node)
        return None if value is None else int(value)

    def batch_size(self, call: ast.Call, made: Mapping[str, ast.expr]) -> int | None:
        """Return the batch size of a loader, or None if it is only known at run time.

        `made` maps names to the expressions assigned to them, for arguments such as `**options`.
        """
        found = self.whole(keyword(call, "batch_size", 1))
        for spread in (k.value for k in call.keywords if k.arg is None):
            if found is None and isinstance(spread, ast.Name) and spread.id in made:
                found = self._in_mapping(made[spread.id])
        return found

    def _in_mapping(self, value: ast.expr) -> int | None:
        if isinstance(value, ast.Dict):
            for key, inner in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "batch_size":
                    return self.whole(inner)
        if isinstance(value, ast.Call) and called(value) == "dict":
            return self.whole(keyword(value, "batch_size"))
        return None
