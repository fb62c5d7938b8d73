"""Helpers for syntax trees, spans of source text, and numbers that need no run of the script."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
        """Return the text of an expression or statement of this script."""
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
        """Return the text after edits that do not overlap; those at one place apply in order."""
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

    `place` counts positional arguments from 0; None: keyword only.
    """
    for found in call.keywords:
        if found.arg == name:
            return found.value
    if place is not None and len(call.args) > place:
        return call.args[place]
    return None


def options(tree: ast.Module) -> dict[str, Any]:
    """Return the options of argparse and their defaults, by attribute of the parsed arguments."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if last_name(node) != "add_argument" or not isinstance(node, ast.Call):
            continue
        names = [n.value for n in node.args if isinstance(n, ast.Constant)]
        longest = max((str(name) for name in names), key=len, default="")
        dest, default = keyword(node, "dest"), keyword(node, "default")
        name = str(dest.value) if isinstance(dest, ast.Constant) else longest.lstrip("-")
        if name and longest.startswith("--"):
            found[name.replace("-", "_")] = literal(default)
    return found


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return names that are bound once, with their literals, fields and parameters included."""
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and (name := assigned(node)):
            found.setdefault(name, []).append(literal(node.value))
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, default in zip(arguments, node.args.defaults, strict=True):
                found.setdefault(argument.arg, []).append(literal(default))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


class Numbers:
    """Numbers of expressions that are made of literals, constants and options."""

    def __init__(self, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._constants = constants
        self._options = options

    def of(self, node: ast.expr | None) -> float | int | None:
        """Return the number of an expression; None if only a run can tell."""
        value = self._value(node)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return value if good else None

    def _value(self, node: ast.expr | None) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = self.of(node.left), self.of(node.right)
            if left is None or right is None:
                return None
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
            return None
        if isinstance(node, ast.Name):
            return self._constants.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._options.get(node.attr, self._constants.get(node.attr))
        return literal(node)


def batch_size(call: ast.Call, numbers: Numbers, made: Mapping[str, ast.expr]) -> int | None:
    """Return the batch size of a loader; None if only a run can tell.

    `made` has the values of names, to look up `**options`.
    """
    found = numbers.of(keyword(call, "batch_size", 1))
    for spread in (k.value for k in call.keywords if k.arg is None):
        if found is None and isinstance(spread, ast.Name) and spread.id in made:
            found = _in_mapping(made[spread.id], numbers)
    return int(found) if found is not None else None


def _in_mapping(value: ast.expr, numbers: Numbers) -> float | int | None:
    if isinstance(value, ast.Dict):
        for key, inner in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "batch_size":
                return numbers.of(inner)
    if called(value) == "dict" and isinstance(value, ast.Call):
        return numbers.of(keyword(value, "batch_size"))
    return None
