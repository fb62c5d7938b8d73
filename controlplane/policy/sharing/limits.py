"""Limits on running jobs and slots, of users in all projects and of priority classes.

Rigid jobs wait while they would exceed a limit. Elastic jobs also give slots back when a limit
becomes smaller.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from controlplane.policy.api import JobView, Reason
from controlplane.policy.placement.slot_partition import slots_in_words
from controlplane.policy.sharing.caps import Ledger, words
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId
from schemas.sharing import Project, Sharing, UserShare


class Bound(NamedTuple):
    """Limit of everything that is counted under one key."""

    key: str
    code: str  # of the reason of a job that it stops
    name: str  # for users
    slots: int | None
    running: int | None = None


class Quota:
    """Jobs and slots that count towards limits. They grow while jobs are admitted.

    Args:
        has: account and slots of each job that has slots and is not admitted by `take`.
        projects: False: limits of projects do not count, because they are budgets.
    """

    def __init__(
        self,
        sharing: Sharing,
        ledger: Ledger,
        has: Mapping[JobId, tuple[str, int]],
        *,
        projects: bool,
    ) -> None:
        self._sharing = sharing
        self._projects = projects
        self._classes = ledger.classes
        self._jobs: Counter[str] = Counter()
        self._slots: Counter[str] = Counter()
        self._known: dict[tuple[str, str], list[Bound]] = {}  # by account and class
        self._next: Counter[str] = Counter()  # jobs that were admitted and have no slots yet
        for job, (account, slots) in has.items():
            self.take(job, account, slots)

    @property
    def bounds_elastic_jobs(self) -> bool:
        """True if users or classes have limits of jobs or slots."""
        limits = (self._sharing.user_limits, *self._sharing.users.values())
        users = any(one.running is not None or one.slots is not None for one in limits)
        return users or any(one.limit is not None for one in self._sharing.classes.values())

    def take(self, job: JobId, account: str, slots: int, *, starts: bool = False) -> None:
        """Count a job with these slots."""
        for bound in self._bounds(job, account):
            self._jobs[bound.key] += 1
            self._slots[bound.key] += slots
            self._next[bound.key] += starts

    def refusal(self, job: JobId, account: str, slots: int) -> Reason | None:
        """Return why another job cannot have these slots, or None if it can."""
        if not (bounds := self._bounds(job, account)):
            return None
        found = (self._exceeded(bound, slots) for bound in bounds)
        return next((reason for reason in found if reason is not None), None)

    def grow(self, jobs: Sequence[JobView]) -> Sequence[JobView]:
        """Count another slot of each job that no limit bounds. Return these jobs.

        Earlier jobs come first if a limit is reached.
        """
        total = Counter[str]()
        by_account = Counter((job.account, self._classes.get(job.job, "")) for job in jobs)
        for key, many in by_account.items():
            for bound in self._known_bounds(*key):
                total[bound.key] += many
                if (
                    bound.slots is not None
                    and self._slots[bound.key] + total[bound.key] > bound.slots
                ):
                    return [job for job in jobs if self._grow_one(job)]
        self._slots += total
        return jobs

    def _grow_one(self, job: JobView) -> bool:
        bounds = self._bounds(job.job, job.account)
        if any(one.slots is not None and self._slots[one.key] >= one.slots for one in bounds):
            return False
        for bound in bounds:
            self._slots[bound.key] += 1
        return True

    def _bounds(self, job: JobId, account: str) -> list[Bound]:
        return self._known_bounds(account, self._classes.get(job, ""))

    def _known_bounds(self, account: str, name: str) -> list[Bound]:
        key = account, name
        if key not in self._known:
            bounds = self._bounds_of(*key)
            limited = (one for one in bounds if (one.slots, one.running) != (None, None))
            self._known[key] = list(limited)
        return self._known[key]

    def _bounds_of(self, account: str, name: str) -> list[Bound]:
        """Return the limits for jobs of an account, in the class of that name."""
        project, _, user = account.partition("/")
        limits, its_class = self._sharing.limits_of(user), self._sharing.classes.get(name)
        found = [Bound(f"user {user}", "user_limit", f"user {user}", limits.slots, limits.running)]
        if its_class is not None:
            found.append(Bound(f"class {name}", "class_limit", f"class {name}", its_class.limit))
        if self._projects:
            rules = self._sharing.projects.get(project, Project())
            own = rules.users.get(user, UserShare()).limit
            found.append(Bound(account, "limit", words(account), own))
            whole = f"project {project}"
            found.append(Bound(whole, "limit", whole, rules.limit))
        return found

    def _exceeded(self, bound: Bound, slots: int) -> Reason | None:
        jobs, has, limit = self._jobs[bound.key], self._slots[bound.key], bound.slots
        if bound.running is not None and jobs >= bound.running:
            ahead = self._next[bound.key]
            text = f"{bound.name} runs {jobs - ahead} job{'s' * (jobs - ahead != 1)}"
            text += f" and {ahead} start before this one" if ahead else ""
            numbers = {"limit": float(bound.running), "has": float(jobs)}
            return Reason(bound.code, f"{text}, as many as one user may", numbers)
        if limit is None or has + slots <= limit:
            return None
        text = f"{bound.name} may have {slots_in_words(limit)} and has {has}; it needs {slots}"
        numbers = {"needs": float(slots), "limit": float(limit), "has": float(has)}
        return Reason(bound.code, text, numbers)


class Limited(NamedTuple):
    """Most slots of the elastic jobs that a limit bounds, and why some of them have to wait."""

    caps: Mapping[JobId, int] = {}
    reasons: Mapping[JobId, Reason] = {}

    def reason(self, job: JobView, cap: int) -> Reason:
        """Return why a job waits, or gives up slots."""
        before = len(job.running_on)
        if not before:
            return self.reasons[job.job]
        text = f"{'' if cap else 'paused: '}gives back {slots_in_words(before - cap)}"
        why = self.reasons[job.job].text if not cap else "its user or class has as many as it may"
        numbers = {"slots_now": float(before), "slots_then": float(cap)}
        return Reason("gave_back", f"{text}: {why}", numbers)


def limited_jobs(
    jobs: Sequence[JobView], useful: Mapping[JobId, int], quota: Quota, *, gangs: bool
) -> Turns[Limited]:
    """Find the caps of elastic jobs, which get their minimum in the given order.

    The rest goes to them one by one, always to the job with the fewest slots.
    """
    caps: dict[JobId, int] = {}
    reasons: dict[JobId, Reason] = {}
    sizes: dict[int, list[tuple[int, JobView]]] = defaultdict(list)  # jobs and places, by cap
    for place, job in enumerate(jobs):
        yield
        most = useful[job.job]
        if not most:
            continue
        refused = quota.refusal(job.job, job.account, job.least)
        if refused is not None:
            caps[job.job], reasons[job.job] = 0, refused
            continue
        whole = gangs and quota.refusal(job.job, job.account, most) is None
        size = most if whole else min(job.least, most)
        quota.take(job.job, job.account, size, starts=not job.running_on)
        caps[job.job] = size
        if size < most:
            sizes[size].append((place, job))
    while sizes:
        yield
        size = min(sizes)
        places = {job.job: place for place, job in sizes[size]}
        grown = quota.grow([job for _, job in sorted(sizes.pop(size), key=itemgetter(0))])
        caps |= dict.fromkeys([job.job for job in grown], size + 1)
        more = [(places[job.job], job) for job in grown if size + 1 < useful[job.job]]
        if more:
            sizes[size + 1] += more
    could = {job.job: max(useful[job.job], len(job.running_on)) for job in jobs}
    return Limited({name: cap for name, cap in caps.items() if cap < could[name]}, reasons)
