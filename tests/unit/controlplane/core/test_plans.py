"""How a plan moves jobs that train, and what is written down about it."""

from __future__ import annotations

from collections.abc import Mapping
from signal import SIGKILL
from typing import Any

import msgspec
import pytest

from controlplane.core import policy_events
from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import NodeSuspected, PlanProposed
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import Verdict, check, difference
from controlplane.policy.api import GainSeen, Plan, Reason, SearchStats, SlotView
from schemas.ids import JobId, Seconds, SlotId
from schemas.jobs import StopRule
from schemas.wire.agent import JOIN, SUSPEND, GroupDelta
from schemas.wire.client import Decision, Size
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
    news,
    paused,
    proposal,
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
    started,
    store,
    suspended,
    switch,
)
from tests.support.controller import ELASTIC, Controller, cluster_of, training

HALVES = {S0: 32, T0: 32}
ON_N1 = {S0: 32, S1: 32}
STORE = "127.0.0.1:29500"
OLD, NEW = (1, 0), (2, 1)  # rank 0 of version 1, and the newcomer of version 2
FASTER = Reason("grow", "two are faster", {"speed_now": 400.0, "speed_then": 800.0})
IDLE = SearchStats(
    generations=30,
    best_fitness=0.75,
    mean_fitness=0.5,
    incumbent_fitness=0.6,
    diversity=0.25,
    decision_ms=1.5,
)
Placed = Mapping[SlotId, int]


def order(make: Any, version: int, on: Any, born: Born, job: JobId = A, **more: Any) -> GroupDelta:
    """A delta of an elastic job."""
    delta: GroupDelta = make(job, version, on=on, born=born, **ELASTIC, **more)
    return delta


def alone() -> Controller:
    """Job a trains on one slot of the first node; each node has two."""
    return training(cluster_of(n1=2, n2=2), S0)


def both() -> Controller:
    """Job a trains on one slot of each node."""
    return training(cluster_of(n1=2, n2=2), S0, T0)


def neighbours() -> Controller:
    """Job a trains on both slots of the first node, job b on the only one of the second."""
    return training(training(cluster_of(n1=2, n2=1), S0, S1), T0, name="b")


def plan(controller: Controller, placed: Mapping[JobId, Placed], **reasons: Reason) -> Plan:
    """A plan of the present."""
    given = {JobId(job.replace("_", "-")): reason for job, reason in reasons.items()}
    return proposal(placed, based_on=controller.state.version, reasons=given).plan


def grown(controller: Controller, reason: Reason = FASTER) -> None:
    """A plan brought job a, which was alone, onto a slot of the second node; it settled."""
    controller.take(PlanProposed(plan=plan(controller, {A: HALVES}, a_1=reason)))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, started(A, 2, rank=1))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1))


def moves(verdict: Verdict) -> dict[JobId, Placed]:
    return {move.job: move.local_batch for move in verdict.moves}


def phases(controller: Controller) -> dict[JobId, Phase]:
    return {name: job.phase for name, job in controller.state.jobs.items()}


def placed(controller: Controller, job: JobId = A) -> dict[SlotId, int]:
    """What `job` trains on, and with which batches."""
    group = controller.job(job).group
    return {member.slot: member.local_batch for member in group.members} if group else {}


def outcomes(controller: Controller, job: JobId = A) -> list[tuple[int, str, str, str]]:
    """Version, who decided, the code of the reason, and what came of it."""
    decisions = controller.history_of(job).decisions
    return [(d.version, d.by, d.code, d.outcome) for d in decisions if d.code != "order"]


# --- one job grows, shrinks, pauses, takes another batch


def test_a_plan_grows_a_job_onto_free_slots_while_it_trains() -> None:
    controller = alone()

    commands = controller.take(PlanProposed(plan=plan(controller, {A: HALVES}, a_1=FASTER)))

    prepare = order(run, 2, HALVES, [OLD, NEW], kind=JOIN)
    assert commands == [
        news("job.rescaling", A, reason="two are faster: 1 -> 2 slots, batch 64 -> 64"),
        send(N2, prepare),
        send(N1, prepare),
    ]
    assert placed(controller) == {S0: BATCH}, "the old group trains"


def test_a_plan_shrinks_a_job_and_its_leaver_is_told() -> None:
    controller = both()

    commands = controller.place({A: {S0: BATCH}})

    former = members(A, HALVES, [(1, 0), (1, 1)])[1:]
    leave = order(switch, 2, S0, [OLD], kind=JOIN, former=former)
    assert commands == [
        news("job.rescaling", A, reason="planned: 2 -> 1 slots, batch 64 -> 64"),
        send(N1, leave),
        send(N2, leave),
    ]


def test_a_plan_may_keep_another_member_than_the_first() -> None:
    controller = both()

    commands = controller.place({A: {T0: BATCH}})

    former = members(A, HALVES, [(1, 0), (1, 1)])[:1]
    leave = order(switch, 2, T0, [(1, 1)], kind=JOIN, former=former)
    assert deltas(commands) == [send(N2, leave), send(N1, leave)]


def test_a_plan_changes_only_the_batch() -> None:
    controller = both()

    commands = controller.place({A: {S0: 64, T0: 40}})

    bigger = order(switch, 2, {S0: 64, T0: 40}, [(1, 0), (1, 1)], kind=JOIN)
    assert deltas(commands) == [send(N1, bigger), send(N2, bigger)]
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N2, formed(A, rank=1, index=3, group=2))
    job = controller.job(A)
    assert (job.accounting.rescales, job.accounting.batch_changes, placed(controller)) == (
        0,
        1,
        {S0: 64, T0: 40},
    )


def test_a_plan_pauses_a_job_and_the_next_resumes_it_from_its_checkpoint() -> None:
    controller = both()

    commands = controller.place({A: {}})

    suspend = order(switch, 2, {}, [], kind=SUSPEND, former=members(A, HALVES, [(1, 0), (1, 1)]))
    assert deltas(commands) == [send(N1, suspend), send(N2, suspend)]
    controller.tell(N1, suspended(A, index=3, group=2, epoch=1, step=20))
    assert controller.job(A).phase is Phase.PAUSED
    controller.tell(N1, exited(A, code=0))
    controller.tell(N2, exited(A, rank=1, code=0))

    commands = controller.place({A: {T1: BATCH}})

    again = order(run, 3, T1, [(3, 0)], resume=resume_at(1, 2))
    assert commands == [
        news("job.starting", A, reason="planned: n2/1, resumes after epoch 1", slots=T1),
        send(N2, again),
    ]


def test_a_plan_of_what_is_there_changes_nothing() -> None:
    controller = both()

    assert controller.place({A: dict(reversed(HALVES.items()))}) == []


def test_a_plan_that_changes_one_job_tells_only_the_nodes_of_that_job() -> None:
    controller = cluster_of(n1=2, n2=1, n3=1)
    training(training(controller, S0), T0, name="b")
    training(controller, SlotId("n3/0"), name="c")
    kept = {B: placed(controller, B), C: placed(controller, C)}

    commands = controller.place({A: {S0: 32, S1: 32}, **kept})

    prepare = order(run, 2, ON_N1, [OLD, NEW], kind=JOIN)
    assert deltas(commands) == [send(N1, prepare)]


def test_a_plan_of_a_search_says_what_it_changed_and_how_the_search_stands() -> None:
    controller = neighbours()

    commands = controller.take(
        PlanProposed(plan=plan(controller, {A: {S0: 64}, B: {T0: 32}}), stats=IDLE)
    )

    assert commands[-1] == news(
        "policy.plan",
        changes=2,
        generations=30,
        best_fitness=0.75,
        mean_fitness=0.5,
        diversity=0.25,
        decision_ms=1.5,
    )
    assert controller.reactor.totals.plans_taken == 3, "two plans began the jobs"


def test_a_plan_that_changes_nothing_is_not_counted() -> None:
    controller = alone()

    commands = controller.take(PlanProposed(plan=plan(controller, {A: {S0: BATCH}}), stats=IDLE))

    assert (commands, controller.reactor.totals.plans_taken) == ([], 1)


# --- slots go from one job to another


def test_slots_move_in_one_plan_and_the_newcomer_is_prepared_beside_the_leaver() -> None:
    controller = neighbours()

    commands = controller.place({B: {T0: 32, S1: 32}, A: {S0: BATCH}})

    former = members(A, ON_N1, [(1, 0), (1, 1)])[1:]
    leave = order(switch, 2, S0, [OLD], kind=JOIN, former=former)
    join = order(run, 2, {T0: 32, S1: 32}, [OLD, NEW], job=B, kind=JOIN)
    assert commands == [
        news("job.rescaling", A, reason="planned: 2 -> 1 slots, batch 64 -> 64"),
        send(N1, leave),
        news("job.rescaling", B, reason="planned: 1 -> 2 slots, batch 64 -> 64"),
        send(N1, join),
        send(N2, join),
    ], "the shrink goes first"
    assert controller.state.slot_index.owners() == {S0: A, S1: A, T0: B}
    assert {
        slot: job.job for slot, (job, _) in controller.state.slot_index.reservations().items()
    } == {S1: B}


def test_the_newcomer_has_the_slot_when_the_leaver_is_gone() -> None:
    controller = neighbours()
    controller.place({B: {T0: 32, S1: 32}, A: {S0: BATCH}})
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N1, started(B, 2, rank=1))
    assert controller.state.slot_index.owners()[S1] == A, "its process lives"

    controller.tell(N1, exited(A, rank=1, code=0))

    assert (
        controller.state.slot_index.owners()[S1],
        controller.state.slot_index.reservations(),
    ) == (B, {})
    controller.tell(N1, ready(B, 2, rank=1))
    controller.tell(N2, store(B, index=3, group=2, port=29500))
    controller.tell(N1, formed(B, 2, rank=1))
    controller.tell(N2, formed(B, index=4, group=2))
    assert phases(controller) == {A: Phase.RUNNING, B: Phase.RUNNING}
    assert (placed(controller), placed(controller, B)) == ({S0: BATCH}, {T0: 32, S1: 32})


def test_a_paused_job_gives_its_slots_to_one_that_grows_in_the_same_plan() -> None:
    controller = neighbours()

    controller.place({B: {T0: 22, S0: 21, S1: 21}, A: {}})

    assert {
        slot: job.job for slot, (job, _) in controller.state.slot_index.reservations().items()
    } == {
        S0: B,
        S1: B,
    }
    assert [d.to for d in controller.history_of(A).decisions] == [
        Size(slots=(S0, S1), batch=64),
        Size(),
    ]


def test_a_start_waits_until_a_slot_is_free() -> None:
    controller = neighbours()
    controller.submit("c", **ELASTIC)

    commands = controller.place({C: {S1: BATCH}, A: {S0: BATCH}})

    assert commands[-1] == RequestPlan()
    assert phases(controller) == {A: Phase.RESCALING, B: Phase.RUNNING, C: Phase.QUEUED}
    controller.tell(N1, formed(A, index=3, group=2))
    assert controller.place({C: {S1: BATCH}}) == [RequestPlan()], "its process lives"
    controller.tell(N1, exited(A, rank=1, code=0))
    assert deltas(controller.place({C: {S1: BATCH}})) == [
        send(N1, order(run, 1, S1, [(1, 0)], job=C))
    ]


def test_what_one_job_gives_up_goes_to_one_job_only() -> None:
    controller = neighbours()
    controller.take(resized(A, 1))  # the second slot is left
    assert controller.state.slot_index.releasing() == {S1: A}

    controller.place({B: {T0: 32, S1: 32}})

    assert controller.state.slot_index.releasing() == {}
    assert controller.view().slots[1] == SlotView(
        slot=S1, node=N1, kind="cpu", usable=False, leaving=False, cores=2, host_cores=2
    )


def test_two_growths_onto_one_slot_that_is_left_are_one() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, S1)
    training(training(controller, T0, name="b"), T1, name="c")
    wanted = {B: {T0: 32, S1: 32}, C: {T1: 32, S1: 32}, A: {S0: 64}}

    verdict = check(plan(controller, wanted), controller.state, Seconds(controller.now))

    assert moves(verdict) == {A: {S0: 64}, B: {T0: 32, S1: 32}}
    assert verdict.refused == {C: "slot n1/1 is taken"}


def test_a_slot_is_not_promised_again_before_the_one_that_waited_for_it_is_gone() -> None:
    controller = training(cluster_of(n1=2, n2=2), T0, T1)
    training(training(controller, S0, name="b"), S1, name="c")
    controller.place({A: {T0: BATCH}, B: {S0: 32, T1: 32}})
    controller.tell(N2, started(B, 2, rank=1))
    controller.tell(N2, join_failed(A, index=3, group=2, error="no"))
    assert phases(controller) == dict.fromkeys((A, B, C), Phase.RUNNING)
    assert list(controller.state.slot_index.reservations()) == [T1], (
        "the newcomer of b was told to stop"
    )

    controller.now = controller.job(A).attempts.next_change_at
    wanted = {A: {T0: BATCH}, C: {S1: 32, T1: 32}}
    verdict = check(plan(controller, wanted), controller.state, Seconds(controller.now))

    assert moves(verdict) == {A: {T0: BATCH}}
    assert verdict.refused == {C: "slot n2/1 is taken"}


def test_a_newcomer_waits_for_a_worker_of_an_unknown_job_that_comes_to_light() -> None:
    ghost = JobId("ghost-9")
    controller = training(cluster_of(n1=1, n2=1), S0)
    controller.submit("b")
    controller.place({B: {T0: BATCH}})
    controller.take(cancelled(B))
    controller.place({A: HALVES})
    controller.take(greeting(N2, seen(ghost), boot="boot-2"))

    controller.tell(N2, cleared(B, 2))  # it never began

    assert controller.state.slot_index.owners() == {S0: A, T0: ghost}
    controller.tell(N2, exited(ghost, code=0))
    assert controller.state.slot_index.owners() == {S0: A, T0: A}
    controller.tell(N2, ready(A, 2, rank=1))


def test_a_job_does_not_wait_for_a_slot_that_it_just_left() -> None:
    controller = both()
    controller.place({A: {S0: BATCH}})
    controller.tell(N1, formed(A, index=3, group=2))
    assert controller.state.slot_index.releasing() == {T0: A}

    assert controller.place({A: HALVES}) == [RequestPlan()]


# --- to other slots


def test_a_migration_grows_first_and_shrinks_by_the_next_plan() -> None:
    controller = alone()
    there = {T0: BATCH}

    first = controller.place({A: there})

    prepare = order(run, 2, HALVES, [OLD, NEW], kind=JOIN)
    assert deltas(first) == [send(N2, prepare), send(N1, prepare)]
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))
    assert controller.tell(N2, formed(A, 2, rank=1))[-1] == RequestPlan()
    second = controller.place({A: there})
    former = members(A, HALVES, [OLD, NEW])[:1]
    leave = order(switch, 3, T0, [NEW], kind=JOIN, former=former)
    assert deltas(second) == [send(N2, leave), send(N1, leave)]
    controller.tell(N2, formed(A, 2, rank=1, index=3, group=3))
    assert (placed(controller), controller.job(A).accounting.rescales) == (there, 2)


def test_a_migration_never_trains_with_a_batch_above_the_limit() -> None:
    controller = cluster_of(n1=2, n2=2)
    controller.submit("a", slots=(1, 2), batch_size=2, max_batch_size="keep")
    controller.place({A: {S0: 1, S1: 1}})
    for report in (ready, formed):
        controller.tell(N1, report(A))
        controller.tell(N1, report(A, rank=1))

    controller.place({A: {T0: 1, T1: 1}})

    assert controller.history_of(A).decisions[-1].to.batch <= 2


def test_slots_that_a_migration_leaves_are_not_promised_before_it_shrinks() -> None:
    controller = training(training(cluster_of(n1=1, n2=2), S0), T0, name="b")

    commands = controller.place({A: {T1: BATCH}, B: {T0: 32, S0: 32}})

    assert commands[-1] == RequestPlan()
    assert phases(controller) == {A: Phase.RESCALING, B: Phase.RUNNING}
    assert controller.state.slot_index.releasing() == {}


# --- what is refused or left alone


def test_a_stale_entry_is_refused_the_rest_is_done_and_a_new_plan_is_asked_for() -> None:
    controller = neighbours()
    stale = plan(controller, {A: {S0: BATCH}, B: {T0: 32}})
    controller.place({A: {S0: 32, S1: 16}})
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N1, formed(A, rank=1, index=3, group=2))

    verdict = check(stale, controller.state, Seconds(controller.now))
    commands = controller.take(PlanProposed(plan=stale))

    assert moves(verdict) == {B: {T0: 32}}
    assert verdict.refused == {A: "the job changed after the plan was made"}
    assert reasons(commands) == ["planned: 1 -> 1 slots, batch 64 -> 32"]
    assert commands[-1] == RequestPlan()
    assert placed(controller) == {S0: 32, S1: 16}


def test_a_plan_of_the_moment_of_the_last_change_is_no_older_than_it() -> None:
    controller = alone()
    assert controller.job(A).changed_version == controller.view().version

    assert deltas(controller.place({A: {}})) != []


def test_an_epoch_does_not_make_a_plan_stale() -> None:
    controller = both()
    view = plan(controller, {A: {S0: BATCH}})
    assert controller.tell(N1, epoch_end(A, 1))[-1] == RequestPlan()

    assert reasons(controller.take(PlanProposed(plan=view))) != []


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({S0: 64, T0: 65}, "a local batch is out of range"),
        ({S0: 64, T0: 0}, "a local batch is out of range"),
        ({S0: 64, T0: 64, T1: 64}, "the global batch exceeds its limit"),
        ({S0: 1, S1: 1, T0: 1, T1: 1}, "4 slots are outside the job's range"),
        ({S0: 64}, "1 slots are outside the job's range"),
        ({S0: 32, S1: 32, SlotId("n9/0"): 32}, "slot n9/0 is not available any more"),
        ({S0: 32, SlotId("n2/7"): 32}, "slot n2/7 is not available any more"),
    ],
)
def test_a_plan_outside_the_bounds_of_a_running_job_is_refused(wanted: Placed, why: str) -> None:
    controller = cluster_of(n1=2, n2=2)
    training(controller, S0, S1, slots=(2, 3), max_batch_size=150)

    verdict = check(plan(controller, {A: wanted}), controller.state, Seconds(controller.now))

    assert verdict == Verdict(refused={A: why})
    assert controller.place({A: wanted}) == [RequestPlan()]


def test_a_job_grows_onto_no_suspect_node_and_shrinks_away_from_it() -> None:
    controller = both()
    controller.take(NodeSuspected(node=N2, silent_s=6.0))

    assert controller.place({A: {S0: 22, T0: 21, T1: 21}}) == [RequestPlan()]
    assert reasons(controller.place({A: {S0: BATCH}})) != []


def in_hand(controller: Controller) -> None:
    controller.take(resized(A, 2))


def in_a_pause(controller: Controller) -> None:
    controller.take(paused(A))


def changing(controller: Controller) -> None:
    controller.place({A: {S0: BATCH, T0: BATCH}})


def starting_again(controller: Controller) -> None:
    controller.tell(N1, exited(A, signal=SIGKILL))
    controller.tell(N2, exited(A, rank=1, signal=SIGKILL))
    controller.place({A: {S1: BATCH}})


def ended(controller: Controller) -> None:
    controller.tell(N1, raised(A, index=3, error="ValueError", where=""))
    controller.tell(N1, exited(A, code=1))


@pytest.mark.parametrize("then", [in_hand, in_a_pause, changing, starting_again, ended])
def test_a_job_in_a_hand_changing_starting_or_ended_is_left_alone(then: Any) -> None:
    controller = both()
    then(controller)
    version = controller.job(A).version

    assert controller.place({A: {S0: BATCH}}) == []
    assert controller.place({A: {}}) == []
    assert difference(plan(controller, {}), controller.state, Seconds(controller.now)) == plan(
        controller, {}
    )
    assert controller.job(A).version == version


def test_a_job_whose_training_is_done_is_left_alone() -> None:
    controller = both()
    controller.tell(N1, finished(A, index=3, reason="its epochs are done"))

    verdict = check(plan(controller, {A: {S0: 64}}), controller.state, Seconds(controller.now))

    assert verdict == Verdict(refused={A: "the training has finished"})
    assert not controller.view().jobs[A].movable


def test_a_job_that_was_lost_after_its_training_was_done_is_started_again() -> None:
    controller = training(cluster_of(n1=1), S0)
    controller.tell(N1, finished(A, index=3, reason="its epochs are done"))
    controller.tell(N1, exited(A, signal=SIGKILL))
    assert controller.view().jobs[A].movable

    commands = controller.place({A: {S0: BATCH}})

    assert reasons(commands) == ["planned: n1/0"]


def test_a_job_that_is_given_back_is_not_moved_by_a_plan_from_before() -> None:
    controller = both()
    controller.take(resized(A, 2))
    view = plan(controller, {A: {S0: BATCH}})
    controller.take(resumed(A, auto=True))

    assert controller.take(PlanProposed(plan=view)) == [RequestPlan()]
    assert reasons(controller.place({A: {S0: BATCH}})) != []


def test_a_growth_that_came_to_nothing_is_not_tried_again_at_once() -> None:
    controller = alone()
    controller.place({A: HALVES})
    controller.tell(N2, refused(A, 2, rank=1, error="no zygote"))
    job = controller.job(A)
    wait_s = job.attempts.next_change_at - controller.now
    assert (wait_s, controller.view().jobs[A].retry_at) == (1.0, job.attempts.next_change_at)

    assert controller.place({A: HALVES}) == [RequestPlan()]
    controller.now += wait_s
    assert reasons(controller.place({A: HALVES})) != []


def test_a_shrink_that_came_to_nothing_is_not_tried_again_at_once() -> None:
    controller = both()
    controller.place({A: {S0: BATCH}})
    controller.tell(N1, join_failed(A, index=3, group=2, error="no"))
    assert controller.job(A).attempts.next_change_at > controller.now

    assert controller.place({A: {S0: BATCH}}) == [RequestPlan()]


# --- jobs that a plan does not name


def test_a_job_that_a_proposal_does_not_name_is_left_alone() -> None:
    controller = neighbours()

    assert controller.place({}) == []
    assert reasons(controller.place({B: {T0: 32}})) == ["planned: 1 -> 1 slots, batch 64 -> 32"]


def test_the_difference_says_that_jobs_which_a_policy_leaves_out_stop() -> None:
    controller = neighbours()
    whole = plan(controller, {B: {T0: 32}}, a_1=Reason("waits", "b is shorter"))

    changed = difference(whole, controller.state, Seconds(controller.now))

    assert changed == msgspec.structs.replace(whole, local_batch={A: {}, B: {T0: 32}})


def test_the_difference_leaves_out_what_is_there_and_what_does_not_fit() -> None:
    controller = neighbours()
    controller.submit("c", **ELASTIC)
    wanted = {A: dict(ON_N1), B: {T0: BATCH, S1: BATCH}, C: {T0: BATCH}}
    why = {"a_1": Reason("stays", "stays"), "c_3": Reason("starts", "starts")}

    changed = difference(plan(controller, wanted, **why), controller.state, Seconds(0.0))

    assert changed == plan(controller, {})


def test_the_difference_stops_no_job_that_the_policy_could_not_know_of() -> None:
    controller = alone()
    old = plan(controller, {A: {S0: BATCH}})
    training(controller, T0, name="b")

    assert difference(old, controller.state, Seconds(0.0)) == Plan(based_on=old.based_on)


def test_the_difference_leads_to_what_the_whole_plan_asks_for() -> None:
    controller = neighbours()
    whole = plan(controller, {B: {T0: 32, S0: 32}})
    changed = difference(whole, controller.state, Seconds(controller.now))

    controller.take(PlanProposed(plan=changed))

    assert difference(whole, controller.state, Seconds(controller.now)).local_batch == {}
    assert [controller.history_of(job).decisions[-1].to.slots for job in (A, B)] == [(), (T0, S0)]


def test_survivors_keep_the_batch_and_take_it_in_passes() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, S1)
    controller.place({A: {S0: BATCH, S1: BATCH}})
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N1, formed(A, rank=1, index=3, group=2))

    controller.tell(N1, exited(A, rank=1, signal=SIGKILL))

    assert controller.history_of(A).decisions[-1].to == Size(slots=(S0,), batch=2 * BATCH)


# --- decisions


def test_every_group_is_a_decision_with_its_reason_numbers_and_outcome() -> None:
    controller = alone()
    at = controller.now
    controller.now += 5.0
    grow = PlanProposed(plan=plan(controller, {A: HALVES}, a_1=FASTER))
    controller.take(grow)
    first = Decision(
        time=Seconds(at),
        before=Size(),
        to=Size(slots=(S0,), batch=64),
        reason="planned",
        code="planned",
        version=controller.history_of(A).decisions[0].version,
        outcome="formed",
    )
    under_way = Decision(
        time=Seconds(at + 5.0),
        before=Size(slots=(S0,), batch=64),
        to=Size(slots=(S0, T0), batch=64),
        reason="two are faster",
        code="grow",
        numbers={"speed_now": 400.0, "speed_then": 800.0},
        version=controller.job(A).version,
    )
    assert controller.history_of(A).decisions == [first, under_way]

    controller.now += 2.0
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1))

    done = msgspec.structs.replace(under_way, outcome="formed", took_s=2.0)
    assert controller.history_of(A).decisions == [first, done]


def lose_the_newcomer(controller: Controller) -> None:
    controller.place({A: {S0: 32, T0: 22, T1: 10}})
    controller.tell(N2, refused(A, 2, rank=2, error="no zygote"))


def fail_to_join(controller: Controller) -> None:
    controller.place({A: {S0: BATCH}})
    controller.tell(N1, join_failed(A, index=3, group=2, error="no"))


def lose_a_member(controller: Controller) -> None:
    controller.tell(N2, exited(A, rank=1, signal=SIGKILL))


def lose_a_member_in_a_change(controller: Controller) -> None:
    controller.place({A: {S0: 32, T0: 22, T1: 10}})
    lose_a_member(controller)


def lose_all(controller: Controller) -> None:
    lose_a_member(controller)
    controller.tell(N1, exited(A, signal=SIGKILL))


def pause(controller: Controller) -> None:
    controller.take(paused(A))
    controller.tell(N1, suspended(A, index=3, group=2))


@pytest.mark.parametrize(
    ("happens", "then"),
    [
        (lose_the_newcomer, [(2, "policy", "planned", "abandoned")]),
        (fail_to_join, [(2, "policy", "planned", "abandoned")]),
        (lose_a_member, [(2, "cluster", "lost", "")]),
        (
            lose_a_member_in_a_change,
            [(2, "policy", "planned", "broken"), (3, "cluster", "lost", "")],
        ),
        (lose_all, [(2, "cluster", "lost", "lost")]),
        (pause, [(2, "operator", "operator", "suspended")]),
    ],
)
def test_a_decision_says_who_decided_and_what_came_of_it(happens: Any, then: Any) -> None:
    controller = both()

    happens(controller)

    assert outcomes(controller) == [(1, "policy", "planned", "formed"), *then]


# --- what a change was good for


def test_the_first_whole_epoch_of_a_group_shows_what_the_change_was_good_for() -> None:
    controller = alone()
    grown(controller)

    commands = controller.tell(N1, epoch_end(A, 1, index=5, group=2, samples_per_s=600.0))

    assert commands[0] == news("job.gain", A, version=2, predicted=2.0, realised=1.5)
    assert controller.history_of(A).decisions[-1].numbers == {
        "speed_now": 400.0,
        "speed_then": 800.0,
        "speed_realised": 600.0,
    }
    assert controller.reactor.totals.gains == [(2.0, 1.5)]
    again = controller.tell(N1, epoch_end(A, 2, index=6, group=2, samples_per_s=700.0))
    assert [command.event.event for command in again if command != RequestPlan()] == ["job.epoch"]  # type: ignore[union-attr]
    assert controller.reactor.totals.gains == [(2.0, 1.5)]


@pytest.mark.parametrize("correction", [None, 0.75])
def test_what_came_of_a_promise_is_taught_at_once_and_after_a_restart(
    correction: float | None,
) -> None:
    controller = alone()
    more = {} if correction is None else {"correction": correction}
    grown(controller, msgspec.structs.replace(FASTER, numbers=FASTER.numbers | more))

    controller.tell(N1, epoch_end(A, 1, index=5, group=2, samples_per_s=600.0))

    state, records = controller.state, controller.reactor.records
    gain = GainSeen(
        job=A, family=controller.job(A).family, predicted=2.0, realised=1.5, correction=correction
    )
    assert gain in [policy_events.event_of_record(record, state) for record in records]
    assert gain in [
        event for _, event in policy_events.history(state.jobs.values(), controller.histories)
    ]


def test_an_epoch_that_two_groups_shared_shows_nothing() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0, epochs=1)
    controller.take(PlanProposed(plan=plan(controller, {A: HALVES}, a_1=FASTER)))
    controller.tell(N1, store(A, index=4, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=5, group=2, epoch=1, step=20))
    controller.tell(N2, formed(A, 2, rank=1, epoch=1, step=20))

    controller.tell(N1, epoch_end(A, 2, index=6, group=2))
    shared = controller.history_of(A).epochs[-1]
    controller.tell(N1, epoch_end(A, 3, index=7, group=2))
    whole = controller.history_of(A).epochs[-1]

    assert [(e.whole, e.slots, e.nodes) for e in (shared, whole)] == [(False, 2, 2), (True, 2, 2)]
    assert controller.reactor.totals.gains == [(2.0, 500.0 / 400.0)]


def test_an_epoch_of_the_group_before_shows_nothing() -> None:
    controller = alone()
    controller.take(PlanProposed(plan=plan(controller, {A: HALVES}, a_1=FASTER)))

    controller.tell(N1, epoch_end(A, 1))

    assert controller.reactor.totals.gains == []
    assert controller.history_of(A).epochs[-1].whole


@pytest.mark.parametrize(
    "numbers", [{}, {"speed_then": 800.0}, {"speed_now": 0.0, "speed_then": 800.0}]
)
def test_a_change_of_which_no_speed_was_promised_has_no_gain(numbers: dict[str, float]) -> None:
    controller = alone()
    grown(controller, Reason("grow", "grow", numbers))

    controller.tell(N1, epoch_end(A, 1, index=5, group=2))

    assert controller.reactor.totals.gains == []
    assert controller.history_of(A).decisions[-1].numbers == numbers


def test_an_epoch_after_a_pause_in_it_was_not_done_by_one_group() -> None:
    controller = training(cluster_of(n1=1), S0, epochs=1)
    controller.place({A: {}})
    controller.tell(N1, suspended(A, index=4, group=2, epoch=1, step=20))
    controller.tell(N1, exited(A, code=0))
    controller.place({A: {S0: BATCH}})
    controller.tell(N1, ready(A, 3, resumed=1))
    controller.tell(N1, formed(A, 3, epoch=1, step=20))

    controller.tell(N1, epoch_end(A, 2, 3, index=3))

    assert not controller.history_of(A).epochs[-1].whole


def test_an_epoch_is_noted_with_the_size_of_the_group_that_reported_it() -> None:
    controller = alone()
    controller.place({A: HALVES})
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))

    controller.tell(N1, epoch_end(A, 1, index=5, group=2))

    (epoch,) = controller.history_of(A).epochs
    assert (epoch.slots, epoch.nodes, epoch.whole) == (2, 2, False)


def test_the_first_step_of_a_migration_is_not_held_against_what_its_end_promised() -> None:
    controller = alone()
    promised = Reason("move", "closer", {"speed_now": 400.0, "speed_then": 420.0})
    controller.take(PlanProposed(plan=plan(controller, {A: {T0: BATCH}}, a_1=promised)))
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1))

    controller.tell(N1, epoch_end(A, 1, index=5, group=2, samples_per_s=790.0))

    assert controller.reactor.totals.gains == []


# --- what a policy sees


def movable(controller: Controller, job: JobId = A) -> bool:
    return controller.view().jobs[job].movable


def slots(controller: Controller) -> dict[SlotId, str]:
    """What the view says of each slot."""
    return {
        slot.slot: "usable" if slot.usable else "leaving" if slot.leaving else "taken"
        for slot in controller.view().slots
    }


def test_a_slot_says_which_model_it_is_whatever_happens_to_it() -> None:
    controller = Controller()
    controller.start()
    controller.take(greeting(N1, model="H200"))
    controller.take(greeting(N2, slots=2))

    def models() -> list[str]:
        return [slot.model for slot in controller.view().slots]

    told = [models()]
    training(controller, S0)  # only this slot is looked at again
    told.append(models())
    controller.take(NodeSuspected(node=N1, silent_s=6.0))
    told.append(models())

    assert told == [["H200", "", ""]] * 3


def test_a_node_that_returns_with_other_gpus_says_so() -> None:
    controller = Controller()
    controller.start()
    controller.take(greeting(N1, model="V100"))
    before = controller.view().slots

    controller.take(greeting(N1, boot="boot-2", model="H200"))

    assert [slot.model for slot in before] == ["V100"]
    assert controller.view().slots == (msgspec.structs.replace(before[0], model="H200"),)


def test_a_job_is_movable_while_it_waits_and_trains_and_not_in_between() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", **ELASTIC)
    told = [movable(controller)]
    controller.place({A: S0})
    told.append(movable(controller))
    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))
    told.append(movable(controller))
    controller.place({A: HALVES})
    told.append(movable(controller))
    controller.tell(N2, refused(A, 2, rank=1, error="no zygote"))
    told.append(movable(controller))
    controller.now = controller.job(A).attempts.next_change_at
    controller.place({A: {}})
    told.append(movable(controller))
    controller.tell(N1, suspended(A, index=3, group=3))
    told.append(movable(controller))

    assert told == [True, False, True, False, True, False, True]


def test_a_job_that_changes_is_seen_where_it_goes_to() -> None:
    controller = alone()
    controller.place({A: HALVES})

    assert controller.view().jobs[A].running_on == HALVES


def test_a_slot_is_leaving_from_the_order_until_its_process_is_gone() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0, T0)
    told = [slots(controller)]
    controller.place({A: {S0: BATCH}})
    told.append(slots(controller))
    controller.tell(N1, formed(A, index=3, group=2))
    told.append(slots(controller))
    controller.tell(N2, exited(A, rank=1, code=0))
    told.append(slots(controller))

    assert told == [
        {S0: "taken", T0: "taken", T1: "usable"},
        {S0: "taken", T0: "leaving", T1: "usable"},
        {S0: "taken", T0: "leaving", T1: "usable"},
        {S0: "taken", T0: "usable", T1: "usable"},
    ]


def test_a_slot_that_was_promised_is_not_leaving_for_anybody_else() -> None:
    controller = neighbours()
    controller.place({A: {S0: BATCH}, B: {T0: 32, S1: 32}})

    assert slots(controller) == {S0: "taken", S1: "taken", T0: "taken"}


def test_a_slot_that_a_change_brings_newcomers_for_is_not_leaving() -> None:
    controller = alone()
    controller.place({A: {T0: BATCH}})

    assert slots(controller) == {S0: "taken", S1: "usable", T0: "taken", T1: "usable"}


def test_slots_of_a_lost_node_are_not_seen_and_of_a_suspect_one_not_leaving() -> None:
    controller = both()
    controller.place({A: {S0: BATCH}})
    controller.take(NodeSuspected(node=N2, silent_s=6.0))
    suspect = slots(controller)
    controller.lose(N2)

    assert suspect == {S0: "taken", S1: "usable", T0: "taken", T1: "taken"}
    assert slots(controller) == {S0: "taken", S1: "usable"}


def test_a_slot_that_an_operator_waits_for_is_not_leaving() -> None:
    controller = training(training(cluster_of(n1=1, n2=2), S0), T0, T1, name="b")
    controller.take(resized(A, 3))
    assert controller.job(A).override_wait_reason != ""

    controller.place({B: {T0: BATCH}})

    assert slots(controller) == {S0: "taken", T0: "taken", T1: "taken"}


@pytest.mark.parametrize(
    ("name", "spec", "family"),
    [
        ("digits", {}, "ann/digits train.py"),
        ("digits-12", {}, "ann/digits train.py"),
        ("digits-a_07", {"args": ("--width", "64")}, "ann/digits-a train.py --width 64"),
        ("7", {}, "ann/7 train.py"),
        ("digits-12", {"family": "wide 12", "args": ("--width", "64")}, "ann/wide 12"),
    ],
)
def test_jobs_of_one_script_are_a_family_unless_the_user_names_one(
    name: str, spec: dict[str, Any], family: str
) -> None:
    controller = cluster_of(n1=1)
    controller.submit(name, **spec)

    (view,) = controller.view().jobs.values()

    assert view.family == family


@pytest.mark.parametrize(
    ("stop_rule", "samples"),
    [
        (None, 10_000),  # the script says 10 epochs of 1000 samples
        (StopRule(epochs=3), 3000),
        (StopRule(samples=2500), 2500),
        (StopRule(epochs=3, samples=2500), 2500),
        (StopRule(epochs=3, metric="accuracy", at_least=0.9), None),
        (StopRule(metric="accuracy", at_least=0.9), None),
    ],
)
def test_stated_work_is_in_samples_when_a_stop_rule_states_it(
    stop_rule: StopRule | None, samples: int | None
) -> None:
    controller = training(cluster_of(n1=1), S0, epochs=1, stop=stop_rule)

    assert controller.view().jobs[A].stop_samples == samples


def test_stated_work_is_unknown_before_the_data_set_is_known() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", stop=StopRule(epochs=3))
    controller.submit("b", stop=StopRule(samples=2500))
    controller.submit("c")

    jobs = controller.view().jobs
    assert [jobs[job].stop_samples for job in (A, B, C)] == [None, 2500, None]


@pytest.mark.parametrize(
    ("metrics", "seen"),
    [
        ({}, None),
        ({"noise_scale": 512.5}, 512.5),
        ({"noise_scale": 0.0}, None),
        ({"noise_scale": -1.0}, None),
        ({"noise_scale": float("nan")}, None),
        ({"noise_scale": float("inf")}, None),
    ],
)
def test_the_noise_scale_is_seen_if_it_is_a_number_of_samples(
    metrics: dict[str, float], seen: float | None
) -> None:
    controller = alone()

    controller.tell(N1, epoch_end(A, 1, metrics=metrics))

    assert controller.view().jobs[A].noise_scale == seen


def test_a_view_has_the_times_of_a_job() -> None:
    controller = cluster_of(n1=2)
    controller.now = 100.0
    controller.submit("a", **ELASTIC)
    controller.now = 110.0
    controller.place({A: S0})
    controller.now = 113.0
    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))
    controller.now = 120.0
    controller.tell(N1, epoch_end(A, 1))
    controller.now = 130.0
    controller.place({A: ON_N1})
    controller.now = 131.0

    seen = controller.view().jobs[A]

    assert (seen.submitted_at, seen.start_s, seen.epoch_at) == (100.0, 3.0, 120.0)
    assert (seen.moved_at, seen.ran_s) == (130.0, 20.0)


def test_a_job_ran_with_slots_up_to_the_moment_that_its_group_trains() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.now = 1010.0
    controller.place({A: S0})
    controller.now = 1013.0
    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))

    seen = controller.view().jobs[A]

    assert (seen.moved_at, seen.ran_s, seen.waited_s) == (1013.0, 3.0, 10.0)


def test_a_view_has_since_when_a_job_has_its_slots_whatever_its_batch() -> None:
    controller = both()
    before = controller.view().jobs[A].placed_at
    controller.now += 10.0
    controller.place({A: {S0: 64, T0: 40}})
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N2, formed(A, rank=1, index=3, group=2))
    rebatched = controller.view().jobs[A]
    controller.now += 10.0
    controller.place({A: {T0: BATCH}})
    controller.tell(N2, formed(A, rank=1, index=4, group=3))
    shrunk = controller.view().jobs[A]

    assert rebatched.placed_at == before
    assert rebatched.moved_at > before
    assert (shrunk.placed_at, shrunk.moved_at) == (controller.now, controller.now)


def test_the_history_of_plans_gives_the_same_state_again() -> None:
    controller = neighbours()
    grow = {B: {T0: 32, S1: 32}, A: {S0: BATCH}}
    controller.take(PlanProposed(plan=plan(controller, grow, b_2=FASTER), stats=IDLE))
    controller.tell(N1, formed(A, index=3, group=2))
    controller.tell(N1, exited(A, rank=1, code=0))
    controller.tell(N1, ready(B, 2, rank=1))
    controller.tell(N2, store(B, index=3, group=2, port=29500))
    controller.tell(N1, formed(B, 2, rank=1))
    controller.tell(N2, formed(B, index=4, group=2))
    controller.tell(N2, epoch_end(B, 1, index=5, group=2))
    controller.place({A: {}})

    assert controller.reactor.totals.gains != []
    assert controller.replayed() == controller.state


# --- restarts, and what a job was served


def restarting(controller: Controller, placed: Mapping[JobId, Placed]) -> Plan:
    """A plan that stops every job that it moves."""
    return msgspec.structs.replace(plan(controller, placed), restart=tuple(placed))


def test_a_job_that_a_plan_restarts_is_paused_instead_of_changed() -> None:
    controller = alone()

    verdict = check(restarting(controller, {A: HALVES}), controller.state, Seconds(0.0))

    assert (moves(verdict), dict(verdict.refused)) == ({A: {}}, {})


def test_a_restart_onto_the_same_slots_is_none() -> None:
    controller = alone()

    larger = check(restarting(controller, {A: {S0: 32}}), controller.state, Seconds(0.0))
    same = check(restarting(controller, {A: {S0: 64}}), controller.state, Seconds(0.0))

    assert (moves(larger), moves(same)) == ({A: {S0: 32}}, {})


def test_jobs_that_trade_places_by_restarts_are_both_stopped_at_once() -> None:
    controller = neighbours()

    trade = restarting(controller, {A: {T0: 64}, B: {S0: 32, S1: 32}})

    assert moves(check(trade, controller.state, Seconds(0.0))) == {A: {}, B: {}}


def test_the_difference_of_a_restart_is_a_pause_that_needs_no_further_word() -> None:
    controller = alone()

    changed = difference(restarting(controller, {A: HALVES}), controller.state, Seconds(0.0))

    assert (changed.local_batch, changed.restart) == ({A: {}}, ())


def test_attained_service_counts_the_slots_that_a_job_had_at_each_time() -> None:
    controller = alone()
    controller.now += 10.0
    grown(controller)
    controller.now += 5.0

    seen = controller.view().jobs[A]

    assert (seen.slot_s, seen.served(Seconds(controller.now))) == (10.0, 20.0)
