"""Commands as the pages of this repository show them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for path in {*ROOT.glob("docs/**/*.md"), *ROOT.rglob("README.md")}
        if not {".venv", "build", "node_modules", "shared"} & set(path.relative_to(ROOT).parts)
    )
)
OURS: Final = re.compile(r"(bin/[\w-]+|ones(-agent|-controller)?)(\s|$)")
FENCE: Final = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
INLINE: Final = re.compile(r"(?<!`)`([^`]+)`(?!`)")
NOT_PROSE: Final = (  # with what stands for it
    (re.compile(r"<!--.*?-->|^ *```.*?^ *```$", re.DOTALL | re.MULTILINE), ""),
    (re.compile(r"^(#+ | *\|).*$", re.MULTILINE), "\n"),
    (re.compile(r"`[^`]+`"), "code"),
    (re.compile(r"!\[[^]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^]]*)\]\([^)]*\)"), r"\1"),
)
SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][*_)\"'])\s+")
STANDS_FOR: Final = {"N": "2", "S": "2", "SEQ": "2", "SLOT": "node-1/0"}  # in examples of usage


class Shown(NamedTuple):
    """One command of a page."""

    words: tuple[str, ...]
    whole: bool  # as somebody runs it; else a mention, which may leave arguments out

    @property
    def program(self) -> str:
        """What is run."""
        return self.words[0].removeprefix("bin/") if self.words else ""


def shown(page: str) -> Iterator[Shown]:
    """Every command of ours on a page: in its blocks, and in the middle of sentences."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language in {"", "sh", "bash", "console"}:
            yield from _in_block(block)
    for mention in INLINE.findall(FENCE.sub("", text)):
        line = " ".join(mention.split())
        if OURS.match(line):
            yield Shown(tuple(_words(re.sub(r"[\[\]]|\|\S+|\.\.\.", " ", line))), whole=False)


def commands_of_block(page: str, holds: str) -> list[str]:
    """The lines of the block of a page in which a text occurs, without their remarks."""
    blocks = [b for _, b in FENCE.findall((ROOT / page).read_text(encoding="utf-8")) if holds in b]
    assert len(blocks) == 1, (page, holds)
    return [line.partition("  #")[0].strip() for line in blocks[0].splitlines()]


def _in_block(block: str) -> Iterator[Shown]:
    for line in block.replace("\\\n", " ").splitlines():
        bare = re.sub(r"^(\$ |[A-Z_]+=\S+ )+", "", line.strip())
        for part in re.split(r"&&|;|\|", bare.partition(" #")[0]):
            if OURS.match(part.strip()):
                yield Shown(tuple(_words(part)), whole=True)


def _words(line: str) -> list[str]:
    return [STANDS_FOR.get(word, word) for word in shlex.split(line)]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose; code, tables, headings and targets of links are not prose."""
    for pattern, instead in NOT_PROSE:
        text = pattern.sub(instead, text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        line = re.sub(r"^([-*]|\d+\.) ", "", " ".join(block.split()))
        yield from filter(None, SENTENCE_END.split(line))
