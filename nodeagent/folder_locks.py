"""One agent on a run folder and on a work folder: two would take each other's workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from nodeagent.worker_folders import NodeFolders
from schemas.errors import SettingsError
from schemas.file_lock import try_lock

log = structlog.get_logger("folders")


class FolderLocks:
    """The folders of one agent, which are its own until it ends, however it ends.

    Args:
        folders: of the node, which are there; `checkpoints` is for all nodes.
        node: its name, told to whoever else wants them.

    Raises:
        SettingsError: if another agent has one of them.
    """

    def __init__(self, folders: NodeFolders, node: str) -> None:
        self._held: list[int] = []
        for setting, folder, name in (
            ("run", folders.run, "agent.lock"),
            ("work", folders.work, ".agent.lock"),
        ):
            try:
                self._take(setting, folder, folder / name, node)
            except OSError as error:  # such a node is unhealthy, and says so
                log.warning("folder not locked", folder=str(folder), why=error.strerror)
            except SettingsError:
                self.close()
                raise

    def _take(self, setting: str, folder: Path, path: Path, node: str) -> None:
        lock = try_lock(path)
        if lock is None:
            what = f"{setting} {folder} is in use by another agent{_owner(path)}"
            remedy = f"stop that one, or give each agent a {setting} of its own"
            raise SettingsError(what, remedy, setting)
        self._held.append(lock)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} {node}\n".encode())

    def close(self) -> None:
        """Let the next agent have them."""
        for lock in self._held:
            os.close(lock)
        self._held = []


def _owner(path: Path) -> str:
    """Who wrote that it has the lock, as far as it came to that."""
    words: Sequence[str] = path.read_text(encoding="utf-8", errors="replace").split()
    return f" (node {words[1]}, pid {words[0]})" if len(words) == 2 else ""  # noqa: PLR2004
