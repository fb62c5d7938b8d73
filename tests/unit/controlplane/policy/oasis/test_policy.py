"""Policy `oasis`: admission, promises, and the use of idle slots."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import Budget, JobView
from controlplane.policy.oasis.job_plans import grid_of
from controlplane.policy.oasis.policy import Oasis, sizes_now
from controlplane.policy.options import OasisOptions
from controlplane.policy.placement.slot_partition import partition_of
from schemas.ids import JobId, Seconds
from schemas.jobs import Utility
from tests.support.builders import S0, changed_job, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, epoch_seen, row_of, steps_seen, view_of

RATE: Final = 100.0  # samples per second on each slot of a job of family f
OPTIONS: Final = OasisOptions(interval_s=10.0, horizon=60, start_stall_s=0.0, l=1e-3, u=1.0)
SURE: Final = Utility(value=10.0, deadline_s=300.0, decay=0.1)
A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")


def taught(options: OasisOptions = OPTIONS) -> Oasis:
    """Policy that knows family f: n slots are n times as fast."""
    policy = Oasis(options)
    for slots in (1, 2, 4):
        seen = epoch_seen(JobId("f-0"), family="f", slots=slots, samples_per_s=RATE * slots)
        policy.observe(seen, Seconds(0.0))
    return policy


def asking(
    job: JobId, seconds: float, utility: Utility | None = SURE, *, at: float = 0.0, **changes: Any
) -> JobView:
    """Job that takes so long on one slot."""
    fields = {"slots": (1, 4), "batch_size": 64, "batch_limit": 64, "local_limit": 64, **changes}
    return job_view(
        job, at, family="f", utility=utility, stop_samples=int(seconds * RATE), **fields
    )


def cluster(*nodes: int) -> InstantCluster:
    return InstantCluster(taught(), row_of(*(nodes or (4,))))


# --- admission


def test_a_worthwhile_job_starts_and_gets_a_promise() -> None:
    here = cluster()
    here.submit(asking(A, 60.0))

    assert list(here.settle()) == [A]

    assert here.rejected == {}
    promised = here.jobs[A].promised_at
    assert promised is not None
    assert 60.0 / 4 <= promised <= SURE.deadline_s


def test_a_job_without_value_at_its_end_is_rejected_with_an_accepted_window() -> None:
    here = cluster()
    here.submit(asking(A, 400.0, Utility(value=10.0, deadline_s=30.0, decay=1.0)))

    here.settle()

    reason = here.rejected[A]
    assert reason.text == (
        "it would be done at 00:01:50 UTC, its value is gone by 00:00:32 UTC; "
        "a window that would be accepted: deadline_s >= 193"
    )
    assert reason.numbers["end"] == 110.0


def test_a_job_that_started_meanwhile_is_not_rejected() -> None:
    policy, hopeless = taught(), asking(A, 400.0, Utility(value=10.0, deadline_s=30.0, decay=1.0))
    waits = view_of(row_of(4), hopeless)
    policy.improve(waits, Budget(generations=1), default_rng(0), Seconds(0.0))
    runs = view_of(row_of(4), msgspec.structs.replace(hopeless, running_on={S0: 64}))

    plans = [policy.plan(view, Seconds(0.0)) for view in (waits, runs)]

    assert [list(plan.rejected) for plan in plans] == [[A], []]
    assert list(plans[1].local_batch) == [A]


@settings(max_examples=examples(25), deadline=None)
@given(
    seconds=st.floats(20.0, 2000.0),
    value=st.floats(0.5, 100.0),
    deadline_s=st.floats(1.0, 200.0),
    decay=st.floats(0.01, 2.0),
    before=st.lists(st.floats(50.0, 500.0), max_size=3),
)
def test_a_suggested_deadline_or_value_is_accepted(
    seconds: float, value: float, deadline_s: float, decay: float, before: list[float]
) -> None:
    here = cluster()
    for number, busy in enumerate(before):
        here.submit(asking(JobId(f"x-{number}"), busy, Utility(value=100.0)))
    here.settle()
    here.submit(asking(A, seconds, Utility(value=value, deadline_s=deadline_s, decay=decay)))
    here.settle()
    if A not in here.rejected:
        return

    numbers = here.rejected[A].numbers
    if "accepted_deadline_s" in numbers:
        better = Utility(value=value, deadline_s=numbers["accepted_deadline_s"], decay=decay)
    elif "accepted_value" in numbers:
        better = Utility(value=numbers["accepted_value"], deadline_s=deadline_s, decay=decay)
    else:
        return
    here.submit(asking(B, seconds, better, at=here.now))
    here.settle()

    assert B not in here.rejected


def test_promised_slots_raise_the_value_that_is_needed() -> None:
    soon = {"deadline_s": 60.0, "decay": 1.0}
    here = cluster()
    here.submit(asking(A, 150.0, Utility(value=100.0, **soon)))
    here.settle()

    here.submit(asking(B, 60.0, Utility(value=0.5, **soon)))
    here.submit(asking(C, 60.0, Utility(value=50.0, **soon)))
    here.settle()

    assert list(here.rejected) == [B]
    assert "less than the price of its slots" in here.rejected[B].text
    assert here.jobs[C].promised_at is not None


def test_a_job_without_a_utility_gets_no_promise_and_makes_room() -> None:
    here = cluster()
    here.submit(asking(A, 1e9, None))

    assert here.settle() == {A: [slot.slot for slot in row_of(4)]}
    assert (here.rejected, here.jobs[A].promised_at) == ({}, None)

    here.submit(asking(B, 120.0, Utility(value=100.0, deadline_s=45.0, decay=1.0)))
    held = here.settle()

    assert len(held[B]) >= 3
    assert len(held.get(A, [])) == 4 - len(held[B])


# --- unknown speeds and lengths


def test_one_job_of_an_unknown_family_is_measured_first() -> None:
    here = cluster()
    here.submit(
        *(changed_job(asking(j, 60.0, at=at), family="g") for j, at in ((A, 0.0), (B, 1.0)))
    )

    assert list(here.settle()) == [A]

    reasons = here.plans[0].reasons
    assert "to be measured" in reasons[A].text
    assert reasons[B].text == "waits: to be admitted after a job of its family is measured"
    assert here.jobs[A].promised_at is None
    for step, at in ((1, 8.0), (2, 9.0)):
        seen = steps_seen(A, family="g", step=step, samples_done=step * 100)
        here.policy.observe(seen, Seconds(at))
    here.at(10.0)
    assert all(job.promised_at is not None for job in here.jobs.values())


def test_a_job_of_unknown_length_runs_without_a_promise() -> None:
    here = cluster()
    endless = msgspec.structs.replace(asking(A, 60.0), stop_samples=None, last_batch=64)
    here.submit(endless)
    here.settle()
    here.submit(asking(B, 60.0, at=1.0))

    here.at(1.0)

    assert here.jobs[A].promised_at is None
    assert here.jobs[B].promised_at is not None
    text = here.plans[0].reasons[A].text
    assert text.endswith("its length is unknown: it gets slots that are not promised")


# --- promises


def test_a_promise_survives_a_restart_and_a_later_expectation() -> None:
    here = cluster()
    here.submit(asking(A, 60.0))
    here.settle()
    promised = here.jobs[A].promised_at
    assert promised is not None
    here.policy = taught()

    here.at(1.0)

    assert (here.jobs[A].promised_at, here.jobs[A].expected_at) == (promised, promised)
    assert here.plans[-1].promised == {A: promised}

    here.at(promised - 10.0)  # without any progress
    assert here.jobs[A].promised_at == promised
    assert promised < (here.jobs[A].expected_at or 0.0) <= promised + 100.0


def test_promises_are_planned_again_after_a_lost_node() -> None:
    here = cluster(2, 2)
    here.submit(asking(A, 100.0), asking(B, 100.0))
    here.settle()
    before = {name: job.promised_at for name, job in here.jobs.items()}
    here.slots = row_of(2)
    for name in before:
        here.jobs[name] = msgspec.structs.replace(here.jobs[name], running_on={})

    held = here.at(5.0)

    assert sum(len(slots) for slots in held.values()) == 2
    assert {name: job.promised_at for name, job in here.jobs.items()} == before


UTILITIES = (None, Utility(value=5.0), SURE, Utility(value=90.0, deadline_s=60.0, decay=0.5))
JOBS = st.tuples(st.floats(1.0, 600.0), st.sampled_from(UTILITIES), st.integers(1, 3))


@settings(max_examples=examples(25), deadline=None)
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=8),
    nodes=st.sampled_from([(4,), (2, 2), (1, 3, 2)]),
    gap_s=st.sampled_from([0.0, 7.0, 40.0]),
)
def test_no_interval_is_promised_twice(
    jobs: list[tuple[float, Utility | None, int]], nodes: tuple[int, ...], gap_s: float
) -> None:
    policy = taught()
    here = InstantCluster(policy, row_of(*nodes))
    for number, (seconds, utility, least) in enumerate(jobs):
        name = JobId(f"j-{number}")
        here.submit(asking(name, seconds, utility, at=here.now, slots=(least, 4)))
        held = here.settle()

        assert sum(len(slots) for slots in held.values()) <= sum(nodes)
        grid = grid_of(here.view(), here.now, OPTIONS.interval_s, OPTIONS.horizon)
        used = np.zeros((OPTIONS.horizon, len(nodes)), dtype=np.int64)
        schedules = policy._decided.schedules
        assert all(grid.take(used, schedule) for schedule in schedules.values())
        assert schedules.keys() <= here.jobs.keys()
        here.at(here.now + gap_s)


def test_decisions_do_not_depend_on_the_seed_and_end_after_few_steps() -> None:
    view = view_of(row_of(4), *(asking(JobId(f"j-{n}"), 30.0 + n, at=float(n)) for n in range(20)))
    plans = []
    for seed in (1, 2):
        policy, steps = taught(), 1
        while policy.improve(view, Budget(steps=1), default_rng(seed), Seconds(20.0)):
            steps += 1
        assert steps == 3
        plans.append(msgspec.msgpack.encode(policy.plan(view, Seconds(20.0))))

    assert plans[0] == plans[1]


def test_idle_slots_go_to_jobs_that_gain_by_them() -> None:
    waits, runs, other = asking(A, 60.0), asking(B, 60.0), asking(C, 60.0, None)
    view = view_of(row_of(6), waits, runs, other)
    partition = partition_of(view, Seconds(0.0))

    sizes = sizes_now(
        partition, ([], [waits, runs], [other]), {B: 2}, {A: 3}, lambda _, slots: slots <= 2
    )

    assert sizes == {B: 2, A: 3, C: 1}
