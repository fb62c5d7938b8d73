"""Keys that may connect. They come from authorised.toml and from online changes by admins.

Online changes are kept in a file of the state folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from controlplane.service.rights import JOIN, NODE, projects_of, sees_all
from schemas.errors import (
    BadFieldError,
    DeniedError,
    SettingsError,
    TooLargeError,
    UnavailableError,
)
from schemas.host.files import replace_file
from schemas.ids import Seconds
from schemas.transport.keys import Identity, KnownKeys, check_public, identity_of, require_private
from schemas.wire.client import AddKey, KeyInfo

FILE: Final = "keys.json"
REMEDY: Final = "restore a backup; without the file, revoked keys would become valid"


class OnlineChanges(msgspec.Struct, frozen=True):
    """Online additions and revocations. Each public key occurs once."""

    keys: tuple[KeyInfo, ...] = ()


class KeyFile:
    """File of online changes. Each change replaces the file atomically and durably."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_stored: Callable[[Path], None] = lambda _: None  # called after each change

    def read(self) -> dict[bytes, KeyInfo]:
        """Return the online changes by public key, or an empty dict if there is no file.

        Raises:
            SettingsError: if the file cannot be read, or users other than its owner may read it.
        """
        if not self.path.exists():
            return {}
        require_private(self.path)
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=OnlineChanges)
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self.path}: {error}", REMEDY) from None
        return {one.public.encode(): one for one in found.keys}

    def write(self, changes: dict[bytes, KeyInfo]) -> None:
        """Replace the content of the file.

        Raises:
            OSError: if the file cannot be written; the old content is intact.
        """
        data = msgspec.json.format(msgspec.json.encode(OnlineChanges(tuple(changes.values()))))
        replace_file(self.path, data)
        self.on_stored(self.path)


LOOK_S: Final = 1.0  # delay until an expired key is disconnected
MAX_KEYS: Final = 10_000  # added or revoked online
MAX_LOGINS: Final = 50  # keys that a user added for logins
LOGIN_S: Final = 86_400.0  # longest validity of such a key
OnRevoked = Callable[[list[Identity]], None]
OnChanged = Callable[[dict[bytes, Identity], list[bytes]], None]


class KeyTable:
    """Owner of `known`, the table in which all sockets look up keys. Revoked keys stay invalid."""

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
        self.known = KnownKeys(self._merged(), clock)
        self._valid = dict(self.known)
        self._expires_at = self.known.next_expiry()
        self.on_revoked: OnRevoked = lambda _: None  # called with the owners of keys now invalid
        # Called with keys that became valid or have another owner, and keys that are not valid.
        self.on_changed: OnChanged = lambda *_: None

    def reload(self, listed: Mapping[bytes, Identity]) -> None:
        """Replace the keys of authorised.toml."""
        self._listed = dict(listed)
        self._refresh()

    async def watch(self) -> None:
        """Disconnect owners of expired keys, until cancelled."""
        before = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            if now >= self._expires_at or now < before:  # a clock set back revives keys
                self._refresh()
            before = now

    def _refresh(self) -> None:
        """Update `known`, and report the owners of keys that are no longer valid."""
        self.known.listed = self._merged()
        self._expires_at = self.known.next_expiry()
        valid = dict(self.known)
        before, self._valid = self._valid, valid
        fresh = {key: who for key, who in valid.items() if before.get(key) != who}
        gone = {key: who for key, who in before.items() if valid.get(key) != who}
        if fresh or gone:
            self.on_changed(fresh, [key for key in gone if key not in valid])
        if gone:
            self.on_revoked(list(gone.values()))

    def _merged(self) -> dict[bytes, Identity]:
        keys = {
            key: Identity(one.role, one.name, one.projects, one.expires)
            for key, one in self._online.items()
        }
        keys.update(self._listed)
        revoked = {key for key, one in self._online.items() if one.state == "revoked"}
        return {key: who for key, who in keys.items() if key not in revoked}

    def rows(self) -> Iterator[KeyInfo]:
        """Yield all keys, those of authorised.toml first."""
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

    def add(self, request: AddKey, by: Identity) -> KeyInfo:
        """Authorise a key from now on, and return the stored entry.

        Only an admin may add any key. Another user may add keys for logins: with the user's own
        name and rights, which expire within a day, and not after the user's present key. A join
        key named `NAME` may add keys of nodes `NAME-...`. Such a key replaces the key that it
        added for the same node before.

        Raises:
            DeniedError: if the owner `by` may not add this key.
            BadFieldError: if a field is invalid, or the key has another owner or was revoked.
            TooLargeError: if there are too many keys.
            UnavailableError: if the key cannot be stored; nothing was changed.
        """
        try:
            check_public(request.public)
            who = identity_of(request.name, request.role, request.projects, request.expires)
        except SettingsError as error:
            raise BadFieldError(error.message, error.hint, error.field) from None
        if problem := self._ambiguity(who):
            raise BadFieldError(problem, "choose another name", problem.partition(":")[0])
        now = self._clock()
        if by.role == JOIN:
            _permit_node(who, by)
        elif by.role != "admin":
            self._permit_login(who, by, now)
        key = request.public.encode()
        if (known := self.known.listed.get(key)) is not None:
            if known != who:
                what = f"public: this key already belongs to {known}, or has other rights"
                raise BadFieldError(what, "create another pair, or revoke this key first", "public")
            return self._row(key)
        if key in self._online:
            what = "public: this key was revoked"
            raise BadFieldError(what, "create another pair of keys", "public")
        if request.expires is not None and request.expires <= now:
            raise BadFieldError("expires: the time has passed", "give a later time", "expires")
        row = KeyInfo(
            public=request.public, name=who.name, role=who.role, projects=who.projects,
            expires=request.expires, by=by.name, at=Seconds(now),
        )  # fmt: skip
        kept = {
            key: one
            for key, one in self._online.items()
            if not _is_old_login(one, now)
            and not (by.role == JOIN and (one.by, one.name) == (by.name, who.name))
        }
        online = {**kept, key: row}
        if len(online) > MAX_KEYS:
            what = f"public: {MAX_KEYS} keys were added or revoked online, the maximum"
            raise TooLargeError(what, "add keys to authorised.toml instead", "public")
        self._write(online, "nothing was changed")
        self._online = online
        self._refresh()
        return row

    def _permit_login(self, who: Identity, by: Identity, now: float) -> None:
        told = () if sees_all(by) else projects_of(by)  # what `GetCluster` replies
        own = (who.name, who.role) == (by.name, by.role) and who.projects in {by.projects, told}
        latest = min(now + LOGIN_S, now + LOGIN_S if by.expires is None else by.expires)
        if not own or who.expires is None or who.expires > latest:
            what = f"{by} may only add keys with the same name and rights, for up to a day"
            raise DeniedError(what, "ask an admin to add other keys")
        logins = [one for one in self._online.values() if one.name == by.name == one.by]
        if sum(not _is_old_login(one, now) for one in logins) >= MAX_LOGINS:
            what = f"{by.name} has {MAX_LOGINS} keys for logins, the maximum"
            raise TooLargeError(what, "log out elsewhere, or wait until one expires")

    def _ambiguity(self, who: Identity) -> str:
        """Return why an owner could be taken for another one, or "" if that is impossible."""
        others = [one for one in self.known.values() if one.name != who.name]
        roles = {one.role for one in self.known.values() if one.name == who.name}
        if roles - {who.role}:
            return f"name: {who.name!r} already names a key with role {roles.pop()}"
        if any(who.name in one.projects for one in others):
            return f"name: {who.name!r} is a project"
        return ""

    def revoke(self, wanted: str, by: str) -> tuple[KeyInfo, ...]:
        """Revoke keys. The revocation applies at once, and is permanent as soon as it is stored.

        `wanted` is a public key or the name of an owner. A name revokes all keys of the owner.

        Raises:
            BadFieldError: if there is no such key, or no admin would be left.
            UnavailableError: if the revocation cannot be stored; it applies until a restart.
        """
        rows = {row.public.encode(): row for row in self.rows()}
        found = {key: row for key, row in rows.items() if wanted in {row.public, row.name}}
        if not found:
            what = f"key: no key or owner {wanted[:64]!r}"
            raise BadFieldError(what, "`ones key list` lists all keys", "key")
        fresh = {key: row for key, row in found.items() if row.state != "revoked"}
        admins = {key for key, who in self.known.items() if who.role == "admin"}
        if admins and not admins - fresh.keys():
            what = "key: no admin would be left"
            raise BadFieldError(what, "add another admin's key first", "key")
        now = Seconds(self._clock())
        changed = {key: replace(row, state="revoked", by=by, at=now) for key, row in fresh.items()}
        before = self._online
        self._online = {**before, **changed}
        self._refresh()
        if changed:
            self._write(self._online, "it holds until the controller restarts")
        return tuple({**found, **changed}.values())

    def _write(self, online: dict[bytes, KeyInfo], otherwise: str) -> None:
        try:
            self._file.write(online)
        except OSError as error:
            what = f"{self._file.path.name} cannot be written ({error.strerror}): {otherwise}"
            raise UnavailableError(what, "free space there and repeat the command") from None


def _permit_node(who: Identity, by: Identity) -> None:
    prefix = f"{by.name}-"
    if who.role != NODE or who.projects or not who.name.startswith(prefix):
        what = f"{by} may only add keys of nodes whose names begin with {prefix!r}"
        raise DeniedError(what, "ask an admin to add other keys")


def _is_old_login(row: KeyInfo, now: float) -> bool:
    """True if a user added this key for a login, which is over. Revoked keys are kept."""
    over = row.expires is not None and row.expires <= now
    return row.state == "valid" and row.by == row.name and over
