"""The corpus: a text file for each target, an input a line in base64, findings with what they were."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "corpus"


def inputs_of(target: str) -> dict[bytes, str]:
    """The inputs that are kept, each with what it once showed, or nothing."""
    path, found, note = FOLDER / f"{target}.txt", {}, ""
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        if line.startswith("# "):
            note = line.removeprefix("# ")
        else:
            found[base64.b64decode(line)] = note
            note = ""
    return found


def keep(target: str, inputs: Mapping[bytes, str]) -> None:
    """Write the file of a target: findings first, then the others by length."""
    FOLDER.mkdir(exist_ok=True)
    lines: list[str] = []
    for data in sorted(inputs, key=lambda one: (not inputs[one], len(one), one)):
        lines += [f"# {inputs[data]}"] if inputs[data] else []
        lines.append(base64.b64encode(data).decode())
    (FOLDER / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def unpack(inputs: Iterable[bytes], folder: Path) -> None:
    """Each as a file of its own, as fuzzers want them."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
