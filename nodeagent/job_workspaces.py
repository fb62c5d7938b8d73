"""Lays out the working directories of jobs from their snapshots."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.agent_errors import NodeWorkspaceError, WorkspaceError
from nodeagent.folder_checks import is_node_fault
from schemas.workdir_archives import (
    UNREADABLE,
    USUAL,
    ArchiveBounds,
    ArchiveTooLargeError,
    members,
    opened,
)

MARK: Final = ".ones-snapshot"


def is_laid_out(folder: Path, digest: str) -> bool:
    """Whether `folder` was made from this snapshot.

    Args:
        folder: a job's working directory, which need not exist.
        digest: sha256 of the archive, hexadecimal.
    """
    try:
        return (folder / MARK).read_text(encoding="utf-8").partition("\n")[0] == digest
    except (OSError, UnicodeDecodeError):  # the job may have written there
        return False


def lay_out(archive: Path, folder: Path, digest: str, bounds: ArchiveBounds = USUAL) -> None:
    """Unpack `archive` as `folder`, whole or not at all.

    Args:
        archive: a tar file, compressed or not.
        folder: a job's working directory; an older one is replaced.
        digest: sha256 of the archive, hexadecimal.
        bounds: of what comes out of it.

    Raises:
        WorkspaceError: if the archive is damaged, unsafe or too large, or the disk does not take
            it.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        with archive.open("rb") as file:
            _require_digest(file, digest)
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(mode=0o700, parents=True)
            with opened(file, bounds) as tar:
                for member in members(tar, bounds):
                    tar.extract(member, fresh, filter="data")
        manifest = json.dumps(dict(_laid_out(fresh)))
        (fresh / MARK).write_text(f"{digest}\n{manifest}\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except (*UNREADABLE, ArchiveTooLargeError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        ours = isinstance(error, OSError) and is_node_fault(error)
        kind = NodeWorkspaceError if ours else WorkspaceError
        raise kind(f"cannot unpack the working directory: {error}") from None


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

    Args:
        folder: a job's working directory.

    Returns:
        Size in bytes and time of the last change in ns, by relative path; nothing where nobody
        wrote it down, or the job damaged it.
    """
    try:
        text = (folder / MARK).read_text(encoding="utf-8").partition("\n")[2]
        return msgspec.json.decode(text or "{}", type=dict[str, tuple[int, int]])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}


def _require_digest(file: BufferedReader, digest: str) -> None:
    found = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    if found != digest:
        raise WorkspaceError("the working directory's archive was damaged on its way")
