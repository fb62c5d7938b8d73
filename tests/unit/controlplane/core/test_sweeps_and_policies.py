"""Slots move both ways between a sweep and ordinary jobs, under policies as they are shipped."""

from __future__ import annotations

import pytest
from numpy.random import default_rng

from controlplane.core import policy_events
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import difference
from controlplane.policy.api import Budget, PlanTaken, Policy
from controlplane.policy.registry import make
from schemas.ids import JobId, Rank, Seconds
from schemas.sweeps import RandomSearch
from schemas.wire.agent import StepsReported
from tests.support.builders import cancelled
from tests.support.sweep_world import SweepCluster, sweep_job

SPEED = 7.5  # samples per second of a slot, as units of two seconds have it


class Shared:
    """A cluster of four slots whose policy is asked every second; units take two."""

    def __init__(self, policy: str) -> None:
        self.cluster = SweepCluster(n1=4)
        self.policy: Policy = make(policy, {})
        self.rng = default_rng(0)

    def pass_time(self, seconds: int) -> None:
        cluster = self.cluster
        for second in range(seconds):
            cluster.later(1.0)
            now = Seconds(cluster.controller.now)
            if second % 2:
                self._end_units()
            for job in cluster.controller.state.jobs.values():
                if job.phase is Phase.RUNNING:
                    self._tell_speed(job.job, now)
            self._tell_events(now)
            view = cluster.controller.view()
            self.policy.improve(view, Budget(generations=20), self.rng, now)
            plan = difference(self.policy.plan(view, now), cluster.controller.state, now)
            if not plan.empty:
                cluster.take(PlanProposed(plan=plan))
                slots = {name: tuple(placed) for name, placed in plan.local_batch.items()}
                self.policy.observe(PlanTaken(waiting=(), slots=slots), now)
            cluster.settle()

    def _end_units(self) -> None:
        for node in self.cluster.world.nodes.values():
            for process in node.living():
                if process.unit is not None and process.begun:
                    process.end()
        self.cluster.settle()

    def _tell_events(self, now: Seconds) -> None:
        records, self.cluster.records = self.cluster.records, []
        for record in records:
            seen = policy_events.event_of_record(record, self.cluster.controller.state)
            if seen is not None:
                self.policy.observe(seen, now)

    def _tell_speed(self, name: JobId, now: Seconds) -> None:
        job = self.cluster.job(name)
        assert job.group is not None
        first = job.workers[job.group.members[0].worker]
        steps = StepsReported(
            job=name,
            version=first.version,
            rank=Rank(first.rank),
            group=job.group.version,
            epoch=1,
            step=int(now),
            samples_done=int(now * SPEED),
            samples_per_s=SPEED * len(job.group.members),
            train_loss=None,
            global_batch=job.group.global_batch,
            lr=0.1,
        )
        seen = policy_events.event_of_steps(steps, self.cluster.controller.state)
        if seen is not None:
            self.policy.observe(seen, now)

    def slots_of(self, name: JobId) -> int:
        group = self.cluster.job(name).group
        return len(group.members) if group else 0


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "seconds"), [("ones", 40), ("fair", 40), ("goodput", 260)])
def test_a_sweep_takes_idle_slots_gives_them_up_and_takes_them_again(
    policy: str, seconds: int
) -> None:
    shared = Shared(policy)
    sweep = shared.cluster.submit(**sweep_job((1, 4), searcher=RandomSearch(8), epochs=500))
    shared.pass_time(seconds)
    alone = shared.slots_of(sweep)

    jobs = [shared.cluster.submit(name, slots=(1, 2)) for name in ("b", "c")]
    shared.pass_time(seconds)
    beside = shared.slots_of(sweep)
    others = [shared.slots_of(job) for job in jobs]
    for job in jobs:
        shared.cluster.take(cancelled(job))
    shared.pass_time(seconds)

    assert alone == 4
    assert 1 <= beside < 4
    assert all(others)
    assert shared.slots_of(sweep) == 4
    assert shared.cluster.controller.sweep_history(sweep).units_repeated == 0
    assert shared.cluster.controller.replayed() == shared.cluster.controller.state


def test_a_policy_of_fixed_sizes_gives_a_sweep_the_slots_that_it_wants() -> None:
    shared = Shared("fifo")
    sweep = shared.cluster.submit(**sweep_job((1, 4)), slots_wanted=3)
    job = shared.cluster.submit("b", slots=(1, 2))

    shared.pass_time(5)
    sizes = shared.slots_of(sweep), shared.slots_of(job)
    shared.pass_time(20)

    assert sizes == (3, 1)
    assert shared.cluster.job(sweep).phase is Phase.SUCCEEDED


def test_slots_that_a_sweep_has_no_trials_for_go_to_others() -> None:
    shared = Shared("ones")
    few = shared.cluster.submit(**sweep_job((1, 4), searcher=RandomSearch(2), epochs=500))
    shared.pass_time(30)
    alone = shared.slots_of(few)
    job = shared.cluster.submit("b", slots=(1, 2))

    shared.pass_time(30)

    assert alone == 2
    assert shared.slots_of(job) == 2
    assert shared.slots_of(few) >= 1
