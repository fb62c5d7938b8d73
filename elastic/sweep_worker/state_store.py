"""Store of a sweep worker's states, which come from memory, its node's disk or other nodes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from elastic.collectives.background import Background
from elastic.sweep_worker.unit import digest, size
from elastic.sweep_worker.unit_runner import UnitResult
from elastic.training_errors import ElasticError
from schemas.errors import OnesError
from schemas.host.state_files import (
    DamagedStateError,
    Frames,
    StateFile,
    find_state,
    header_of,
    map_state,
    split_frames,
    write_state,
)
from schemas.ids import JobId
from schemas.transport.state_transfer import MemoryTarget, fetch_state
from schemas.wire.files import AskState
from schemas.wire.sweeps import StateRef, StateSource, UnitOrder

MAX_CACHED_BYTES: Final = 256 << 20  # limit of cached states; the newest may exceed it
DISK_TIMEOUT_S: Final = 30.0  # limit for retries on a full disk
RETRY_INTERVAL_S: Final = 0.5


class StateLostError(ElasticError):
    """Raised if no source provided a valid copy of the state."""


class DiskFullError(ElasticError):
    """Raised if the node's disk does not accept a state."""


def fetch_frames(target: MemoryTarget, sources: Sequence[str], asked: AskState, key: str) -> Frames:
    """Fetch a state from the first of `sources` (HOST:PORT) that provides it."""
    frames: Frames = ()

    def check() -> None:
        nonlocal frames
        frames = target.frames(asked.digest)

    fetch_state(sources, asked, key, target, check)
    return frames


class StateStore:
    """Cache of the states that this worker trained last, and access to all other states."""

    def __init__(self, job: JobId, folder: Path) -> None:
        self.key = ""  # for requests of states; set with each unit
        self._job = job
        self._folder = folder
        self._lock = threading.Lock()  # because the server runs in another thread
        self._receive_buffer = MemoryTarget()  # reused for each received state
        self._damaged: set[Path] = set()  # damaged files
        self._cache: OrderedDict[str, tuple[bytes, Frames]] = OrderedDict()  # keyed by digest

    # --- requests of other workers

    def key_of(self, job: JobId) -> str:
        """Return the key for requests of states of `job`, or "" if this is another job."""
        return self.key if job == self._job else ""

    def find(self, request: AskState) -> Sequence[bytes | bytearray | memoryview] | None:
        """Return the bytes of a state's file, from memory or disk, for a peer; None if unknown."""
        with self._lock:
            if (cached := self._cache.get(request.digest)) is not None:
                return (cached[0], *cached[1])
        path = find_state(self._folder, request.trial, request.version, request.digest)
        return None if path is None else [map_state(path)]

    # --- states for this worker

    def get(self, state: StateRef, sources: Sequence[StateSource]) -> FoundState:
        """Return a state from memory, disk or `sources`, or raise StateLostError.

        The next call may overwrite the returned state.
        """
        with self._lock:
            if (cached := self._cache.get(state.digest)) is not None:
                return FoundState(cached[1])
        if (found := self._on_disk(state)) is not None:
            return found
        asked = AskState(
            job=self._job, trial=state.trial, version=state.version, digest=state.digest, offset=0
        )
        try:
            addresses = [source.address for source in sources]
            return FoundState(fetch_frames(self._receive_buffer, addresses, asked, self.key))
        except (OnesError, MemoryError) as error:
            no_memory = f"no memory for the state: {error}"
            problem = error.message if isinstance(error, OnesError) else no_memory
            raise StateLostError(problem, "the unit is trained again") from None

    def _on_disk(self, state: StateRef) -> FoundState | None:
        path = find_state(self._folder, state.trial, state.version, state.digest)
        if path is None or path in self._damaged:
            return None
        try:
            _, frames = split_frames(map_state(path))
        except (OSError, ValueError, DamagedStateError):  # deleted after `find_state`
            return None
        return FoundState(frames, partial(self._verify, path, frames, state.digest))

    def _verify(self, path: Path, frames: Frames, wanted: str) -> bool:
        """Return whether a file has the digest `wanted`. If it has another, delete the file."""
        if digest(frames) == wanted:
            return True
        sys.stderr.write(f"[ones] {path.name} is damaged; looking for another copy\n")
        self._damaged.add(path)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def put(self, unit: UnitOrder, result: UnitResult, limit_s: float = DISK_TIMEOUT_S) -> None:
        """Write a unit's state durably to the disk, and store it in memory.

        If the disk is full, it retries for `limit_s` seconds and then raises DiskFullError.
        """
        name = unit.result
        file = StateFile(name.trial, name.version, unit.attempt)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                write_state(self._folder, file, result.frames, result.digest)
            except OSError as error:
                if time.monotonic() >= deadline:
                    state = f"a state of {size(result.frames) / 1e6:.1f} MB"
                    problem = f"cannot write {state} to {self._folder}: {error.strerror}"
                    raise DiskFullError(problem, "free space there") from None
                time.sleep(RETRY_INTERVAL_S)
            else:
                break
        self._cache_state(result.digest, result.frames)

    def _cache_state(self, digest: str, frames: Frames) -> None:
        with self._lock:
            self._cache[digest] = (header_of(frames, digest), frames)
            self._cache.move_to_end(digest)
            while len(self._cache) > 1 and (
                sum(size(cached) for _, cached in self._cache.values()) > MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)


class FoundState:
    """A state to train on. If it is from a file, `verify` checks the file during the training.

    `verify` is None if the state was verified when it was received.
    """

    def __init__(self, frames: Frames, verify: Callable[[], bool] | None = None) -> None:
        self.frames = frames
        self._verification = None if verify is None else Background(verify, "digest")

    def is_valid(self) -> bool:
        """Return whether the state has the expected digest; wait until its check has ended."""
        return self._verification is None or self._verification.result()
