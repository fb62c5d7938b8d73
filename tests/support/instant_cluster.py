"""A cluster in which changes take no time: enough to see where a policy leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, JobView, Plan, Policy, Reason, SlotView
from schemas.ids import JobId, NodeId, Seconds, SlotId
from tests.support.builders import changed_job
from tests.support.views import taken_slots

ENOUGH = 20  # questions at one moment


class ToldOracle:
    """An oracle: jobs last as long as it was told, and n slots make them n times as fast."""

    def __init__(self, steps: Mapping[JobId, float] | None = None, default: float = 100.0) -> None:
        self.steps = dict(steps or {})
        self._default = default

    def remaining_steps(self, job: JobView) -> float:
        return self.steps.get(job.job, self._default)

    def step_s(self, job: JobView, slots: int) -> float:
        return 1.0 / slots

    def remaining_s(self, job: JobView, slots: int) -> float:
        return self.remaining_steps(job) * self.step_s(job, slots)

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        return 1.0


@dataclass
class InstantCluster:
    """Follows a policy's plans as the core does: stops first, then starts on what is free."""

    policy: Policy
    slots: Sequence[SlotView]
    jobs: dict[JobId, JobView] = field(default_factory=dict)
    now: Seconds = Seconds(0.0)
    plans: list[Plan] = field(default_factory=list)
    rejected: dict[JobId, Reason] = field(default_factory=dict)

    def view(self) -> ClusterView:
        return ClusterView(
            version=len(self.plans),
            slots=tuple(taken_slots(self.slots, self.jobs.values())),
            jobs=dict(self.jobs),
        )

    def submit(self, *jobs: JobView) -> None:
        for job in jobs:
            self.jobs[job.job] = changed_job(job, moved_at=self.now)

    def end(self, *names: JobId) -> None:
        for name in names:
            del self.jobs[name]

    def settle(self) -> dict[JobId, list[SlotId]]:
        """Ask and follow until nothing changes; who has what then."""
        for _ in range(ENOUGH):
            view = self.view()
            self.policy.improve(view, Budget(generations=1), default_rng(0), self.now)
            plan = self.policy.plan(view, self.now)
            self.plans.append(plan)
            if not self._follow(plan):
                return {
                    name: list(job.running_on) for name, job in self.jobs.items() if job.running_on
                }
        raise AssertionError("the policy does not come to rest")

    def at(self, now: float) -> dict[JobId, list[SlotId]]:
        """The same, later."""
        self.now = Seconds(now)
        return self.settle()

    def sizes(self, now: float) -> dict[JobId, int]:
        """Number of slots of each job that has any, later."""
        return {name: len(slots) for name, slots in self.at(now).items()}

    def _follow(self, plan: Plan) -> bool:
        before = dict(self.jobs)
        held = {slot for job in before.values() for slot in job.running_on}
        for name, job in before.items():
            target = plan.local_batch.get(name, {})
            stops = name in plan.restart and target.keys() != job.running_on.keys()
            if job.running_on:
                self._set(name, {} if stops else target)
            elif not target.keys() & held:
                self._set(name, target)
        for name in plan.rejected:
            self.rejected[name] = plan.rejected[name]
            del self.jobs[name]
        for name, end in plan.promised.items():
            job = self.jobs[name]
            first = end if job.promised_at is None else job.promised_at
            self.jobs[name] = msgspec.structs.replace(job, promised_at=first, expected_at=end)
        owned = [slot for job in self.jobs.values() for slot in job.running_on]
        assert len(owned) == len(set(owned))
        return self.jobs != before

    def _set(self, name: JobId, placed: Mapping[SlotId, int]) -> None:
        job = self.jobs[name]
        if dict(placed) != dict(job.running_on):
            passed = self.now - job.moved_at
            runs = bool(job.running_on)
            self.jobs[name] = msgspec.structs.replace(
                job,
                running_on=dict(placed),
                slot_s=job.served(self.now),
                ran_s=job.ran_s + passed * runs,
                waited_s=job.waited_s + passed * (not runs),
                moved_at=self.now,
                placed_at=job.placed_at if placed.keys() == job.running_on.keys() else self.now,
            )
