"""Remaining work of jobs by their relatives and their users' statements."""

from __future__ import annotations

from typing import Any

from controlplane.policy.api import (
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    SearchStats,
    StepsSeen,
)
from controlplane.policy.ones.job_lengths import JobLengths
from schemas.ids import JobId
from tests.support.builders import A, B, job_view
from tests.support.views import epoch_seen
from tests.unit.controlplane.policy.tables import cases

EPOCH = 100  # samples


def a_job(name: JobId = A, **changes: Any) -> JobView:
    done = int(changes.pop("epochs", 0))
    known = {"epoch": done, "samples_done": EPOCH * done, "epoch_samples": EPOCH, "family": "u/f"}
    return job_view(name, **{**known, **changes})


def epoch(number: int, job: JobId = A, **changes: Any) -> EpochSeen:
    done = {"epoch": number, "samples_done": EPOCH * number}
    return epoch_seen(job, family="u/f", global_batch=10, samples_per_s=1.0, **done, **changes)


def ended(total: int, job: JobId = B, *, succeeded: bool = True, family: str = "u/f") -> JobEnded:
    return JobEnded(job=job, family=family, samples_done=total, succeeded=succeeded)


def lived(number: int, epochs: int) -> list[PolicyEvent]:
    """A relative from its first epoch to its end."""
    name = JobId(f"r-{number}")
    return [*(epoch(at, name) for at in range(1, epochs + 1)), ended(EPOCH * epochs, name)]


def knowing(*events: PolicyEvent) -> JobLengths:
    lengths = JobLengths()
    for event in events:
        lengths.observe(event)
    return lengths


def accuracy(lengths: JobLengths) -> SearchStats:
    return lengths.calibration.added_to(SearchStats())


TEN_EPOCHS = [event for number in range(8) for event in lived(number, 10)]
STEPS = StepsSeen(job=A, family="u/f", group=1, slots=1, nodes=1, global_batch=10, step=25,
                  samples_done=250)  # fmt: skip


@cases(
    "events, job, left",
    a_stated_end_is_exact=([ended(5000)], a_job(epochs=2, stop_samples=1000), 800.0),
    nothing_is_known_of_a_first_job=([], a_job(), None),
    without_finished_relatives_the_work_doubles=([epoch(3)], a_job(epochs=3), 300.0),
    relatives_of_ten_epochs_predict_five_more_after_five=(TEN_EPOCHS, a_job(epochs=5), 500.0),
    a_job_that_outlived_its_relatives_doubles=(TEN_EPOCHS, a_job(epochs=11), 1100.0),
    a_relative_that_failed_has_no_length=(
        [ended(100, succeeded=False), epoch(3)], a_job(epochs=3), 300.0),
    telemetry_counts_between_epochs=([ended(1000), STEPS], a_job(epochs=2), 750.0),
)  # fmt: skip
def test_statements_relatives_and_progress_predict_the_remaining_work(
    events: list[PolicyEvent], job: JobView, left: float | None
) -> None:
    assert knowing(*events).remaining(job) == left


def leaving(*totals: int, family: str = "u/f") -> JobLengths:
    """Jobs of which users stated 1000 samples ended after these totals."""
    lengths = JobLengths()
    for number, total in enumerate(totals):
        name = JobId(f"r-{number}")
        lengths.remaining(a_job(name, stop_samples=1000, family=family))
        lengths.observe(ended(total, name, family=family))
    return lengths


@cases(
    "lengths, left, settled",
    scripts_that_leave_early_have_the_length_of_relatives=(leaving(400, 400), 400.0, True),
    scripts_that_kept_their_statements_have_that_length=(leaving(1000, 990), 1000.0, True),
    another_family_of_the_user_leaves_early=(
        leaving(400, 400, family="u/g"), None, False),
    another_user_leaves_early_now_and_then=(
        leaving(*[1000] * 30, 400, family="v/g"), 1000.0, True),
)  # fmt: skip
def test_a_statement_is_certain_unless_scripts_are_known_to_leave_early(
    lengths: JobLengths,
    left: float | None,
    settled: bool,  # noqa: FBT001
) -> None:
    job = a_job(stop_samples=1000)

    assert (lengths.remaining(job), lengths.is_settled(job)) == (left, settled)


def test_predictions_are_compared_with_actual_lengths() -> None:
    lengths = knowing(*TEN_EPOCHS)
    for at in range(1, 10):
        lengths.observe(epoch(at))
        lengths.remaining(a_job(epochs=at))
    assert accuracy(lengths).length_predictions == 0, "no prediction was requested before"

    lengths.observe(ended(1000, A))

    seen = accuracy(lengths)
    assert seen.length_predictions == 7, (
        "after 1, 2, 3, 4, 5, 7 and 9 epochs: a quarter more each time"
    )
    assert (seen.length_error, seen.length_coverage_80) == (0.0, 1.0)


def test_a_job_given_up_is_no_outcome() -> None:
    lengths = knowing(ended(1000))
    lengths.remaining(a_job())

    lengths.observe(ended(100, A, succeeded=False))

    assert accuracy(lengths) == SearchStats()


def test_a_prediction_is_informed_by_relatives_but_not_by_age_alone() -> None:
    new, known = JobLengths(), knowing(ended(1000))
    for lengths in (new, known):
        lengths.remaining(a_job(epochs=5))

    assert (new.informed(A), known.informed(A)) == (False, True)


def test_inactive_jobs_are_forgotten() -> None:
    names = [JobId(f"r-{n}") for n in range(200)]
    lengths = knowing(*(epoch(5, name) for name in names), epoch(3))
    for name in names:
        lengths.remaining(a_job(name, epochs=5))

    lengths.forget({A})

    assert lengths.families["u/f"].at_work == {A: 300}
    assert lengths.calibration.known == 0
