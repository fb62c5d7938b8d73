"""States of sweeps on this node's disk. Fetch wanted states, delete others, serve other nodes.

The files are the only record, so a restarted agent finds everything again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from nodeagent.folders import NodeFolders
from nodeagent.owned_files import acting_as, owner_of, remove_tree
from schemas.errors import OnesError
from schemas.host.state_files import (
    UNFINISHED,
    StateFile,
    check_file,
    digest_of,
    find_state,
    read_piece,
    states_in,
    sync_folder,
)
from schemas.ids import JobId
from schemas.transport.state_transfer import PIECE, FileTarget, StateServer, Stored, fetch_state
from schemas.wire.files import AskState
from schemas.wire.sweeps import StateCopied, StateNotCopied, StateRef, SweepDelta, WantedState

log = structlog.get_logger("states")
JOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
DATA: Final = "data"  # folder of staged data, next to the states
FETCHES: Final = 2  # concurrent fetches
MAX_REASON_CHARACTERS: Final = 1000  # in a report


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference between the wanted states and the files."""

    doomed: tuple[StateFile, ...]  # to delete, finished or not
    present: tuple[WantedState, ...]
    missing: tuple[WantedState, ...]


def compare(
    delta: SweepDelta, files: Iterable[StateFile], digests: Mapping[StateFile, str]
) -> Comparison:
    """Compare the state files of a job, finished or not, with the wanted states.

    Files of attempts that are in progress, or newer than the delta, are kept.
    """
    wanted = {_key(one.state) for one in delta.wanted}
    attempts = {unit.attempt for unit in delta.units}
    named = {(file.trial, file.version, digest) for file, digest in digests.items()}
    doomed = tuple(
        file
        for file in files
        if (file.trial, file.version, digests.get(file)) not in wanted
        and file.attempt not in attempts
        and file.attempt <= delta.attempts
        and not (file.attempt == 0 and file not in digests and _is_coming(file, delta))
    )
    present = tuple(one for one in delta.wanted if _key(one.state) in named)
    missing = tuple(one for one in delta.wanted if _key(one.state) not in named)
    return Comparison(doomed, present, missing)


def _key(state: StateRef) -> tuple[int, int, str]:
    return state.trial, state.version, state.digest


def _is_coming(file: StateFile, delta: SweepDelta) -> bool:
    return any(
        (one.state.trial, one.state.version) == (file.trial, file.version) for one in delta.wanted
    )


class StateKeeper:
    """States of all sweeps on this node. `publish` receives the outcome for each wanted state."""

    def __init__(
        self, folders: NodeFolders, publish: Callable[[StateCopied | StateNotCopied], None]
    ) -> None:
        self._folders = folders
        self._publish = publish
        self._newest: dict[JobId, SweepDelta] = {}
        self._reconciling: set[JobId] = set()
        self._fetching: set[tuple[JobId, StateRef]] = set()
        self._slots = asyncio.Semaphore(FETCHES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, delta: SweepDelta) -> None:
        """Apply a delta. Stop fetches that an older delta wanted and this one does not."""
        self._newest[delta.job] = delta
        if delta.job not in self._reconciling:
            self._reconciling.add(delta.job)
            self._spawn(self._reconcile(delta.job))

    def key(self, job: JobId) -> str:
        """Return the key for requests of a sweep's states. Other threads may call this."""
        return self._newest[job].states_key if job in self._newest else ""

    def forget(self, job: JobId) -> None:
        """Delete the staged data of an ended job. Its states are kept for a while."""
        self._spawn(asyncio.to_thread(remove_tree, self._folders.states(job) / DATA))

    def close(self) -> None:
        """Cancel all work."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    # --- comparison of wanted and present states

    async def _reconcile(self, job: JobId) -> None:
        """Compare repeatedly, until no newer delta arrives during a comparison."""
        folder = self._folders.states(job)
        compared: SweepDelta | None = None
        try:
            while compared is not (delta := self._newest[job]):
                compared = delta
                found = await asyncio.to_thread(_compare_as_owner, folder, delta)
                self._settle(delta, found)
        except OSError as error:
            log.warning("states could not be compared", job=job, error=str(error))
        finally:
            self._reconciling.discard(job)

    def _settle(self, delta: SweepDelta, found: Comparison) -> None:
        for wanted in found.present:
            if wanted.sources:
                self._publish(_copied(delta.job, wanted.state))
        for wanted in found.missing:
            key = (delta.job, wanted.state)
            if not wanted.sources:
                why = "the state is not on this node's disk any more"
                self._publish(_not_copied(delta.job, wanted.state, why))
            elif key not in self._fetching:
                self._fetching.add(key)
                self._spawn(self._fetch(delta.job, wanted))

    async def _fetch(self, job: JobId, wanted: WantedState) -> None:
        state = wanted.state

        def stopped() -> bool:
            newest = self._newest[job]
            return self._closed or all(one.state != state for one in newest.wanted)

        try:
            async with self._slots:
                if not stopped():
                    folder, key = self._folders.states(job), self.key(job)
                    await asyncio.to_thread(_fetch_as_owner, folder, job, key, wanted, stopped)
        except (OnesError, OSError) as error:
            if not stopped():
                log.warning("state could not be copied", job=job, trial=state.trial, why=str(error))
                self._publish(_not_copied(job, state, str(error)))
        else:
            if not stopped():
                self._publish(_copied(job, state))
        finally:
            self._fetching.discard((job, state))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- functions that run in a thread


def _compare_as_owner(folder: Path, delta: SweepDelta) -> Comparison:
    """Compare states with the rights of the folder's owner, and delete unwanted files."""
    with acting_as(owner_of(folder)):
        paths = list(states_in(folder))
        digests = {file: found for file, path in paths if (found := digest_of(path)) is not None}
        comparison = compare(delta, (file for file, _ in paths), digests)
        for file in comparison.doomed:
            for name in (file.name, file.name + UNFINISHED):
                (folder / name).unlink(missing_ok=True)
    return comparison


def _fetch_as_owner(
    folder: Path, job: JobId, key: str, wanted: WantedState, stopped: Callable[[], bool]
) -> None:
    """Fetch a state as its owner. The file appears complete and durable, or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with acting_as(owner_of(folder)):
        _fetch_into(folder, job, key, wanted, stopped)


def _fetch_into(
    folder: Path, job: JobId, key: str, wanted: WantedState, stopped: Callable[[], bool]
) -> None:
    state = wanted.state
    file = StateFile(state.trial, state.version, attempt=0)
    fresh = folder / (file.name + UNFINISHED)
    try:
        target = FileTarget(fresh)
        try:
            asked = AskState(
                job=job, trial=state.trial, version=state.version, digest=state.digest, offset=0
            )
            fetch_state(
                [source.address for source in wanted.sources],
                asked,
                key,
                target,
                lambda: check_file(fresh, state.digest),
                stopped=stopped,
            )
        finally:
            target.close()
        fresh.rename(folder / file.name)
        sync_folder(folder)
    finally:
        fresh.unlink(missing_ok=True)


# --- server for other nodes


def serve_states(
    folders: NodeFolders, key: Callable[[JobId], str], address: str, port: int
) -> StateServer | None:
    """Serve the states on this node's disk. If that is impossible, log why and return None."""

    def find(asked: AskState) -> Stored | None:
        if not JOB.fullmatch(asked.job):
            return None
        folder = folders.states(asked.job)
        with acting_as(owner_of(folder)):
            path = find_state(folder, asked.trial, asked.version, asked.digest)
            return None if path is None else Stored(*read_piece(path, asked.offset, PIECE))

    try:
        return StateServer(address, key, find, port)
    except OSError as error:
        log.warning("states cannot be served", address=address, port=port, why=str(error))
        return None


def _copied(job: JobId, state: StateRef) -> StateCopied:
    return StateCopied(job=job, trial=state.trial, version=state.version)


def _not_copied(job: JobId, state: StateRef, why: str) -> StateNotCopied:
    return StateNotCopied(
        job=job, trial=state.trial, version=state.version, reason=why[:MAX_REASON_CHARACTERS]
    )
