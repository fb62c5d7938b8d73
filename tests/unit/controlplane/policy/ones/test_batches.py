"""Batches that are chosen again on the same slots, and how fast they may grow."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import ClusterView, EpochSeen, JobView, Plan, StepsSeen
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from controlplane.policy.placement.slot_partition import split
from controlplane.prediction.throughput import SpeedModel
from schemas.epochs import StepTimes
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, epoch_seen, row_of, view_of
from tests.unit.controlplane.policy.tables import cases

FIRST, LIMIT, LOUD = 64, 8192, 1e9  # batches; a noise scale at which the largest batch is the best


def a_job(job: JobId = A, *on: SlotId, batch: int = FIRST, **changes: Any) -> JobView:
    """1 to 4 slots, warm, with a batch of 64 that may grow."""
    how = {"family": "f", "epoch": 1, "batch_limit": LIMIT, "local_limit": LIMIT, **changes}
    return job_view(job, slots=(1, 4), running_on=split(batch, on) if on else {}, **how)


def steps(
    job: JobId = A, *, batch: int = FIRST, group: int = 1, step: int = 10, **changes: Any
) -> StepsSeen:
    """Telemetry of a group that trained so many steps with that batch: each takes 0.1 s."""
    seen = StepsSeen(
        job=job, family="f", group=group, slots=1, nodes=1, global_batch=batch, step=step,
        samples_done=64 * step, samples_per_s=batch / 0.1, noise_scale=LOUD, group_steps=10,
    )  # fmt: skip
    return msgspec.structs.replace(seen, **changes)


def shown(*jobs: JobView, version: int = 1) -> ClusterView:
    return view_of(row_of(2, 2), *jobs, version=version)


def policy_of(*events: StepsSeen | EpochSeen, jobs: tuple[JobView, ...], **options: Any) -> Ones:
    """It saw these jobs, and then what happened to them."""
    policy = Ones(OnesOptions(**options))
    policy.plan(shown(*jobs), Seconds(0.0))
    for event in events:
        policy.observe(event, NOW)
    return policy


def batches(plan: Plan) -> dict[JobId, int]:
    return {job: sum(placed.values()) for job, placed in plan.local_batch.items()}


# --- which jobs, and when


def test_noise_doubles_the_batch_of_a_job_on_its_slots() -> None:
    job = a_job(A, S0, T0)

    plan = policy_of(steps(), jobs=(job,)).batches(shown(job), NOW)

    assert plan.local_batch == {A: {S0: 64, T0: 64}}
    assert plan.reasons[A].code == "batch"
    numbers = plan.reasons[A].numbers
    assert [numbers[name] for name in ("slots_then", "batch_now", "batch_then")] == [2, 64, 128]
    assert plan.reasons[A].text.startswith("batch up to 128 (")


def test_only_jobs_with_new_reports_get_new_batches() -> None:
    jobs = (a_job(A, S0), a_job(B, S1))
    policy = policy_of(steps(A), jobs=jobs)

    first, again = policy.batches(shown(*jobs), NOW), policy.batches(shown(*jobs), NOW)
    policy.observe(steps(B), NOW)
    other = policy.batches(shown(*jobs), NOW)

    assert [batches(plan) for plan in (first, again, other)] == [{A: 128}, {}, {B: 128}]


@cases(
    "changes, batch",
    gated=({"moved_at": NOW, "placed_at": NOW}, {A: 128}),
    not_movable=({"movable": False}, {}),
    before_its_retry=({"retry_at": Seconds(NOW + 1.0)}, {}),
    waiting=({"running_on": {}}, {}),
)
def test_jobs_on_slots_that_may_change_get_another_batch_also_while_gated(
    changes: dict[str, Any], batch: dict[JobId, int]
) -> None:
    job = msgspec.structs.replace(a_job(A, S0), **changes)

    plan = policy_of(steps(), jobs=(job,)).batches(shown(job), NOW)

    assert batches(plan) == batch
    assert batch or plan == Plan(based_on=1)


def test_a_plan_and_batches_alone_choose_the_same_batch() -> None:
    """So a live search, which reads whole plans, gives what a simulation in rounds does."""
    job = a_job(A, S0, moved_at=NOW, placed_at=NOW, most=1)
    view = view_of(row_of(1), job)

    alone = policy_of(steps(), jobs=(job,)).batches(view, NOW)
    whole = policy_of(steps(), jobs=(job,)).plan(view, NOW)

    assert alone.local_batch == whole.local_batch == {A: {S0: 128}}
    assert alone.reasons[A].numbers.keys() <= whole.reasons[A].numbers.keys()
    assert alone.reasons[A].text == whole.reasons[A].text


def test_a_change_of_the_batch_closes_no_gate() -> None:
    """Its gate counts from when it got its slots."""
    job = a_job(A, S0, moved_at=NOW, placed_at=Seconds(NOW - 60.0))

    assert policy_of(jobs=(job,)).plan(shown(job), NOW).wake_at is None


# --- how fast they grow


# (step, steps that the group has measured) of reports with the same batch
@cases(
    "batch, reports, grown",
    enough_steps_with_it=(128, [(15, 4), (19, 8), (21, 10)], [{}, {}, {A: 256}]),
    without_a_count_from_the_first_report=(64, [(40, 0), (49, 0), (50, 0)], [{}, {}, {A: 128}]),
)
def test_a_batch_doubles_after_enough_steps_with_it(
    batch: int, reports: list[tuple[int, int]], grown: list[dict[JobId, int]]
) -> None:
    job, before = a_job(A, S0, batch=batch), [steps()] * (batch > FIRST)
    policy = policy_of(*before, jobs=(a_job(A, S0),))
    found = []
    for step, measured in reports:
        policy.observe(steps(batch=batch, group=2, step=step, group_steps=measured), NOW)
        found.append(batches(policy.batches(shown(job, version=step), NOW)))

    assert found == grown


@settings(max_examples=examples(60), deadline=None)
@given(
    asked=st.lists(
        st.sampled_from(["batches", "plan", "epoch", "report", "shrink", "wait", "view"]),
        min_size=1, max_size=12,
    ),
    begin=st.sampled_from([64, 100, 256, 1024]),
)  # fmt: skip
def test_no_batch_more_than_doubles_without_steps_between(asked: list[str], begin: int) -> None:
    job = a_job(A, S0, batch=begin)
    policy = policy_of(steps(batch=begin), jobs=(job,))
    version, largest = 1, begin
    for number, what in enumerate(asked, 2):
        now, batch = Seconds(NOW + 40.0 * number), sum(job.running_on.values())
        if what in {"batches", "plan"}:
            view = shown(job, version=version)
            plan = policy.batches(view, now) if what == "batches" else policy.plan(view, now)
            if placed := plan.local_batch.get(A):
                job = msgspec.structs.replace(
                    job, running_on=dict(placed), last_batch=sum(placed.values())
                )
        elif what == "epoch":
            policy.observe(epoch(batch), now)
        elif what == "report":  # of the group before, or of one that trained nothing yet
            policy.observe(steps(batch=batch, group=number, group_steps=0), now)
        elif what == "shrink":
            job = msgspec.structs.replace(job, running_on={S0: max(1, batch // 2)})
        elif what == "wait":
            job = msgspec.structs.replace(job, running_on={})
        version = number
        largest = max(largest, sum(job.running_on.values()))

    assert largest <= 2 * begin


def epoch(batch: int) -> EpochSeen:
    usual = {"family": "f", "samples_per_s": 640.0, "noise_scale": LOUD}
    return epoch_seen(A, global_batch=batch, whole=False, **usual)


# --- in how many passes


def test_a_measured_pass_predicts_steps_of_several_passes() -> None:
    """A pass of 32 samples takes 0.1 s alone, and no reduction: two of them 0.2 s."""
    policy = policy_of(jobs=(a_job(),))
    times = StepTimes(pass_s=0.1, sync_s=0.0, local_batch=32, passes=2)
    policy.observe(steps(batch=64, samples_per_s=64 / 0.2, step_times=times), NOW)

    model = policy.estimates.families["f"].speed_model(FIRST)
    one, two = np.array([1, 1]), np.array([32.0, 64.0])

    assert model.step_s(one, one, two).tolist() == pytest.approx([0.1, 0.1 + computing(model, 32)])


def computing(model: SpeedModel, samples: float) -> float:
    return model.compute[0] + model.compute[1] * samples


def test_an_epoch_of_several_passes_measures_no_pass() -> None:
    times = StepTimes(pass_s=0.1, sync_s=0.0, local_batch=32, passes=2)
    policy = policy_of(steps(batch=64, step_times=times), jobs=(a_job(A, S0),))
    epoch_of_64 = msgspec.structs.replace(epoch(64), whole=True)
    policy.observe(epoch_of_64, NOW)

    assert {key[2] for key in policy.estimates.families["f"].means} == {32}


# --- noise scales


@cases(
    "events, epoch, noise_scale",
    the_last_report=([steps(noise_scale=1024.0), steps(noise_scale=4096.0, step=11)], 1, 4096.0),
    the_prior=([], 0, 4 * FIRST),
    relatives=([steps(B, noise_scale=1000.0)], 0, pytest.approx(1000, rel=0.05)),
)
def test_a_noise_scale_is_the_last_report_or_that_of_relatives_or_the_prior(
    events: list[StepsSeen], epoch: int, noise_scale: Any
) -> None:
    job = a_job(A, S0, epoch=epoch)

    assert policy_of(*events, jobs=(job,)).estimates.noise_scale(job) == noise_scale
