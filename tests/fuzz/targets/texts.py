"""What others wrote, on the way to a terminal."""

from __future__ import annotations

import re
from typing import Final

from controlplane.cli.terminal import harmless, harmless_output
from tests.fuzz.choices import Choices

SGR: Final = re.compile(r"\x1b\[[0-9;:]*m")
STEERS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def terminal(data: bytes) -> None:
    """Nothing is left that steers it; colours stay in output."""
    text = Choices(data).rest().decode("utf-8", "surrogateescape")
    assert not STEERS.search(harmless(text))
    harmless(text).encode()
    line = harmless_output(text.replace("\n", ""))
    assert not STEERS.search(SGR.sub("", line))
    line.encode()
