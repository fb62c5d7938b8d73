"""Problems and batch limits under each reading of the paper."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.api import JobView, PlanTaken, StepsSeen
from controlplane.policy.ones_paper.candidates import mean_draw, within_limits, work_left
from controlplane.policy.ones_paper.job_estimates import after_epoch, arrival_rate
from controlplane.policy.options import IMPROVED, OnesPaperOptions, ScaleDown
from controlplane.policy.registry import check_options
from controlplane.policy.search.observed_jobs import LimitBounds, resumed
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B
from tests.support.views import planned, steps_seen, view_of
from tests.unit.controlplane.policy.ones_paper.problems import SLOTS, problem_of, seen, warm_job
from tests.unit.controlplane.policy.tables import cases


def test_the_paper_is_the_default_and_a_preset_fills_in_what_is_not_given() -> None:
    improved = check_options("ones-paper", {"preset": "improved", "score": "running"})

    assert check_options("ones-paper", {"preset": "paper"}) == OnesPaperOptions()
    assert improved == OnesPaperOptions(**{**IMPROVED, "preset": "improved", "score": "running"})
    assert not IMPROVED.items() & msgspec.structs.asdict(OnesPaperOptions()).items()


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


@pytest.mark.parametrize(("batch", "batches"), [("kept", [0, 64, 128]), ("goodput", [0, 128, 128])])
def test_a_slot_keeps_its_first_batch_or_gets_the_best(batch: str, batches: list[int]) -> None:
    job = warm_job(on=1, noise_scale=1e6, last_batch=64)
    events = (seen(1, 64, 100.0), seen(1, 128, 190.0))

    assert problem_of(job, events=events, batch=batch).batches[0].tolist() == batches


def test_no_batch_is_more_than_twice_the_last_one() -> None:
    assert problem_of(warm_job(last_batch=24), events=(seen(),) * 2).batches.max() == 48


# --- Y


def test_a_stated_length_is_used_and_else_a_forecast() -> None:
    stated, forecast = problem_of(warm_job(stop_samples=4000)), problem_of(warm_job())

    assert work_left(stated, mean_draw(stated)).tolist() == [[3000.0]]
    assert work_left(forecast, mean_draw(forecast)) == pytest.approx(10_000.0)
    new = problem_of(warm_job(epoch=0, samples_done=0))
    assert work_left(new, mean_draw(new)).tolist() == [[0.0]]  # by eq. 7


# --- R


def steps(many: int) -> StepsSeen:
    return steps_seen(A, family="f", step=many, samples_done=64 * many)


REJECTED = PlanTaken(waiting=(A,))
COLD = warm_job(on=1, epoch=0, samples_done=0, moved_at=Seconds(50.0))
LONG: dict[str, Any] = {"now": 100.0, "scale_down": "off", "report_interval_s": 30.0}


@cases(
    "event, options, most",
    cold=(steps(9), LONG, 1),
    warm=(steps(10), LONG, 2),
    warm_after_few_steps=(steps(3), {**LONG, "warmup_steps": 3}, 2),
)
def test_a_job_has_its_minimum_until_it_is_warm(
    event: StepsSeen, options: dict[str, Any], most: int
) -> None:
    assert int(problem_of(COLD, events=(event,), **options).most[0]) == most


@cases(
    "job, events, options, limit",
    a_long_epoch_counts_in_pieces=(
        warm_job(on=1, moved_at=Seconds(50.0)), (), {"report_interval_s": 30.0}, 128),
    or_whole=(warm_job(on=1, moved_at=Seconds(50.0)), (), {"report_interval_s": 0.0}, 64),
    each_rejection_halves=(warm_job(), (REJECTED, REJECTED), {"limit_floor": "one"}, 16),
    not_below_the_first_batch=(warm_job(), (REJECTED, REJECTED), {"limit_floor": "first"}, 64),
)  # fmt: skip
def test_epochs_raise_a_limit_and_rejections_lower_it(
    job: JobView, events: tuple[PlanTaken, ...], options: dict[str, Any], limit: int
) -> None:
    assert int(problem_of(job, events=events, **options).limits[0]) == limit


def test_a_job_keeps_its_last_slot_whatever_its_limit() -> None:
    job = warm_job(on=1, moved_at=Seconds(90.0))  # its R was halved: floor(R c / B) = 32 // 64

    found = problem_of(job, events=(REJECTED,), limit_floor="one")

    assert int((within_limits(found.present[None, :], found) >= 0).sum()) == 1


# --- the gate


def test_gates_close_until_an_epoch_ends() -> None:
    early = warm_job(A, on=2, moved_at=Seconds(50.0), epoch_at=Seconds(70.0))
    late = warm_job(B, on=2, first=2, moved_at=Seconds(90.0), epoch_at=Seconds(60.0))
    waits = warm_job(JobId("c-3"))
    view = view_of(SLOTS, early, late, waits)
    kept = {A: dict(early.running_on), B: dict(late.running_on)}

    def changed(gate: str) -> list[str]:
        options = {"preset": "improved", "gate": gate}
        plan = planned("ones-paper", view, [seen(), seen(job=B)], options=options)
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


# --- R after an epoch, under each reading of scale-up, scale-down and resume


BOUNDS = LimitBounds(first=64, least=64, most=1024)


LAMBDA = 1 / 30.0


def after(limit: int, reading: ScaleDown, ran_s: float, *, contended: bool = True) -> int:
    return after_epoch(
        limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=LAMBDA, contended=contended
    )


@pytest.mark.parametrize(
    ("reading", "limits"),
    [
        # sigma T = 0, 2/3, 1, 5/3, 8/3, 10: the divisor is 1, 2, 2, 3, 4, 11
        ("literal", [512, 512, 512, 171, 128, 64]),
        ("contended", [512, 512, 512, 171, 128, 128]),
        ("authors", [256] * 6),
        ("off", [512] * 6),
    ],
)
def test_each_reading_has_its_limit_after_an_epoch(reading: ScaleDown, limits: list[int]) -> None:
    found = [after(256, reading, ran_s) for ran_s in (0.0, 20.0, 30.0, 50.0, 80.0, 300.0)]

    assert found == limits


def test_a_limit_grows_up_to_that_of_the_user() -> None:
    assert after(256, "contended", 300.0, contended=False) == 512
    assert [after(limit, "off", 0.0) for limit in (600, 1024)] == [1024, 1024]


@given(
    reading=st.sampled_from(["literal", "contended", "authors", "off"]),
    limit=st.integers(64, 1024),
    ran_s=st.floats(0.0, 1e7),
    rate=st.floats(0.0, 100.0),
    contended=st.booleans(),
)
def test_a_limit_stays_within_its_bounds_and_at_most_doubles_or_halves(
    reading: ScaleDown,
    limit: int,
    ran_s: float,
    rate: float,
    contended: bool,  # noqa: FBT001
) -> None:
    new = after_epoch(limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=rate, contended=contended)

    assert 64 <= new <= min(1024, 2 * limit)
    assert new >= limit / 2 or reading in {"literal", "authors"}
    assert new == min(2 * limit, 1024) or rate or reading == "authors"


def test_a_rejected_job_keeps_half_of_its_limit_down_to_the_floor() -> None:
    to_first = [resumed(limit, BOUNDS) for limit in (512, 128, 101, 64)]
    to_one = [resumed(limit, LimitBounds(first=64, least=1, most=1024)) for limit in (512, 64, 1)]

    assert to_first == [256, 64, 64, 64]
    assert to_one == [256, 32, 1]


@pytest.mark.parametrize(
    ("submitted_at", "per_s"),
    [([], 0.0), ([3.0], 0.0), ([3.0, 3.0], 0.0), ([10.0, 0.0, 5.0], 0.2)],
    ids=["no job", "one job", "one moment", "in any order"],
)
def test_the_arrival_rate_is_the_mean_rate_of_submissions(
    submitted_at: list[float], per_s: float
) -> None:
    assert arrival_rate([Seconds(at) for at in submitted_at]) == per_s
