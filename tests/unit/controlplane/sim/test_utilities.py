"""What generated jobs are worth, and what a policy that admits them makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from controlplane.core.history import JobLeft, Record
from controlplane.core.inputs import Input
from controlplane.core.model.job import Job
from controlplane.journal.database import input_from
from controlplane.journal.replay import replay
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, trace_of
from controlplane.sim.traces.generators import generate, with_utilities
from schemas.codec import encode
from schemas.ids import Seconds

CROWDED = Scenario(
    jobs=8,
    interval_s=20.0,
    warm_up=0.0,
    nodes=(NodeGroup(count=1, slots=4),),
    knowledge="L3",
    utilities=True,
)


def test_utilities_are_drawn_as_in_the_paper_and_leave_the_trace_as_it_is() -> None:
    plain = generate(jobs=2000, seed=3)

    trace = with_utilities(plain, 3, lambda job: 100.0 * job.slots)

    assert [(job.name, job.at, job.workload) for job in trace.jobs] == [
        (job.name, job.at, job.workload) for job in plain.jobs
    ]
    worth = [job.utility for job in trace.jobs if job.utility is not None]
    assert len(worth) == 2000
    assert all(1.0 <= each.value <= 100.0 for each in worth)
    windows = [
        each.deadline_s / 100.0 / job.slots for each, job in zip(worth, trace.jobs, strict=True)
    ]
    assert (min(windows), max(windows)) == pytest.approx((1.5, 6.0), abs=0.02)
    per_slot = [each.decay * each.deadline_s / 8.0 for each in worth]
    kinds = [sum(low <= decay <= high for decay in per_slot) for low, high in ((0, 0), (3.9, 6.1))]
    assert kinds == pytest.approx([200, 700], abs=60)
    assert with_utilities(plain, 3, lambda job: 100.0 * job.slots) == trace


def test_only_generated_jobs_are_given_utilities() -> None:
    with pytest.raises(TraceError, match="generated trace; write columns value, deadline_s"):
        Scenario(utilities=True, workload="mine.csv")


def test_in_a_crowd_admission_is_worth_more_than_a_queue_and_a_journal_keeps_its_promises() -> None:
    trace = trace_of(CROWDED, 3)

    told: list[tuple[Seconds, Input]] = []
    admitted = simulate(
        "oasis", CROWDED, 3, trace=trace, record=lambda now, event, _: told.append((now, event))
    ).jobs
    queued = simulate("fifo", CROWDED, 3, trace=trace).jobs

    assert {job.state for job in admitted} == {"succeeded", "rejected"}
    assert sum(job.worth or 0.0 for job in admitted) > sum(job.worth or 0.0 for job in queued)
    promised = [job for job in admitted if job.promised_at is not None]
    assert len(promised) > len(admitted) / 2
    broken = [job for job in promised if (job.ended_at or 0.0) > (job.promised_at or 0.0)]
    assert len(broken) <= 1

    left: list[Job] = []

    def keep(records: Sequence[Record]) -> None:
        left.extend(record.last for record in records if isinstance(record, JobLeft))

    again = replay(((now, input_from(encode(event))) for now, event in told), keep).state
    ends = {
        job.spec.name: (job.phase.value, job.promised_end and job.promised_end.first)
        for job in [*left, *again.jobs.values()]
    }
    assert ends == {job.job: (job.state, job.promised_at) for job in admitted}
