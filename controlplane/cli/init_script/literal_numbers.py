"""Numbers that can be read from a script without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from controlplane.cli.init_script.syntax import assigned, called, keyword, last_name


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

    Args:
        made: values of names, to look up `**options`.
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
