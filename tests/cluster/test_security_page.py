"""docs/security/ says what the code says: its tests are there, its bounds are those in force."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from typing import Final

from tests.support.documented import ROOT

MODEL: Final = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PAGES: Final = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "security").glob("*.md"))
}
LIMITS: Final = PAGES.pop("bounds")
TESTS: Final = re.findall(r"\| `(tests/\S+?\.py)(?:::(\w+))?` \|", "".join(PAGES.values()))
BOUNDS: Final = re.findall(r"\| (\d+) \| `([\w.]+)` \|", LIMITS)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def threats() -> list[tuple[str, list[str]]]:
    """Each threat's interface, which is the section that it stands in, and its row."""
    found = []
    for section in "".join(PAGES.values()).split("\n## ")[1:]:
        interface, *lines = section.splitlines()
        rows = [cells(line) for line in lines if line.startswith("| ")]
        found += [(interface, row) for row in rows[1:]]
    return found


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
    assert len(TESTS) == len(threats())


def test_the_threat_model_is_the_summary_of_the_threats() -> None:
    lines = MODEL.split("## Threat model")[1].splitlines()
    heads, *rows = [cells(line) for line in lines if line.startswith("| ")]
    model = {
        (row[0], actor, asset)
        for row in rows
        for actor, told in zip(heads[1:], row[1:], strict=True)
        for asset in told.split(", ")
        if told != "-"
    }

    assert model == {
        (interface, actor, asset)
        for interface, (_, actors, asset, *_) in threats()
        for actor in actors.split(", ")
    }


def test_each_documented_bound_equals_its_constant() -> None:
    assert [(name, int(most)) for most, name in BOUNDS] == [
        (name, bound(name)) for _, name in BOUNDS
    ]
    assert len(BOUNDS) == LIMITS.split("\n## ")[0].count("\n| ") - 1
