"""How a group of workers becomes another one while it trains."""

from __future__ import annotations

import math
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.core.commands import Command, RequestPlan
from controlplane.core.desired_state import desired
from controlplane.core.handlers import overrides
from controlplane.core.handlers.recovery import MAX_RECOVERIES
from controlplane.core.inputs import OverrideDue, RescaleExpired, ResizeRequested
from controlplane.core.model.job import Job, ManualOverride
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.report_bounds import MAX_MEASURE
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.slot_index import SlotIndex
from controlplane.core.state import PREPARE_LIMIT_S, QUIESCE_LIMIT_S, SWITCH_LIMIT_S
from schemas.ids import JobId, NodeId, Seconds, SlotId, Version
from schemas.nodes import Member
from schemas.wire.agent import JOIN, PREPARE, RECOVER, SUSPEND, GroupBroken, GroupDelta, JoinFailed
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    Born,
    C,
    broken,
    cancelled,
    cleared,
    deltas,
    epoch_end,
    exited,
    finished,
    formed,
    greeting,
    join_failed,
    members,
    named,
    news,
    paused,
    quiesced,
    raised,
    ready,
    reasons,
    refused,
    resized,
    resume_at,
    resumed,
    run,
    seen,
    send,
    settle,
    started,
    stop,
    store,
    suspended,
    switch,
)
from tests.support.controller import ELASTIC, Controller, cluster_of, training

HALVES = {S0: 32, T0: 32}
STORE = "127.0.0.1:29500"
OLD, NEW = (1, 0), (2, 1)  # rank 0 of version 1, and the newcomer of version 2


def order(make: Any, version: int, on: Any, born: Born, **changes: Any) -> GroupDelta:
    """A delta of job a, which is elastic."""
    delta: GroupDelta = make(A, version, on=on, born=born, **ELASTIC, **changes)
    return delta


def leaving(*slots: SlotId) -> tuple[Member, ...]:
    """Members of the first group of job a on two slots, but only those on `slots`."""
    both = members(A, {S0: 32, T0: 32}, [(1, 0), (1, 1)])
    return tuple(member for member in both if member.slot in slots)


def alone() -> Controller:
    """Job a trains on one slot of the first node; each node has two."""
    return training(cluster_of(n1=2, n2=2), S0)


def both() -> Controller:
    """Job a trains on one slot of each node."""
    return training(cluster_of(n1=2, n2=2), S0, T0)


def growing() -> Controller:
    """Job a was on one slot and is told to take one on the other node."""
    controller = alone()
    controller.take(resized(A, on=(S0, T0)))
    return controller


def switching() -> Controller:
    """The same, when all were told to switch."""
    controller = growing()
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, started(A, 2, rank=1))
    controller.tell(N2, ready(A, 2, rank=1))
    return controller


def quiescing() -> Controller:
    """A worker of three is lost; the other two are told to come to rest."""
    controller = training(cluster_of(n1=2, n2=2), S0, S1, T0)
    controller.tell(N2, exited(A, rank=2, signal=SIGKILL))
    return controller


def phase(controller: Controller, job: JobId = A) -> Phase:
    return controller.job(job).phase


def slots(controller: Controller, job: JobId = A) -> list[SlotId]:
    group = controller.job(job).group
    return [member.slot for member in group.members] if group else []


def change(controller: Controller, job: JobId = A) -> RescalePhase | None:
    under_way = controller.job(job).change
    return under_way.phase if under_way else None


def expire(controller: Controller, after_s: float) -> list[Command]:
    """Let the deadline of job a's change pass."""
    version = controller.job(A).version
    assert controller.due(after_s - 1) == []
    controller.now += after_s
    due = RescaleExpired(job=A, version=version)
    assert due in controller.due()
    return controller.take(due)


# --- a group grows


def test_growing_prepares_the_newcomers_and_rank_0_and_nobody_else() -> None:
    controller = training(cluster_of(n1=1, n2=1, n3=1), S0, T0)
    third = SlotId("n3/0")

    commands = controller.take(resized(A, 3))

    prepare = order(run, 2, {S0: 22, T0: 21, third: 21}, [(1, 0), (1, 1), (2, 2)], kind=JOIN)
    why = "ann asked for 3 slots: 2 -> 3 slots, batch 64 -> 64"
    assert commands == [
        news("job.override", A, user="ann", override="resize", slots=3, batch=None),
        news("job.rescaling", A, reason=why),
        send(third.rpartition("/")[0], prepare),  # type: ignore[arg-type]
        send(N1, prepare),
        RequestPlan(),
    ]
    assert slots(controller) == [S0, T0], "the old group trains"


def test_all_are_told_to_switch_when_the_newcomer_is_ready_and_the_store_is_open() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    assert deltas(controller.tell(N2, ready(A, 2, rank=1))) == [], "nobody knows the store"
    commands = controller.tell(N1, store(A, index=3, group=2, port=29500))

    join = order(switch, 2, HALVES, [OLD, NEW], kind=JOIN, store=STORE)
    assert deltas(commands) == [send(N2, join), send(N1, join)]
    assert change(controller) is RescalePhase.SWITCHING


def test_nobody_switches_while_one_newcomer_of_two_is_not_ready() -> None:
    controller = alone()
    controller.take(resized(A, on=(S0, S1, T0)))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N1, started(A, 2, rank=1))
    controller.tell(N2, started(A, 2, rank=2))

    assert deltas(controller.tell(N1, ready(A, 2, rank=1))) == []
    assert change(controller) is RescalePhase.PREPARING
    commands = controller.tell(N2, ready(A, 2, rank=2))

    assert [command.node for command in deltas(commands)] == [N1, N2]
    assert change(controller) is RescalePhase.SWITCHING


def test_the_store_may_be_open_before_the_newcomer_is_ready() -> None:
    controller = growing()
    assert deltas(controller.tell(N1, store(A, index=3, group=2, port=29500))) == []

    commands = controller.tell(N2, ready(A, 2, rank=1))

    assert [command.node for command in deltas(commands)] == [N2, N1]


def test_a_group_is_settled_when_each_of_its_members_takes_its_steps_in_it() -> None:
    controller = switching()
    controller.now += 2.0
    assert controller.tell(N1, formed(A, index=4, group=2)) == []
    assert phase(controller) is Phase.RESCALING

    commands = controller.tell(N2, formed(A, 2, rank=1))

    settled = order(settle, 2, HALVES, [OLD, NEW])
    why = "trains on 2 slots, batch 64: ann asked for n1/0, n2/0"
    assert commands == [
        news("job.running", A, reason=why, slots=2, batch=64, took_s=2.0),
        send(N1, settled),
        send(N2, settled),
        RequestPlan(),
    ]
    job = controller.job(A)
    assert (
        job.accounting.rescales,
        job.accounting.batch_changes,
        controller.history_of(A).versions[-1].outcome,
    ) == (1, 0, "formed")
    assert (
        controller.history_of(A).versions[-1].kind,
        controller.history_of(A).versions[-1].took_s,
    ) == (JOIN, 2.0)


@pytest.mark.parametrize(
    ("pause_ms", "step_ms", "said"),
    [
        (12.5, 50.0, {"pause_ms": 12.5, "pause_steps": 0.25}),
        (12.5, 0.0, {"pause_ms": 12.5}),
        (12.5, math.nan, {"pause_ms": 12.5}),
        (0.0, 50.0, {}),
        (-1.0, 50.0, {}),
        (math.nan, 50.0, {}),
        (math.inf, 0.0, {"pause_ms": MAX_MEASURE}),
    ],
)
def test_a_change_says_how_long_training_stood_still_for_it(
    pause_ms: float, step_ms: float, said: dict[str, float]
) -> None:
    controller = switching()
    controller.tell(N1, formed(A, index=4, group=2, pause_ms=pause_ms, step_ms=step_ms))

    (announced, *_) = controller.tell(N2, formed(A, 2, rank=1))

    why = "trains on 2 slots, batch 64: ann asked for n1/0, n2/0"
    assert announced == news("job.running", A, reason=why, slots=2, batch=64, took_s=0.0, **said)
    assert controller.history_of(A).decisions[-1].numbers == said


def test_a_newcomer_is_chosen_on_the_node_where_the_job_is() -> None:
    controller = alone()

    controller.take(resized(A, 2))

    (newcomer,) = [worker for worker in controller.job(A).workers.values() if worker.version == 2]
    assert newcomer.slot == S1


def test_a_job_that_waits_is_started_at_the_size_that_was_asked_for() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", **ELASTIC)

    commands = controller.take(resized(A, 2))

    first = order(run, 1, {S0: 32, S1: 32}, [(1, 0), (1, 1)])
    assert deltas(commands) == [send(N1, first)]


def test_a_job_that_waits_starts_on_what_is_free_within_its_bounds_and_grows_to_the_order() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **ELASTIC)

    commands = controller.take(resized(A, 2))

    assert reasons(commands) == ["ann asked for 2 slots; 1 for now, no more are free: n1/0"]
    controller.tell(N1, started(A))
    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))
    assert controller.job(A).override_wait_reason == "waiting for 1 more slot, as ann ordered"
    assert reasons(controller.take(greeting(N2))) == [
        "ann asked for 2 slots: 1 -> 2 slots, batch 64 -> 64"
    ]


def test_growth_in_part_goes_on_while_slots_become_free_and_is_followed_by_the_rest() -> None:
    controller = training(cluster_of(n1=1), S0, slots=(1, 8))
    controller.take(resized(A, 6))
    told = [reasons(controller.take(greeting(node))) for node in (N2, NodeId("n3"))]
    kept = [slot.usable for slot in controller.view().slots]
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))

    settled = controller.tell(N2, formed(A, 2, rank=1))

    why = "ann asked for 6 slots; {} for now, no more are free"
    assert told == [[f"{why.format(2)}: 1 -> 2 slots, batch 64 -> 64"], []]
    assert kept == [False, False, False], "no policy takes what becomes free"
    assert reasons(settled) == [
        f"trains on 2 slots, batch 64: {why.format(2)}",
        f"{why.format(3)}: 2 -> 3 slots, batch 64 -> 64",
    ]


def test_an_order_for_a_batch_smaller_than_its_slots_is_given_once() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0)
    first = reasons(controller.take(resized(A, 4, batch=2)))

    again = controller.tell(N1, started(A, 2, rank=1))

    assert first == ["ann asked for 4 slots, batch 2: 1 -> 4 slots, batch 64 -> 4"]
    assert (reasons(again), controller.job(A).version) == ([], 2)


def test_a_job_that_waits_is_not_started_below_its_least() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **{**ELASTIC, "slots": (2, 4)})

    commands = controller.take(resized(A, 3))

    assert deltas(commands) == []
    assert controller.job(A).override_wait_reason == (
        "waiting for slots: ann ordered 3 slots, at least 2 are needed"
    )
    assert len(deltas(controller.take(greeting(N2)))) == 2, "a slot came"


def test_a_job_goes_on_at_what_is_free_after_a_pause_whatever_size_was_asked_for() -> None:
    controller = both()
    controller.take(resized(A, 4))
    controller.take(paused(A))
    controller.tell(N1, suspended(A, index=3, group=2))
    controller.tell(N1, exited(A, code=0))
    controller.tell(N2, exited(A, rank=1, code=0))

    controller.take(resumed(A))

    assert (phase(controller), slots(controller)) == (Phase.STARTING, [S0, T0])


def test_orders_are_among_the_decisions_with_who_gave_them() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **{**ELASTIC, "slots": (2, 4)})
    controller.take(resized(A, 4, batch=128, user="bob"))
    controller.take(paused(A))
    controller.take(resumed(A))
    controller.take(resized(A, on=(S0, S1)))
    controller.take(resumed(A, auto=True))

    decisions = controller.history_of(A).decisions

    assert {(one.code, one.by, one.outcome) for one in decisions} == {
        ("order", "operator", "ordered")
    }
    assert [one.reason for one in decisions] == [
        "bob asked for 4 slots, batch 128",
        "ann asked for a pause",
        "ann ended the pause",
        f"ann asked for {S0}, {S1}",
        "ann returned the job to the policy",
    ]


def test_an_order_does_not_take_the_outcome_of_the_group_before_it() -> None:
    controller = growing()
    controller.take(paused(A))

    decisions = controller.history_of(A).decisions

    assert [(one.version, one.outcome) for one in decisions] == [
        (1, "formed"),
        (0, "ordered"),
        (2, "abandoned"),
        (0, "ordered"),
        (3, ""),
    ]


def test_a_job_that_waits_says_who_paused_and_resumed_it() -> None:
    controller = cluster_of()
    controller.submit("a", **ELASTIC)
    reasons_ = [controller.job(A).reason]

    for event in (paused(A), resumed(A), paused(A), resized(A, 1)):
        controller.take(event)
        reasons_.append(controller.job(A).reason)

    assert reasons_ == [
        "submitted", "paused by ann", "resumed by ann", "paused by ann", "resumed by ann",
    ]  # fmt: skip


def test_an_order_that_does_not_fit_waits_and_says_for_what() -> None:
    controller = training(cluster_of(n1=1), S0)

    commands = controller.take(resized(A, 2))

    assert deltas(commands) == []
    assert controller.job(A).override_wait_reason == "waiting for 1 more slot, as ann ordered"
    assert deltas(controller.take(greeting(N2))) != [], "a slot came"
    assert controller.job(A).override_wait_reason == ""


# --- a group shrinks, or changes its batch only


def test_shrinking_to_one_switches_at_once_and_tells_the_leaver() -> None:
    controller = both()

    commands = controller.take(resized(A, 1))

    leave = order(switch, 2, S0, [OLD], kind=JOIN, former=leaving(T0))
    assert deltas(commands) == [send(N1, leave), send(N2, leave)]


def test_a_group_that_shrank_is_settled_without_the_leaver_which_exits_by_itself() -> None:
    controller = both()
    controller.take(resized(A, 1))

    commands = controller.tell(N1, formed(A, index=3, group=2))

    assert deltas(commands) == [
        send(N1, order(settle, 2, S0, [OLD])),
        send(N2, stop(A, 2)),
    ]
    assert controller.job(A).workers[named(A, 1, 1)].phase is WorkerPhase.RETIRING
    assert not controller.view().slots[2].usable, "its process still lives"
    controller.tell(N2, exited(A, rank=1, code=0))
    assert controller.view().slots[2].usable
    assert phase(controller) is Phase.RUNNING


def test_a_leaver_may_be_gone_before_the_others_say_that_they_switched() -> None:
    controller = both()
    controller.take(resized(A, 1))

    assert deltas(controller.tell(N2, exited(A, rank=1, code=0))) == []
    controller.tell(N1, formed(A, index=3, group=2))

    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0])


def test_a_smaller_group_of_several_meets_at_a_new_store() -> None:
    controller = training(cluster_of(n1=2, n2=1), S0, S1, T0)

    prepare = controller.take(resized(A, 2))
    commands = controller.tell(N1, store(A, index=3, group=2, port=29500))

    halves = {S0: 32, S1: 32}
    former = members(A, {S0: 22, S1: 21, T0: 21}, [(1, 0), (1, 1), (1, 2)])[2:]
    changes: dict[str, Any] = {"kind": JOIN, "former": former}
    born = [(1, 0), (1, 1)]
    assert deltas(prepare) == [send(N1, order(run, 2, halves, born, **changes))]
    leave = order(switch, 2, halves, born, store=STORE, **changes)
    assert deltas(commands) == [send(N1, leave), send(N2, leave)]


def test_a_new_batch_is_a_new_version_of_the_same_workers() -> None:
    controller = both()

    commands = controller.take(resized(A, batch=101))

    bigger = order(switch, 2, {S0: 51, T0: 50}, [(1, 0), (1, 1)], kind=JOIN)
    assert deltas(commands) == [send(N1, bigger), send(N2, bigger)]
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N2, formed(A, rank=1, index=3, group=2))
    job = controller.job(A)
    assert (job.accounting.rescales, job.accounting.batch_changes) == (0, 1)
    assert [worker.local_batch for worker in job.group_workers()] == [51, 50]


def test_asking_for_what_is_there_changes_nothing() -> None:
    controller = both()

    assert deltas(controller.take(resized(A, 2, batch=BATCH))) == []
    assert phase(controller) is Phase.RUNNING


def test_moving_to_other_slots_grows_first_and_shrinks_then() -> None:
    controller = alone()
    controller.take(resized(A, on=(T0,)))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))

    commands = controller.tell(N2, formed(A, 2, rank=1))

    former = members(A, HALVES, [OLD, NEW])[:1]
    leave = order(switch, 3, T0, [NEW], kind=JOIN, former=former)
    settled = order(settle, 2, HALVES, [OLD, NEW])
    assert deltas(commands) == [
        send(N1, settled),
        send(N2, settled),
        send(N2, leave),
        send(N1, leave),
    ]
    controller.tell(N2, formed(A, 2, rank=1, index=3, group=3))
    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [T0])


# --- pause and resume


def test_a_pause_is_a_group_of_nobody() -> None:
    controller = both()

    commands = controller.take(paused(A))

    suspend = order(switch, 2, {}, [], kind=SUSPEND, former=leaving(S0, T0))
    assert commands == [
        news("job.override", A, user="ann", override="pause", slots=None, batch=None),
        news("job.rescaling", A, reason="paused by ann: 2 -> 0 slots, batch 64 -> 0"),
        send(N1, suspend),
        send(N2, suspend),
        RequestPlan(),
    ]


def test_a_job_is_paused_when_its_checkpoint_is_durable_and_resumes_from_it() -> None:
    controller = both()
    controller.tell(N1, epoch_end(A, 1))
    controller.take(paused(A))

    commands = controller.tell(N1, suspended(A, index=4, group=2, epoch=1, step=20))

    assert commands == [
        news("job.paused", A, reason="paused by ann, at step 20", epoch=1),
        send(N1, stop(A, 2)),
        send(N2, stop(A, 2)),
        RequestPlan(),
    ]
    assert {worker.phase for worker in controller.job(A).workers.values()} == {WorkerPhase.RETIRING}
    controller.tell(N1, exited(A, code=0))
    controller.tell(N2, exited(A, rank=1, code=0))
    controller.take(resumed(A))
    commands = controller.place({A: S0})
    again = order(run, 3, S0, [(3, 0)], resume=resume_at(1, 2))
    assert deltas(commands) == [send(N1, again)]


def test_a_size_of_zero_is_a_pause_and_a_resume_brings_the_size_of_before() -> None:
    controller = training(cluster_of(n1=2), S0)
    controller.take(resized(A, 1))
    controller.take(resized(A, 0))
    controller.tell(N1, suspended(A, index=3, group=2))
    controller.tell(N1, exited(A, code=0))
    assert phase(controller) is Phase.PAUSED

    controller.take(resumed(A))

    assert (phase(controller), slots(controller)) == (Phase.STARTING, [S0])


def test_a_job_that_is_just_starting_is_paused_at_once() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **ELASTIC)
    controller.place({A: S0})

    commands = controller.take(paused(A))

    assert deltas(commands) == [send(N1, stop(A, 2))]
    assert phase(controller) is Phase.PAUSED


def test_a_paused_job_stays_paused_whatever_the_policy_plans() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **ELASTIC)
    controller.take(paused(A))

    assert controller.place({A: S0}) == []
    assert phase(controller) is Phase.QUEUED


# --- newcomers that do not come


KEPT = order(settle, 2, S0, [OLD], of=1)  # version 2 is given up


def test_a_lost_newcomer_leaves_the_old_group_training() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    commands = controller.tell(N2, exited(A, 2, rank=1, signal=SIGKILL))

    why = "a newcomer was lost: a worker was killed by SIGKILL"
    assert reasons(commands) == [f"trains on 1 slot, batch 64: {why}"]
    assert deltas(commands) == [send(N2, stop(A, 2)), send(N1, KEPT)]
    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0])
    assert controller.history_of(A).versions[-1].outcome == "abandoned"


def test_a_newcomer_that_is_lost_before_the_boundary_leaves_the_old_group_training() -> None:
    controller = switching()

    commands = controller.tell(N2, exited(A, 2, rank=1, signal=SIGKILL))

    assert deltas(commands) == [send(N2, stop(A, 2)), send(N1, KEPT)]
    assert phase(controller) is Phase.RUNNING


@pytest.mark.parametrize("code", [0, 3])
def test_a_newcomer_that_ends_is_no_failure_of_the_job(code: int) -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    controller.tell(N2, exited(A, 2, rank=1, code=code))

    job = controller.job(A)
    assert (job.phase, job.attempts.failures, job.attempts.losses) == (Phase.RUNNING, 0, 0)


def test_a_newcomer_whose_script_is_through_first_is_not_lost() -> None:
    """The job's last epoch ends in the group that it has just joined; its node says so first."""
    controller = switching()
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N1, finished(A, index=5, reason="10 of 10 epochs"))

    early = controller.tell(N2, exited(A, 2, rank=1, code=0))
    last = controller.tell(N1, exited(A, code=0))

    assert reasons(early) == []
    assert (reasons(last), phase(controller)) == (["10 of 10 epochs"], Phase.SUCCEEDED)
    assert controller.job(A).attempts.recoveries == 0


def test_a_newcomer_that_cannot_be_started_leaves_the_old_group_training() -> None:
    controller = growing()

    commands = controller.tell(N2, refused(A, 2, rank=1, error="no zygote"))

    why = "a newcomer could not start: no zygote"
    assert reasons(commands) == [f"trains on 1 slot, batch 64: {why}"]
    assert phase(controller) is Phase.RUNNING


def test_a_newcomer_that_comes_too_late_is_stopped() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    commands = expire(controller, PREPARE_LIMIT_S)

    assert reasons(commands) == ["trains on 1 slot, batch 64: not ready after 600 s: n2/0"]
    assert controller.job(A).workers[named(A, 2, 1)].phase is WorkerPhase.LEAVING
    assert controller.tell(N2, ready(A, 2, rank=1)) == [], "too late"


def test_a_boundary_that_never_comes_ends_the_change() -> None:
    controller = switching()

    commands = expire(controller, SWITCH_LIMIT_S)

    assert reasons(commands) == [
        "trains on 1 slot, batch 64: the group did not switch within 1800 s"
    ]
    assert phase(controller) is Phase.RUNNING


def test_a_group_that_cannot_be_built_leaves_the_old_group_training() -> None:
    controller = switching()

    commands = controller.tell(N1, join_failed(A, index=4, group=2, error="timed out"))

    why = "the new group could not be built: timed out"
    assert reasons(commands) == [f"trains on 1 slot, batch 64: {why}"]
    assert controller.job(A).workers[named(A, 2, 1)].phase is WorkerPhase.LEAVING


def test_an_order_that_failed_is_tried_again_after_a_pause_that_doubles() -> None:
    controller = growing()
    pauses = []
    for version in (2, 3, 4):
        controller.tell(N2, refused(A, version, rank=1, error="no zygote"))
        pauses.append(controller.job(A).attempts.next_change_at - controller.now)
        assert controller.job(A).override_wait_reason == "waiting for its next retry"
        controller.now += pauses[-1]
        assert controller.due() == [OverrideDue(job=A)]
        controller.take(OverrideDue(job=A))
        assert change(controller) is RescalePhase.PREPARING

    assert pauses == [1.0, 2.0, 4.0]


def test_a_member_that_switched_although_the_change_was_abandoned_is_mended() -> None:
    controller = switching()
    controller.tell(N2, exited(A, 2, rank=1, signal=SIGKILL))

    commands = controller.tell(N1, formed(A, index=4, group=2))

    assert reasons(commands) == [
        "a worker switched to the abandoned version 2; 1 worker continues",
    ]
    assert deltas(commands) == [send(N1, order(run, 3, S0, [OLD], kind=RECOVER))]


def test_a_member_that_switched_before_the_change_was_abandoned_is_mended_at_once() -> None:
    controller = switching()
    controller.tell(N1, formed(A, index=4, group=2))

    commands = controller.tell(N2, exited(A, 2, rank=1, signal=SIGKILL))

    assert reasons(commands)[-1] == (
        "a worker switched to the abandoned version 2; 1 worker continues"
    )
    assert send(N1, order(run, 3, S0, [OLD], kind=RECOVER)) in deltas(commands)
    assert deltas(controller.tell(N1, broken(A, index=5, group=2, error="reset"))) == []


def test_when_the_last_incumbent_ends_well_the_job_has_ended_whatever_its_newcomers_do() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))
    controller.tell(N1, finished(A, index=3, reason="10 of 10 epochs"))

    commands = controller.tell(N1, exited(A, code=0))

    assert reasons(commands) == ["10 of 10 epochs"]
    assert phase(controller) is Phase.SUCCEEDED


# --- a second order


def test_a_newer_order_takes_the_place_of_one_that_is_prepared() -> None:
    controller = growing()

    commands = controller.take(resized(A, on=(S0, S1)))

    assert reasons(commands) == [
        "trains on 1 slot, batch 64: replaced by a newer order",
        "ann asked for n1/0, n1/1: 1 -> 2 slots, batch 64 -> 64",
    ]
    job = controller.job(A)
    assert job.version == 3, "versions are never used again"
    assert job.workers[named(A, 2, 1)].phase is WorkerPhase.LEAVING


def test_a_newer_order_waits_for_a_switch_that_is_under_way() -> None:
    controller = switching()

    commands = controller.take(resized(A, 1))

    assert deltas(commands) == []
    controller.tell(N1, formed(A, index=4, group=2))
    commands = controller.tell(N2, formed(A, 2, rank=1))
    assert reasons(commands)[1:] == ["ann asked for 1 slot: 2 -> 1 slots, batch 64 -> 64"]


def test_the_same_order_again_leaves_the_newcomer_alone() -> None:
    controller = growing()

    assert deltas(controller.take(resized(A, on=(S0, T0)))) == []
    assert controller.job(A).version == 2


def test_a_pause_takes_the_place_of_a_growth_that_is_prepared() -> None:
    controller = growing()

    commands = controller.take(paused(A))

    assert reasons(commands)[1:] == ["paused by ann: 1 -> 0 slots, batch 64 -> 0"]


def test_a_job_that_is_cancelled_while_it_grows_is_stopped_everywhere() -> None:
    controller = growing()

    commands = controller.take(cancelled(A))

    assert {command.node: command.delta for command in deltas(commands)} == {
        N1: stop(A, 3, forget=True),
        N2: stop(A, 3, forget=True),
    }
    assert change(controller) is None


# --- a slot goes from one job to another


def handing_over() -> Controller:
    """On a full cluster job b gives up its slot, which job a is to have."""
    controller = training(cluster_of(n1=1, n2=1), S0)
    training(controller, T0, name="b")
    controller.take(paused(B))
    controller.take(resized(A, 2))
    return controller


def test_a_job_waits_until_somebody_leaves() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)
    training(controller, T0, name="b")

    assert deltas(controller.take(resized(A, 2))) == []
    assert controller.state.slot_index.reservations() == {}


def test_a_newcomer_is_prepared_beside_a_worker_that_leaves() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)
    training(controller, T0, name="b")
    controller.take(paused(B))

    commands = controller.take(resized(A, 2))

    prepare = order(run, 2, HALVES, [OLD, NEW], kind=JOIN)
    assert deltas(commands) == [send(N2, prepare), send(N1, prepare)]
    assert controller.job(A).workers[named(A, 2, 1)].reserved
    assert controller.state.slot_index.owners()[T0] == B


def test_a_newcomer_owns_its_slot_when_the_owner_was_seen_gone() -> None:
    controller = handing_over()
    controller.tell(N2, started(A, 2, rank=1))
    controller.tell(N2, suspended(B, index=3, group=2))

    controller.tell(N2, exited(B, code=0))

    assert controller.state.slot_index.owners()[T0] == A
    assert controller.state.slot_index.reservations() == {}
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    assert change(controller) is RescalePhase.SWITCHING


def test_a_slot_that_is_kept_after_all_is_no_longer_waited_for() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0)
    training(controller, T0, T1, name="b")
    controller.take(resized(B, 1))
    controller.take(resized(A, 2))
    assert controller.job(A).workers[named(A, 2, 1)].reserved

    commands = controller.tell(N2, join_failed(B, index=3, group=2, error="no"))

    assert "trains on 1 slot, batch 64: the reserved slots are not given up" in reasons(commands)
    assert controller.state.slot_index.owners()[T1] == B
    assert phase(controller) is Phase.RUNNING


def test_a_slot_is_promised_to_one_only() -> None:
    controller = training(cluster_of(n1=1, n2=1, n3=1), S0)
    training(controller, T0, name="b")
    training(controller, SlotId("n3/0"), name="c")
    controller.take(paused(B))
    controller.take(resized(A, 2))

    controller.take(resized(C, 2))

    assert [job.job for job, _ in controller.state.slot_index.reservations().values()] == [A]
    assert controller.job(C).override_wait_reason == "waiting for 1 more slot, as ann ordered"


# --- a member is lost


def test_a_lost_member_brings_the_others_to_rest() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, S1, T0)

    commands = controller.tell(N2, exited(A, rank=2, signal=SIGKILL))

    rest = order(run, 2, {S0: 32, S1: 32}, [(1, 0), (1, 1)], kind=RECOVER)
    assert commands == [
        news("worker.exited", A, rank=2, slot=T0, version=1, code=None, signal=9),
        news("job.rescaling", A, reason="a worker was killed by SIGKILL; 2 workers continue"),
        send(N1, rest),
        RequestPlan(),
    ]
    assert change(controller) is RescalePhase.QUIESCING


def test_survivors_at_one_step_go_on_as_they_are() -> None:
    controller = quiescing()
    controller.tell(N1, quiesced(A, index=3, group=2, step=20, port=29500))

    commands = controller.tell(N1, quiesced(A, rank=1, index=3, group=2, step=20, port=29501))

    join = order(switch, 2, {S0: 32, S1: 32}, [(1, 0), (1, 1)], kind=RECOVER, store=STORE)
    assert deltas(commands) == [send(N1, join)]


def test_survivors_that_disagree_take_the_furthest_step() -> None:
    controller = quiescing()
    controller.tell(N1, quiesced(A, index=3, group=2, step=20, port=29500))

    commands = controller.tell(N1, quiesced(A, rank=1, index=3, group=2, step=21, port=29501))

    (command,) = deltas(commands)
    assert (command.delta.source, command.delta.store) == (1, STORE)


def test_a_mended_group_trains_on_without_a_checkpoint() -> None:
    controller = quiescing()
    for rank in (0, 1):
        controller.tell(N1, quiesced(A, rank=rank, index=3, group=2))
    controller.tell(N1, formed(A, index=4, group=2, step=20))

    commands = controller.tell(N1, formed(A, rank=1, index=4, group=2, step=20))

    job = controller.job(A)
    assert (job.phase, job.attempts.losses, controller.history_of(A).versions[-1].kind) == (
        Phase.RUNNING,
        0,
        RECOVER,
    )
    assert deltas(commands) == [
        send(N1, order(settle, 2, {S0: 32, S1: 32}, [(1, 0), (1, 1)])),
        send(N2, stop(A, 2)),
    ]


def test_the_word_of_a_broken_group_is_enough_to_mend_it() -> None:
    controller = both()

    commands = controller.tell(N1, broken(A, index=3, group=1, error="reset by peer"))

    rest = order(run, 2, HALVES, [(1, 0), (1, 1)], kind=RECOVER)
    assert deltas(commands) == [send(N1, rest), send(N2, rest)]
    assert controller.tell(N2, broken(A, rank=1, index=3, group=1, error="reset")) == []


def test_a_newcomer_without_the_whole_state_is_dismissed() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, S1)
    controller.take(resized(A, on=(S0, S1, T0)))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, started(A, 2, rank=2))
    controller.tell(N2, ready(A, 2, rank=2))
    controller.tell(N1, exited(A, rank=1, signal=SIGKILL))
    controller.tell(N2, quiesced(A, 2, rank=2, index=2, group=3, has_full_state=False))

    commands = controller.tell(N1, quiesced(A, index=4, group=3))

    assert {command.node: command.delta for command in deltas(commands)} == {
        N1: order(switch, 3, S0, [OLD], kind=RECOVER),
        N2: stop(A, 3, stage=PREPARE + 1),
    }
    assert controller.job(A).workers[named(A, 2, 2)].phase is WorkerPhase.LEAVING


def test_a_newcomer_that_passed_the_boundary_may_be_the_only_one_that_is_left() -> None:
    controller = switching()
    controller.tell(N2, formed(A, 2, rank=1))

    controller.tell(N1, exited(A, signal=SIGKILL))

    assert change(controller) is RescalePhase.QUIESCING
    commands = controller.tell(N2, quiesced(A, 2, rank=1, index=3, group=3))
    assert deltas(commands)[-1] == send(N2, order(switch, 3, T0, [NEW], kind=RECOVER))


def test_a_survivor_that_is_lost_at_rest_is_not_waited_for() -> None:
    controller = quiescing()
    controller.tell(N1, quiesced(A, index=3, group=2))

    controller.tell(N1, exited(A, rank=1, signal=SIGKILL))

    assert change(controller) is RescalePhase.REJOINING
    controller.tell(N1, formed(A, index=4, group=2))
    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0])


@pytest.mark.parametrize("end", [{"signal": SIGKILL}, {"code": 0}], ids=["killed", "ended"])
def test_a_survivor_that_is_gone_while_it_rejoins_is_another_mend(end: dict[str, int]) -> None:
    controller = quiescing()
    for rank in (0, 1):
        controller.tell(N1, quiesced(A, rank=rank, index=3, group=2))

    commands = controller.tell(N1, exited(A, rank=1, **end))

    assert deltas(commands) == [send(N1, order(run, 3, S0, [OLD], kind=RECOVER))]
    assert change(controller) is RescalePhase.QUIESCING


def test_when_the_last_survivor_is_lost_the_job_starts_again_from_its_checkpoint() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, T0, epochs=2)
    controller.tell(N2, exited(A, rank=1, signal=SIGKILL))

    commands = controller.tell(N1, exited(A, signal=SIGKILL))

    assert reasons(commands) == ["a worker was killed by SIGKILL; resumes after epoch 2"]
    assert phase(controller) is Phase.PAUSED
    again = order(run, 4, T0, [(4, 0)], resume=resume_at(2, 1))
    assert deltas(controller.place({A: T0})) == [send(N2, again)]


def test_survivors_that_do_not_come_to_rest_in_time_are_given_up() -> None:
    controller = quiescing()

    commands = expire(controller, QUIESCE_LIMIT_S)

    assert reasons(commands) == [
        "a worker was killed by SIGKILL, and the survivors did not form a group within 1800 s; restarts from the beginning"
    ]


def test_nobody_who_has_the_whole_state_is_nobody_to_go_on_with() -> None:
    controller = quiescing()

    for rank in (0, 1):
        controller.tell(N1, quiesced(A, rank=rank, index=3, group=2, has_full_state=False))

    assert phase(controller) is Phase.PAUSED


def test_a_group_that_breaks_again_and_again_starts_from_its_checkpoint() -> None:
    controller = both()
    controller.tell(N1, broken(A, index=3, group=1, error="reset"))
    for recover in range(2, MAX_RECOVERIES + 2):
        assert phase(controller) is Phase.RESCALING
        for node, rank in ((N1, 0), (N2, 1)):
            controller.tell(node, quiesced(A, rank=rank, index=2 * recover, group=recover))
        controller.tell(N1, join_failed(A, index=2 * recover + 1, group=recover, error="no"))

    assert phase(controller) is Phase.PAUSED


def test_a_script_that_fails_on_one_slot_fails_the_job() -> None:
    controller = both()

    commands = controller.tell(N2, exited(A, rank=1, code=3))

    assert phase(controller) is Phase.FAILED
    assert set(deltas(commands)) == {
        send(N1, stop(A, 2, forget=True)),
        send(N2, stop(A, 2, forget=True)),
    }


def test_a_script_that_raised_fails_the_job_also_where_its_peers_tell_of_the_broken_group_first() -> (
    None
):
    controller = both()
    controller.tell(N1, raised(A, index=3, error="OSError: disk full", where="train.py:7"))
    controller.tell(N2, broken(A, rank=1, index=3, group=1, error="reset by peer"))
    controller.tell(N2, raised(A, rank=1, index=4, error="UsageError: apart", where=""))

    commands = controller.tell(N1, exited(A, code=1))

    assert reasons(commands) == ["OSError: disk full (train.py:7) (exit code 1)"]
    assert phase(controller) is Phase.FAILED


def test_a_script_that_raises_while_others_recover_from_a_loss_is_left_behind() -> None:
    controller = training(cluster_of(n1=2, n2=1), S0, S1, T0)
    controller.tell(N2, exited(A, rank=2, signal=SIGKILL))

    controller.tell(N1, exited(A, rank=1, code=1))

    assert change(controller) is RescalePhase.QUIESCING


@pytest.mark.parametrize(
    "consequence",
    [
        broken(A, rank=1, index=3, group=1, error="reset by peer"),
        join_failed(A, rank=1, index=3, group=1, error="reset by peer"),
    ],
)
def test_a_script_that_raises_before_its_group_has_formed_fails_the_job(
    consequence: GroupBroken | JoinFailed,
) -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **ELASTIC)
    controller.place({A: HALVES})
    for node, rank in ((N1, 0), (N2, 1)):
        controller.tell(node, ready(A, rank=rank, port=29500))
    controller.tell(N1, raised(A, index=3, error="OSError: disk full", where=""))

    commands = controller.tell(N2, consequence)

    assert reasons(commands) == ["OSError: disk full"], "its process may go on in a thread"
    assert phase(controller) is Phase.FAILED


def test_a_job_has_succeeded_when_its_last_worker_ends() -> None:
    controller = both()
    controller.tell(N1, finished(A, index=3, reason="10 of 10 epochs"))

    controller.tell(N1, exited(A, code=0))
    assert phase(controller) is Phase.RUNNING
    controller.tell(N2, exited(A, rank=1, code=0))

    assert phase(controller) is Phase.SUCCEEDED


def test_a_script_that_ends_on_one_slot_while_another_waits_for_it_failed() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **ELASTIC)
    controller.place({A: HALVES})
    controller.tell(N1, started(A))
    controller.tell(N2, ready(A, rank=1))

    commands = controller.tell(N1, exited(A, code=0))

    assert reasons(commands) == ["the script exited on one slot while another slot waited for it"]


def test_a_job_of_which_one_node_tells_the_end_waits_for_the_other_to_tell() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **ELASTIC)
    controller.place({A: HALVES})
    for node, rank in ((N1, 0), (N2, 1)):
        controller.tell(node, ready(A, rank=rank, port=29500))

    controller.tell(N2, formed(A, rank=1))
    controller.tell(N2, exited(A, rank=1, code=0))
    assert phase(controller) is Phase.STARTING
    for report in (formed(A), epoch_end(A, 1), finished(A, index=4, reason="1 of 1 epochs")):
        controller.tell(N1, report)
    controller.tell(N1, exited(A, code=0))

    assert (phase(controller), controller.job(A).progress.epoch) == (Phase.SUCCEEDED, 1)


@pytest.mark.parametrize("why", [join_failed, broken])
def test_a_first_group_that_cannot_form_is_started_again(why: Any) -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **ELASTIC)
    controller.place({A: HALVES})
    for node, rank in ((N1, 0), (N2, 1)):
        controller.tell(node, ready(A, rank=rank, port=29500))

    commands = controller.tell(N2, why(A, rank=1, index=2, group=1, error="no store"))

    assert reasons(commands) == ["the group could not form: no store; restarts from the beginning"]


# --- nodes


def test_a_lost_node_leaves_the_survivors_on_another_training() -> None:
    controller = both()

    commands = controller.lose(N2)

    assert deltas(commands) == [
        send(N1, order(run, 2, S0, [OLD], kind=RECOVER)),
        send(N2, stop(A, 2, stage=PREPARE)),
    ]
    assert controller.job(A).workers[named(A, 1, 1)].phase is WorkerPhase.LEAVING


def test_a_node_that_returns_is_told_to_stop_what_others_went_on_without() -> None:
    controller = both()
    controller.lose(N2)

    commands = controller.take(greeting(N2, seen(A, rank=1), slots=2))

    assert deltas(commands) == [send(N2, stop(A, 2, stage=PREPARE))]
    controller.tell(N1, quiesced(A, index=3, group=2))
    controller.tell(N1, formed(A, index=4, group=2))
    commands = controller.take(greeting(N2, seen(A, rank=1), slots=2))
    assert deltas(commands) == [send(N2, stop(A, 2))]


def test_a_node_that_came_back_empty_is_not_told_to_start_a_lost_member_again() -> None:
    controller = both()

    commands = controller.take(greeting(N2, slots=2, boot="boot-2"))

    assert deltas(commands)[-1] == send(N2, stop(A, 2, stage=PREPARE))
    assert change(controller) is RescalePhase.QUIESCING


def test_a_node_that_came_back_empty_is_not_told_to_start_again_what_had_ended_there() -> None:
    controller = both()
    controller.tell(N2, exited(A, rank=1, code=0))

    commands = controller.take(greeting(N2, slots=2, boot="boot-2"))

    assert deltas(commands) == []
    assert desired(controller.state, controller.job(A), N2) == stop(A, 1)


def test_a_lost_node_with_newcomers_only_leaves_the_old_group_training() -> None:
    controller = growing()

    controller.lose(N2)

    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0])


def test_a_lost_node_with_all_that_trained_pauses_the_job() -> None:
    controller = growing()

    controller.lose(N1)

    assert phase(controller) is Phase.PAUSED
    assert controller.job(A).workers[named(A, 2, 1)].phase is WorkerPhase.LEAVING


# --- a new controller


def greet_all(controller: Controller, *there: tuple[int, int, SlotId]) -> list[Command]:
    """A new controller takes over; both agents greet it with these workers."""
    controller.start()
    commands = []
    for node in (N1, N2):
        workers = [
            seen(A, version, rank=rank, slot=int(slot[-1]))
            for version, rank, slot in there
            if slot.startswith(node)
        ]
        commands += controller.take(greeting(node, *workers, slots=2))
    return commands


def test_a_new_controller_goes_on_preparing() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    commands = greet_all(controller, (1, 0, S0), (2, 1, T0))

    prepare = order(run, 2, HALVES, [OLD, NEW], kind=JOIN, term=2)
    assert deltas(commands) == [send(N1, prepare), send(N2, prepare)]
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    assert change(controller) is RescalePhase.SWITCHING


def test_a_new_controller_goes_on_switching() -> None:
    controller = switching()

    commands = greet_all(controller, (1, 0, S0), (2, 1, T0))

    join = order(switch, 2, HALVES, [OLD, NEW], kind=JOIN, store=STORE, term=2)
    assert deltas(commands) == [send(N1, join), send(N2, join)]
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1))
    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0, T0])


def test_a_new_controller_goes_on_bringing_to_rest() -> None:
    controller = quiescing()
    controller.tell(N1, quiesced(A, index=3, group=2, port=29500))

    commands = greet_all(controller, (1, 0, S0), (1, 1, S1))

    rest = order(run, 2, {S0: 32, S1: 32}, [(1, 0), (1, 1)], kind=RECOVER, term=2)
    assert deltas(commands) == [send(N1, rest)]
    controller.tell(N1, quiesced(A, rank=1, index=3, group=2))
    assert change(controller) is RescalePhase.REJOINING


def test_a_new_controller_goes_on_rejoining() -> None:
    controller = quiescing()
    for rank in (0, 1):
        controller.tell(N1, quiesced(A, rank=rank, index=3, group=2, port=29500))

    commands = greet_all(controller, (1, 0, S0), (1, 1, S1))

    join = order(switch, 2, {S0: 32, S1: 32}, [(1, 0), (1, 1)], kind=RECOVER, store=STORE, term=2)
    assert deltas(commands) == [send(N1, join)]


def test_a_new_controller_that_finds_a_newcomer_gone_gives_the_change_up() -> None:
    controller = growing()
    controller.tell(N2, started(A, 2, rank=1))

    greet_all(controller, (1, 0, S0))

    assert (phase(controller), slots(controller)) == (Phase.RUNNING, [S0])


def test_a_node_that_nobody_told_of_the_change_runs_what_it_ran() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, T0)
    controller.take(resized(A, on=(S0, T0, S1)))

    commands = controller.take(greeting(N2, seen(A, rank=1), slots=2))

    assert deltas(commands) == [send(N2, order(settle, 1, HALVES, [(1, 0), (1, 1)]))]


# --- manual overrides and the policy


def test_the_policy_sees_and_moves_no_job_under_a_hand() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)
    controller.take(resized(A, 1))

    assert controller.view().jobs == {}
    assert controller.place({A: {T0: BATCH}}) == []


def test_slots_that_a_hand_waits_for_are_kept_from_the_policy() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **{**ELASTIC, "slots": (3, 4)})
    controller.take(resized(A, 3))

    assert controller.job(A).override_wait_reason != ""
    assert [slot.usable for slot in controller.view().slots] == [False, False]


def test_auto_gives_a_job_back_to_the_policy() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)
    controller.take(resized(A, 1))

    commands = controller.take(resumed(A, auto=True))

    assert commands == [
        news("job.override", A, user="ann", override="off"),
        RequestPlan(),
    ]
    assert list(controller.view().jobs) == [A]


def test_a_hand_on_a_job_that_ended_changes_nothing() -> None:
    controller = alone()
    controller.take(cancelled(A))

    assert [controller.take(order) for order in (resized(A, 2), paused(A), resumed(A))] == [[]] * 3


# --- what nodes said before


def test_a_worker_that_lives_is_not_cleared_by_what_its_node_said_when_it_was_a_member() -> None:
    controller = both()
    controller.take(cancelled(A))

    controller.tell(N2, cleared(A, 2))

    assert controller.job(A).workers[named(A, 1, 1)].phase is WorkerPhase.LEAVING
    assert T0 in controller.state.slot_index.owners()


def test_the_history_of_a_change_gives_the_same_state_again() -> None:
    controller = switching()
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1))
    controller.tell(N2, exited(A, 2, rank=1, signal=SIGKILL))
    controller.tell(N1, quiesced(A, index=5, group=3))

    assert controller.job(A).version == Version(3)
    assert controller.replayed() == controller.state


# --- what must not add up


def test_a_new_controller_gives_every_change_its_time_again() -> None:
    controller = growing()
    controller.now += 10_000.0
    controller.start()

    assert controller.reactor.due(Seconds(controller.now)) == []


def test_a_survivor_that_exits_while_the_job_is_mended_does_not_make_it_a_success() -> None:
    controller = both()
    controller.tell(N2, exited(A, rank=1, signal=SIGKILL))
    assert change(controller) is RescalePhase.QUIESCING

    controller.tell(N1, exited(A, code=0))

    assert phase(controller) is Phase.PAUSED


def test_growths_that_failed_do_not_cost_a_job_its_mend() -> None:
    controller = both()
    for _ in range(7):
        controller.take(resized(A, 3))
        newcomer = next(w for w in controller.job(A).workers.values() if w.version > 1)
        node = N1 if newcomer.slot.startswith(N1) else N2
        controller.tell(node, exited(A, newcomer.version, rank=newcomer.rank, signal=SIGKILL))
        assert phase(controller) is Phase.RUNNING

    controller.tell(N2, exited(A, rank=1, signal=SIGKILL))

    assert change(controller) is RescalePhase.QUIESCING


def test_an_order_for_the_batch_leaves_the_job_where_it_was_ordered_to_be() -> None:
    controller = both()
    controller.take(ResizeRequested(job=A, user="ann", slots=None, batch=None, on=(S1, T0)))
    controller.take(ResizeRequested(job=A, user="ann", slots=None, batch=32, on=()))

    override = controller.job(A).override

    assert override is not None
    assert (override.on, override.batch) == ((S1, T0), 32)


def test_slots_to_add_leave_out_slots_that_the_job_has() -> None:
    free = SimpleNamespace(free=[S0, S1], releasing={S0: B})
    index = cast("SlotIndex", SimpleNamespace(available=lambda: free))
    job = cast("Job", SimpleNamespace(job=A))
    wanted = ManualOverride(user="ann", slots=3)

    assert overrides._slots_to_add(index, job, wanted, [S0], 3) == ([S1], [])
