"""States that a sweep worker reads from memory, its node's disk or other nodes, and writes."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

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

MAX_CACHED_BYTES: Final = 256 << 20  # limit of states in memory; the newest is kept at any size
DISK_TIMEOUT_S: Final = 30.0  # retry time of a full disk, seconds
RETRY_INTERVAL_S: Final = 0.5


class StateLostError(ElasticError):
    """A valid state could not be obtained from any source."""


class DiskFullError(ElasticError):
    """The node's disk does not accept a state."""


class StateStore:
    """Cache of the states that this worker trained last; finds the states it trains next."""

    def __init__(self, job: JobId, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._lock = threading.Lock()  # the server has a thread of its own
        self._receive_buffer = MemoryTarget()  # receive buffer, reused for each state
        self._damaged: set[Path] = set()  # files
        self._cache: OrderedDict[str, tuple[bytes, Frames]] = OrderedDict()  # by digest

    # --- what others ask for

    def find(self, request: AskState) -> Sequence[bytes | bytearray | memoryview] | None:
        """Return a state's file as bytes, from memory, else from disk, for a request of any peer.

        The requested digest has to match.
        """
        if request.job != self._job:
            return None
        with self._lock:
            if (cached := self._cache.get(request.digest)) is not None:
                return (cached[0], *cached[1])
        path = find_state(self._folder, request.trial, request.version, request.digest)
        return None if path is None else [map_state(path)]

    # --- what this worker needs

    def get(self, state: StateRef, sources: Sequence[StateSource]) -> FoundState:
        """Return a state, from memory, disk or `sources`; blocks. The next call may overwrite it.

        Raises:
            StateLostError: if no source provided it.
        """
        with self._lock:
            if (cached := self._cache.get(state.digest)) is not None:
                return FoundState(cached[1])
        if (found := self._on_disk(state)) is not None:
            return found
        frames: Frames = ()

        def check() -> None:
            nonlocal frames
            frames = self._receive_buffer.frames(state.digest)

        asked = AskState(
            job=self._job, trial=state.trial, version=state.version, digest=state.digest, offset=0
        )
        try:
            fetch_state([source.address for source in sources], asked, self._receive_buffer, check)
        except (OnesError, MemoryError) as error:
            problem = (
                error.message
                if isinstance(error, OnesError)
                else f"no memory for the state: {error}"
            )
            raise StateLostError(problem, "the unit is trained again") from None
        return FoundState(frames)

    def _on_disk(self, state: StateRef) -> FoundState | None:
        path = find_state(self._folder, state.trial, state.version, state.digest)
        if path is None or path in self._damaged:
            return None
        try:
            _, frames = split_frames(map_state(path))
        except (OSError, ValueError, DamagedStateError):  # the file was deleted meanwhile
            return None
        return FileState(frames, state.digest, partial(self._drop, path))

    def _drop(self, path: Path) -> None:
        sys.stderr.write(f"[ones] {path.name} is damaged; looking for another copy\n")
        self._damaged.add(path)
        with contextlib.suppress(OSError):
            path.unlink()

    def put(self, unit: UnitOrder, result: UnitResult, limit_s: float = DISK_TIMEOUT_S) -> None:
        """Store a unit's state in memory, and durably on disk, retrying for `limit_s` seconds.

        Raises:
            DiskFullError: if the disk did not accept it.
        """
        name = unit.result
        file = StateFile(name.trial, name.version, unit.attempt)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                write_state(self._folder, file, result.frames, result.digest)
            except OSError as error:
                if time.monotonic() >= deadline:
                    problem = f"cannot write a state of {_size(result.frames)} to {self._folder}"
                    hint = "free space there"
                    raise DiskFullError(f"{problem}: {error.strerror}", hint) from None
                time.sleep(RETRY_INTERVAL_S)
            else:
                break
        self._cache_state(result.digest, result.frames)

    def _cache_state(self, digest: str, frames: Frames) -> None:
        with self._lock:
            self._cache[digest] = (header_of(frames, digest), frames)
            self._cache.move_to_end(digest)
            while len(self._cache) > 1 and self._bytes() > MAX_CACHED_BYTES:
                self._cache.popitem(last=False)

    def _bytes(self) -> int:
        return sum(len(frame) for _, frames in self._cache.values() for frame in frames)


class FoundState:
    """A state that was verified when it was received."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    def is_valid(self) -> bool:
        """Return whether the state has the expected digest; may wait."""
        return True


class FileState(FoundState):
    """A state on this node's disk, which is verified in a thread while it is trained on."""

    def __init__(self, frames: Frames, digest: str, reject: Callable[[], None]) -> None:
        super().__init__(frames)
        self._wanted = digest
        self._reject = reject
        self._sound = False
        self._thread = threading.Thread(target=self._check, name="digest", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        whole = hashlib.sha256()
        for frame in self.frames:
            whole.update(frame)
        self._sound = whole.hexdigest() == self._wanted

    def is_valid(self) -> bool:
        """Wait for the verification and return its result; an invalid file is dropped."""
        self._thread.join()
        if not self._sound:
            self._reject()
        return self._sound


class StateWait:
    """A state that is fetched in a thread of its own."""

    def __init__(self, get: Callable[[], FoundState]) -> None:
        """Start to fetch; `state` raises what `get` raises."""
        self._get = get
        self._state: FoundState | None = None
        self._error: Exception | None = None
        self.seconds = 0.0  # duration of the fetch
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._state = self._get()
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self._error = error
        self.seconds = time.monotonic() - began

    def state(self) -> FoundState:
        """Wait for the state."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._state is not None  # noqa: S101 - set if there was no error
        return self._state


def _size(frames: Frames) -> str:
    return f"{sum(map(len, frames)) / 1e6:.1f} MB"
