"""Problems under each reading of the paper."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.policy.api import Plan, PlanTaken, StepsSeen
from controlplane.policy.ones_paper.candidates import mean_draw, within_limits, work_left
from controlplane.policy.options import LITERAL, OnesPaperOptions
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B
from tests.support.views import planned, steps_seen, view_of
from tests.unit.controlplane.policy.ones_paper.problems import SLOTS, problem_of, seen, warm_job

# --- options


def test_literal_readings_are_options() -> None:
    literal = OnesPaperOptions(**LITERAL)

    assert msgspec.structs.asdict(literal).items() >= LITERAL.items()
    assert literal != OnesPaperOptions()


# --- T = Y / X


def test_only_a_fitted_speed_is_sublinear_in_slots() -> None:
    events = (seen(1, 64, 100.0), seen(2, 128, 150.0), seen(4, 256, 200.0))
    job = warm_job(on=1, last_batch=512)
    options: dict[str, Any] = {"events": events, "scale_down": "off", "limit_floor": "first"}

    mean = problem_of(job, **options, speed="mean").rates[0, 1:, 0]
    model = problem_of(job, **options, speed="model").rates[0, 1:, 0]

    assert mean[1] == pytest.approx(2 * mean[0])
    assert model[1] < 1.9 * model[0]


def test_goodput_prefers_smaller_batches() -> None:
    job = warm_job(on=1, noise_scale=64.0, last_batch=512)
    events = (seen(1, 64, 100.0), seen(1, 256, 150.0))

    speed = problem_of(job, events=events, speed="model")
    goodput = problem_of(job, events=events, speed="goodput")

    assert speed.batches[0, 1] > goodput.batches[0, 1] >= 64


def test_a_slot_keeps_its_first_batch_or_gets_the_best() -> None:
    job = warm_job(on=1, noise_scale=1e6, last_batch=64)
    events = (seen(1, 64, 100.0), seen(1, 128, 190.0))

    kept = problem_of(job, events=events, batch="kept")
    best = problem_of(job, events=events, batch="goodput")

    assert kept.batches[0].tolist() == [0, 64, 128]
    assert best.batches[0].tolist() == [0, 128, 128]


def test_no_batch_is_more_than_twice_the_last_one() -> None:
    problem = problem_of(warm_job(last_batch=24), events=(seen(),) * 2)

    assert problem.batches.max() == 48


# --- Y


def test_a_stated_length_is_used_and_else_a_forecast() -> None:
    stated, forecast = problem_of(warm_job(stop_samples=4000)), problem_of(warm_job())

    assert work_left(stated, mean_draw(stated)).tolist() == [[3000.0]]
    assert work_left(forecast, mean_draw(forecast)) == pytest.approx(10_000.0)
    new = problem_of(warm_job(epoch=0, samples_done=0))
    assert work_left(new, mean_draw(new)).tolist() == [[0.0]]  # by eq. 7


# --- R


def test_a_job_has_its_minimum_until_it_is_warm() -> None:
    def steps(many: int) -> StepsSeen:
        return steps_seen(A, family="f", step=many, samples_done=64 * many)

    job = warm_job(on=1, epoch=0, samples_done=0, moved_at=Seconds(50.0))
    long: dict[str, Any] = {"now": 100.0, "scale_down": "off", "report_interval_s": 30.0}

    cold = problem_of(job, events=(steps(9),), **long)
    warm = problem_of(job, events=(steps(10),), **long)
    eager = problem_of(job, events=(steps(3),), warmup_steps=3, **long)

    assert [int(problem.most[0]) for problem in (cold, warm, eager)] == [1, 2, 2]


def test_a_long_epoch_counts_in_pieces() -> None:
    job = warm_job(on=1, moved_at=Seconds(50.0))

    pieces = problem_of(job, events=(), report_interval_s=30.0)
    whole = problem_of(job, events=(), report_interval_s=0.0)

    assert (int(pieces.limits[0]), int(whole.limits[0])) == (128, 64)


def test_a_limit_is_halved_when_a_job_is_rejected() -> None:
    job, rejected = warm_job(), PlanTaken(waiting=(A,))
    halves = problem_of(job, events=(rejected, rejected), limit_floor="one")
    first = problem_of(job, events=(rejected, rejected), limit_floor="first")

    assert [int(p.limits[0]) for p in (halves, first)] == [16, 64]


def test_scaling_down_may_take_the_last_slot() -> None:
    rejected = PlanTaken(waiting=(A,))
    job = warm_job(
        on=1, moved_at=Seconds(90.0)
    )  # its R was halved while it waited: floor(R c / B) = floor(32 / 64)
    least = problem_of(job, events=(rejected,), limit_floor="one")
    literal = problem_of(job, events=(rejected,), limit_floor="one", keep_least=False)

    left = [
        int((within_limits(problem.present[None, :], problem) >= 0).sum())
        for problem in (least, literal)
    ]
    assert left == [1, 0]


def test_a_job_whose_limit_allows_no_slot_starves() -> None:
    waits = warm_job()
    policy = make("ones-paper", {"limit_floor": "one", "keep_least": False, "gate": "off"})
    plans: list[Plan] = []
    for moment in range(3):
        policy.observe(PlanTaken(waiting=(A,)), Seconds(moment))
        plans.append(policy.plan(view_of(SLOTS, waits, version=moment), Seconds(moment)))

    assert [A in plan.local_batch for plan in plans] == [True, False, False]
    assert plans[-1].reasons[A].text == "waits: its batch limit of 16 allows no slot"


# --- the gate


def test_gates_close_until_an_epoch_ends() -> None:
    early = warm_job(A, on=2, moved_at=Seconds(50.0), epoch_at=Seconds(70.0))
    late = warm_job(B, on=2, first=2, moved_at=Seconds(90.0), epoch_at=Seconds(60.0))
    waits = warm_job(JobId("c-3"))
    view = view_of(SLOTS, early, late, waits)
    kept = {A: dict(early.running_on), B: dict(late.running_on)}

    def changed(gate: str) -> list[str]:
        plan = planned("ones-paper", view, [seen(), seen(job=B)], options={"gate": gate})
        return sorted(name for name in view.jobs if plan.local_batch.get(name) != kept.get(name))

    assert changed("all") == []
    assert B not in changed("job")
    assert "c-3" in changed("job")
    assert {A, B, "c-3"} >= set(changed("off")) >= {"c-3"}


def test_a_gate_opens_after_a_report_interval_and_when_a_change_has_settled() -> None:
    job = warm_job(on=2, moved_at=Seconds(90.0), epoch_at=Seconds(60.0))
    view = view_of(SLOTS, job)

    pieces = planned("ones-paper", view, options={"report_interval_s": 30.0})
    never = planned("ones-paper", view, options={"report_interval_s": 0.0})

    assert pieces.wake_at == Seconds(120.0)
    assert never.wake_at is None
    settles = warm_job(on=2, moved_at=Seconds(99.0), epoch_at=Seconds(99.5))
    plan = planned("ones-paper", view_of(SLOTS, settles), options={"settle_s": 3.0})
    assert (plan.local_batch, plan.wake_at) == ({A: dict(settles.running_on)}, Seconds(102.0))
