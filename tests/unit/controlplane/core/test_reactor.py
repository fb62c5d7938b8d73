"""What the core does about each thing that can happen."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Any, Final

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
from controlplane.core.model.job_phases import ScriptReports
from controlplane.core.state import RETRY_FIRST_S, RETRY_LONGEST_S, START_LIMIT_S
from controlplane.policy.api import Reason
from controlplane.service.api.replies import job_summary
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import UnknownJobError
from schemas.ids import BootId, JobId, Seconds, SlotId, Version, WorkerId
from schemas.jobs import StopRule
from schemas.wire.agent import PREPARE, START
from schemas.wire.client import EpochInfo, JobSummary, VersionInfo
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
from tests.unit.controlplane.core.steps import (
    Happens,
    Story,
    do,
    lose,
    place,
    played,
    stories,
    submit,
    to,
    told,
)

FIRST = WorkerId(f"{A}.v1.r0")
GHOST = JobId("ghost-9")
A2 = JobId("a-2")
REPLAN = {"commands": [RequestPlan()]}
NOTHING = {"commands": []}
KILLED = exited(A, signal=SIGKILL)
FREE, TAKEN = {"usable": {S0: True}}, {"usable": {S0: False}}
FORGET = stop(A, 2, forget=True)
SUSPECT = NodeSuspected(node=N1, silent_s=6.5)
AFTER_2 = "the script exited after epoch 2, before its stop rule was met"
VANISHED = "a worker vanished without an exit status"
TOO_LATE = "the script did not reach its first epoch within 1800 s"
RUN_1 = greeting(N1, run_id="run-1")
IN_RUN_2 = greeting(N1, boot="boot-2", run_id="run-2")


def ended(how: str, reason: str, code: int | None = None, epoch: int = 0) -> Announce:
    return news(f"job.{how}", A, reason=reason, exit_code=code, epoch=epoch)


def gone(version: int = 1, code: int | None = None, signal: int | None = None) -> Announce:
    return news("worker.exited", A, rank=0, slot=S0, version=version, code=code, signal=signal)


def one() -> Controller:
    return cluster_of(n1=1)


def two() -> Controller:
    return cluster_of(n1=1, n2=1)


def trains(epochs: int = 0, **spec: Any) -> Happens:
    """Job a trains on the first slot."""
    return lambda controller: running(controller, epochs=epochs, **spec) and None


def starts(**spec: Any) -> Happens:
    return lambda controller: starting(controller, **spec) and None


def begins(job: JobId, version: int, on: SlotId = S0) -> Happens:
    return lambda controller: begin(controller, job, version, on=on)


def two_slots() -> Controller:
    """Job a, which needs two slots, was ordered on both of the only node."""
    return told(cluster_of(n1=2), submit(slots=(2, 2)), place({A: {S0: 32, S1: 32}}))


def both_start() -> Controller:
    return told(two_slots(), *(started(A, rank=rank, pid=100 + rank) for rank in (0, 1)))


def expire(controller: Controller) -> object:
    """Let the only deadline of a start pass."""
    assert controller.due(START_LIMIT_S - 1) == []
    (expired,) = controller.due(START_LIMIT_S)
    return controller.take(expired)


def again_and_again(times: int, back_off: tuple[float, ...] = (), **end: int) -> Story:
    """Job a ends so and starts again, so many times."""
    story: Story = []
    for at in range(times):
        story += [exited(A, 1 + 2 * at, **end), {"phase": "paused"}]
        if back_off:
            story += [back_off[at] - 0.001, place({A: S0}), REPLAN, 0.001]
        story += [begins(A, 3 + 2 * at)]
    return story


def failures_of(controller: Controller) -> list[tuple[str, str]]:
    """Codes and reasons of a's decisions that order no group."""
    decisions = controller.history_of(A).decisions
    return [(one.code, one.reason) for one in decisions if not one.version]


def summary(controller: Controller, later_s: float = 0.0) -> JobSummary:
    """A's line of `ones ps`."""
    now = Seconds(controller.now + later_s)
    return job_summary(controller.job(A), None, TelemetryTable(), now)


def progress_shown(controller: Controller) -> float | None:
    return summary(controller).progress


SUBMISSIONS: Final[dict[str, Story]] = {
    "a submission is accepted and asks for a plan": [
        one, submit("a", user="ann"),
        {
            "commands": [news("job.submitted", A, name="a", user="ann"), Accept(A), RequestPlan()],
            "phase": "queued", "active": [A],
        },
    ],
    "jobs are numbered in order of arrival whatever their names": [
        one, submit("a"), submit("b"), submit("a"), {"active": [A, B, JobId("a-3")]},
    ],
    "the same key twice is one job": [
        one, submit("a", key="once"), submit("a", key="once"), {"commands": [Accept(A)], "phases": {A: "queued"}},
    ],
    "the same key is the same job even after it ended": [
        one, submit("a", key="once"), cancelled(A), submit("a", key="once"), {"commands": [Accept(A)]},
    ],
    "the same key of another user is another job": [
        one, submit("a", key="once", user="ann"), submit("b", key="once", user="bob"), {"active": [A, B]},
    ],
    "submissions without a key are different jobs": [one, submit("a"), submit("a"), {"active": [A, A2]}],
}  # fmt: skip

STARTS: Final[dict[str, Story]] = {
    "a plan prepares the job on the node of its member only": [
        two, submit("a"), proposal({A: {T0: BATCH}}, reasons={A: Reason("next_in_line", "its turn by arrival")}),
        {
            "commands": [
                news("job.starting", A, reason=f"its turn by arrival: {T0}", slots=T0), send(N2, run(A, on=T0)),
            ],
            "versions": [
                VersionInfo(
                    version=Version(1), resumed_epoch=0, kind=START, time=Seconds(1000.0), slots=(T0,), global_batch=BATCH,
                )
            ],
            "usable": {S0: True, T0: False},
        },
    ],
    "a worker that started is announced": [
        starting, started(A, pid=42),
        {
            "commands": [news("worker.started", A, rank=0, slot=S0, version=1, pid=42)],
            "processes": {FIRST: Process(N1)},
        },
    ],
    "a worker that is ready is told to switch": [
        starting, started(A), ready(A),
        {"commands": [news("worker.ready", A, rank=0, slot=S0, version=1), send(N1, switch(A))]},
    ],
    "a ready worker says how long its imports took": [
        starting, ready(A, imports_s=1.5),
        {
            "commands": [
                news("worker.ready", A, rank=0, slot=S0, version=1, imports_s=1.5),
                send(N1, switch(A)),
            ]
        },
    ],
    "a ready worker needs no word of its start": [starting, ready(A), {"orders": to(switch(A), N1)}],
    "a formed group is running and settled": [
        starting, started(A), ready(A), formed(A),
        {
            "commands": [
                news("job.running", A, reason="trains on 1 slot, batch 64", slots=1, epoch=0, batch=64),
                send(N1, settle(A)), RequestPlan(),
            ],
            "phase": "running", "outcome": "formed", "starts": {},
        },
    ],
    "an epoch is kept and announced": [
        running, 234.0, epoch_end(A, 1),
        {
            "commands": [
                news(
                    "job.epoch", A, epoch=1, train_loss=1.0, samples_per_s=500.0, global_batch=BATCH, lr=0.1, accuracy=0.5,
                ),
                RequestPlan(),
            ],
            "progress.epoch": 1, "progress.epoch_at": 1234.0, "progress.samples_done": 1000,
            "progress.checkpoint": resume_at(1, 1),
            "epoch infos": [
                EpochInfo(
                    epoch=1, time=Seconds(1234.0), step=16, global_batch=BATCH, lr=0.1, samples_per_s=500.0, train_loss=1.0,
                    metrics={"accuracy": 0.5}, slots=1, nodes=1, whole=True, samples_done=1000, epoch_samples=1000,
                )
            ],
        },
    ],
}  # fmt: skip

ENDS: Final[dict[str, Story]] = {
    "exit code 0 is success and the node may forget the job": [
        one, trains(2), finished(A, index=5, reason="2 of 2 epochs"), exited(A, code=0),
        {
            "commands": [gone(code=0), ended("succeeded", "2 of 2 epochs", 0, 2), send(N1, FORGET), RequestPlan()],
            "phase": "succeeded", "active": [], "with processes": [], **FREE,
        },
    ],
    "a script that ends early says after which epoch": [one, trains(2), exited(A, code=0), {"reasons": [AFTER_2]}],
    "a script that ends alone before its first epoch trained nothing and says so": [
        starting, started(A), exited(A, code=0),
        {
            "reasons": [
                'nothing was trained: the script exited (exit code 0) and never reached agent.epochs of elastic.ScalingAgent; kind = "command" is for other programs'
            ],
            "phase": "succeeded", progress_shown: 0.0,
        },
    ],
    "a resumed script that ends before it trains again says after which epoch": [
        one, trains(2), KILLED, place({A: S0}), started(A, 3), exited(A, 3, code=0), {"reasons": [AFTER_2]},
    ],
    "a pause before the first epoch says what it ended": [
        running, KILLED, place({A: S0}), paused(A),
        {"reason": "paused by ann before its first epoch: the script was stopped and will restart from the beginning"},
    ],
    "a pause before training says what it ended": [
        one, trains(2), KILLED, place({A: S0}), paused(A),
        {"reason": "paused by ann while starting: the script was stopped and will resume from step 32"},
    ],
    "exit code 3 fails the job and names the code": [
        running, exited(A, code=3),
        {"commands": [gone(code=3), ended("failed", "the script exited with code 3", 3), send(N1, FORGET), RequestPlan()]},
    ],
    "a failure names what the script raised and where": [
        running, raised(A, index=3, error="ValueError: no", where="train.py:7"), exited(A, code=1),
        {"reasons": ["ValueError: no (train.py:7) (exit code 1)"]},
    ],
    "a worker that nobody saw end is done, without a code, if it said so before": [
        one, trains(1), finished(A, index=4, reason="1 of 1 epochs"), exited(A),
        {"reasons": ["1 of 1 epochs"], "phase": "succeeded", "attempts.exit_code": None},
    ],
    "a worker that nobody saw end failed if its script raised": [
        running, raised(A, index=3, error="ValueError: no", where=""), exited(A),
        {"reasons": ["ValueError: no"], "phase": "failed"},
    ],
}  # fmt: skip

RETRIES: Final[dict[str, Story]] = {
    "a failed script is tried again after a back off that doubles": [
        one, trains(retries=3), *again_and_again(3, (1.0, 2.0, 4.0), code=3), exited(A, 7, code=3),
        {"phase": "failed", "reasons": ["the script exited with code 3 (try 4 of 4)"]},
    ],
    "a job that succeeds after a failure says at which try, and its failure is a decision": [
        one, trains(retries=1), *again_and_again(1, (1.0,), code=3),
        *(finished(A, 3, index=4, reason="1 of 1 epochs"), exited(A, 3, code=0)),
        {
            "reasons": ["1 of 1 epochs; succeeded at try 2 of 2"],
            "attempts.last_failure": "try 1 of 2 failed: the script exited with code 3",
            failures_of: [("failed", "try 1 of 2 failed: the script exited with code 3; retrying in 1 s")],
        },
    ],
    "a retry says which try failed and how long it waits": [
        one, trains(retries=2), exited(A, code=3),
        {
            "commands": [
                gone(code=3), send(N1, stop(A, 2)),
                news("job.paused", A, reason="try 1 of 3 failed: the script exited with code 3; retrying in 1 s"),
                RequestPlan(),
            ],
        },
    ],
    "what the library refuses is not tried again": [
        one, trains(retries=2), raised(A, index=3, error="UsageError: no", where="train.py:7", refused=True), exited(A, code=1),
        {
            "phase": "failed",
            "reasons": ["UsageError: no (train.py:7) (exit code 1); not retried: the library would refuse it again"],
        },
    ],
    "a job is not started before its back-off is over": [
        one, trains(retries=1), exited(A, code=3), place({A: S0}), REPLAN,
        RETRY_FIRST_S, place({A: S0}), {"orders": to(run(A, 3, retries=1), N1)},
    ],
}  # fmt: skip

LOSSES: Final[dict[str, Story]] = {
    "a killed worker pauses its job and is not counted": [
        one, trains(2), KILLED,
        {
            "commands": [
                gone(signal=9), send(N1, stop(A, 2)),
                news("job.paused", A, reason="a worker was killed by SIGKILL; resumes after epoch 2"), RequestPlan(),
            ],
            "attempts.failures": 0, "attempts.next_start_at": 0.0,
        },
    ],
    "a lost job resumes from the last reported epoch and its version": [
        one, trains(2), exited(A, signal=SIGTERM), place({A: S0}),
        {
            "commands": [
                news("job.starting", A, reason=f"planned: {S0}, resumes after epoch 2", slots=S0),
                send(N1, run(A, 3, resume=resume_at(2, 1))),
            ],
            "resumed": [(1, 0, 0, "formed"), (3, 2, 32, "")],
        },
    ],
    "a resumed job that finished no epoch resumes from the version that did": [
        one, trains(2), KILLED, begins(A, 3), exited(A, 3, signal=SIGKILL), place({A: S0}),
        {"orders": to(run(A, 5, resume=resume_at(2, 1)), N1)},
    ],
    "a resumed group says after which epoch": [
        one, trains(2), KILLED, place({A: S0}), started(A, 3), ready(A, 3, resumed=2), formed(A, 3, epoch=2),
        {"reasons": ["trains on 1 slot, batch 64, resumed after epoch 2, step 32"]},
    ],
    "a segmentation fault is a failure of the script": [
        running, exited(A, signal=SIGSEGV),
        {
            "reasons": ["a worker crashed with SIGSEGV"], "phase": "failed", "attempts.failures": 1,
            "attempts.exit_code": 128 + SIGSEGV,
        },
    ],
    "a worker that is gone without a trace is lost": [
        running, exited(A), {"reasons": [f"{VANISHED}; restarts from the beginning"], "attempts.failures": 0},
    ],
    "a job that loses worker after worker gives up": [
        running, *again_and_again(MAX_LOSSES - 1, signal=SIGKILL), exited(A, 2 * MAX_LOSSES - 1, signal=SIGKILL),
        {
            "reasons": [f"a worker was killed by SIGKILL; {MAX_LOSSES} losses in a row without a finished epoch"],
            "phase": "failed",
        },
    ],
    "a finished epoch forgives the losses before": [
        running, *again_and_again(MAX_LOSSES - 1, signal=SIGKILL), epoch_end(A, 1, 2 * MAX_LOSSES - 1, index=3),
        exited(A, 2 * MAX_LOSSES - 1, signal=SIGKILL),
        {"reasons": ["a worker was killed by SIGKILL; resumes after epoch 1"], "attempts.losses": 1},
    ],
}  # fmt: skip

NOT_STARTED: Final[dict[str, Story]] = {
    "a refused worker fails its job with error and hint": [
        starting, refused(A, error="no such python", hint="correct `python`"),
        {"commands": [ended("failed", "no such python; correct `python`"), send(N1, FORGET), RequestPlan()], **FREE},
    ],
    "a refused worker is retried like a failed script": [
        one, starts(retries=1), refused(A, error="no zygote"), {"reasons": ["try 1 of 2 failed: no zygote; retrying in 1 s"]},
    ],
    "a refused worker that was called off frees its slot and asks for a plan": [
        starting, cancelled(A), refused(A, error="no zygote"), REPLAN | FREE,
    ],
    "a group that does not form in time is a failure of the script": [
        starting, started(A), ready(A), expire,
        {
            "commands": [ended("failed", TOO_LATE), send(N1, FORGET), RequestPlan()],
            **TAKEN,  # its process still lives
        },
        9 * START_LIMIT_S, {"due": []},
    ],
    "a script that raised fails in time though its process goes on": [
        starting, started(A), raised(A, index=3, error="ValueError: no", where=""), expire, {"reasons": ["ValueError: no"]},
    ],
    "an old deadline leaves the new one alone": [
        starting, KILLED, place({A: S0}), StartExpired(job=A, version=Version(1)), NOTHING,
        START_LIMIT_S, {"due": [StartExpired(job=A, version=Version(3))]},
    ],
    "a new controller gives forming groups their time again": [
        starting, 2 * START_LIMIT_S, do("start"), {"due": []},
        START_LIMIT_S, {"due": [StartExpired(job=A, version=Version(1))]},
    ],
}  # fmt: skip

CANCELLED: Final[dict[str, Story]] = {
    "a waiting job is cancelled at once": [
        one, submit(), cancelled(A, user="ann"), {"commands": [ended("cancelled", "cancelled by ann"), RequestPlan()]},
    ],
    "a cancelled worker is stopped and holds its slot until it is gone": [
        running, cancelled(A), {"orders": to(FORGET, N1), **TAKEN},
        exited(A, signal=SIGTERM), {"commands": [gone(signal=15), RequestPlan()], **FREE, "phase": "cancelled"},
    ],
    "a worker called off before it was ever started frees its slot when cleared": [
        starting, cancelled(A), TAKEN, (N1, cleared(A, 2)), REPLAN | FREE | {"with processes": []},
    ],
    "cleared says nothing about the version it names": [
        one, trains(1), KILLED, begins(A, 3), (N1, cleared(A, 3)), {"phase": "running", **TAKEN},
    ],
    "cancelling an ended job changes nothing": [running, cancelled(A), cancelled(A), NOTHING | {"phase": "cancelled"}],
}  # fmt: skip

SILENT: Final[dict[str, Story]] = {
    "a silent node gets no new work and keeps what it has": [
        lambda: running(cluster_of(n1=2)), SUSPECT,
        {
            "commands": [news("node.suspect", N1, silent_s=6.5), RequestPlan()],
            "usable": {S0: False, S1: False}, "phase": "running",
        },
    ],
    "a node that speaks again in time is up": [
        lambda: running(cluster_of(n1=2)), SUSPECT, NodeHeard(node=N1),
        {"commands": [news("node.up", N1), RequestPlan()], "usable": {S0: False, S1: True}},
    ],
    "a lost node pauses its jobs and no others": [
        two, trains(1), submit("b"), begins(B, 1, T0), lose(N1),
        {
            "commands": [
                news("node.lost", N1, silent_s=30.0), send(N1, stop(A, 2)),
                news("job.paused", A, reason="node n1 has been silent for 30 s; resumes after epoch 1"), RequestPlan(),
            ],
            (B, "phase.value"): "running", "usable": {T0: False},
        },
    ],
    "a job of a lost node goes on elsewhere": [
        two, trains(1), lose(N1), place({A: T0}), {"orders": to(run(A, 3, on=T0, resume=resume_at(1, 1)), N2)},
    ],
    "slots of a lost node are not used before it greets": [
        running, lose(N1), place({A: S0}), REPLAN, greeting(N1, boot="boot-2"), place({A: S0}), {"orders": to(run(A, 3), N1)},
    ],
    "a node is lost only once": [running, lose(N1), lose(N1), NOTHING | {"attempts.losses": 1}],
}  # fmt: skip

RETURNS: Final[dict[str, Story]] = {
    "a new node joins and asks for a plan": [
        cluster_of, greeting(N1, slots=2),
        {"commands": [news("node.joined", N1, slots=2), RequestPlan()], "usable": {S0: True, S1: True}},
    ],
    "a node that returns with an old worker is told to stop it": [
        two, trains(), lose(N1), begins(A, 3, T0), greeting(N1, seen(A)),
        {"commands": [news("node.up", N1), send(N1, stop(A, 3)), RequestPlan()], "usable": {S0: False, T0: False}},
        exited(A, signal=SIGTERM), {"usable": {S0: True, T0: False}, "phase": "running"},
    ],
    "a node that returns without a started worker lost it": [
        one, trains(1), greeting(N1, boot="boot-2"),
        {
            "commands": [
                gone(), send(N1, stop(A, 2)), news("job.paused", A, reason=f"{VANISHED}; resumes after epoch 1"),
                send(N1, stop(A, 2)), RequestPlan(),
            ],
            **FREE,
        },
    ],
    "a node that returns without an ordered worker is sent the order again": [
        starting, greeting(N1, boot="boot-2"), {"commands": [send(N1, run(A)), RequestPlan()], "phase": "starting"},
    ],
    "a worker that went unheard with its nodes folders is not begun again": [
        cluster_of, RUN_1, starts(), IN_RUN_2,
        {
            "commands": [
                gone(), send(N1, stop(A, 2)), news("job.paused", A, reason=f"{VANISHED}; restarts from the beginning"),
                send(N1, stop(A, 2)), RequestPlan(),
            ],
            "processes": {FIRST: Process(N1, confirmed=False)},
        },
    ],
    **{
        f"one that a node with the same folders does not have has not begun: {run_id!r}": [
            cluster_of, RUN_1, starts(), greeting(N1, boot="boot-2", run_id=run_id),
            {"commands": [send(N1, run(A)), RequestPlan()], "processes": {}},
        ]
        for run_id in ("run-1", "")
    },
    "a called off worker that went with its nodes folders may have run": [
        cluster_of, RUN_1, starts(), cancelled(A), greeting(N1, boot="boot-2"),  # an agent that does not say
        greeting(N1, boot="boot-3", run_id="run-2"), {"processes": {FIRST: Process(N1, confirmed=False)}, **FREE},
    ],
    "a node that returns with its worker keeps it": [
        one, trains(1), greeting(N1, seen(A), boot="boot-2"),
        {"commands": [send(N1, settle(A)), RequestPlan()], "phase": "running"},
    ],
    "a greeting tells of a start that was not heard of": [
        starting, greeting(N1, seen(A, pid=42), boot="boot-2"),
        {
            "commands": [
                news("worker.started", A, rank=0, slot=S0, version=1, pid=42), send(N1, run(A)), RequestPlan(),
            ],
        },
    ],
    "a worker that ended says so itself behind its reports": [
        running, greeting(N1, seen(A, ended=True, code=0), boot="boot-2"), {"phase": "running"},
        epoch_end(A, 1), exited(A, code=0), {"phase": "succeeded", "progress.epoch": 1},
    ],
    "an order that was called off is called off again until the node says cleared": [
        starting, cancelled(A), *2 * [greeting(N1), {"commands": [send(N1, FORGET), RequestPlan()], **TAKEN}],
        (N1, cleared(A, 2)), REPLAN | FREE,
    ],
    "a called off worker that a returning node lost is gone": [
        running, cancelled(A), greeting(N1, boot="boot-2"), {"orders": to(FORGET, N1), **FREE},
    ],
    "a worker of an unknown job keeps its slot and is not killed": [
        cluster_of, greeting(N1, seen(GHOST, slot=1), slots=2),
        {"commands": [news("node.joined", N1, slots=2), RequestPlan()], "usable": {S0: True, S1: False}},
        submit(), place({JobId("a-10"): S1}), REPLAN,
    ],
    "an unknown worker that ended holds nothing": [cluster_of, greeting(N1, seen(GHOST, ended=True)), FREE],
    "the exit of an unknown worker frees its slot and asks for a plan": [
        cluster_of, greeting(N1, seen(GHOST)), (N1, exited(GHOST, code=0)), REPLAN | FREE,
    ],
    "an unknown worker that could not be started frees its slot": [
        cluster_of, greeting(N1, seen(GHOST, pid=None)), (N1, refused(GHOST, error="no zygote")), REPLAN | FREE,
    ],
    "a report of an unknown worker frees nothing": [cluster_of, greeting(N1, seen(GHOST)), (N1, epoch_end(GHOST, 1)), TAKEN],
    "the exit of an unknown worker frees no other slot": [
        cluster_of, greeting(N1, seen(GHOST, 1, slot=0), seen(GHOST, 2, slot=1), slots=2), (N1, exited(GHOST, 1, code=0)),
        {"usable": {S0: True, S1: False}},
    ],
    "every node that ran a job hears of its end": [
        two, trains(), KILLED, begins(A, 3, T0), exited(A, 3, code=0), {"orders": to(stop(A, 4, forget=True), N2, N1)},
    ],
    "a node that refused a job hears of its end too": [
        two, starts(retries=1), refused(A, error="no zygote"), RETRY_FIRST_S, begins(A, 3, T0), exited(A, 3, code=0),
        {"orders": to(stop(A, 4, forget=True), N2, N1)},
    ],
    "a new controller awaits its nodes and keeps their jobs": [
        lambda: running(cluster_of(n1=2)), do("start"),
        {
            "commands": [news("controller.started", term=2, release=""), RequestPlan()],
            "nodes' phases": {N1: "awaited"}, "usable": {S0: False, S1: False}, "phase": "running",
        },
    ],
    "a node that greets a new controller is sent its state in the new term": [
        running, do("start"), greeting(N1, seen(A)),
        {"commands": [news("node.up", N1), send(N1, settle(A, term=2)), RequestPlan()]},
    ],
    "an awaited node that never comes is lost": [running, do("start"), SUSPECT, lose(N1), {"phase": "paused"}],
}  # fmt: skip


def reported(seq: int, report: Any, boot: str = "boot-1") -> NodeReported:
    return NodeReported(node=N1, boot=BootId(boot), seq=seq, event=report)


STALE_NEWS: Final[dict[str, Story]] = {
    "an event that was committed before changes nothing": [running, reported(3, KILLED), NOTHING | {"phase": "running"}],
    "an event of an earlier life of the agent changes nothing": [
        running, greeting(N1, seen(A), boot="boot-2"), reported(9, KILLED), NOTHING | {"phase": "running"},
    ],
    "a report whose index was taken changes nothing": [
        one, trains(2), greeting(N1, seen(A), boot="boot-2"),
        *(step for report in (ready(A), formed(A), epoch_end(A, 1), epoch_end(A, 2)) for step in (report, NOTHING)),
        epoch_end(A, 3), {"progress.epoch": 3},
    ],
    "the last report again changes nothing": [starting, ready(A), ready(A), NOTHING, formed(A), formed(A), NOTHING],
    "an epoch of an old version changes nothing": [
        two, trains(1), lose(N1), begins(A, 3, T0), greeting(N1, seen(A)), epoch_end(A, 2, 1),
        NOTHING | {"progress.checkpoint": resume_at(1, 1)},
    ],
    "the end of an old worker says nothing about its job": [
        two, trains(), lose(N1), begins(A, 3, T0), greeting(N1, seen(A)),
        finished(A, index=3, reason="done"), raised(A, index=4, error="E", where=""), exited(A, code=1),
        {"phase": "running", "attempts.failures": 0, "status.script": ScriptReports()},
    ],
    "an epoch that was reported before a resume is not counted twice": [
        one, trains(2), KILLED, begins(A, 3), epoch_end(A, 2, 3, index=3), NOTHING | {"progress.checkpoint": resume_at(2, 1)},
    ],
    "a worker that leaves may still say ready and formed": [
        starting, cancelled(A), ready(A), NOTHING, formed(A), NOTHING | {"workers": {(1, 0): "leaving"}},
    ],
    "an input that was skipped keeps its place in the stream": [
        running, InputSkipped(what="NodeReported", error="E()", node=N1, boot=BootId("boot-1"), seq=4),
        NOTHING | {"committed": {N1: 4}},
    ],
    "an event of an unknown node changes nothing": [cluster_of, reported(1, started(A)), NOTHING],
}  # fmt: skip


def stale(placed: Any) -> Happens:
    """A plan of the moment before job a changed."""
    return lambda controller: controller.take(
        proposal(placed, based_on=controller.job(A).changed_version - 1)
    )


LARGE = {"max_batch_size": 200, "max_local_batch": 100}
STALE_PLANS: Final[dict[str, Story]] = {
    "a stale plan keeps the entries that still fit": [
        lambda: cluster_of(n1=2, n2=1), submit("a"), submit("b"), submit("c"), place({C: S1}),
        proposal({A: {S0: BATCH}, B: {S1: BATCH}, C: {T0: BATCH}}),
        {"orders": to(run(A), N1), "asks": True, "phases": {A: "starting", B: "queued", C: "starting"}},
    ],
    "a plan that gives one slot to two jobs starts the first": [
        one, submit("a"), submit("b"), place({A: S0, B: S0}), {"orders": to(run(A), N1)},
    ],
    "a stale plan starts nothing on a suspect node": [one, submit(), SUSPECT, place({A: S0}), REPLAN],
    "a stale plan starts nothing on a lost node": [one, submit(), lose(N1), place({A: S0}), REPLAN],
    "a stale plan starts no job that ended": [one, submit(), cancelled(A), place({A: S0}), NOTHING],
    "a stale plan leaves a running job as it is": [
        lambda: running(cluster_of(n1=2), slots=(1, 2)), stale({A: {S1: BATCH}}), REPLAN, stale({A: {}}), REPLAN,
        stale({A: {S0: BATCH}}), NOTHING,  # it asks for nothing
        stale({}), NOTHING | {"phase": "running"},
    ],
    "a plan may name jobs and slots that do not exist": [one, submit(), place({B: S0, A: SlotId("n9/0")}), REPLAN],
    **{
        f"a plan outside the bounds of a job is refused: {what}": [
            lambda: cluster_of(n1=2), submit(), place({A: placed}), REPLAN | {"phase": "queued"},
        ]
        for what, placed in (
            ("empty batch", {S0: 0}), ("batch too large", {S0: BATCH + 1}), ("too many slots", {S0: 32, S1: 32}),
        )
    },
    "a plan may grow the batch up to what one slot holds": [
        one, submit(**LARGE), place({A: {S0: 101}}), REPLAN,
        place({A: {S0: 100}}), {"orders": to(run(A, on={S0: 100}, **LARGE), N1)},
    ],
}  # fmt: skip


@stories(
    SUBMISSIONS | STARTS | ENDS | RETRIES | LOSSES | NOT_STARTED | CANCELLED | SILENT | RETURNS
    | STALE_NEWS | STALE_PLANS
)  # fmt: skip
def test_the_core_does_what_is_right(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


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
    assert summary(controller).progress == 1512 / (1000 + 9 * 512)


def test_where_samples_end_the_job_a_short_last_epoch_says_nothing_of_others() -> None:
    controller = running(stop=StopRule(samples=1500))

    controller.tell(N1, epoch_end(A, 1, trained_samples=1000))
    controller.tell(N1, epoch_end(A, 2, samples_done=1500, trained_samples=500))

    seen_of = controller.view().jobs[A]
    assert (seen_of.epoch_samples, seen_of.stop_samples) == (1000, 1500)


def test_a_script_that_leaves_the_library_out_is_refused_on_several_slots() -> None:
    controller = both_start()

    commands = controller.tell(N1, exited(A, rank=1, code=0))

    (why,) = reasons(commands)
    assert why.startswith(
        "nothing was trained: the script exited (exit code 0) on one of its 2 slots and never reached"
    )
    assert why.endswith(
        "; `ones init train.py` shows the lines to change; unchanged it runs as "
        'kind = "torchrun" (a process on each slot) or kind = "command" (once)'
    )
    assert send(N1, FORGET) in commands, "the other one ends, too"
    assert controller.job(A).phase.value == "failed"


def test_a_script_that_takes_long_before_it_loads_is_named_and_waited_for() -> None:
    plain = summary(two_slots(), 90).reason
    controller = told(both_start(), ready(A, rank=1))

    assert summary(controller, 59).reason == plain
    assert summary(controller, 90).reason == (
        "not at agent.epochs after 2 min on 1 of 2 slots: its script prepares, or it never calls "
        f"ScalingAgent and is not trained by this cluster; {plain}"
    )
    controller.now += START_LIMIT_S
    (expired,) = controller.due()
    assert controller.take(expired) == []
    assert (controller.job(A).phase.value, controller.due()) == ("starting", [])
    assert controller.due(START_LIMIT_S) == [expired]


def test_a_back_off_has_a_longest() -> None:
    controller = running(retries=100)
    for version in range(1, 21, 2):
        controller.tell(N1, exited(A, version, code=3))
        pause_s = controller.job(A).attempts.next_start_at - controller.now
        controller.now += pause_s
        begin(controller, A, version + 2)

    assert RETRY_FIRST_S < pause_s == RETRY_LONGEST_S


def test_cancelling_an_unknown_job_is_an_error() -> None:
    with pytest.raises(UnknownJobError):
        cluster_of().take(cancelled(A))


def test_the_history_gives_the_same_state_again() -> None:
    controller = running(two(), epochs=2, retries=1)
    told(controller, submit("b", key="k"), exited(A, code=3), lose(N2), do("start"))
    told(controller, submission("c"), cancelled(B))

    assert controller.replayed() == controller.state


def test_the_snapshot_of_a_job_travels_with_every_order() -> None:
    controller = starting()

    assert controller.job(A).snapshot == SNAPSHOT
    assert desired(controller.state, controller.job(A), N1).snapshot == SNAPSHOT
    assert desired(controller.state, controller.job(A), N2) == stop(A, 1, stage=PREPARE)
