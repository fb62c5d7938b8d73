"""Accounts and their caps: the slots of each job if the jobs can use more than the budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from controlplane.policy.api import JobView
from schemas.ids import JobId, Seconds


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Usage and slots of accounts that views of jobs do not show."""

    usage: Mapping[str, float] = {}  # of each account, decayed slot seconds
    outside: Mapping[str, int] = {}  # slots of each account's jobs that the view omits
    began_at: Mapping[JobId, Seconds] = {}  # when a job got its first slots after it had none
    holders: Mapping[JobId, tuple[str, int]] = {}  # account and slots of each job of `outside`
    classes: Mapping[JobId, str] = {}  # of the jobs that have one
    ranks: Mapping[JobId, int] = {}  # of their classes, where they are not 0

    def began(self, job: JobView) -> float:
        """Return when the job's turn began; if that is unknown, its turn is over."""
        return self.began_at.get(job.job, -math.inf)


def useful_slots(job: JobView, capacity: int, *, gangs: bool) -> int:
    """Return the most slots that the job can use, or 0 if the cluster is too small for it."""
    if job.least > capacity:
        return 0
    most = job.wanted if gangs else job.most
    return max(job.least, min(most, job.batch_limit, capacity))


def is_in_turn(job: JobView, ledger: Ledger, now: Seconds, turn_s: float) -> bool:
    """True if the job has had slots for less than a turn."""
    return bool(job.running_on) and now - ledger.began(job) < turn_s


def turn_order(
    jobs: Sequence[JobView], ledger: Ledger, now: Seconds, turn_s: float
) -> list[JobView]:
    """Return an account's jobs in the order in which they get their minimum slots.

    Jobs of a class of higher rank go first. Running jobs keep their slots for a turn. Then a job
    that has been paused for a turn goes first. Other jobs wait in the order of their submission.
    """

    def key(job: JobView) -> tuple[int, int, float, float]:
        first = -ledger.ranks.get(job.job, 0)
        if job.running_on:
            place = 0 if is_in_turn(job, ledger, now, turn_s) else 2
            return (first, place, ledger.began(job), job.submitted_at)
        paused = job.last_batch > 0 or job.samples_done > 0
        if paused and now >= turn_end(job, ledger, turn_s):
            return (first, 1, job.moved_at, job.submitted_at)
        return (first, 3, 0.0, job.submitted_at)

    return sorted(jobs, key=key)


def turn_end(job: JobView, ledger: Ledger, turn_s: float) -> Seconds:
    """Return when a running job's turn ends, or when a job has waited for a turn."""
    return Seconds((ledger.began(job) if job.running_on else job.moved_at) + turn_s)


def deal_caps(
    jobs: Sequence[JobView], budget: int, useful: Mapping[JobId, int], *, gangs: bool
) -> dict[JobId, int]:
    """Return the most slots of each job; 0: it has to wait. Their sum is at most `budget`.

    Each job gets its minimum if that still fits, in the given order. The rest goes to these jobs
    one by one, always to the job with the fewest slots. A job of a fixed size (`gangs`) gets all
    slots that it wants, or its minimum if the budget is smaller than that.
    """
    caps: dict[JobId, int] = {}
    room = budget
    for job in jobs:
        most = useful[job.job]
        size = most if gangs and most <= budget else min(job.least, most)
        caps[job.job] = size if size <= room else 0
        room -= caps[job.job]
    growing = [job.job for job in jobs if 0 < caps[job.job] < useful[job.job]]
    level = bisect_right(
        range(1, max((useful[name] for name in growing), default=0)),
        room,
        key=lambda size: sum(_grown(caps[name], useful[name], size) for name in growing),
    )
    for name in growing:
        more = _grown(caps[name], useful[name], level)
        caps[name], room = caps[name] + more, room - more
    for name in [one for one in growing if caps[one] == level < useful[one]][:room]:
        caps[name] += 1
    return caps


def _grown(cap: int, useful: int, size: int) -> int:
    """Return how many slots a job with `cap` slots lacks to have `size`, or all useful ones."""
    return max(0, min(size, useful) - cap)


def words(account: str) -> str:
    """Return an account in words, such as `user alice of project vision`, or `user alice`."""
    project, _, user = account.partition("/")
    return f"user {user}" if project == user else f"user {user} of project {project}"
