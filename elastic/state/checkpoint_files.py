"""Checkpoints in a folder: their names, how they are written and read."""

from __future__ import annotations

import os
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from elastic.state.host_copy import plain_containers
from elastic.training_errors import CheckpointError
from schemas.groups import ResumePoint
from schemas.ids import Version

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT: Final = 1
KEPT: Final = 2  # the newest, and the one before it


def checkpoint_path(folder: Path, point: ResumePoint) -> Path:
    """Where the checkpoint of an epoch lies.

    Args:
        point: epochs that are done, and version of the group that wrote it.
    """
    return folder / f"epoch-{point.epoch:06d}.v{point.version}.pt"


def list_checkpoints(folder: Path) -> list[tuple[Path, ResumePoint]]:
    """All checkpoints in `folder`, oldest first.

    Args:
        folder: of the job's checkpoints; one that is not there has none.

    Returns:
        Files and what their names say, by epoch, then by version.
    """
    found = []
    for path in folder.glob("epoch-*.v*.pt"):
        epoch, _, version = path.stem.removeprefix("epoch-").partition(".v")
        if epoch.isdigit() and version.isdigit():
            found.append((path, ResumePoint(epoch=int(epoch), version=Version(int(version)))))
    return sorted(found, key=lambda entry: (entry[1].epoch, entry[1].version))


def find_checkpoint(folder: Path, point: ResumePoint, version: int) -> Path:
    """The file to resume from: the one of `point`, or the furthest of what went on from it.

    A group whose nodes are cut off goes on and drops old epochs, while its reports wait, or are
    lost with a node. Every group since `point` went on from there. Of several, the latest group's
    counts: an older one may be training on, where nobody reaches it.

    Returns:
        The file; if there is none, the one of `point`, which is not there.
    """
    later = [
        (other.version, other.epoch, path)
        for path, other in list_checkpoints(folder)
        if point.version <= other.version < version and other.epoch >= point.epoch
    ]
    if later:
        return max(later)[-1]
    older = [
        path
        for path, other in list_checkpoints(folder)
        if other.epoch >= point.epoch and other.version <= point.version
    ]
    return older[-1] if older else checkpoint_path(folder, point)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint in `path`; nothing in it is executed.

    Args:
        path: of the file; its tensors come to the host.

    Raises:
        CheckpointError: if it is not there or damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        hint = "let `checkpoints` of every agent be the same shared folder"
        raise CheckpointError(f"no checkpoint {path.name} on this node", hint) from None
    except Exception as error:
        hint = "an earlier one may be whole"
        first = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {first}", hint) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path.name} is of another format")
    return content


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write `content` durably, with as little of the training thread's time as torch allows.

    Without the archive's own checksums: they cost half of the write or more, under the lock that
    the training thread needs, and the rename keeps half a file from being taken for a whole.

    Args:
        content: tensors, numbers, text and their containers, `format` among them; a named tuple
            is read back as a tuple.
        path: of the file, which is replaced in place; the caller renames it.

    Raises:
        OSError: if the disk does not take it.
    """
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with _ArchiveFile(FileIO(path, "wb")) as file:  # a raw file takes 2 GiB a call at most
            _save_archive(content, file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(checksums)


class _ArchiveFile(BufferedWriter):
    """Takes all that is written; it keeps the disk's error, which torch may not raise."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def _save_archive(content: dict[str, Any], file: _ArchiveFile) -> None:
    try:
        torch.save(plain_containers(content), file)
    except RuntimeError as error:  # torch ends the archive all the same and finds that it is short
        raise (file.error or error) from None
