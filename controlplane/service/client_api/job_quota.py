"""How many jobs one user may have that have not ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from controlplane.core.state import State
from schemas.errors import DeniedError

COUNTED_AGAIN_S: Final = 1.0  # at the earliest: thousands of jobs are not counted for each refusal


class JobQuota:
    """Counts a user's jobs when that many could be there, and only then.

    Args:
        state: that the next submission meets.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        state: Callable[[], State],
        most: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._most = most
        self._clock = clock
        self._at_most: dict[str, int] = {}  # what was counted, and what came since
        self._counted_at: dict[str, float] = {}

    def take(self, user: str) -> None:
        """One more job is about to be submitted.

        Raises:
            DeniedError: if it has as many as may be.
        """
        most = self._most()
        if self._at_most.get(user, most) >= most:
            now = self._clock()
            if now - self._counted_at.get(user, -COUNTED_AGAIN_S) >= COUNTED_AGAIN_S:
                jobs = self._state().jobs.values()
                self._at_most[user] = sum(job.user == user and not job.ended for job in jobs)
                self._counted_at[user] = now
        if self._at_most[user] >= most:
            what = f"{user} has {most} jobs that have not ended, as many as one user may"
            raise DeniedError(what, "wait for some of them, or cancel them (limits.live_jobs)")
        self._at_most[user] += 1
