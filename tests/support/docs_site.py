"""Source of the documentation site, and a check of the built site.

`python -m tests.support.docs_site stage` copies the pages to build/docs, where zensical.toml reads
them; `python -m tests.support.docs_site check` prints each problem of site/ and exits with 1.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tests.support.documented import PAGES, ROOT

STAGE: Final = ROOT / "build" / "docs"
SITE: Final = ROOT / "site"
LINK: Final = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
SHOWN_ELSEWHERE: Final = {"a"}  # elements whose address is opened, not loaded with the page
CSS_ADDRESS: Final = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


def place(path: Path) -> Path:
    """Return the place of a file of the repository in the site; README files are under `code`."""
    return path.relative_to("docs") if path.parts[0] == "docs" else Path("code") / path


def rewritten(text: str, page: Path, root: Path = ROOT) -> tuple[str, set[Path]]:
    """Return a page with links for its place in the site, and the files that it links to."""
    linked: set[Path] = set()

    def moved(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / found[1]))
        if (root / target).is_dir():
            target /= "README.md"
        if target.parts[0] == ".." or not (root / target).exists():
            return found[1]  # an example in a block of code, or a mistake that the build reports
        linked.add(target)
        return os.path.relpath(place(target), place(page).parent)

    return LINK.sub(moved, text), linked


def stage() -> None:
    """Copy all pages and the files that they link to."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE)
    for page in map(Path, PAGES):
        text, linked = rewritten((ROOT / page).read_text("utf-8"), page)
        (STAGE / place(page)).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / place(page)).write_text(text, "utf-8")
        for file in linked - set(map(Path, PAGES)):
            (STAGE / place(file)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, STAGE / place(file))


class Document(HTMLParser):
    """Anchors and addresses of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.addresses: set[tuple[str, str]] = set()  # with the name of the element
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in {"href", "src"} and value is not None:
                self.addresses.add((tag, value))


def problems(site: Path = SITE) -> Iterator[str]:
    """Return links to nothing, and what the site would load from other hosts."""
    pages = {path: Document(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for tag, address in sorted(page.addresses):
            url = urlsplit(address)
            if url.scheme or url.netloc:
                if tag not in SHOWN_ELSEWHERE and url.scheme != "data":
                    yield f"{name}: {tag} is loaded from {address}"
                continue
            base = site if url.path.startswith("/") else path.parent
            target = Path(os.path.normpath(base / unquote(url.path).lstrip("/")))
            target = path if not url.path else target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name}: {address} does not exist"
            elif target in pages and unquote(url.fragment) not in pages[target].anchors:
                yield f"{name}: {address} has no such anchor"
    for style in sorted(site.rglob("*.css")):
        for address in CSS_ADDRESS.findall(style.read_text("utf-8")):
            yield f"{style.relative_to(site)}: loads {address}"


def main() -> None:
    """Stage the pages, or check the site."""
    if sys.argv[1:] == ["stage"]:
        stage()
    elif found := list(problems()):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
