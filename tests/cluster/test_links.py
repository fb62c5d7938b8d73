"""Every link of a page leads to a file, and to a section that the file has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.documented import FENCE, PAGES, ROOT

LINK: Final = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING: Final = re.compile(r"^#+ +(.+)$", re.MULTILINE)
ANCHOR: Final = re.compile(r'<a id="([^"]+)">')
UNITS: Final = sorted((ROOT / "controlplane" / "cli" / "samples").glob("ones-*.*"))


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def sections(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those it sets itself."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    repeated = {f"{slug}-{n}" for slug, most in found.items() for n in range(1, most + 1)}
    return {*found, *repeated, *ANCHOR.findall(text)}


@pytest.mark.parametrize("page", ["CHANGELOG.md", *PAGES])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    here = ROOT / page
    broken = []
    for path, section in LINK.findall(prose(here)):
        target = (here.parent / path).resolve() if path else here
        if not target.exists():
            broken.append(path)
        elif section and section not in sections(prose(target)):
            broken.append(f"{path}#{section}")

    assert broken == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_documentation_of_a_unit_exists(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    named = re.findall(r"\bfile:///opt/ones/(\S+)|(?<!/)\b(docs/\S+\.md)", text)

    missing = [path for path in map("".join, named) if not (ROOT / path).exists()]

    assert missing == []


def test_a_heading_has_the_anchor_that_github_gives_it() -> None:
    text = '# A client\'s folder\n## /etc/ones/agent.toml\n## Drain\n## Drain\n<a id="old"></a>'

    assert sections(text) == {"a-clients-folder", "etconesagenttoml", "drain", "drain-1", "old"}
