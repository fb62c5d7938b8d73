"""Every text that the pages about troubleshooting quote is one that the product writes."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.documented import ROOT

FILES = [ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting-cluster.md")]
PACKAGES = ("controlplane", "elastic", "nodeagent", "schemas")


def quotes(page: str) -> list[str]:
    """Texts in the first column of the tables under `you see`."""
    rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", page, re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def parts(quote: str) -> list[str]:
    """What stands between the placeholders of a quote."""
    return [part.strip() for part in re.split(r"<[^<>]+>", quote) if part.strip()]


@functools.cache
def sources() -> dict[Path, str]:
    return {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


@functools.cache
def literals(path: Path) -> tuple[str, ...]:
    """The literal texts of a module, those of f-strings piece by piece, without docstrings."""
    tree = ast.parse(sources()[path])
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    )


def is_written_by(path: Path, quote: str) -> bool:
    """True if one module has all parts of a quote."""
    source = sources()[path]
    if not all(word in source for part in parts(quote) for word in part.split()):
        return False  # reading every module takes seconds
    return all(any(part in text for text in literals(path)) for part in parts(quote))


def unwritten(page: str) -> list[str]:
    return [one for one in quotes(page) if not any(is_written_by(path, one) for path in sources())]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_product_writes_each_text_that_a_page_quotes(file: Path) -> None:
    assert unwritten(file.read_text(encoding="utf-8")) == []


def test_every_quote_says_more_than_a_word_between_its_placeholders() -> None:
    found = [quote for file in FILES for quote in quotes(file.read_text(encoding="utf-8"))]

    assert [one for one in found if max(len(part.split()) for part in parts(one)) < 2] == []
    assert len(found) == len(set(found)) > 100


def test_a_text_that_no_module_writes_would_be_found() -> None:
    page = FILES[1].read_text(encoding="utf-8")
    changed = page.replace("this key is no longer authorised", "this key is not authorised now")

    assert unwritten(changed) == ["this key is not authorised now"]
