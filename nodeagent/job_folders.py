"""Working directories of jobs. Unpack them from snapshots, list and read them for jobs' owners."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.errors import NodeWorkspaceError, WorkspaceError
from nodeagent.folders import NodeFolders
from nodeagent.health import is_node_fault
from nodeagent.owned_files import (
    Owner,
    acting_as,
    make_folder,
    owner_of,
    read_small,
    remove_tree,
    write_private,
)
from schemas.errors import BadFieldError, OnesError, UnavailableError
from schemas.host.archives import (
    DEFAULT_BOUNDS,
    UNREADABLE,
    ArchiveBounds,
    ArchiveTooLargeError,
    members,
    opened,
    unpack,
)
from schemas.host.files import require_regular
from schemas.host.state_files import StateFile
from schemas.ids import JobId
from schemas.wire import files

MARK: Final = ".ones-snapshot"
MAX_MARK_BYTES: Final = 512 << 20  # fits the most and longest names that an archive can have
PIECE: Final = 1 << 20
MAX_FILES: Final = 10_000
MAX_NAMES: Final = 1 << 20  # bytes of all paths in one list
MAX_REFUSED: Final = 20
AREAS: Final = (files.WORK, files.CHECKPOINTS, files.STATES)
IGNORED_FOLDERS: Final = frozenset({"__pycache__", ".git"})


def is_laid_out(folder: Path, digest: str) -> bool:
    """True if a job's working directory was made from the snapshot with this SHA-256."""
    try:
        return _mark(folder).partition("\n")[0] == digest
    except (OSError, ValueError):
        return False


def _mark(folder: Path) -> str:
    """Return the content of the mark, a file that the job might have replaced by anything."""
    with acting_as(owner_of(folder)):
        return read_small(folder / MARK, MAX_MARK_BYTES).decode()


def lay_out(
    archive: Path,
    folder: Path,
    digest: str,
    bounds: ArchiveBounds = DEFAULT_BOUNDS,
    owner: Owner | None = None,
) -> None:
    """Unpack a snapshot as a job's working directory, owned by `owner`, completely or not at all.

    Raises:
        WorkspaceError: if the archive is damaged, unsafe or too large, or the disk cannot store
            it.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        with archive.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise WorkspaceError("the working directory's archive was damaged in transit")
            file.seek(0)
            remove_tree(fresh)
            make_folder(fresh, owner)
            with acting_as(owner):
                with opened(file, bounds) as tar:
                    for member in members(tar, bounds):
                        unpack(tar, member, fresh)
                manifest = json.dumps(dict(_laid_out(fresh)))
                write_private(fresh / MARK, f"{digest}\n{manifest}\n".encode())
        remove_tree(folder)
        fresh.rename(folder)
    except (*UNREADABLE, ArchiveTooLargeError) as error:
        remove_tree(fresh)
        ours = isinstance(error, OSError) and is_node_fault(error)
        kind = NodeWorkspaceError if ours else WorkspaceError
        raise kind(f"cannot unpack the working directory: {error}") from None


def _laid_out(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(UnicodeEncodeError):
                str(path).encode()
                yield str(path.relative_to(folder)), _size_and_time(path)


def read_manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size (bytes) and modification time (ns) of each unpacked file, if recorded."""
    try:
        text = _mark(folder).partition("\n")[2]
        return msgspec.json.decode(text or "{}", type=dict[str, tuple[int, int]])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}


def answer(asked: files.ToNode, folders: NodeFolders) -> files.FromNode:
    """Serve a request of the relay. This blocks on the disk, so do not call it in an event loop."""
    try:
        if isinstance(asked, files.AskFiles):
            return _file_list(asked, folders)
        root = _root(folders, asked.job, asked.area)
        with acting_as(owner_of(root)):
            return _piece(asked, root)
    except OnesError as error:
        failed = error
    except OSError as error:
        failed = UnavailableError(
            f"the node cannot read the file: {error.strerror}", "check its disk"
        )
    except (ValueError, RuntimeError) as error:  # a NUL byte; a cycle of links
        failed = BadFieldError(f"invalid path: {error}", "use a path of the list", "path")
    return files.FilesRefused(
        request=asked.request, code=failed.code, message=failed.message, hint=failed.hint
    )


def stamp_of(status: os.stat_result) -> str:
    """Return a stamp that changes whenever the file changes."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _root(folders: NodeFolders, job: JobId, area: files.Area) -> Path:
    """Return the job's folder in an area. Refuse a job name that could lead out of the area."""
    if not job or "/" in job or job.startswith(".") or "\0" in job:
        raise BadFieldError(f"{job!r} is not a job", "name a job that ran here", "job")
    roots = {files.WORK: folders.job(job), files.CHECKPOINTS: folders.checkpoints / job}
    root = roots.get(area, folders.states(job))
    return root.parent.resolve() / root.name


# --- lists


def _file_list(asked: files.AskFiles, folders: NodeFolders) -> files.FileList:
    found: list[files.FileInfo] = []
    refused: list[str] = []
    left_out = names = 0
    for area in AREAS:
        root = _root(folders, asked.job, area)
        had = read_manifest(root) if area == files.WORK else {}
        with acting_as(owner_of(root)):
            for info in _infos(root, area, had, refused):
                names += len(info.path.encode())
                if len(found) >= MAX_FILES or names > MAX_NAMES:
                    left_out += 1
                else:
                    found.append(info)
    return files.FileList(
        request=asked.request,
        files=tuple(found),
        left_out=left_out,
        refused=tuple(refused[:MAX_REFUSED]),
    )


def _infos(
    root: Path, area: files.Area, had: Mapping[str, tuple[int, int]], refused: list[str]
) -> Iterator[files.FileInfo]:
    for path in _paths(root):
        if area == files.STATES and StateFile.of(path.name) is None:  # staged data, not a state
            continue
        info = _info(root, path, area, refused)
        if info is not None and had.get(info.path) != _size_and_time(path):
            yield info


def _paths(root: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in IGNORED_FOLDERS)
        for name in sorted([*names, *(f for f in folders if Path(here, f).is_symlink())]):
            if not (name == MARK and Path(here) == root) and not name.endswith((".pyc", ".new")):
                yield Path(here, name)


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def _info(root: Path, path: Path, area: files.Area, refused: list[str]) -> files.FileInfo | None:
    """Return a file's entry for the list, or return None and add the reason to `refused`."""
    name = os.fsencode(path.relative_to(root)).decode("utf-8", "replace")
    try:
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError):
        refused.append(f"{name}: broken link")
        return None
    if not target.is_relative_to(root):
        refused.append(f"{name}: a link that leads out of the job's folder")
    elif stat.S_ISREG(status.st_mode):
        return files.FileInfo(area=area, path=name, size=status.st_size, stamp=stamp_of(status))
    elif not path.is_symlink():
        refused.append(f"{name}: not a regular file")
    return None


# --- pieces


def _piece(asked: files.AskPiece, root: Path) -> files.FilePiece:
    descriptor = open_beneath(root, asked.path)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        file.seek(asked.offset)
        data = file.read(PIECE)
    return files.FilePiece(
        request=asked.request,
        offset=asked.offset,
        data=data,
        size=status.st_size,
        stamp=stamp_of(status),
        digest=hashlib.sha256(data).hexdigest(),
    )


def open_beneath(root: Path, path: str) -> int:
    """Open a regular file inside of a folder for reading, and return its descriptor.

    The path of `root` has no links. A link is followed only if it stays inside `root`. Each folder
    of the path is opened separately without following links, so that no folder can be swapped after
    the check.

    Raises:
        BadFieldError: if the file is outside, missing, or not a regular file.
        OSError: if the disk cannot read it.
    """
    target = (root / path).resolve()
    if Path(path).is_absolute() or not target.is_relative_to(root) or target == root:
        hint = "fetch a file inside of it"
        raise BadFieldError(f"{path} leads out of the job's folder", hint, "path")
    *folders, name = target.relative_to(root).parts
    here = -1
    try:
        here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
    except (FileNotFoundError, NotADirectoryError):
        what = f"{path} is not on this node any more"
        raise BadFieldError(what, "`ones fetch JOB --list` shows the files", "path") from None
    finally:
        if here >= 0:
            os.close(here)
    try:
        return require_regular(opened, target)
    except OSError:
        what = f"{path} is not a regular file"
        raise BadFieldError(what, "fetch files only", "path") from None
