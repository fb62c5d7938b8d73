"""Keeps what ended jobs left on a node within bounds, as its settings say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from nodeagent.agent_settings import AgentSettings
from nodeagent.job_workspaces import MARK
from nodeagent.leftovers import Kept, Leftovers
from nodeagent.worker_folders import NodeFolders
from schemas.ids import JobId
from schemas.retention import FileSeen

log = structlog.get_logger("ended_jobs")
FIRST_S: Final = 60.0  # after the start: by then the controller said what lives
FIND_S: Final = 2.0
LOOK_S: Final = 600.0  # at most
SHORTEST_LOOK_S: Final = 10.0
STATES_S: Final = 3600.0  # at least: trials that graduated begin with them


class EndedJobs:
    """Working directories, states of sweeps and checkpoints, each kept by itself.

    Args:
        busy: the jobs that are known to this node now.
    """

    def __init__(
        self,
        folders: NodeFolders,
        settings: Callable[[], AgentSettings],
        busy: Callable[[], set[JobId]],
    ) -> None:
        def work() -> Kept:
            now = settings()
            return Kept(now.keep_work_s, now.keep_work_bytes)

        def states() -> Kept:
            now = settings()
            return Kept(max(now.keep_work_s, STATES_S), now.keep_work_bytes)

        def checkpoints() -> Kept:
            now = settings()
            return Kept(now.keep_checkpoints_s, now.keep_checkpoints_bytes)

        self._busy = busy
        self._found: set[JobId] = set()  # as the agent began, and not heard of since
        self._own = (Leftovers(folders.work, ours=MARK), Leftovers(folders.all_states))
        self._keepers = (
            Keeper(self._own[0], work, busy),
            Keeper(self._own[1], states, busy),
            Keeper(Leftovers(folders.checkpoints, shared=True), checkpoints, busy),
        )

    async def find(self) -> list[JobId]:
        """Look who left something here, unless the disk takes long to say it.

        Returns:
            Sweeps that have ended.
        """
        with contextlib.suppress(TimeoutError):
            found, ended = await asyncio.wait_for(asyncio.to_thread(self._look), FIND_S)
            self._found = set(found)
            return ended
        return []

    def _look(self) -> tuple[list[JobId], list[JobId]]:
        return [job for area in self._own for job in area.unmarked()], self._own[1].marked()

    @property
    def unended(self) -> tuple[JobId, ...]:
        """Jobs that left something here and are not known to have ended, for the hello."""
        return tuple(sorted(self._found | self._busy()))

    def note(self, job: JobId, *, ended: bool) -> None:
        """Nothing of a job runs here any more, and it will not come back; or it begins."""
        self._found.discard(job)
        for keeper in self._keepers:
            keeper.note(job, ended=ended)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What runs for ever."""
        return [keeper.run() for keeper in self._keepers]


class Keeper:
    """Keeps one folder within its bounds, in a thread, one thing after the other.

    Args:
        keep: what stays, asked anew each time.
        busy: the jobs that are known to this node now.
    """

    def __init__(
        self, area: Leftovers, keep: Callable[[], Kept], busy: Callable[[], set[JobId]]
    ) -> None:
        self._area = area
        self._keep = keep
        self._busy = busy
        self._noted: dict[JobId, bool] = {}
        self._wake = asyncio.Event()
        self._sizes: dict[str, FileSeen] = {}

    def note(self, job: JobId, *, ended: bool) -> None:
        """See `EndedJobs.note`."""
        self._noted.pop(job, None)
        self._noted[job] = ended
        self._wake.set()

    async def run(self) -> None:
        """Mark and delete, for ever."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + FIRST_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), look_at - loop.time())
            self._wake.clear()
            keep = self._keep()
            if (due := loop.time() >= look_at) or not keep.seconds:
                look_at = loop.time() + min(LOOK_S, max(keep.seconds, SHORTEST_LOOK_S))
            await self.turn(keep, look=due or not keep.seconds)

    async def turn(self, keep: Kept, *, look: bool) -> None:
        """Mark those of which something was heard; what the disk does not take is tried again.

        Args:
            look: whether to delete what is beyond that, too.
        """
        noted, self._noted = self._noted, {}
        left = await asyncio.to_thread(self._mark, noted)
        self._noted = {**left, **self._noted}
        if look:
            await asyncio.to_thread(self._delete, keep, self._busy())

    def _mark(self, noted: dict[JobId, bool]) -> dict[JobId, bool]:
        left = dict(noted)
        try:
            for job, ended in noted.items():
                self._area.note(job, ended=ended)
                del left[job]
        except OSError as error:
            log.warning("job not marked", ended=noted, why=str(error))
        return left

    def _delete(self, keep: Kept, busy: set[JobId]) -> None:
        try:
            gone = self._area.delete(keep, busy, time.time(), self._sizes)
        except FileNotFoundError:  # nothing was ever put there
            return
        except OSError as error:
            log.warning("what ended jobs left stays", why=str(error))
            return
        if gone:
            log.info("what ended jobs left is deleted", folder=str(self._area.root), jobs=gone)
