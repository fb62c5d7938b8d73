"""What a policy is told of what happened in the core."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.core import policy_events
from controlplane.core.model.job_phases import Phase
from controlplane.policy.api import EpochSeen, JobEnded, PolicyEvent, StepsSeen
from schemas.epochs import StepTimes
from schemas.ids import JobId, Rank, Seconds, Version
from schemas.jobs import StopRule
from schemas.wire.agent import StepsReported
from tests.support import builders
from tests.support.builders import BATCH, N1, S0, S1, T0, A, B, formed, ready, started
from tests.support.controller import Controller, cluster_of, running, training
from tests.unit.controlplane.core.steps import happens, place, submit


def learnt(controller: Controller) -> list[PolicyEvent]:
    """What the last input teaches."""
    records = controller.reactor.records
    found = [policy_events.event_of_record(record, controller.state) for record in records]
    return [event for event in found if event is not None]


def past(controller: Controller) -> list[tuple[Seconds, PolicyEvent]]:
    """Everything that may be learnt again, and when it happened."""
    return policy_events.history(controller.state.jobs.values(), controller.histories)


def steps(job: JobId, version: int = 1, **changes: Any) -> StepsReported:
    return StepsReported(
        job=job, version=Version(1), rank=Rank(0), group=Version(version), epoch=1, step=7,
        samples_done=7 * BATCH, samples_per_s=500.0, train_loss=1.0, global_batch=BATCH, lr=0.1,
        **changes,
    )  # fmt: skip


def seen(**changes: Any) -> EpochSeen:
    first: dict[str, Any] = {
        "job": A, "family": "ann/f", "slots": 1, "nodes": 1, "global_batch": BATCH,
        "samples_per_s": 500.0, "whole": True, "epoch": 1, "train_loss": 1.0,
    }  # fmt: skip
    done = 1000 * changes.get("epoch", 1)
    return EpochSeen(**{**first, "samples_done": done, **changes})


# --- of events


def test_an_epoch_teaches_its_speed_at_its_size() -> None:
    controller = running(family="f")

    controller.tell(N1, builders.epoch_end(A, 1))

    assert learnt(controller) == [seen()]


def test_epochs_teach_the_noise_scale_that_each_of_them_told_of_and_no_mean() -> None:
    controller = running(family="f")

    for epoch, scale in [(1, 64.0), (2, 256.0), (3, -1.0)]:
        controller.tell(N1, builders.epoch_end(A, epoch, train_loss=1.0, noise_scale=scale))

    smoothed = controller.job(A).progress.noise_scale
    assert smoothed is not None
    assert 64.0 < smoothed < 256.0
    assert [event for _, event in past(controller)] == [
        seen(noise_scale=64.0),
        seen(epoch=2, noise_scale=256.0, beside=((1, ()),)),
        seen(epoch=3, beside=((1, ()),)),
    ]  # fmt: skip


def test_an_epoch_teaches_the_metric_that_decides_when_the_job_is_done() -> None:
    rule = StopRule(metric="accuracy", at_least=0.9)
    controller = running(family="f", stop=rule)

    controller.tell(N1, builders.epoch_end(A, 1))

    assert learnt(controller) == [seen(stop_metric=0.5)]
    assert controller.view().jobs[A].stop == rule


def test_an_epoch_of_a_group_that_spans_nodes_says_so() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, S1, T0, family="f")

    controller.tell(N1, builders.epoch_end(A, 1))

    assert learnt(controller) == [seen(slots=3, nodes=2)]


@pytest.mark.parametrize(("code", "succeeded"), [(0, True), (3, False)])
def test_an_end_teaches_how_far_the_job_came_and_whether_that_is_all(
    code: int,
    succeeded: bool,  # noqa: FBT001
) -> None:
    controller = running(family="f", epochs=2)
    told: list[PolicyEvent] = []
    if succeeded:
        controller.tell(N1, builders.finished(A, index=5, reason="done"))
        told += learnt(controller)

    controller.tell(N1, builders.exited(A, code=code))
    told += learnt(controller)

    assert told == [JobEnded(job=A, family="ann/f", samples_done=2000, succeeded=succeeded)]


def test_a_job_that_is_cancelled_did_not_succeed() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", family="f")

    controller.take(builders.cancelled(A))

    assert learnt(controller) == [JobEnded(job=A, family="ann/f", samples_done=0, succeeded=False)]


def test_starts_and_nodes_teach_nothing() -> None:
    controller = Controller()
    controller.start()
    told: list[PolicyEvent] = []
    for step in (builders.greeting(), submit(), place({A: S0}), started(A), ready(A), formed(A)):
        happens(controller, step)
        told += learnt(controller)

    assert controller.job(A).phase is Phase.RUNNING
    assert told == []


# --- of telemetry


def test_telemetry_teaches_while_its_group_is_in_force() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0, T0, family="f")

    assert policy_events.event_of_steps(steps(A), controller.state) == StepsSeen(
        job=A, family="ann/f", group=1, slots=2, nodes=2, global_batch=BATCH, step=7,
        samples_done=7 * BATCH, samples_per_s=500.0, train_loss=1.0,
    )  # fmt: skip


NONSENSE = (-1.0, float("nan"), float("inf"))
BOUNDED = {
    "cpu_cores": {0.0: 0.0, 1.5: 1.5, None: None, **dict.fromkeys((1e300, *NONSENSE))},
    "sent_bytes_per_s": {0.0: 0.0, 1.5: 1.5, None: None, **dict.fromkeys((1e300, *NONSENSE))},
    "noise_scale": {512.5: 512.5, **dict.fromkeys((None, 0.0, float("-inf"), *NONSENSE))},
    "group_steps": {0: 0, 17: 17, -1: 0, 2**60: 0},
}


@pytest.mark.parametrize(
    ("field", "told", "known"),
    [(field, *pair) for field in BOUNDED for pair in BOUNDED[field].items()],
)
def test_telemetry_teaches_what_can_be(field: str, told: float | None, known: float | None) -> None:
    learns = policy_events.event_of_steps(steps(A, **{field: told}), running().state)

    assert isinstance(learns, StepsSeen)
    assert getattr(learns, field) == known


TIMES = StepTimes(pass_s=0.5, sync_s=0.125, local_batch=32, passes=2)


@pytest.mark.parametrize("change", [{}, {"sync_s": 0.0}])
def test_telemetry_has_plausible_step_times(change: dict[str, float]) -> None:
    times = msgspec.structs.replace(TIMES, **change)

    learns = policy_events.event_of_steps(steps(A, step_times=times), running().state)

    assert isinstance(learns, StepsSeen)
    assert learns.step_times == times


@pytest.mark.parametrize(
    "change",
    [
        {"pass_s": 0.0}, {"pass_s": float("nan")}, {"pass_s": float("inf")}, {"sync_s": 0.75}, {"sync_s": -0.125},
        {"local_batch": 0}, {"local_batch": BATCH + 1}, {"passes": 0}, {"passes": 2**60},
    ],
)  # fmt: skip
def test_implausible_step_times_are_dropped(change: dict[str, Any]) -> None:
    times = msgspec.structs.replace(TIMES, **change)
    controller = running(family="f")

    learns = policy_events.event_of_steps(steps(A, step_times=times), controller.state)
    for epoch, reported in ((1, TIMES), (2, times)):
        controller.tell(N1, builders.epoch_end(A, epoch, train_loss=1.0, step_times=reported))

    assert isinstance(learns, StepsSeen)
    assert learns.step_times is None
    assert [getattr(event, "step_times", None) for _, event in past(controller)] == [TIMES, None]


def test_telemetry_of_another_group_or_of_a_job_that_is_unknown_or_waits_teaches_nothing() -> None:
    controller = running()
    controller.submit("b")

    assert policy_events.event_of_steps(steps(A, 2), controller.state) is None
    assert policy_events.event_of_steps(steps(B, 0), controller.state) is None
    assert policy_events.event_of_steps(steps(JobId("ghost-9")), controller.state) is None


# --- of history


def test_a_new_search_learns_every_epoch_and_end_again_oldest_first() -> None:
    controller = running(family="f")
    told: list[tuple[Seconds, PolicyEvent]] = []
    for epoch in (1, 2):
        controller.now += 10.0
        controller.tell(N1, builders.epoch_end(A, epoch, samples_per_s=100.0 * epoch))
        told += [(Seconds(controller.now), event) for event in learnt(controller)]
    controller.now += 10.0
    controller.tell(N1, builders.exited(A, code=3))
    told += [(Seconds(controller.now), event) for event in learnt(controller)]

    assert [type(event) for _, event in told] == [EpochSeen, EpochSeen, JobEnded]
    assert past(controller) == told


def test_the_histories_of_jobs_are_woven_together_by_time() -> None:
    controller = cluster_of(n1=2)
    training(controller, S0, family="f")
    training(controller, S1, name="b", family="g")
    for at, job in [(1010.0, B), (1020.0, A)]:
        controller.now = at
        controller.tell(N1, builders.epoch_end(job, 1))

    assert past(controller) == [
        (1010.0, seen(job=B, family="ann/g")),
        (1020.0, seen()),
    ]


def test_only_the_latest_epochs_are_learnt_again() -> None:
    controller = running(epochs=policy_events.KEPT_EPOCHS + 3)

    assert len(past(controller)) == policy_events.KEPT_EPOCHS


def test_a_cluster_without_a_past_teaches_nothing() -> None:
    assert past(cluster_of(n1=1)) == []
