"""Who may connect: what authorised.toml says, what admins said online, and what time it is.

Keys that were added or revoked while the controller ran, as a file of its state folder.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from schemas.errors import BadFieldError, SettingsError, TooLargeError, UnavailableError
from schemas.ids import Seconds
from schemas.transport import Identity, KnownKeys, check_public, identity_of, refuse_wide
from schemas.wire.client import AddKey, KeyInfo

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


LOOK_S: Final = 1.0  # how much later than its time a key's connections may end
MAX_KEYS: Final = 10_000  # that were added or revoked online
Gone = Callable[[list[Identity]], None]


class KeyTable:
    """Owns `known`, which all sockets ask; a revocation beats whatever else is said of a key.

    Args:
        clock: seconds since the epoch.

    Raises:
        SettingsError: if the file cannot be used.
    """

    def __init__(
        self,
        file: KeyFile,
        listed: Mapping[bytes, Identity],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._clock = clock
        self._listed = dict(listed)
        self._online = file.read()
        self.known = KnownKeys(self._joined(), clock)
        self._valid = dict(self.known)
        self.gone: Gone = lambda _: None  # told whose keys are not valid any more

    def reload(self, listed: Mapping[bytes, Identity]) -> None:
        """Take over what authorised.toml says now.

        Args:
            listed: public key (Z85) to its owner.
        """
        self._listed = dict(listed)
        self._settle()

    async def watch(self) -> None:
        """End what is open with keys whose time is over, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._settle()

    def _settle(self) -> None:
        """Let `known` say what holds now, and tell of those who are not in it any more."""
        self.known.listed = self._joined()
        valid = dict(self.known)
        gone = [who for key, who in self._valid.items() if valid.get(key) != who]
        self._valid = valid
        if gone:
            self.gone(gone)

    def _joined(self) -> dict[bytes, Identity]:
        keys = {
            key: Identity(one.role, one.name, one.projects, one.expires)
            for key, one in self._online.items()
        }
        keys.update(self._listed)
        revoked = {key for key, one in self._online.items() if one.state == "revoked"}
        return {key: who for key, who in keys.items() if key not in revoked}

    def rows(self) -> Iterator[KeyInfo]:
        """All that is known of keys, those of authorised.toml first."""
        for key in dict.fromkeys([*self._listed, *self._online]):
            yield self._row(key)

    def _row(self, key: bytes) -> KeyInfo:
        said, who = self._online.get(key), self._listed.get(key)
        if said is None or (who is not None and said.state != "revoked"):
            if who is None:
                raise KeyError(key)
            said = KeyInfo(
                public=key.decode(),
                name=who.name,
                role=who.role,
                projects=who.projects,
                expires=None if who.expires is None else Seconds(who.expires),
                kept="file",
            )
        over = said.expires is not None and said.expires <= self._clock()
        return replace(said, state="expired") if over and said.state == "valid" else said

    def add(self, request: AddKey, by: str) -> KeyInfo:
        """Let somebody connect from now on.

        Returns:
            The key as it is kept.

        Raises:
            BadFieldError: if a field is wrong, or the key is another's or revoked.
            TooLargeError: if there are too many.
            UnavailableError: if it cannot be written down; nothing was changed.
        """
        key, who = request.public.encode(), self._checked(request)
        if (known := self.known.listed.get(key)) is not None:
            if known != who:
                what = f"public: this key is {known}'s already, or has other rights"
                raise BadFieldError(what, "make another pair, or revoke it first", "public")
            return self._row(key)
        if key in self._online:
            what = "public: this key was revoked"
            raise BadFieldError(what, "make another pair of keys", "public")
        now = self._clock()
        if request.expires is not None and request.expires <= now:
            raise BadFieldError("expires: that time is over", "give a later one", "expires")
        row = KeyInfo(
            public=request.public, name=who.name, role=who.role, projects=who.projects,
            expires=request.expires, by=by, at=Seconds(now),
        )  # fmt: skip
        self._keep({key: row})
        self._settle()
        return row

    def _checked(self, request: AddKey) -> Identity:
        try:
            check_public(request.public)
            who = identity_of(request.name, request.role, request.projects, request.expires)
        except SettingsError as error:
            raise BadFieldError(error.message, error.hint, error.field) from None
        return who

    def revoke(self, wanted: str, by: str) -> tuple[KeyInfo, ...]:
        """Take keys away; it holds at once, and for ever when it is written down.

        Args:
            wanted: a public key, or the name of their owner.

        Raises:
            BadFieldError: if there is no such key, or nobody could undo it.
            UnavailableError: if it cannot be written down: then it holds until a restart.
        """
        rows = {row.public.encode(): row for row in self.rows()}
        found = {key: row for key, row in rows.items() if wanted in {row.public, row.name}}
        if not found:
            what = f"key: there is none of {wanted[:64]!r}"
            raise BadFieldError(what, "`ones key list` has every one", "key")
        fresh = {key: row for key, row in found.items() if row.state != "revoked"}
        admins = {key for key, who in self.known.items() if who.role == "admin"}
        if admins and not admins - fresh.keys():
            what = "key: these are the last admin's"
            raise BadFieldError(what, "add another admin's key first", "key")
        now = Seconds(self._clock())
        changed = {key: replace(row, state="revoked", by=by, at=now) for key, row in fresh.items()}
        before = self._online
        self._online = {**before, **changed}
        self._settle()
        if changed:
            self._write(self._online, "it holds until the controller restarts")
        return tuple({**found, **changed}.values())

    def _keep(self, changed: dict[bytes, KeyInfo]) -> None:
        online = {**self._online, **changed}
        if len(online) > MAX_KEYS:
            what = f"public: {MAX_KEYS} keys were added or revoked, and there is no room for more"
            raise TooLargeError(what, "keep keys in authorised.toml", "public")
        self._write(online, "nothing was changed")
        self._online = {**self._online, **changed}

    def _write(self, online: dict[bytes, KeyInfo], otherwise: str) -> None:
        try:
            self._file.write(online)
        except OSError as error:
            what = f"{self._file.path.name} cannot be written ({error.strerror}): {otherwise}"
            raise UnavailableError(what, "free space there, and say it again") from None
