"""Values of secret variables of jobs. They are in no journal, backup, feed or reply."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from schemas.host.state_files import sync_folder
from schemas.jobs import JobSpec, SecretEnv

log = structlog.get_logger("secret_store")
ID_BYTES: Final = 16


class SecretStore:
    """Private files, one for each submission. Jobs that derive from one job share its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.on_stored: Callable[[Path], None] = lambda _: None  # called with each new file

    def put(self, values: Mapping[str, str]) -> SecretEnv:
        """Store values durably under a new id."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = SecretEnv(names=tuple(sorted(values)), id=secrets.token_hex(ID_BYTES))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(self._folder / found.id, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(values))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        self.on_stored(self._folder / found.id)
        return found

    def of(self, spec: JobSpec) -> dict[str, str]:
        """Return the values of a job's secret variables, or none if they are not kept any more."""
        if not isinstance(spec.secret_env, SecretEnv):
            return {}
        try:
            data = (self._folder / spec.secret_env.id).read_bytes()
            return msgspec.msgpack.decode(data, type=dict[str, str])
        except (OSError, msgspec.MsgspecError):  # after `ones admin restore`, for example
            log.warning("secrets of a job are missing", job=spec.name)
            return {}

    def forget(self, spec: JobSpec, live: Iterable[JobSpec]) -> None:
        """Delete the values of a job that has ended, unless a live job shares them."""
        own = spec.secret_env
        if isinstance(own, SecretEnv) and all(one.secret_env != own for one in live):
            (self._folder / own.id).unlink(missing_ok=True)

    def keep_only(self, live: Iterable[JobSpec]) -> None:
        """Delete values that no live job uses, as after a crash."""
        used = {one.secret_env.id for one in live if isinstance(one.secret_env, SecretEnv)}
        for path in self._folder.glob("*"):
            if path.name not in used:
                path.unlink(missing_ok=True)
