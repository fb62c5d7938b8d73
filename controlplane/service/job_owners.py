"""Whose a job is, whether it is here or has left: looked up for every right."""

from __future__ import annotations

from typing import Final

from controlplane.core.model.job import JobOwner
from controlplane.service.commit_loop import CommitLoop
from schemas.ids import JobId

REMEMBERED: Final = 10_000  # of those that left: it never changes


class JobOwners:
    """Answers from the newest state, else from the journal."""

    def __init__(self, commit_loop: CommitLoop) -> None:
        self._commit_loop = commit_loop
        self._left: dict[JobId, JobOwner] = {}

    def of(self, name: JobId) -> JobOwner | None:
        """Whose a job is; None if there is none, or it is not kept any more.

        Raises:
            JournalError: if the journal cannot be read.
        """
        loop = self._commit_loop
        job = loop.reactor.state.jobs.get(name) or loop.committed.state.jobs.get(name)
        if job is not None:
            return job.owner
        known = self._left.get(name)
        if known is None and (known := loop.reader.ended.owner(name)) is not None:
            if len(self._left) >= REMEMBERED:
                self._left.clear()
            self._left[name] = known
        return known
