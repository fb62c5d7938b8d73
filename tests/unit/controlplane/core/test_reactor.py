"""What the core does about each thing that can happen."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM

import pytest

from controlplane.core.commands import Accept, Announce, RequestPlan
from controlplane.core.desired_state import desired
from controlplane.core.handlers.lifecycle import MAX_LOSSES
from controlplane.core.history import Process
from controlplane.core.inputs import (
    InputSkipped,
    NodeHeard,
    NodeReported,
    NodeSuspected,
    StartExpired,
)
from controlplane.core.model.job_phases import Phase, Running, ScriptReports
from controlplane.core.model.node import NodePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.state import RETRY_FIRST_S, RETRY_LONGEST_S, START_LIMIT_S
from controlplane.policy.api import Reason
from controlplane.service.api.replies import job_summary
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import UnknownJobError
from schemas.ids import BootId, JobId, Seconds, SlotId, Version, WorkerId
from schemas.jobs import StopRule
from schemas.wire.agent import PREPARE, START, AgentEvent, GroupFormed, WorkerReady
from schemas.wire.client import EpochInfo, JobSummary, VersionInfo
from schemas.wire.worker import Report
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    SNAPSHOT,
    T0,
    A,
    B,
    C,
    cancelled,
    cleared,
    deltas,
    epoch_end,
    exited,
    finished,
    formed,
    greeting,
    news,
    paused,
    proposal,
    raised,
    ready,
    reasons,
    refused,
    resume_at,
    run,
    seen,
    send,
    settle,
    started,
    stop,
    submission,
    switch,
)
from tests.support.controller import Controller, begin, cluster_of, running, starting

FIRST = WorkerId(f"{A}.v1.r0")
GHOST = JobId("ghost-9")


def usable(controller: Controller) -> dict[SlotId, bool]:
    return {slot.slot: slot.usable for slot in controller.view().slots}


# --- submission


def test_a_submission_is_accepted_and_asks_for_a_plan() -> None:
    controller = cluster_of(n1=1)

    commands = controller.submit("a", user="ann")

    assert commands == [
        news("job.submitted", A, name="a", user="ann"),
        Accept(A),
        RequestPlan(),
    ]
    assert controller.job(A).phase is Phase.QUEUED
    assert list(controller.state.active) == [A]


def test_jobs_are_numbered_in_order_of_arrival_whatever_their_names() -> None:
    controller = cluster_of()

    accepted = [controller.submit(name)[1] for name in ("a", "b", "a")]

    assert accepted == [Accept(A), Accept(B), Accept(JobId("a-3"))]


def test_the_same_key_twice_is_one_job() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", key="once")

    assert controller.submit("a", key="once") == [Accept(A)]
    assert list(controller.state.jobs) == [A]


def test_the_same_key_is_the_same_job_even_after_it_ended() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", key="once")
    controller.take(cancelled(A))

    assert controller.submit("a", key="once") == [Accept(A)]


def test_the_same_key_of_another_user_is_another_job() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", key="once", user="ann")

    assert controller.submit("b", key="once", user="bob")[1] == Accept(B)


def test_submissions_without_a_key_are_different_jobs() -> None:
    controller = cluster_of(n1=1)

    assert [controller.submit("a")[1], controller.submit("a")[1]] == [
        Accept(A),
        Accept(JobId("a-2")),
    ]


# --- from a plan to training


def test_a_plan_prepares_the_job_on_the_node_of_its_member_only() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a")

    commands = controller.take(
        proposal({A: {T0: BATCH}}, reasons={A: Reason("next_in_line", "its turn by arrival")})
    )

    assert commands == [
        news("job.starting", A, reason=f"its turn by arrival: {T0}", slots=T0),
        send(N2, run(A, on=T0)),
    ]
    assert controller.history_of(A).versions == [
        VersionInfo(
            version=Version(1),
            resumed_epoch=0,
            kind=START,
            time=Seconds(controller.now),
            slots=(T0,),
            global_batch=BATCH,
        )
    ]
    assert usable(controller) == {S0: True, T0: False}


def test_a_worker_that_started_is_announced() -> None:
    controller = starting()

    commands = controller.tell(N1, started(A, pid=42))

    assert commands == [news("worker.started", A, rank=0, slot=S0, version=1, pid=42)]
    assert controller.history_of(A).processes == {FIRST: Process(N1)}


def test_a_worker_that_is_ready_is_told_to_switch() -> None:
    controller = starting()
    controller.tell(N1, started(A))

    commands = controller.tell(N1, ready(A))

    assert commands == [
        news("worker.ready", A, rank=0, slot=S0, version=1),
        send(N1, switch(A)),
    ]


def test_a_ready_worker_needs_no_word_of_its_start() -> None:
    controller = starting()

    assert deltas(controller.tell(N1, ready(A))) == [send(N1, switch(A))]


def test_a_formed_group_is_running_and_settled() -> None:
    controller = starting()
    controller.tell(N1, started(A))
    controller.tell(N1, ready(A))

    commands = controller.tell(N1, formed(A))

    assert commands == [
        news("job.running", A, reason="trains on 1 slot, batch 64", slots=1, epoch=0, batch=64),
        send(N1, settle(A)),
        RequestPlan(),
    ]
    assert controller.job(A).phase is Phase.RUNNING
    assert controller.history_of(A).versions[-1].outcome == "formed"
    assert controller.state.deadlines.starts == {}


def test_an_epoch_is_kept_and_announced() -> None:
    controller = running()
    controller.now = 1234.0

    commands = controller.tell(N1, epoch_end(A, 1))

    assert commands == [
        news(
            "job.epoch",
            A,
            epoch=1,
            train_loss=1.0,
            samples_per_s=500.0,
            global_batch=BATCH,
            lr=0.1,
            accuracy=0.5,
        ),
        RequestPlan(),
    ]
    job = controller.job(A)
    assert (
        job.progress.epoch,
        job.progress.epoch_at,
        job.progress.samples_done,
        job.progress.checkpoint,
    ) == (
        1,
        1234.0,
        1000,
        resume_at(1, 1),
    )
    assert controller.history_of(A).epochs == [
        EpochInfo(
            epoch=1,
            time=Seconds(1234.0),
            step=16,
            global_batch=BATCH,
            lr=0.1,
            samples_per_s=500.0,
            train_loss=1.0,
            metrics={"accuracy": 0.5},
            slots=1,
            nodes=1,
            whole=True,
            samples_done=1000,
            epoch_samples=1000,
        )
    ]


def test_epochs_to_come_are_expected_to_end_where_the_last_one_did() -> None:
    controller = running()  # ten epochs of 1000 samples are stated
    controller.tell(N1, epoch_end(A, 1, trained_samples=1000))
    whole = controller.view().jobs[A]

    left = {"trained_samples": 512, "left_early": True}
    commands = controller.tell(N1, epoch_end(A, 2, samples_done=1512, **left))

    seen_of = controller.view().jobs[A]
    assert (whole.epoch_samples, whole.stop_samples) == (1000, 10_000)
    assert (seen_of.epoch_samples, seen_of.stop_samples) == (512, 1000 + 9 * 512)
    info = controller.history_of(A).epochs[-1]
    assert (info.trained_samples, info.epoch_samples, info.left_early) == (512, 1000, True)
    told = [command.event.detail for command in commands if isinstance(command, Announce)]
    assert [left.items() <= detail.items() for detail in told] == [True]
    now = Seconds(controller.now)
    summary = job_summary(controller.job(A), None, TelemetryTable(), now)
    assert summary.progress == 1512 / (1000 + 9 * 512)


def test_where_samples_end_the_job_a_short_last_epoch_says_nothing_of_others() -> None:
    controller = running(stop=StopRule(samples=1500))

    controller.tell(N1, epoch_end(A, 1, trained_samples=1000))
    controller.tell(N1, epoch_end(A, 2, samples_done=1500, trained_samples=500))

    seen_of = controller.view().jobs[A]
    assert (seen_of.epoch_samples, seen_of.stop_samples) == (1000, 1500)


# --- how jobs end


def test_exit_code_0_is_success_and_the_node_may_forget_the_job() -> None:
    controller = running(epochs=2)
    controller.tell(N1, finished(A, index=5, reason="2 of 2 epochs"))

    commands = controller.tell(N1, exited(A, code=0))

    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=0, signal=None),
        news("job.succeeded", A, reason="2 of 2 epochs", exit_code=0, epoch=2),
        send(N1, stop(A, 2, forget=True)),
        RequestPlan(),
    ]
    assert controller.job(A).phase is Phase.SUCCEEDED
    assert controller.state.active == controller.state.jobs_with_processes == {}
    assert usable(controller) == {S0: True}


def test_a_script_that_ends_early_says_after_which_epoch() -> None:
    controller = running(epochs=2)

    commands = controller.tell(N1, exited(A, code=0))

    assert reasons(commands) == ["the script exited after epoch 2, before its stop rule was met"]


def summary(controller: Controller, later_s: float = 0.0) -> JobSummary:
    """A's line of `ones ps`."""
    now = Seconds(controller.now + later_s)
    return job_summary(controller.job(A), None, TelemetryTable(), now)


def test_a_script_that_ends_alone_before_its_first_epoch_trained_nothing_and_says_so() -> None:
    controller = starting()
    controller.tell(N1, started(A))

    commands = controller.tell(N1, exited(A, code=0))

    never = "never reached agent.epochs of elastic.ScalingAgent"
    assert reasons(commands) == [
        f"nothing was trained: the script exited (exit code 0) and {never}"
    ]
    assert (controller.job(A).phase, summary(controller).progress) == (Phase.SUCCEEDED, 0.0)


def test_a_script_that_leaves_the_library_out_is_refused_on_several_slots() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", slots=(2, 2))
    controller.place({A: {S0: 32, S1: 32}})
    for rank in (0, 1):
        controller.tell(N1, started(A, rank=rank, pid=100 + rank))

    commands = controller.tell(N1, exited(A, rank=1, code=0))

    (why,) = reasons(commands)
    assert why.startswith(
        "nothing was trained: the script exited (exit code 0) on one of its 2 slots and never reached"
    )
    assert "needs: from elastic import ScalingAgent; agent = ScalingAgent.from_env(); " in why
    assert why.endswith("; `ones init train.py` shows where; or request slots = [1, 1]")
    assert send(N1, stop(A, 2, forget=True)) in commands, "the other one ends, too"
    assert controller.job(A).phase is Phase.FAILED


def test_a_resumed_script_that_ends_before_it_trains_again_says_after_which_epoch() -> None:
    controller = running(epochs=2)
    controller.tell(N1, exited(A, signal=SIGKILL))
    controller.place({A: S0})
    controller.tell(N1, started(A, 3))

    commands = controller.tell(N1, exited(A, 3, code=0))

    assert reasons(commands) == ["the script exited after epoch 2, before its stop rule was met"]


def test_a_script_that_takes_long_before_it_loads_is_named_and_waited_for() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", slots=(2, 2))
    controller.place({A: {S0: 32, S1: 32}})
    plain = summary(controller, 90).reason
    for rank in (0, 1):
        controller.tell(N1, started(A, rank=rank, pid=100 + rank))
    controller.tell(N1, ready(A, rank=1))

    assert summary(controller, 59).reason == plain
    assert summary(controller, 90).reason == (
        "not at agent.epochs after 2 min on 1 of 2 slots: its script prepares, or it never calls "
        f"ScalingAgent and is not trained by this cluster; {plain}"
    )
    controller.now += START_LIMIT_S
    (expired,) = controller.due()
    assert controller.take(expired) == []
    assert (controller.job(A).phase, controller.due()) == (Phase.STARTING, [])
    assert controller.due(START_LIMIT_S) == [expired]


@pytest.mark.parametrize(
    ("epochs", "why"),
    [
        (
            0,
            "paused by ann before its first epoch: the script was stopped and will restart from the beginning",
        ),
        (2, "paused by ann while starting: the script was stopped and will resume from step 32"),
    ],
)
def test_a_pause_before_training_says_what_it_ended(epochs: int, why: str) -> None:
    controller = running(epochs=epochs)
    controller.tell(N1, exited(A, signal=SIGKILL))
    controller.place({A: S0})

    commands = controller.take(paused(A))

    assert reasons(commands)[-1:] == [why]


def test_exit_code_3_fails_the_job_and_names_the_code() -> None:
    controller = running()

    commands = controller.tell(N1, exited(A, code=3))

    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=3, signal=None),
        news("job.failed", A, reason="the script exited with code 3", exit_code=3, epoch=0),
        send(N1, stop(A, 2, forget=True)),
        RequestPlan(),
    ]


def test_a_failure_names_what_the_script_raised_and_where() -> None:
    controller = running()
    controller.tell(N1, raised(A, index=3, error="ValueError: no", where="train.py:7"))

    commands = controller.tell(N1, exited(A, code=1))

    assert reasons(commands) == ["ValueError: no (train.py:7) (exit code 1)"]


def test_a_worker_that_nobody_saw_end_is_done_if_it_said_so_before() -> None:
    controller = running(epochs=1)
    controller.tell(N1, finished(A, index=4, reason="1 of 1 epochs"))

    commands = controller.tell(N1, exited(A))

    assert reasons(commands) == ["1 of 1 epochs"]
    assert controller.job(A).phase is Phase.SUCCEEDED


def test_an_exit_that_nobody_saw_has_no_code() -> None:
    controller = running(epochs=1)
    controller.tell(N1, finished(A, index=4, reason="1 of 1 epochs"))

    controller.tell(N1, exited(A))

    assert controller.job(A).attempts.exit_code is None


def test_a_worker_that_nobody_saw_end_failed_if_its_script_raised() -> None:
    controller = running()
    controller.tell(N1, raised(A, index=3, error="ValueError: no", where=""))

    commands = controller.tell(N1, exited(A))

    assert reasons(commands) == ["ValueError: no"]
    assert controller.job(A).phase is Phase.FAILED


# --- retries


def test_a_failed_script_is_tried_again_after_a_back_off_that_doubles() -> None:
    controller = running(retries=3)
    pauses = []
    for version in (1, 3, 5):
        if version > 1:
            begin(controller, A, version)
        controller.tell(N1, exited(A, version, code=3))
        assert controller.job(A).phase is Phase.PAUSED
        pauses.append(controller.job(A).attempts.next_start_at - controller.now)
        controller.now += pauses[-1]
    begin(controller, A, 7)

    last = controller.tell(N1, exited(A, 7, code=3))

    assert pauses == [1.0, 2.0, 4.0]
    assert controller.job(A).phase is Phase.FAILED
    assert reasons(last) == ["the script exited with code 3 (attempt 4 of 4)"]


def test_a_retry_says_how_long_it_waits_and_how_many_are_left() -> None:
    controller = running(retries=2)

    commands = controller.tell(N1, exited(A, code=3))

    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=3, signal=None),
        send(N1, stop(A, 2)),
        news(
            "job.paused", A, reason="the script exited with code 3; retrying in 1 s, 2 retries left"
        ),
        RequestPlan(),
    ]


def test_what_the_library_refuses_is_not_tried_again() -> None:
    controller = running(retries=2)
    refusal = raised(A, index=3, error="UsageError: no", where="train.py:7", refused=True)
    controller.tell(N1, refusal)

    commands = controller.tell(N1, exited(A, code=1))

    assert controller.job(A).phase is Phase.FAILED
    assert reasons(commands) == [
        "UsageError: no (train.py:7) (exit code 1); not retried: the library would refuse it again"
    ]


def test_a_back_off_has_a_longest() -> None:
    controller = running(retries=100)
    version = 1
    for _ in range(10):
        controller.tell(N1, exited(A, version, code=3))
        pause_s = controller.job(A).attempts.next_start_at - controller.now
        controller.now += pause_s
        version += 2
        begin(controller, A, version)

    assert RETRY_FIRST_S < pause_s == RETRY_LONGEST_S


def test_a_job_is_not_started_before_its_back_off_is_over() -> None:
    controller = running(retries=1)
    controller.tell(N1, exited(A, code=3))

    assert controller.place({A: S0}) == [RequestPlan()]
    controller.now += RETRY_FIRST_S
    assert deltas(controller.place({A: S0})) == [send(N1, run(A, 3, retries=1))]


# --- losses


def test_a_killed_worker_pauses_its_job_and_is_not_counted() -> None:
    controller = running(epochs=2)

    commands = controller.tell(N1, exited(A, signal=SIGKILL))

    why = "a worker was killed by SIGKILL; resumes after epoch 2"
    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=None, signal=9),
        send(N1, stop(A, 2)),
        news("job.paused", A, reason=why),
        RequestPlan(),
    ]
    assert (controller.job(A).attempts.failures, controller.job(A).attempts.next_start_at) == (
        0,
        0.0,
    )


def test_a_lost_job_resumes_from_the_last_reported_epoch_and_its_version() -> None:
    controller = running(epochs=2)
    controller.tell(N1, exited(A, signal=SIGTERM))

    commands = controller.place({A: S0})

    assert commands == [
        news("job.starting", A, reason=f"planned: {S0}, resumes after epoch 2", slots=S0),
        send(N1, run(A, 3, resume=resume_at(2, 1))),
    ]
    last = controller.history_of(A).versions[-1]
    assert (last.version, last.resumed_epoch, last.resumed_step) == (3, 2, 32)
    assert [version.outcome for version in controller.history_of(A).versions] == ["formed", ""]


def test_a_resumed_job_that_finished_no_epoch_resumes_from_the_version_that_did() -> None:
    controller = running(epochs=2)
    controller.tell(N1, exited(A, signal=SIGKILL))
    begin(controller, A, 3)
    controller.tell(N1, exited(A, 3, signal=SIGKILL))

    assert deltas(controller.place({A: S0})) == [send(N1, run(A, 5, resume=resume_at(2, 1)))]


def test_a_resumed_group_says_after_which_epoch() -> None:
    controller = running(epochs=2)
    controller.tell(N1, exited(A, signal=SIGKILL))
    controller.place({A: S0})
    controller.tell(N1, started(A, 3))
    controller.tell(N1, ready(A, 3, resumed=2))

    commands = controller.tell(N1, formed(A, 3, epoch=2))

    assert reasons(commands) == ["trains on 1 slot, batch 64, resumed after epoch 2, step 32"]


def test_a_segmentation_fault_is_a_failure_of_the_script() -> None:
    controller = running()

    commands = controller.tell(N1, exited(A, signal=SIGSEGV))

    assert reasons(commands) == ["a worker crashed with SIGSEGV"]
    job = controller.job(A)
    assert (job.phase, job.attempts.failures, job.attempts.exit_code) == (
        Phase.FAILED,
        1,
        128 + SIGSEGV,
    )


def test_a_worker_that_is_gone_without_a_trace_is_lost() -> None:
    controller = running()

    commands = controller.tell(N1, exited(A))

    assert reasons(commands) == [
        "a worker vanished without an exit status; restarts from the beginning"
    ]
    assert controller.job(A).attempts.failures == 0


def test_a_job_that_loses_worker_after_worker_gives_up() -> None:
    controller = running()
    version = 1
    for _ in range(MAX_LOSSES - 1):
        controller.tell(N1, exited(A, version, signal=SIGKILL))
        assert controller.job(A).phase is Phase.PAUSED
        version += 2
        begin(controller, A, version)

    commands = controller.tell(N1, exited(A, version, signal=SIGKILL))

    assert reasons(commands) == [
        f"a worker was killed by SIGKILL; {MAX_LOSSES} losses in a row without a finished epoch"
    ]
    assert controller.job(A).phase is Phase.FAILED


def test_a_finished_epoch_forgives_the_losses_before() -> None:
    controller = running()
    version = 1
    for _ in range(MAX_LOSSES - 1):
        controller.tell(N1, exited(A, version, signal=SIGKILL))
        version += 2
        begin(controller, A, version)
    controller.tell(N1, epoch_end(A, 1, version, index=3))

    commands = controller.tell(N1, exited(A, version, signal=SIGKILL))

    assert reasons(commands) == ["a worker was killed by SIGKILL; resumes after epoch 1"]
    assert controller.job(A).attempts.losses == 1


# --- workers that cannot be started


def test_a_refused_worker_fails_its_job_with_error_and_hint() -> None:
    controller = starting()

    commands = controller.tell(N1, refused(A, error="no such python", hint="correct `python`"))

    assert commands == [
        news("job.failed", A, reason="no such python; correct `python`", exit_code=None, epoch=0),
        send(N1, stop(A, 2, forget=True)),
        RequestPlan(),
    ]
    assert usable(controller) == {S0: True}


def test_a_refused_worker_is_retried_like_a_failed_script() -> None:
    controller = starting(retries=1)

    commands = controller.tell(N1, refused(A, error="no zygote"))

    assert reasons(commands) == ["no zygote; retrying in 1 s, 1 retry left"]


def test_a_refused_worker_that_was_called_off_frees_its_slot_and_asks_for_a_plan() -> None:
    controller = starting()
    controller.take(cancelled(A))

    commands = controller.tell(N1, refused(A, error="no zygote"))

    assert usable(controller) == {S0: True}
    assert commands == [RequestPlan()]


def test_a_group_that_does_not_form_in_time_is_a_failure_of_the_script() -> None:
    controller = starting()
    controller.tell(N1, started(A))
    controller.tell(N1, ready(A))
    assert controller.due(START_LIMIT_S - 1) == []
    (expired,) = controller.due(START_LIMIT_S)

    commands = controller.take(expired)

    why = "the script did not reach its first epoch within 1800 s"
    assert commands == [
        news("job.failed", A, reason=why, exit_code=None, epoch=0),
        send(N1, stop(A, 2, forget=True)),
        RequestPlan(),
    ]
    assert usable(controller) == {S0: False}, "its process still lives"
    assert controller.due(9 * START_LIMIT_S) == []


def test_a_script_that_raised_fails_in_time_though_its_process_goes_on() -> None:
    controller = starting()
    controller.tell(N1, started(A))
    controller.tell(N1, raised(A, index=3, error="ValueError: no", where=""))
    (expired,) = controller.due(START_LIMIT_S)

    commands = controller.take(expired)

    assert reasons(commands) == ["ValueError: no"]


def test_an_old_deadline_leaves_the_new_one_alone() -> None:
    controller = starting()
    controller.tell(N1, exited(A, signal=SIGKILL))
    controller.place({A: S0})

    assert controller.take(StartExpired(job=A, version=Version(1))) == []
    assert controller.due(START_LIMIT_S) == [StartExpired(job=A, version=Version(3))]


def test_a_new_controller_gives_forming_groups_their_time_again() -> None:
    controller = starting()
    controller.now += 2 * START_LIMIT_S

    controller.start()

    assert controller.due() == []
    assert controller.due(START_LIMIT_S) == [StartExpired(job=A, version=Version(1))]


# --- cancelling


def test_a_waiting_job_is_cancelled_at_once() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")

    commands = controller.take(cancelled(A, user="ann"))

    assert commands == [
        news("job.cancelled", A, reason="cancelled by ann", exit_code=None, epoch=0),
        RequestPlan(),
    ]


def test_a_cancelled_worker_is_stopped_and_holds_its_slot_until_it_is_gone() -> None:
    controller = running()

    commands = controller.take(cancelled(A))

    assert deltas(commands) == [send(N1, stop(A, 2, forget=True))]
    assert usable(controller) == {S0: False}
    assert controller.tell(N1, exited(A, signal=SIGTERM)) == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=None, signal=15),
        RequestPlan(),
    ]
    assert usable(controller) == {S0: True}
    assert controller.job(A).phase is Phase.CANCELLED


def test_a_worker_called_off_before_it_was_ever_started_frees_its_slot_when_cleared() -> None:
    controller = starting()
    controller.take(cancelled(A))
    assert usable(controller) == {S0: False}

    assert controller.tell(N1, cleared(A, 2)) == [RequestPlan()]

    assert usable(controller) == {S0: True}
    assert controller.state.jobs_with_processes == {}


def test_cleared_says_nothing_about_the_version_it_names() -> None:
    controller = running(epochs=1)
    controller.tell(N1, exited(A, signal=SIGKILL))
    begin(controller, A, 3)

    controller.tell(N1, cleared(A, 3))

    assert controller.job(A).phase is Phase.RUNNING
    assert usable(controller) == {S0: False}


def test_cancelling_an_ended_job_changes_nothing() -> None:
    controller = running()
    controller.take(cancelled(A))

    assert controller.take(cancelled(A)) == []
    assert controller.job(A).phase is Phase.CANCELLED


def test_cancelling_an_unknown_job_is_an_error() -> None:
    with pytest.raises(UnknownJobError):
        cluster_of().take(cancelled(A))


# --- nodes that fall silent


def test_a_silent_node_gets_no_new_work_and_keeps_what_it_has() -> None:
    controller = running(cluster_of(n1=2))

    commands = controller.take(NodeSuspected(node=N1, silent_s=6.5))

    assert commands == [news("node.suspect", N1, silent_s=6.5), RequestPlan()]
    assert usable(controller) == {S0: False, S1: False}
    assert controller.job(A).phase is Phase.RUNNING


def test_a_node_that_speaks_again_in_time_is_up() -> None:
    controller = running(cluster_of(n1=2))
    controller.take(NodeSuspected(node=N1, silent_s=6.5))

    assert controller.take(NodeHeard(node=N1)) == [news("node.up", N1), RequestPlan()]
    assert usable(controller) == {S0: False, S1: True}


def test_a_lost_node_pauses_its_jobs_and_no_others() -> None:
    controller = running(cluster_of(n1=1, n2=1), epochs=1)
    controller.submit("b")
    begin(controller, B, 1, on=T0)

    commands = controller.lose(N1, silent_s=30.0)

    why = "node n1 has been silent for 30 s; resumes after epoch 1"
    assert commands == [
        news("node.lost", N1, silent_s=30.0),
        send(N1, stop(A, 2)),
        news("job.paused", A, reason=why),
        RequestPlan(),
    ]
    assert controller.job(B).phase is Phase.RUNNING
    assert usable(controller) == {T0: False}


def test_a_job_of_a_lost_node_goes_on_elsewhere() -> None:
    controller = running(cluster_of(n1=1, n2=1), epochs=1)
    controller.lose(N1)

    assert deltas(controller.place({A: T0})) == [send(N2, run(A, 3, on=T0, resume=resume_at(1, 1)))]


def test_slots_of_a_lost_node_are_not_used_before_it_greets() -> None:
    controller = running(cluster_of(n1=1))
    controller.lose(N1)

    assert controller.place({A: S0}) == [RequestPlan()]
    controller.take(greeting(N1, boot="boot-2"))
    assert deltas(controller.place({A: S0})) == [send(N1, run(A, 3))]


def test_a_node_is_lost_only_once() -> None:
    controller = running()
    controller.lose(N1)

    assert controller.lose(N1) == []
    assert controller.job(A).attempts.losses == 1


# --- nodes that return


def test_a_new_node_joins_and_asks_for_a_plan() -> None:
    controller = cluster_of()

    assert controller.take(greeting(N1, slots=2)) == [
        news("node.joined", N1, slots=2),
        RequestPlan(),
    ]
    assert usable(controller) == {S0: True, S1: True}


def test_a_node_that_returns_with_an_old_worker_is_told_to_stop_it() -> None:
    controller = running(cluster_of(n1=1, n2=1))
    controller.lose(N1)
    begin(controller, A, 3, on=T0)

    commands = controller.take(greeting(N1, seen(A)))

    assert commands == [news("node.up", N1), send(N1, stop(A, 3)), RequestPlan()]
    assert usable(controller) == {S0: False, T0: False}
    controller.tell(N1, exited(A, signal=SIGTERM))
    assert usable(controller) == {S0: True, T0: False}
    assert controller.job(A).phase is Phase.RUNNING


def test_a_node_that_returns_without_a_started_worker_lost_it() -> None:
    controller = running(epochs=1)

    commands = controller.take(greeting(N1, boot="boot-2"))

    why = "a worker vanished without an exit status; resumes after epoch 1"
    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=None, signal=None),
        send(N1, stop(A, 2)),
        news("job.paused", A, reason=why),
        send(N1, stop(A, 2)),
        RequestPlan(),
    ]
    assert usable(controller) == {S0: True}


def test_a_node_that_returns_without_an_ordered_worker_is_sent_the_order_again() -> None:
    controller = starting()

    commands = controller.take(greeting(N1, boot="boot-2"))

    assert commands == [send(N1, run(A)), RequestPlan()]
    assert controller.job(A).phase is Phase.STARTING


def test_a_worker_that_went_unheard_with_its_nodes_folders_is_not_begun_again() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, run_id="run-1"))
    starting(controller)

    commands = controller.take(greeting(N1, boot="boot-2", run_id="run-2"))

    assert commands == [
        news("worker.exited", A, rank=0, slot=S0, version=1, code=None, signal=None),
        send(N1, stop(A, 2)),
        news(
            "job.paused",
            A,
            reason="a worker vanished without an exit status; restarts from the beginning",
        ),
        send(N1, stop(A, 2)),
        RequestPlan(),
    ]
    assert controller.history_of(A).processes == {FIRST: Process(N1, confirmed=False)}


@pytest.mark.parametrize("run_id", ["run-1", ""])
def test_one_that_a_node_with_the_same_folders_does_not_have_has_not_begun(run_id: str) -> None:
    controller = cluster_of()
    controller.take(greeting(N1, run_id="run-1"))
    starting(controller)

    commands = controller.take(greeting(N1, boot="boot-2", run_id=run_id))

    assert commands == [send(N1, run(A)), RequestPlan()]
    assert controller.history_of(A).processes == {}


def test_a_called_off_worker_that_went_with_its_nodes_folders_may_have_run() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, run_id="run-1"))
    starting(controller)
    controller.take(cancelled(A))

    controller.take(greeting(N1, boot="boot-2"))  # an agent that does not say
    controller.take(greeting(N1, boot="boot-3", run_id="run-2"))

    assert controller.history_of(A).processes == {FIRST: Process(N1, confirmed=False)}
    assert usable(controller) == {S0: True}


def test_a_node_that_returns_with_its_worker_keeps_it() -> None:
    controller = running(epochs=1)

    commands = controller.take(greeting(N1, seen(A), boot="boot-2"))

    assert commands == [send(N1, settle(A)), RequestPlan()]
    assert controller.job(A).phase is Phase.RUNNING


def test_a_greeting_tells_of_a_start_that_was_not_heard_of() -> None:
    controller = starting()

    commands = controller.take(greeting(N1, seen(A, pid=42), boot="boot-2"))

    assert commands == [
        news("worker.started", A, rank=0, slot=S0, version=1, pid=42),
        send(N1, run(A)),
        RequestPlan(),
    ]


def test_a_worker_that_ended_says_so_itself_behind_its_reports() -> None:
    controller = running()

    controller.take(greeting(N1, seen(A, ended=True, code=0), boot="boot-2"))
    assert controller.job(A).phase is Phase.RUNNING
    controller.tell(N1, epoch_end(A, 1))
    controller.tell(N1, exited(A, code=0))

    job = controller.job(A)
    assert (job.phase, job.progress.epoch) == (Phase.SUCCEEDED, 1)


def test_an_order_that_was_called_off_is_called_off_again_until_the_node_says_cleared() -> None:
    controller = starting()
    controller.take(cancelled(A))

    for _ in range(2):
        assert controller.take(greeting(N1)) == [send(N1, stop(A, 2, forget=True)), RequestPlan()]
        assert usable(controller) == {S0: False}

    assert controller.tell(N1, cleared(A, 2)) == [RequestPlan()]
    assert usable(controller) == {S0: True}


def test_a_called_off_worker_that_a_returning_node_lost_is_gone() -> None:
    controller = running()
    controller.take(cancelled(A))

    commands = controller.take(greeting(N1, boot="boot-2"))

    assert deltas(commands) == [send(N1, stop(A, 2, forget=True))]
    assert usable(controller) == {S0: True}


def test_a_worker_of_an_unknown_job_keeps_its_slot_and_is_not_killed() -> None:
    controller = cluster_of()

    commands = controller.take(greeting(N1, seen(GHOST, slot=1), slots=2))

    assert commands == [news("node.joined", N1, slots=2), RequestPlan()]
    assert usable(controller) == {S0: True, S1: False}
    controller.submit("a")
    assert controller.place({JobId("a-10"): S1}) == [RequestPlan()]


def test_an_unknown_worker_that_ended_holds_nothing() -> None:
    controller = cluster_of()

    controller.take(greeting(N1, seen(GHOST, ended=True)))

    assert usable(controller) == {S0: True}


def test_the_exit_of_an_unknown_worker_frees_its_slot() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(GHOST)))

    controller.tell(N1, exited(GHOST, code=0))

    assert usable(controller) == {S0: True}


def test_an_unknown_worker_that_could_not_be_started_frees_its_slot() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(GHOST, pid=None)))

    assert controller.tell(N1, refused(GHOST, error="no zygote")) == [RequestPlan()]
    assert usable(controller) == {S0: True}


def test_the_exit_of_an_unknown_worker_asks_for_a_plan() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(GHOST)))

    assert controller.tell(N1, exited(GHOST, code=0)) == [RequestPlan()]


def test_a_report_of_an_unknown_worker_frees_nothing() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(GHOST)))

    controller.tell(N1, epoch_end(GHOST, 1))

    assert usable(controller) == {S0: False}


def test_the_exit_of_an_unknown_worker_frees_no_other_slot() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(GHOST, 1, slot=0), seen(GHOST, 2, slot=1), slots=2))

    controller.tell(N1, exited(GHOST, 1, code=0))

    assert usable(controller) == {S0: True, S1: False}


def test_every_node_that_ran_a_job_hears_of_its_end() -> None:
    controller = running(cluster_of(n1=1, n2=1))
    controller.tell(N1, exited(A, signal=SIGKILL))
    begin(controller, A, 3, on=T0)

    commands = controller.tell(N2, exited(A, 3, code=0))

    assert set(deltas(commands)) == {
        send(N1, stop(A, 4, forget=True)),
        send(N2, stop(A, 4, forget=True)),
    }


def test_a_node_that_refused_a_job_hears_of_its_end_too() -> None:
    controller = starting(cluster_of(n1=1, n2=1), retries=1)
    controller.tell(N1, refused(A, error="no zygote"))
    controller.now += RETRY_FIRST_S
    begin(controller, A, 3, on=T0)

    commands = controller.tell(N2, exited(A, 3, code=0))

    assert set(deltas(commands)) == {
        send(N1, stop(A, 4, forget=True)),
        send(N2, stop(A, 4, forget=True)),
    }


# --- a new controller


def test_a_new_controller_awaits_its_nodes_and_keeps_their_jobs() -> None:
    controller = running(cluster_of(n1=2))

    commands = controller.start()

    assert commands == [news("controller.started", term=2, release=""), RequestPlan()]
    assert controller.state.nodes[N1].phase is NodePhase.AWAITED
    assert usable(controller) == {S0: False, S1: False}
    assert controller.job(A).phase is Phase.RUNNING


def test_a_node_that_greets_a_new_controller_is_sent_its_state_in_the_new_term() -> None:
    controller = running()
    controller.start()

    assert controller.take(greeting(N1, seen(A))) == [
        news("node.up", N1),
        send(N1, settle(A, term=2)),
        RequestPlan(),
    ]


def test_an_awaited_node_that_never_comes_is_lost() -> None:
    controller = running()
    controller.start()
    controller.take(NodeSuspected(node=N1, silent_s=6.0))

    controller.lose(N1)

    assert controller.job(A).phase is Phase.PAUSED


# --- stale news


def test_an_event_that_was_committed_before_changes_nothing() -> None:
    controller = running()
    exit_again = NodeReported(
        node=N1, boot=BootId("boot-1"), seq=3, event=exited(A, signal=SIGKILL)
    )

    assert controller.take(exit_again) == []
    assert controller.job(A).phase is Phase.RUNNING


def test_an_event_of_an_earlier_life_of_the_agent_changes_nothing() -> None:
    controller = running()
    controller.take(greeting(N1, seen(A), boot="boot-2"))
    late = NodeReported(node=N1, boot=BootId("boot-1"), seq=9, event=exited(A, signal=SIGKILL))

    assert controller.take(late) == []
    assert controller.job(A).phase is Phase.RUNNING


def test_a_report_whose_index_was_taken_changes_nothing() -> None:
    controller = running(epochs=2)
    controller.take(greeting(N1, seen(A), boot="boot-2"))

    again: list[Report] = [ready(A), formed(A), epoch_end(A, 1), epoch_end(A, 2)]

    assert [controller.tell(N1, report) for report in again] == [[], [], [], []]
    assert controller.tell(N1, epoch_end(A, 3)) != []


@pytest.mark.parametrize("report", [ready(A), formed(A)], ids=["ready", "formed"])
def test_the_last_report_again_changes_nothing(report: WorkerReady | GroupFormed) -> None:
    controller = starting()
    controller.tell(N1, ready(A))
    if report != ready(A):
        controller.tell(N1, report)

    assert controller.tell(N1, report) == []


def test_an_epoch_of_an_old_version_changes_nothing() -> None:
    controller = running(cluster_of(n1=1, n2=1), epochs=1)
    controller.lose(N1)
    begin(controller, A, 3, on=T0)
    controller.take(greeting(N1, seen(A)))

    assert controller.tell(N1, epoch_end(A, 2, 1)) == []
    assert controller.job(A).progress.checkpoint == resume_at(1, 1)


def test_the_end_of_an_old_worker_says_nothing_about_its_job() -> None:
    controller = running(cluster_of(n1=1, n2=1))
    controller.lose(N1)
    begin(controller, A, 3, on=T0)
    controller.take(greeting(N1, seen(A)))

    said: tuple[AgentEvent, ...] = (
        finished(A, index=3, reason="done"),
        raised(A, index=4, error="E", where=""),
        exited(A, code=1),
    )
    for report in said:
        controller.tell(N1, report)

    job = controller.job(A)
    assert isinstance(job.status, Running)
    assert (job.attempts.failures, job.status.script) == (0, ScriptReports())


def test_an_epoch_that_was_reported_before_a_resume_is_not_counted_twice() -> None:
    controller = running(epochs=2)
    controller.tell(N1, exited(A, signal=SIGKILL))
    begin(controller, A, 3)

    assert controller.tell(N1, epoch_end(A, 2, 3, index=3)) == []
    assert controller.job(A).progress.checkpoint == resume_at(2, 1)


def test_a_worker_that_leaves_may_still_say_ready_and_formed() -> None:
    controller = starting()
    controller.take(cancelled(A))

    assert [controller.tell(N1, news_of) for news_of in (ready(A), formed(A))] == [[], []]
    assert controller.job(A).workers[FIRST].phase is WorkerPhase.LEAVING


def test_an_input_that_was_skipped_keeps_its_place_in_the_stream() -> None:
    controller = running()
    skipped = InputSkipped(what="NodeReported", error="E()", node=N1, boot=BootId("boot-1"), seq=4)

    assert controller.take(skipped) == []
    assert controller.state.nodes[N1].committed == 4


def test_an_event_of_an_unknown_node_changes_nothing() -> None:
    controller = cluster_of()

    unknown = NodeReported(node=N1, boot=BootId("boot-1"), seq=1, event=started(A))

    assert controller.take(unknown) == []


# --- stale plans


def test_a_stale_plan_keeps_the_entries_that_still_fit() -> None:
    controller = cluster_of(n1=2, n2=1)
    for name in ("a", "b", "c"):
        controller.submit(name)
    stale = proposal({A: {S0: BATCH}, B: {S1: BATCH}, C: {T0: BATCH}})
    controller.place({C: S1})

    commands = controller.take(stale)

    assert deltas(commands) == [send(N1, run(A))]
    assert commands[-1] == RequestPlan()
    assert [controller.job(job).phase for job in (A, B, C)] == [
        Phase.STARTING,
        Phase.QUEUED,
        Phase.STARTING,
    ]


def test_a_plan_that_gives_one_slot_to_two_jobs_starts_the_first() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b")

    commands = controller.place({A: S0, B: S0})

    assert deltas(commands) == [send(N1, run(A))]


@pytest.mark.parametrize("silence", [NodeSuspected, None])
def test_a_stale_plan_starts_nothing_on_a_silent_node(silence: type[NodeSuspected] | None) -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    if silence:
        controller.take(silence(node=N1, silent_s=6.0))
    else:
        controller.lose(N1)

    assert controller.place({A: S0}) == [RequestPlan()]


def test_a_stale_plan_starts_no_job_that_ended() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.take(cancelled(A))

    assert controller.place({A: S0}) == []


def test_a_stale_plan_leaves_a_running_job_as_it_is() -> None:
    controller = running(cluster_of(n1=2), slots=(1, 2))
    before = controller.job(A).changed_version - 1

    assert controller.take(proposal({A: {S1: BATCH}}, based_on=before)) == [RequestPlan()]
    assert controller.take(proposal({A: {}}, based_on=before)) == [RequestPlan()]
    assert controller.take(proposal({A: {S0: BATCH}}, based_on=before)) == [], "it asks for nothing"
    assert controller.take(proposal({}, based_on=before)) == []
    assert controller.job(A).phase is Phase.RUNNING


def test_a_plan_may_name_jobs_and_slots_that_do_not_exist() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")

    assert controller.place({B: S0, A: SlotId("n9/0")}) == [RequestPlan()]


@pytest.mark.parametrize(
    "placed",
    [{S0: 0}, {S0: BATCH + 1}, {S0: 32, S1: 32}],
    ids=["empty batch", "batch too large", "too many slots"],
)
def test_a_plan_outside_the_bounds_of_a_job_is_refused(placed: dict[SlotId, int]) -> None:
    controller = cluster_of(n1=2)
    controller.submit("a")

    assert controller.place({A: placed}) == [RequestPlan()]
    assert controller.job(A).phase is Phase.QUEUED


def test_a_plan_may_grow_the_batch_up_to_what_one_slot_holds() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", max_batch_size=200, max_local_batch=100)

    assert controller.place({A: {S0: 101}}) == [RequestPlan()]
    assert deltas(controller.place({A: {S0: 100}})) == [
        send(N1, run(A, on={S0: 100}, max_batch_size=200, max_local_batch=100))
    ]


# --- history


def test_the_history_gives_the_same_state_again() -> None:
    controller = running(cluster_of(n1=1, n2=1), epochs=2, retries=1)
    controller.submit("b", key="k")
    controller.tell(N1, exited(A, code=3))
    controller.lose(N2)
    controller.start()
    controller.take(submission("c"))
    controller.take(cancelled(B))

    assert controller.replayed() == controller.state


def test_the_snapshot_of_a_job_travels_with_every_order() -> None:
    controller = starting()

    assert controller.job(A).snapshot == SNAPSHOT
    assert desired(controller.state, controller.job(A), N1).snapshot == SNAPSHOT
    assert desired(controller.state, controller.job(A), N2) == stop(A, 1, stage=PREPARE)
