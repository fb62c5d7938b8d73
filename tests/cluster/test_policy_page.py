"""docs/policies.md speaks of every policy, and of every option with its default."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import msgspec
import pytest

from controlplane.policy.registry import POLICIES, check_options
from tests.support.documented import ROOT

PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
OPTIONS = "| option | default | what it does |\n|---|---|---|\n"
SAID_OF_EACH = ("Wants", "Sees", "Costs", "Choose it")
every_policy = pytest.mark.parametrize("policy", POLICIES)


def section(policy: str) -> str:
    """What the page says of a policy."""
    found = re.findall(
        rf"^## {re.escape(policy)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    assert len(found) == 1, policy
    return str(found[0])


def documented_options(text: str) -> dict[str, Any]:
    """Names and defaults of the options that a section has a table of."""
    table = text.partition(OPTIONS)[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()]
    return {name.strip("`"): default_of(cell) for name, cell in rows}


def default_of(cell: str) -> Any:
    """The value that a cell shows as TOML; None where it says that there is none."""
    return None if cell == "none" else tomllib.loads(f"x = {cell.strip('`')}")["x"]


def options_of(policy: str) -> dict[str, Any]:
    """Names and defaults of the options that a policy has."""
    made = check_options(policy, {})
    return {} if made is None else dict(msgspec.json.decode(msgspec.json.encode(made)))


@every_policy
def test_each_policy_has_a_complete_section_on_the_page(policy: str) -> None:
    said = re.findall(r"^- \*\*([^*]+)\*\* ", section(policy), re.MULTILINE)

    assert tuple(said) == SAID_OF_EACH


@every_policy
def test_a_policy_has_all_its_options_on_the_page_with_their_defaults(policy: str) -> None:
    text, options = section(policy), options_of(policy)

    assert documented_options(text) == options
    assert ("No options." in text) == (not options)


@every_policy
def test_a_policy_is_in_the_table_that_compares_all_of_them(policy: str) -> None:
    table = PAGE.partition("## Side by side")[2].partition("\n## ")[0]

    assert re.search(rf"^\| `{re.escape(policy)}` \|", table, re.MULTILINE)
