"""Logins of users to the web page.

Each login has a key pair that this process makes. The user's command adds its public half to the
controller as a key of the user that expires. The secret half never leaves this process, and the
user's own key never gets here.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from controlplane.client.client import Client
from controlplane.client.connection import Home
from schemas.errors import DeniedError, UnavailableError
from schemas.transport.keys import write_keys

SESSION_S: Final = 12 * 3600.0  # after this time a login ends
PENDING_S: Final = 300.0  # time between the command and the first use of its link
KEY: Final = "login"  # name of the files of a login's keys
MAX_PENDING: Final = 100
MAX_SESSIONS: Final = 500


class Session(msgspec.Struct, kw_only=True):
    """A logged-in user of the page."""

    user: str
    role: str
    csrf: str  # token of each form
    ends: float  # monotonic
    client: Client
    stack: AsyncExitStack  # closes the client


class Sessions:
    """Logins, kept in memory: a restart of the page logs everybody out."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._folder = tempfile.TemporaryDirectory(prefix="ones-web-")  # 0700
        self._pending: dict[str, tuple[float, Path]] = {}  # when it ends, folder of its keys
        self._sessions: dict[str, Session] = {}

    def begin(self) -> tuple[str, str]:
        """Return the code of a new login, and the public key that it waits for.

        Raises:
            UnavailableError: if too many logins wait.
        """
        now = time.monotonic()
        for old in [code for code, (ends, _) in self._pending.items() if ends <= now]:
            shutil.rmtree(self._pending.pop(old)[1])
        if len(self._pending) >= MAX_PENDING:
            raise UnavailableError("too many logins wait", "try again in five minutes")
        code = secrets.token_urlsafe(24)
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        pair = write_keys(folder, KEY)
        self._pending[code] = (now + PENDING_S, folder)
        return code, pair.public.decode()

    async def finish(self, code: str) -> str:
        """Log the owner of a code in, and return the token of the session. A code works once.

        Raises:
            OnesError: if the code is unknown, or its key was not added to the controller.
        """
        ends, folder = self._pending.pop(code, (0.0, None))
        if folder is None:
            raise DeniedError("this link was used already, or is too old", "run `ones web login`")
        await self._drop_old()
        stack = AsyncExitStack()
        stack.callback(shutil.rmtree, folder)
        try:
            self._check_room(ends)
            home = replace(self._home, key=folder / f"{KEY}.key_secret")
            client = await stack.enter_async_context(Client(home))
            cluster = await client.cluster()
        except BaseException:
            await stack.aclose()
            raise
        token = secrets.token_urlsafe(32)
        self._sessions[token] = Session(
            user=cluster.user, role=cluster.role, csrf=secrets.token_urlsafe(24),
            ends=time.monotonic() + SESSION_S, client=client, stack=stack,
        )  # fmt: skip
        return token

    def _check_room(self, ends: float) -> None:
        if ends < time.monotonic():
            raise DeniedError("this link is too old", "run `ones web login`")
        if len(self._sessions) >= MAX_SESSIONS:
            raise UnavailableError(f"{MAX_SESSIONS} users are logged in", "try again later")

    async def find(self, token: str) -> Session | None:
        """Return the session of a cookie's token, or None."""
        session = self._sessions.get(token)
        if session is None or session.ends > time.monotonic():
            return session
        await self.end(token)
        return None

    async def end(self, token: str) -> None:
        """Log out. An unknown token is ignored."""
        session = self._sessions.pop(token, None)
        if session is not None:
            await session.stack.aclose()

    async def _drop_old(self) -> None:
        for token in list(self._sessions):
            await self.find(token)

    async def close(self) -> None:
        """Log everybody out, and forget all keys."""
        for token in list(self._sessions):
            await self.end(token)
        self._folder.cleanup()
