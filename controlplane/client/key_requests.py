"""What admins do with keys: list, add and revoke them."""

from __future__ import annotations

import abc
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from controlplane.client.job_files import FileTransfers
from schemas.errors import BadFieldError
from schemas.ids import Seconds
from schemas.messages.keys import AddKey, KeyInfo, Keys, ListKeys, RevokeKey

T = TypeVar("T")


class KeyRequests(FileTransfers):
    """Keeps the cluster's list of keys; for admins."""

    async def keys(self) -> tuple[KeyInfo, ...]:
        """All keys, also those that are not valid any more.

        Raises:
            DeniedError: if the key is no admin's.
        """
        found, cursor = list[KeyInfo](), ""
        while True:
            page = await self._call(ListKeys(cursor=cursor), Keys)
            found += page.keys
            cursor = page.next
            if not cursor:
                return tuple(found)

    async def add_key(
        self,
        public: str,
        name: str,
        role: str,
        projects: Sequence[str] = (),
        expires: float | None = None,
    ) -> KeyInfo:
        """Let the owner of a key connect.

        Args:
            public: his public key, Z85; the secret one stays with him.
            name: his, or the node's.
            role: admin, operator, user, viewer or node.
            projects: whose jobs it is for; the first one's are those that he submits.
            expires: when it ends, seconds since the epoch; None: never.

        Raises:
            DeniedError: if this client's key is no admin's.
            BadFieldError: if a field is wrong, or the key is somebody else's or was revoked.
        """
        asked = {
            "public": public, "name": name, "role": role, "projects": tuple(projects),
            "expires": None if expires is None else Seconds(expires),
        }  # fmt: skip
        try:
            request = msgspec.convert({"type": "keys.add.1", **asked}, AddKey)
        except msgspec.ValidationError as error:
            raise BadFieldError(str(error), "see docs/operations.md, Keys", "role") from None
        return (await self._call(request, Keys)).keys[0]

    async def revoke_key(self, key: str) -> tuple[KeyInfo, ...]:
        """Take keys away for ever; what is open with them ends.

        Args:
            key: a public key, or a name: all keys of that name.

        Raises:
            DeniedError: if this client's key is no admin's.
            BadFieldError: if there is no such key, or it is the last admin's.
        """
        return (await self._call(RevokeKey(key=key), Keys)).keys


class BlockingKeyRequests:
    """The same for scripts without an event loop."""

    @property
    @abc.abstractmethod
    def _sweeps(self) -> KeyRequests:
        """The client whose loop runs in a thread."""

    @abc.abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the client's loop do it."""

    def keys(self) -> tuple[KeyInfo, ...]:
        """See `Client.keys`."""
        return self._run(self._sweeps.keys())

    def add_key(
        self,
        public: str,
        name: str,
        role: str,
        projects: Sequence[str] = (),
        expires: float | None = None,
    ) -> KeyInfo:
        """See `Client.add_key`.

        Args:
            public: Z85.
            role: admin, operator, user, viewer or node.
            expires: seconds since the epoch; None: never.
        """
        return self._run(self._sweeps.add_key(public, name, role, projects, expires))

    def revoke_key(self, key: str) -> tuple[KeyInfo, ...]:
        """See `Client.revoke_key`.

        Args:
            key: a public key, or a name.
        """
        return self._run(self._sweeps.revoke_key(key))
