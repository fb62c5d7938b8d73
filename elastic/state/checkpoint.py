"""The way back: a snapshot on the training thread, an atomic write elsewhere."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from elastic.training_errors import CheckpointError
from schemas.groups import ResumePoint
from schemas.ids import Version

FORMAT: Final = 1
KEPT: Final = 2  # the newest, and the one before it
RETRY_S: Final = 1.0
CLOSE_S: Final = 30.0  # how long a script's end waits for a disk that takes nothing


def path_of(folder: Path, point: ResumePoint) -> Path:
    """Where the checkpoint of an epoch lies."""
    return folder / f"epoch-{point.epoch:06d}.v{point.version}.pt"


def stored(folder: Path) -> list[tuple[Path, ResumePoint]]:
    """All checkpoints in `folder`, oldest first."""
    found = []
    for path in folder.glob("epoch-*.v*.pt"):
        epoch, _, version = path.stem.removeprefix("epoch-").partition(".v")
        if epoch.isdigit() and version.isdigit():
            found.append((path, ResumePoint(epoch=int(epoch), version=Version(int(version)))))
    return sorted(found, key=lambda entry: (entry[1].epoch, entry[1].version))


def find(folder: Path, point: ResumePoint) -> Path:
    """The file to resume from: the one of `point`, or a later one of the same group.

    A worker whose node was cut off goes on and drops old epochs, while its reports wait. What it
    wrote meanwhile continues `point`, so nothing is lost by starting from there.
    """
    exact = path_of(folder, point)
    if exact.exists():
        return exact
    later = [
        path
        for path, other in stored(folder)
        if other.epoch >= point.epoch and other.version <= point.version
    ]
    return later[-1] if later else exact


def copied(state: Any) -> Any:
    """`state` with every tensor copied to the host, so that training may go on meanwhile."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.generic):
        return state.item()  # a checkpoint is read back without executing anything, numpy included
    if numpy is not None and isinstance(state, numpy.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def random_state() -> dict[str, Any]:
    """The state of every generator that a script is likely to use."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since `random_state` gave `state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415 - only where the script used it before

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002


def load(path: Path) -> dict[str, Any]:
    """The checkpoint in `path`; nothing in it is executed.

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


@dataclass(frozen=True, slots=True)
class _Order:
    point: ResumePoint
    content: dict[str, Any]
    durable: tuple[Callable[[], None], ...]  # of this epoch, and of those that it stands for

    def after(self, earlier: _Order) -> _Order:
        """This order in place of an `earlier` one that could not be written."""
        return _Order(self.point, self.content, earlier.durable + self.durable)


_open: set[Writer] = set()  # of this process


def drain() -> None:
    """Let writes that are under way come to an end, as a process that leaves should."""
    for writer in list(_open):
        try:
            writer.close()
        except CheckpointError as error:
            sys.stderr.write(f"[ones] {error}\n")


class Writer:
    """Writes checkpoints in a thread of its own, in order, at most one behind.

    The training thread waits only when two epochs have ended since the disk took the last one. A
    disk that takes nothing (full, away) does not stop training: the newest state is tried again
    and stands for those before it, whose epochs are reported with it.
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
        """Write `content`, already copied, and call `durable` in the writer's thread.

        Raises:
            CheckpointError: if an earlier state could not be written, whatever the disk.
        """
        order = _Order(point, {"format": FORMAT, **content}, (durable,))
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or self._failing or self._error)
            self._raise()
            self._next = order.after(self._next) if self._next else order
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what came between a state and the disk, unless it is only full.

        Raises:
            CheckpointError: if an earlier state could not be written, whatever the disk.
        """
        with self._changed:
            self._raise()

    def close(self) -> None:
        """Wait for what is under way.

        Raises:
            CheckpointError: if the last state could not be written within `CLOSE_S`.
        """
        _open.discard(self)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            full = isinstance(self._error, OSError)
            hint = f"free space at {self._folder}" if full else "track only plain states"
            what = f"cannot write a checkpoint: {self._error}"
            raise CheckpointError(what, hint) from self._error

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
        """Write `order`, or what has replaced it by the time the disk takes something again."""
        given_up_at: float | None = None
        while True:
            try:
                self._store(order)
            except OSError as error:
                if not self._failing:
                    sys.stderr.write(f"[ones] checkpoint: {error}; tried again, training goes on\n")
                with self._changed:
                    self._failing = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._next is not None, timeout=RETRY_S)
                    if self._next is not None:
                        order, self._next = self._next.after(order), None
                    if self._closing:
                        given_up_at = given_up_at or time.monotonic() + CLOSE_S
                if given_up_at is not None and time.monotonic() > given_up_at:
                    raise
            else:
                self._failing = False
                for durable in order.durable:
                    durable()
                return

    def _store(self, order: _Order) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = path_of(self._folder, order.point)
        fresh = target.with_suffix(".new")
        try:
            save(order.content, fresh)
            self._check(fresh)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
        _sync_folder(self._folder)
        self._prune(order.point)

    def _check(self, path: Path) -> None:
        """Read the first checkpoint back: one that cannot be read is no checkpoint."""
        if not self._checked:
            load(path)
            self._checked = True

    def _prune(self, point: ResumePoint) -> None:
        """Drop what is older than the last two epochs, but nothing of a later group."""
        for path, other in stored(self._folder):
            if other.epoch <= point.epoch - KEPT and other.version <= point.version:
                path.unlink(missing_ok=True)


def save(content: dict[str, Any], path: Path) -> None:
    """Write `content` durably, with as little of the training thread's time as torch allows.

    Without the archive's own checksums: they cost half of the write or more, under the lock that
    the training thread needs, and the rename keeps half a file from being taken for a whole.
    """
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with path.open("wb", buffering=0) as file:
            torch.save(content, file)
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(checksums)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
