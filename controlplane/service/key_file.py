"""Keys that were added or revoked while the controller ran, as a file of its state folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from schemas.errors import SettingsError
from schemas.link import refuse_wide
from schemas.messages.keys import KeyInfo

FILE: Final = "keys.json"
REMEDY: Final = "put a backup of it in its place: without it, keys that were revoked would be valid"


class Changes(msgspec.Struct, frozen=True):
    """What was said of keys online, each public key once."""

    keys: tuple[KeyInfo, ...] = ()


class KeyFile:
    """There whole or not at all, and on the disk before anybody hears of it.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[bytes, KeyInfo]:
        """What it has, by public key.

        Raises:
            SettingsError: if it cannot be read, or others than its owner can.
        """
        if not self.path.exists():
            return {}
        refuse_wide(self.path)
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=Changes)
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self.path}: {error}", REMEDY) from None
        return {one.public.encode(): one for one in found.keys}

    def write(self, changes: dict[bytes, KeyInfo]) -> None:
        """Put these in the place of what it has.

        Raises:
            OSError: if it cannot be written; what it had is still there.
        """
        data = msgspec.json.format(msgspec.json.encode(Changes(tuple(changes.values()))))
        fresh = self.path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
