"""The golden bytes of every tag; `python -m tests.support.schemas_golden` writes missing files.

Bytes that exist stay: bytes that changed are a changed meaning, which takes a new tag. With
`--extend`, a message that only got fields takes them into its file, and a conversation new tags.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

import msgspec

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


def extend_grown(folder: Path = FOLDER) -> list[Path]:
    """Write again each file whose every key and line is still there as it was; returns those."""
    extended = []
    for tag, message in sorted(EXAMPLES.items()):
        path, data = folder / f"{tag}.hex", encode(message)
        was = bytes.fromhex(path.read_text(encoding="ascii"))
        if was != data and _holds(msgspec.msgpack.decode(data), msgspec.msgpack.decode(was)):
            path.write_text(_lines(data), encoding="ascii")
            extended.append(path)
    path, lines = folder / CONVERSATIONS, conversations()
    known = path.read_text(encoding="ascii")
    if known != lines and set(known.splitlines()) <= set(lines.splitlines()):
        path.write_text(lines, encoding="ascii")
        extended.append(path)
    return extended


def _holds(new: object, old: object) -> bool:
    """Whether `new` has all that `old` has, at every depth."""
    if isinstance(new, dict) and isinstance(old, dict):
        return all(key in new and _holds(new[key], old[key]) for key in old)
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(_holds, new, old))
    return type(new) is type(old) and new == old


def _lines(data: bytes) -> str:
    return "".join(f"{line}\n" for line in textwrap.wrap(data.hex(), 64))


if __name__ == "__main__":
    missing = write_missing()
    extended = extend_grown() if "--extend" in sys.argv else []
    for written in [*missing, *extended]:
        sys.stdout.write(f"{written}\n")
