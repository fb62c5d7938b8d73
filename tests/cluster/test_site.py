"""The documentation site: its pages, their places and links, and the pages made of the code."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from controlplane.cli.main import build
from controlplane.policy.registry import POLICIES
from tests.support import reference_pages
from tests.support.docs_site import place, problems, rewritten
from tests.support.documented import PAGES, ROOT, sentences

LINES: Final = 150  # at most, of a page
WORDS: Final = 30  # at most, of a sentence
GENERATED: Final = "<!-- Made by "  # at the beginning of a page that a tool writes


def pages_in(nav: Any) -> Iterator[str]:
    """The pages of the navigation, at every depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for inner in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))

    named = sorted(pages_in(settings["project"]["nav"]))

    assert named == sorted(str(place(Path(page))) for page in PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_and_its_sentences_are_short(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")

    long = [one for one in sentences(text) if len(one.split()) > WORDS]
    if not text.startswith(GENERATED):
        assert text.count("\n") <= LINES, page
        assert not long, f"{page}: {' / '.join(long)}"


def test_only_prose_has_sentences() -> None:
    text = """# A long heading

One sentence
of two lines. A [link](to/a/page.md) and `some code` here: two more!

| a table | of two columns |
|---|---|

- an item
- another (in brackets.) End

```
code. More code.
```
"""

    assert list(sentences(text)) == [
        "One sentence of two lines.",
        "A link and code here: two more!",
        "an item",
        "another (in brackets.)",
        "End",
    ]


def test_the_reference_is_what_the_code_says() -> None:
    folder = reference_pages.FOLDER
    written = {path.stem: path.read_text("utf-8") for path in folder.glob("*.md")}
    written.pop("index")

    assert written == reference_pages.pages(), "python -m tests.support.reference_pages writes it"


def test_the_reference_has_every_command_and_every_policy() -> None:
    commands = {name for name in build().resolved_commands() if not name.startswith("-")}
    on_pages = [name for _, names in reference_pages.COMMANDS.values() for name in names]
    policies = [name for _, names in reference_pages.POLICIES.values() for name in names]

    assert sorted(on_pages) == sorted(commands - {"job"})  # has those about jobs once more
    assert sorted(policies) == sorted(POLICIES)


def test_links_follow_a_page_to_its_place_in_the_site() -> None:
    jobs, _ = rewritten(
        "[a](gpus.md#cuda) [b](../README.md) [c](../examples)", Path("docs/jobs.md")
    )
    code, linked = rewritten("[a](../docs/web.md) [b](gone.md)", Path("examples/README.md"))

    assert jobs == "[a](gpus.md#cuda) [b](code/README.md) [c](code/examples/README.md)"
    assert code == "[a](../../web.md) [b](gone.md)"
    assert linked == {Path("docs/web.md")}


def test_the_check_of_the_site_finds_dead_links_and_what_other_hosts_would_serve(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="#top">a</a> <a href="b.html#here">b</a> <a href="https://x.org">x</a>'
        '<a href="c.html">c</a> <a href="b.html#gone">b</a> <img src="none.png">'
        '<script src="https://x.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"><a href="sub">sub</a>')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<a href="../a.html#top">a</a>')
    (tmp_path / "style.css").write_text("@font-face { src: url(https://x.org/font.woff2) }")

    assert list(problems(tmp_path)) == [
        "a.html: b.html#gone has no such anchor",
        "a.html: c.html does not exist",
        "a.html: none.png does not exist",
        "a.html: script is loaded from https://x.org/x.js",
        "style.css: loads https://x.org/font.woff2",
    ]
