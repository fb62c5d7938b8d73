"""Lays out the working directories of jobs from their snapshots."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.agent_errors import NodeWorkspaceError, WorkspaceError
from nodeagent.folder_checks import is_node_fault
from nodeagent.owned_files import (
    Owner,
    acting_as,
    make_folder,
    owner_of,
    read_small,
    remove_tree,
    write_private,
)
from schemas.workdir_archives import (
    UNREADABLE,
    USUAL,
    ArchiveBounds,
    ArchiveTooLargeError,
    members,
    opened,
)

MARK: Final = ".ones-snapshot"
MOST_MARK: Final = 512 << 20  # bytes: as many names as there may be files, as long as they may be


def is_laid_out(folder: Path, digest: str) -> bool:
    """Whether `folder` was made from this snapshot.

    Args:
        folder: a job's working directory, which need not exist.
        digest: sha256 of the archive, hexadecimal.
    """
    try:
        return _mark(folder).partition("\n")[0] == digest
    except (OSError, ValueError):
        return False


def _mark(folder: Path) -> str:
    """What is in the mark, which the job may have put anything in the place of."""
    with acting_as(owner_of(folder)):
        return read_small(folder / MARK, MOST_MARK).decode()


def lay_out(
    archive: Path,
    folder: Path,
    digest: str,
    bounds: ArchiveBounds = USUAL,
    owner: Owner | None = None,
) -> None:
    """Unpack `archive` as `folder`, whole or not at all.

    Args:
        archive: a tar file, compressed or not.
        folder: a job's working directory; an older one is replaced.
        digest: sha256 of the archive, hexadecimal.
        owner: whose the folder becomes, and with whose rights it is filled; None: the agent's.

    Raises:
        WorkspaceError: if the archive is damaged, unsafe or too large, or the disk does not take
            it.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        with archive.open("rb") as file:
            _require_digest(file, digest)
            remove_tree(fresh)
            make_folder(fresh, owner)
            with acting_as(owner):
                _unpack(file, fresh, bounds)
                manifest = json.dumps(dict(_laid_out(fresh)))
                write_private(fresh / MARK, f"{digest}\n{manifest}\n".encode())
        remove_tree(folder)
        fresh.rename(folder)
    except (*UNREADABLE, ArchiveTooLargeError) as error:
        remove_tree(fresh)
        ours = isinstance(error, OSError) and is_node_fault(error)
        kind = NodeWorkspaceError if ours else WorkspaceError
        raise kind(f"cannot unpack the working directory: {error}") from None


def _unpack(file: BufferedReader, folder: Path, bounds: ArchiveBounds) -> None:
    with opened(file, bounds) as tar:
        for member in members(tar, bounds):
            tar.extract(member, folder, filter="data")


def _laid_out(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(UnicodeEncodeError):
                str(path).encode()
                status = path.lstat()
                yield str(path.relative_to(folder)), (status.st_size, status.st_mtime_ns)


def read_manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """The files that `folder` was made with, as they were then.

    Returns:
        Size in bytes and time of the last change in ns, by relative path; nothing where nobody
        wrote it down, or the job damaged it.
    """
    try:
        text = _mark(folder).partition("\n")[2]
        return msgspec.json.decode(text or "{}", type=dict[str, tuple[int, int]])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}


def _require_digest(file: BufferedReader, digest: str) -> None:
    found = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    if found != digest:
        raise WorkspaceError("the working directory's archive was damaged on its way")
