"""Checkpoints in a folder: their names, reading, and writing in a separate thread.

Training waits only while the state is copied.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Final

import torch

from elastic.state.tracked_states import plain_containers
from elastic.training_errors import CheckpointError
from schemas.host.state_files import sync_folder
from schemas.ids import Version
from schemas.nodes import ResumePoint

FORMAT: Final = 1
KEPT_EPOCHS: Final = 2  # the newest epoch and the epoch before


def checkpoint_path(folder: Path, point: ResumePoint) -> Path:
    """Return the path of the checkpoint for `point`, an epoch and a version."""
    return folder / f"epoch-{point.epoch:06d}.v{point.version}.pt"


def list_checkpoints(folder: Path) -> list[tuple[Path, ResumePoint]]:
    """Return the checkpoints in `folder`, sorted by epoch and version; [] if there is no folder."""
    found = []
    for path in folder.glob("epoch-*.v*.pt"):
        epoch, _, version = path.stem.removeprefix("epoch-").partition(".v")
        if epoch.isdigit() and version.isdigit():
            found.append((path, ResumePoint(epoch=int(epoch), version=Version(int(version)))))
    return sorted(found, key=lambda entry: (entry[1].epoch, entry[1].version))


def find_checkpoint(folder: Path, point: ResumePoint, version: int) -> Path:
    """Return the path of the checkpoint from which the group of `version` resumes.

    This is the checkpoint of `point` or a later one. If the nodes of a group are cut off, the
    group continues to train and deletes old epochs. Its reports wait, or are lost with a node, so
    checkpoints after `point` can exist. The checkpoint of the latest group is chosen, because an
    older group might still train where it cannot be reached. If there is no checkpoint, the path of
    `point` is returned.
    """
    found = [
        (other.version, other.epoch, path)
        for path, other in list_checkpoints(folder)
        if other.epoch >= point.epoch
    ]
    later = [entry for entry in found if point.version <= entry[0] < version]
    if later:
        return max(later)[-1]
    older = [path for group, _, path in found if group <= point.version]
    return older[-1] if older else checkpoint_path(folder, point)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint to the host without executing anything, or raise CheckpointError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        hint = "set `checkpoints` of every agent to the same shared folder"
        raise CheckpointError(f"no checkpoint {path.name} on this node", hint) from None
    except Exception as error:
        hint = "try an earlier checkpoint"
        first = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {first}", hint) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path.name} has another format")
    return content


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write `content` durably, and delay the training thread as little as torch allows.

    The archive has no checksums: they take half of the write time or more, under the lock that the
    training thread needs. The caller's rename prevents partial files.
    """
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with _ArchiveFile(FileIO(path, "wb")) as file:  # a raw file writes at most 2 GiB per call
            try:
                torch.save(plain_containers(content), file)
            except RuntimeError as error:  # torch still closes the archive and finds it truncated
                raise (file.error or error) from None
            file.flush()
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(checksums)


class _ArchiveFile(BufferedWriter):
    """File that remembers the first disk error, because torch might not raise it."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


RETRY_INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 30.0  # at the script's end, limit of the wait for a full disk


@dataclass(frozen=True, slots=True)
class _Order:
    point: ResumePoint
    content: dict[str, Any]
    durable: tuple[Callable[[], None], ...]  # callbacks for this epoch and replaced epochs

    def after(self, earlier: _Order) -> _Order:
        """Return this order plus the callbacks of the `earlier` order that was not written."""
        return _Order(self.point, self.content, earlier.durable + self.durable)


_open: set[CheckpointWriter] = set()  # open writers of this process


def drain_checkpoints() -> None:
    """Wait until all open writers have finished, before the process exits."""
    for writer in list(_open):
        try:
            writer.close()
        except CheckpointError as error:
            sys.stderr.write(f"[ones] {error}\n")


class CheckpointWriter:
    """Thread that writes checkpoints in order. At most one checkpoint waits for the disk.

    The training thread waits only if two epochs have ended since the writer began its last
    checkpoint. If the disk is full or unavailable, training continues: the writer retries with the
    newest state, which replaces the older states, and then reports the epochs of all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next: _Order | None = None
        self._changed = threading.Condition()
        self._failing = False
        self._closing = False
        self._error: BaseException | None = None
        self._checked = False
        _open.add(self)
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def write(
        self, point: ResumePoint, content: dict[str, Any], durable: Callable[[], None]
    ) -> None:
        """Queue `content`, which is on the host and must not change any more, for writing.

        `durable` is called in the writer's thread once this state or a newer one is on the disk. If
        an earlier state could not be written, and the disk was not the reason, it raises
        CheckpointError.
        """
        order = _Order(point, {"format": FORMAT, **content}, (durable,))
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or self._failing or self._error)
            self.check()
            self._next = order.after(self._next) if self._next else order
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the last checkpoint is written, on a full disk up to `CLOSE_TIMEOUT_S`."""
        _open.discard(self)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error that ended the writer. A full disk does not end the writer."""
        if self._error is not None:
            full = isinstance(self._error, OSError)
            hint = (
                f"free space at {self._folder}" if full else "track only states that can be pickled"
            )
            problem = f"cannot write a checkpoint: {self._error}"
            raise CheckpointError(problem, hint) from self._error

    def _run(self) -> None:
        while (order := self._take()) is not None:
            try:
                self._persist(order)
            except Exception as error:  # noqa: BLE001 - a user's state may raise anything
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _take(self) -> _Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._closing)
            order, self._next = self._next, None
            self._changed.notify_all()
            return order

    def _persist(self, order: _Order) -> None:
        """Write `order`. While the disk fails, retry with the newest order that is queued."""
        deadline: float | None = None
        while True:
            try:
                self._store(order)
            except OSError as error:
                if not self._failing:
                    sys.stderr.write(
                        f"[ones] cannot write a checkpoint: {error}; retrying, training continues\n"
                    )
                with self._changed:
                    self._failing = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._next is not None, timeout=RETRY_INTERVAL_S)
                    if self._next is not None:
                        order, self._next = self._next.after(order), None
                    if self._closing:
                        deadline = deadline or time.monotonic() + CLOSE_TIMEOUT_S
                if deadline is not None and time.monotonic() > deadline:
                    raise
            else:
                self._failing = False
                for durable in order.durable:
                    durable()
                return

    def _store(self, order: _Order) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = checkpoint_path(self._folder, order.point)
        fresh = target.with_suffix(".new")
        try:
            save_checkpoint(order.content, fresh)
            if not self._checked:
                load_checkpoint(fresh)  # detects a state that cannot be read
                self._checked = True
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
        sync_folder(self._folder)
        self._prune(order.point)

    def _prune(self, point: ResumePoint) -> None:
        """Delete checkpoints that are at least `KEPT_EPOCHS` epochs older than `point`.

        Checkpoints of groups with a higher version than the group of `point` are kept.
        """
        for path, other in list_checkpoints(self._folder):
            if other.epoch <= point.epoch - KEPT_EPOCHS and other.version <= point.version:
                path.unlink(missing_ok=True)
