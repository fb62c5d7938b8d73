"""How long things may take, and what is waited for now: the one place that knows a deadline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from controlplane.core.inputs import Input, RescaleExpired, StartExpired
from controlplane.core.model.rescale import RescalePhase
from schemas.ids import JobId, Seconds, Version

START_LIMIT_S: Final = 1800.0  # from the order to a formed group
PREPARE_LIMIT_S: Final = 600.0  # newcomers import, build, open their data
SWITCH_LIMIT_S: Final = 1800.0  # the boundary comes; steps and evaluations may be long
QUIESCE_LIMIT_S: Final = 1800.0  # a long evaluation may have to end first
LIMITS_S: Final = {
    RescalePhase.PREPARING: PREPARE_LIMIT_S,
    RescalePhase.SWITCHING: SWITCH_LIMIT_S,
    RescalePhase.QUIESCING: QUIESCE_LIMIT_S,
    RescalePhase.REJOINING: SWITCH_LIMIT_S,
}
RETRY_FIRST_S: Final = 1.0  # before something that failed is tried again; doubles
RETRY_LONGEST_S: Final = 60.0


class Deadline(msgspec.Struct, kw_only=True):
    """Until when version `version` of a job's group is waited for."""

    at: Seconds
    limit_s: float  # how long from when it was set
    version: Version


class Deadlines(msgspec.Struct, kw_only=True):
    """What has to happen in time: at most one thing for each job."""

    starts: dict[JobId, Deadline] = {}  # in order of their orders
    rescales: dict[JobId, Deadline] = {}

    def expect_start(self, job: JobId, version: Version, now: Seconds) -> None:
        """A group was ordered: it has to form.

        Args:
            job: that waits for its group; what was waited for before is replaced.
            version: of the group that was ordered.
            now: when, in seconds; the deadline is `START_LIMIT_S` later.
        """
        at = Seconds(now + START_LIMIT_S)
        self.starts[job] = Deadline(at=at, limit_s=START_LIMIT_S, version=version)

    def expect_rescale(
        self, job: JobId, version: Version, phase: RescalePhase, now: Seconds
    ) -> None:
        """A change came to `phase`: it has to leave it.

        Args:
            phase: one that is not the end of a change.
        """
        limit_s = LIMITS_S[phase]
        at = Seconds(now + limit_s)
        self.rescales[job] = Deadline(at=at, limit_s=limit_s, version=version)

    def clear(self, job: JobId) -> None:
        """Nothing of `job` is waited for any more.

        Args:
            job: may have nothing to wait for.
        """
        self.starts.pop(job, None)
        self.rescales.pop(job, None)

    def begin_anew(self, now: Seconds) -> None:
        """Nothing could happen while no controller was there: every wait begins again.

        Args:
            now: when the new controller began, in seconds; each wait has its whole limit from then
                on.
        """
        for deadline in (*self.starts.values(), *self.rescales.values()):
            deadline.at = Seconds(now + deadline.limit_s)

    def passed(self, now: Seconds, order: Iterable[JobId]) -> list[Input]:
        """What did not happen in time, as inputs.

        Args:
            now: deadlines up to then have passed.
            order: of the jobs whose groups change.
        """
        starts: list[Input] = [
            StartExpired(job=job, version=deadline.version)
            for job, deadline in self.starts.items()
            if deadline.at <= now
        ]
        late = {job: each for job, each in self.rescales.items() if each.at <= now}
        inside = [job for job in order if job in late] if len(late) > 1 else list(late)
        return [*starts, *(RescaleExpired(job=j, version=late[j].version) for j in inside)]


def pause_before(tries: int) -> float:
    """Seconds before the next try, after `tries` that failed.

    Args:
        tries: at least 1. The pause doubles from `RETRY_FIRST_S` up to `RETRY_LONGEST_S`.
    """
    return float(min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** min(tries - 1, 10)))
