"""Arrivals, distributions and utilities of generated traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.core.history import JobLeft, Record
from controlplane.core.inputs import Input
from controlplane.core.model.job import Job
from controlplane.journal.database import input_from
from controlplane.journal.replay import replay
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, trace_of
from controlplane.sim.traces import generators
from schemas.codec import encode
from schemas.ids import Seconds


@pytest.mark.parametrize("process", generators.PROCESSES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), jobs=st.integers(1, 50), mean_s=st.floats(1e-3, 1e6))
def test_times_grow_and_depend_on_the_seed(
    process: str, seed: int, jobs: int, mean_s: float
) -> None:
    found = generators.PROCESSES[process](default_rng(seed), jobs, mean_s)

    assert len(found) == jobs
    assert (np.diff(found, prepend=0.0) >= -1e-6 * mean_s).all()
    assert (found == generators.PROCESSES[process](default_rng(seed), jobs, mean_s)).all()


@pytest.mark.parametrize("process", generators.PROCESSES)
def test_a_process_has_the_given_mean_interval(process: str) -> None:
    found = generators.PROCESSES[process](default_rng(1), 100_000, 30.0)

    assert found[-1] / 100_000 == pytest.approx(30.0, rel=0.02)


def test_jobs_of_google_arrive_in_groups_of_three_on_average() -> None:
    found = generators.google(default_rng(2), 30_000, 30.0)

    assert 30_000 / np.unique(found).size == pytest.approx(3.0, rel=0.03)


def test_gaps_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    gaps = np.diff(generators.poisson(default_rng(1), 50_000, 30.0))

    assert gaps.std() == pytest.approx(30.0, rel=0.02)


def test_a_burst_arrives_at_once_and_the_last_may_be_smaller() -> None:
    _, sizes = np.unique(generators.bursts(default_rng(1), 9, 30.0), return_counts=True)

    assert sizes.tolist() == [4, 4, 1]


def test_gaps_of_philly_have_a_heavier_tail_than_exponential_gaps() -> None:
    gaps = np.diff(generators.philly(default_rng(1), 50_000, 30.0))

    assert gaps.std() > 1.7 * 30.0
    assert np.median(gaps) < 0.15 * 30.0  # ln 2 for exponential ones
    assert generators.sample_gaps(default_rng(1), 200_000).mean() == pytest.approx(
        generators.mean_gap_s(), rel=0.01
    )


def test_gpu_times_have_the_quantiles_of_the_table() -> None:
    found = generators.sample(default_rng(1), 200_000)

    assert len(generators.SHARES) == len(generators.GPU_TIME_S) == len(generators.GAP_S)
    for table in (generators.SHARES, generators.GPU_TIME_S, generators.GAP_S):
        assert list(table) == sorted(table)
    for share in (0.1, 0.5, 0.9, 0.99):
        wanted = generators.GPU_TIME_S[generators.SHARES.index(share)]
        assert np.quantile(found, share) == pytest.approx(wanted, rel=0.06)
    assert 1.0 <= found.min() <= found.max() <= generators.GPU_TIME_S[-1]


CROWDED = Scenario(
    jobs=8, interval_s=20.0, warm_up=0.0, nodes=(NodeGroup(count=1, slots=4),), knowledge="L3",
    utilities=True,
)  # fmt: skip


def test_utilities_are_drawn_as_in_the_paper_and_leave_the_trace_as_it_is() -> None:
    plain = generators.generate(jobs=2000, seed=3)

    trace = generators.with_utilities(plain, 3, lambda job: 100.0 * job.slots)

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
    assert generators.with_utilities(plain, 3, lambda job: 100.0 * job.slots) == trace


def test_only_generated_jobs_get_utilities() -> None:
    with pytest.raises(TraceError, match="generated trace; write columns value, deadline_s"):
        Scenario(utilities=True, workload="mine.csv")


def test_admission_beats_a_queue_and_a_journal_keeps_promises() -> None:
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
