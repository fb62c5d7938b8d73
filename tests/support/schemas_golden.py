"""The golden bytes of every tag; `python -m tests.support.schemas_golden` writes missing files.

A file that exists is never written again: bytes that changed are a changed meaning, which takes a
new tag.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

from schemas.codec import CODECS, encode
from tests.support.schemas_examples import EXAMPLES

FOLDER: Final = Path(__file__).parents[1] / "golden" / "wire"
CONVERSATIONS: Final = "conversations.txt"


def golden(tag: str) -> bytes:
    """What a message of this tag looked like when its file was written."""
    return bytes.fromhex((FOLDER / f"{tag}.hex").read_text(encoding="ascii"))


def golden_tags() -> set[str]:
    """The tags that have a file."""
    files = {path.name for path in FOLDER.iterdir()} - {CONVERSATIONS}
    return {name.removesuffix(".hex") for name in files}


def conversations() -> str:
    """Which tags each codec understands, one line each."""
    return "".join(f"{codec.conversation}: {tag}\n" for codec in CODECS for tag in codec.tags)


def write_missing(folder: Path = FOLDER) -> list[Path]:
    """Write each file that is not there; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {f"{tag}.hex": _lines(encode(EXAMPLES[tag])) for tag in sorted(EXAMPLES)}
    contents[CONVERSATIONS] = conversations()
    missing = [folder / name for name in contents if not (folder / name).exists()]
    for path in missing:
        path.write_text(contents[path.name], encoding="ascii")
    return missing


def _lines(data: bytes) -> str:
    return "".join(f"{line}\n" for line in textwrap.wrap(data.hex(), 64))


if __name__ == "__main__":
    for written in write_missing():
        sys.stdout.write(f"{written}\n")
