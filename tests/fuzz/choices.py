"""Bytes of a fuzzer as choices: the same bytes make the same choices, whoever has made them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")
WHOLE: Final = (
    0, 1, -1, 2, 3, 7, 31, 64, 127, 255, 256, 1000, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 - 1,
    2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**53), -(2**63),
)  # fmt: skip
REAL: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 5e-324, 1e9, 2.0**53, 1e300, 1.7976931348623157e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS: Final = (
    "", "a", "a-1", "n1", "n1/0", "log", "../../etc/passwd", "/", ".", "..", "\0", "a\0b", "\n", "\x1b[2J",
    "\u202e", "\ud7ff\uffff", "\U0001f600", "%s%n{}", "*", "[", "[!", "-1", "1e9", "0x10", "nan", "'\"\\",
    "127.0.0.1:1", "a b", "\x7f", "a.1", "jobs.1", "history.99999999999", "\u0660", "sha256", "0" * 64, "f" * 64,
)  # fmt: skip


class Choices:
    """Takes choices from the front of some bytes; when they are used up, every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not used yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """The next bytes, as many as there are."""
        found = self._data[self._at : self._at + size]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        return self.take(self.left)

    def below(self, bound: int) -> int:
        """A number from 0 on."""
        if bound <= 1:
            return 0
        size = 1 if bound <= 256 else 2 if bound <= 65_536 else 4
        return int.from_bytes(self.take(size), "big") % bound

    def flag(self) -> bool:
        return bool(self.below(2))

    def often(self) -> bool:
        """Three times in four, and where there are no bytes."""
        return self.below(4) != 3

    def pick(self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def whole(self) -> int:
        """A number that fits 64 bits, most often one at an edge."""
        if self.often():
            return self.pick(WHOLE)
        return struct.unpack(">q", self.take(8).ljust(8, b"\0"))[0]

    def real(self) -> float:
        if self.often():
            return self.pick(REAL)
        return struct.unpack(">d", self.take(8).ljust(8, b"\0"))[0]

    def text(self) -> str:
        """A text that can be written in UTF-8, short or, seldom, long."""
        kind = self.below(16)
        if kind < 10:
            return self.pick(TEXTS)
        if kind < 15:
            return self.take(self.below(24)).decode("utf-8", "replace")
        return (self.pick(TEXTS) or "x") * (1 << self.below(15))

    def blob(self) -> bytes:
        return self.take(self.below(64)) * (1 << self.below(8) if not self.often() else 1)

    def scalar(self) -> object:
        """Anything that has no parts."""
        kinds = (self.whole, self.real, self.text, self.flag, self.blob, lambda: None)
        return self.pick(kinds)()

    def value(self, depth: int = 3) -> object:
        """Anything that MessagePack and TOML can hold."""
        kind = self.below(8)
        if kind < 6 or depth == 0:
            return self.scalar()
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.below(4))]
        return {self.text(): self.value(depth - 1) for _ in range(self.below(4))}
