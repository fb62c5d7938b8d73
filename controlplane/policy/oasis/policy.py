"""OASiS: admit a job if its value exceeds the cost of its slots, and promise a completion time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from controlplane.policy.api import (
    Budget,
    ClusterView,
    JobEnded,
    JobView,
    Plan,
    Policy,
    PolicyEvent,
    SearchStats,
)
from controlplane.policy.oasis.admission import Admissions, Decisions
from controlplane.policy.oasis.job_estimates import OasisEstimates
from controlplane.policy.oasis.job_plans import IntervalGrid, grid_of
from controlplane.policy.options import OasisOptions
from controlplane.policy.placement.placers import make_placer
from controlplane.policy.placement.slot_partition import Partition, partition_of, useful_slots
from schemas.ids import JobId, Seconds

if TYPE_CHECKING:
    from numpy.random import Generator


# Jobs that may be changed or started: measured, promised by promised end, and others.
Claims = tuple[Sequence[JobView], Sequence[JobView], Sequence[JobView]]


def sizes_now(
    partition: Partition,
    claims: Claims,
    due: Mapping[JobId, int],
    later: Mapping[JobId, int],
    gains: Callable[[JobView, int], bool],
) -> dict[JobId, int]:
    """Return the number of slots of each job. The total is at most `partition.room`.

    Jobs that are `measured` run first, on their minimum. A promised job gets the slots that its
    schedule has for this interval (`due`). The remaining slots are also assigned. First, running
    jobs keep their slots, promised jobs start early with the size of their next interval (`later`),
    and other jobs get their minimum. Then all jobs grow while `gains` is True.
    """
    measured, promised, others = claims
    sizes: dict[JobId, int] = {}
    left = partition.room

    def give(job: JobView, slots: int) -> None:
        nonlocal left
        have = sizes.get(job.job, 0)
        most = max(job.least, useful_slots(job, partition))
        wanted = min(max(slots, have), most, have + left)
        if wanted >= job.least and wanted > have:
            sizes[job.job] = wanted
            left -= wanted - have

    for job in measured:
        give(job, job.least)
    for job in promised:
        give(job, due.get(job.job, 0))
    for job in promised:
        give(job, len(job.running_on))
    for job in promised:
        if not sizes.get(job.job):
            give(job, max(job.least, later.get(job.job, 0)))
            give(job, job.least)
    for job in sorted(others, key=lambda job: not job.running_on):
        give(job, job.least)
    for job in others:
        give(job, len(job.running_on))
    for jobs in (promised, others):
        growing = [job for job in jobs if sizes.get(job.job)]
        while growing and left:  # in turn, each job that gains by it gets one more slot
            before = dict(sizes)
            for job in growing:
                if left and gains(job, sizes[job.job] + 1):
                    give(job, sizes[job.job] + 1)
            growing = [job for job in growing if sizes[job.job] > before[job.job]]
    return sizes


JOBS_PER_STEP: Final = 8  # number of jobs to decide about per step of a budget
MIN_GAIN: Final = 0.5  # least gain of one more slot, as a share of the speed of one slot
MIN_GAIN_UNTRIED: Final = 0.25  # lower for untried sizes, so that these sizes are measured


class Oasis(Policy):
    """Online primal-dual admission (OASiS: Bao, Peng, Wu, Li, INFOCOM '18).

    `improve` makes decisions: it checks promises against the current state, plans jobs again if
    necessary, and admits or rejects new jobs. `plan` turns the decisions into sizes for the
    current interval.
    """

    def __init__(self, options: OasisOptions | None = None) -> None:
        self.options = options or OasisOptions()
        self._estimates = OasisEstimates()
        self._admissions = Admissions(self.options, self._estimates)
        self._placer = make_placer(self.options.placer)
        self._decided = Decisions()
        self._decisions = 0

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and lengths from `event`."""
        self._estimates.observe(event, now)
        self._placer.observe(event, now)
        if isinstance(event, JobEnded):
            self._admissions.forget(event.job)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Decide about undecided jobs; return True if some are still undecided.

        A budget of generations decides about all jobs. Each step of a budget decides about
        `JOBS_PER_STEP` jobs.
        """
        many = len(view.jobs) if budget.generations else JOBS_PER_STEP * budget.steps
        self._decided = self._admissions.decide(view, now, at_most=many)
        self._decisions += 1
        return self._decided.more

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan with the slots promised for this interval; other jobs get the rest."""
        partition, decided = partition_of(view, now), self._decided
        grid = grid_of(view, now, self.options.interval_s, self.options.horizon)
        rejected = {
            name: reason
            for name, reason in decided.rejected.items()
            if (job := view.jobs.get(name)) is not None and job.undecided and job.movable
        }
        claims = self._claims(partition, grid, rejected)
        due = {name: each.size(grid.first) for name, each in decided.schedules.items()}
        later = {name: each.next_size(grid.first) for name, each in decided.schedules.items()}
        sizes = sizes_now(partition, claims, due, later, self._gains)
        wake_at = self._next_interval(view, grid)
        plan = self._placer.plan(partition, sizes, self._why, wake_at)
        reasons = {name: why for name, why in plan.reasons.items() if name not in rejected}
        promises = self._current_promises(view, grid)
        return replace(plan, reasons=reasons, rejected=rejected, promised=promises)

    def stats(self) -> SearchStats:
        """Return statistics; the fitness is the total value at the expected completion times."""
        worth = self._decided.worth
        return SearchStats(
            generations=self._decisions,
            best_fitness=worth,
            mean_fitness=worth,
            incumbent_fitness=worth,
        )

    # --- claims

    def _claims(
        self, partition: Partition, grid: IntervalGrid, rejected: Container[JobId]
    ) -> Claims:
        """Return the jobs by claim; undecided jobs are left out unless they are measured now."""
        measured, promised, others = list[JobView](), list[JobView](), list[JobView]()
        decided, most = self._decided, max(1, grid.slots // self.options.measured_at_once)
        jobs = [*partition.running, *partition.waiting]
        for job in sorted(jobs, key=lambda job: (job.submitted_at, job.job)):
            if job.job in rejected:
                continue
            if job.job in decided.measured and len(measured) < most:
                measured.append(job)
            elif job.job in decided.promised or job.promised_at is not None:
                promised.append(job)
            elif not job.undecided:
                others.append(job)
        promised.sort(key=lambda job: decided.promised.get(job.job, job.promised_at or 0.0))
        return measured, promised, others

    def _gains(self, job: JobView, slots: int) -> bool:
        """True if the last of `slots` slots gains enough; False if no speed was measured."""
        if not self._estimates.knows_speed(job):
            return False
        one, before, then = self._estimates.samples_per_s(job, (1, slots - 1, slots), (1, 1, 1))
        tried = self._estimates.largest(job) >= slots
        return bool(then - before >= (MIN_GAIN if tried else MIN_GAIN_UNTRIED) * one)

    def _next_interval(self, view: ClusterView, grid: IntervalGrid) -> Seconds | None:
        """Return when the next interval begins; None if no job has a schedule or is undecided."""
        waits = any(job.undecided for job in view.jobs.values())
        planned = any(name in view.jobs for name in self._decided.schedules)
        return Seconds(grid.end_of(grid.first)) if planned or waits else None

    # --- results

    def _current_promises(self, view: ClusterView, grid: IntervalGrid) -> dict[JobId, Seconds]:
        """Return each job's promised completion time, or its expected one if that is later.

        If a time differs by less than an interval from the previous forecast (`expected_at`), the
        previous forecast is returned.
        """
        promises: dict[JobId, Seconds] = {}
        for name, promised in self._decided.promised.items():
            job, expected = view.jobs.get(name), self._decided.expected.get(name, promised)
            if job is not None:
                now, known = max(promised, expected), job.expected_at
                near = known is not None and abs(known - now) < grid.interval_s
                promises[name] = known if near and known is not None else Seconds(now)
        return promises

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        decided, numbers = self._decided, dict[str, float]()
        if (end := decided.promised.get(job.job)) is not None:
            numbers = {"promised": end, "expected": decided.expected.get(job.job, end)}
            numbers |= decided.numbers.get(job.job, {})
            words = "its schedule, by which its end is promised"
            return (words if slots else "its schedule has no slots for it now"), numbers
        if job.job in decided.measured:
            words = "to be measured: its speed or its length is unknown"
            return (words if slots else "to be measured after other jobs"), numbers
        if job.undecided:
            return "to be admitted after a job of its family is measured", numbers
        why = decided.unplanned.get(job.job, "it states no utility")
        return f"{why}: it gets slots that are not promised", numbers
