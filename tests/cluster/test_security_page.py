"""docs/security.md says what the code says: its tests are there, its bounds are those in force."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from typing import Final

from tests.support.documented import ROOT

PAGE: Final = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TESTS: Final = re.findall(r"\| `(tests/\S+?\.py)(?:::(\w+))?` \|", PAGE)
BOUNDS: Final = re.findall(r"\| (\d+) \| `([\w.]+)` \|", PAGE)


def bound(name: str) -> object:
    """What stands under a dotted name, in a module or in a value of one."""
    module, rest = name, list[str]()
    while True:
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        else:
            return reduce(getattr, rest, found)


def test_each_threat_cites_an_existing_test() -> None:
    missing = []
    for path, name in TESTS:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
        if name and name not in there:
            missing.append(f"{path}::{name}")

    assert missing == []
    assert len(TESTS) == PAGE.split("## Bounds")[0].count("\n| ") - 1


def test_each_documented_bound_equals_its_constant() -> None:
    assert [(name, int(most)) for most, name in BOUNDS] == [
        (name, bound(name)) for _, name in BOUNDS
    ]
    assert len(BOUNDS) == PAGE.split("## Bounds")[1].count("\n| ") - 1
