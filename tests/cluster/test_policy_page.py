"""docs/policies/ speaks of every policy, on the page that the reference of its options links to."""

from __future__ import annotations

import re

import pytest

from controlplane.policy.registry import POLICIES
from tests.support import reference_pages
from tests.support.documented import ROOT

FOLDER = ROOT / "docs" / "policies"
SAID_OF_EACH = ("Wants", "Sees", "Costs", "Choose it")
every_policy = pytest.mark.parametrize("policy", POLICIES)


def section(policy: str) -> str:
    """What its page says of a policy."""
    link = rf"\[What it does\]\(\.\./policies/(\w+)\.md#{re.escape(policy)}\)"
    (page,) = re.findall(link, "".join(reference_pages.pages().values()))
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"^## {re.escape(policy)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return str(found)


@every_policy
def test_each_policy_has_a_complete_section(policy: str) -> None:
    said = re.findall(r"^- \*\*([^*]+)\*\* ", section(policy), re.MULTILINE)

    assert tuple(said) == SAID_OF_EACH


@every_policy
def test_a_policy_is_in_the_table_that_compares_all_of_them(policy: str) -> None:
    table = (FOLDER / "comparison.md").read_text(encoding="utf-8")

    assert re.search(rf"^\| `{re.escape(policy)}` \|", table, re.MULTILINE)
