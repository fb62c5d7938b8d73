"""How a plan moves jobs that train, and what is written down about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from signal import SIGKILL
from typing import Any, Final

import msgspec
import pytest

from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import NodeSuspected, PlanProposed
from controlplane.core.plan_check import Verdict, check, difference, in_parts
from controlplane.policy.api import Plan, Reason, SearchStats, SlotView
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.jobs import StopRule
from schemas.wire.agent import JOIN, SUSPEND
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
    C,
    cancelled,
    cleared,
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
    started,
    store,
    suspended,
    switch,
)
from tests.support.controller import ELASTIC, Controller, cluster_of, training
from tests.unit.controlplane.core.steps import (
    HALVES,
    NEW,
    NEWCOMER,
    OLD,
    ON_N1,
    STORE_OPENS,
    Happens,
    Story,
    alone,
    both,
    lose,
    order,
    place,
    placed,
    played,
    stories,
    submit,
    to,
    told,
)

PAIR = [(1, 0), (1, 1)]  # both members began with the first version
GROWN = (STORE_OPENS, *NEWCOMER, formed(A, index=4, group=2), formed(A, 2, rank=1))
FASTER = Reason("grow", "two are faster", {"speed_now": 400.0, "speed_then": 800.0})
STATED = {
    "best_fitness": 0.75, "mean_fitness": 0.5, "diversity": 0.25, "view_ms": 0.5,
    "improve_ms": 2.0, "decision_ms": 1.5, "check_ms": 0.125,
}  # fmt: skip
QUARTERS = {"lower_fitness": 0.25, "upper_fitness": 0.625}
IDLE = SearchStats(
    generations=30, incumbent_fitness=0.6, spread=(0.0, 0.25, 0.5, 0.625, 0.75), **STATED
)
SUSPECT = NodeSuspected(node=N2, silent_s=6.0)
REPLAN = {"commands": [RequestPlan()]}
NOTHING = {"commands": []}
TO_BOTH = {B: {T0: 32, S1: 32}, A: {S0: BATCH}}  # a slot goes from job a to job b
GHOST = JobId("ghost-9")
U0 = SlotId("n3/0")
B_SHRINKS = {"reasons": ["planned: 1 -> 1 slots, batch 64 -> 32"]}
Placed = Mapping[SlotId, int]


def neighbours() -> Controller:
    """Job a trains on both slots of the first node, job b on the only one of the second."""
    return training(training(cluster_of(n1=2, n2=1), S0, S1), T0, name="b")


def trio(first: tuple[SlotId, ...], second: SlotId, third: SlotId, **nodes: int) -> Controller:
    """Jobs a, b and c train on these slots."""
    controller = training(cluster_of(**nodes), *first)
    return training(training(controller, second, name="b"), third, name="c")


def plan(controller: Controller, placed: Mapping[JobId, Placed], **reasons: Reason) -> Plan:
    """A plan of the present."""
    given = {JobId(job.replace("_", "-")): reason for job, reason in reasons.items()}
    return proposal(placed, based_on=controller.state.version, reasons=given).plan


def proposes(
    placed: Mapping[JobId, Placed], stats: SearchStats | None = None, **reasons: Reason
) -> Happens:
    return lambda controller: controller.take(
        PlanProposed(plan=plan(controller, placed, **reasons), stats=stats)
    )


def grown(reason: Reason = FASTER) -> Controller:
    """A plan brought job a, which was alone, onto a slot of the second node; it settled."""
    return told(alone(), proposes({A: HALVES}, a_1=reason), *GROWN)


def retry(controller: Controller) -> None:
    """Pass the time until job a's next change."""
    controller.now = controller.job(A).attempts.next_change_at


def judged(controller: Controller, proposed: Plan) -> tuple[dict[JobId, Placed], object]:
    """What a plan would move, and what of it is refused."""
    verdict = check(proposed, controller.state, Seconds(controller.now))
    return {move.job: move.local_batch for move in verdict.moves}, verdict.refused


def changed(controller: Controller, whole: Plan) -> Plan:
    return difference(whole, controller.state, Seconds(controller.now))


def slots(controller: Controller) -> dict[SlotId, str]:
    """What the view says of each slot."""
    return {
        slot.slot: "usable" if slot.usable else "leaving" if slot.leaving else "taken"
        for slot in controller.view().slots
    }


def movable(controller: Controller) -> bool:
    return controller.view().jobs[A].movable


def decisions(controller: Controller) -> list[tuple[int, str, str, str]]:
    """Version, who decided, the code of the reason, and what came of it."""
    made = controller.history_of(A).decisions
    return [(d.version, d.by, d.code, d.outcome) for d in made if d.code != "order"]


def targets(controller: Controller) -> list[Size]:
    return [decision.to for decision in controller.history_of(A).decisions]


def gains(controller: Controller) -> list[tuple[float, float]]:
    return controller.reactor.totals.gains


def plans_taken(controller: Controller) -> int:
    return controller.reactor.totals.plans_taken


def running_on(controller: Controller) -> Placed:
    return controller.view().jobs[A].running_on


def second_slot(controller: Controller) -> SlotView:
    return controller.view().slots[1]


def b_on(controller: Controller) -> Placed:
    return placed(controller, B)


def last_slots(controller: Controller) -> list[tuple[SlotId, ...]]:
    return [controller.history_of(job).decisions[-1].to.slots for job in (A, B)]


LAST_ONE_LEAVES = order(switch, 2, S0, [OLD], kind=JOIN, former=members(A, HALVES, PAIR)[1:])

ONE_JOB: Final[dict[str, Story]] = {
    "a plan grows a job onto free slots while it trains": [
        alone, proposes({A: HALVES}, a_1=FASTER),
        {
            "commands": [
                news("job.rescaling", A, reason="two are faster: 1 -> 2 slots, batch 64 -> 64"),
                *to(order(run, 2, HALVES, [OLD, NEW], kind=JOIN), N2, N1),
            ],
            "placed": {S0: BATCH},  # the old group trains
        },
    ],
    "a plan shrinks a job and its leaver is told": [
        both, place({A: S0}),
        {
            "commands": [
                news("job.rescaling", A, reason="planned: 2 -> 1 slots, batch 64 -> 64"), *to(LAST_ONE_LEAVES, N1, N2),
            ],
        },
    ],
    "a plan may keep another member than the first": [
        both, place({A: T0}),
        {"orders": to(order(switch, 2, T0, [(1, 1)], kind=JOIN, former=members(A, HALVES, PAIR)[:1]), N2, N1)},
    ],
    "a plan changes only the batch": [
        both, place({A: {S0: 64, T0: 40}}), {"orders": to(order(switch, 2, {S0: 64, T0: 40}, PAIR, kind=JOIN), N1, N2)},
        formed(A, index=3, group=2), formed(A, rank=1, index=3, group=2),
        {"accounting.rescales": 0, "accounting.batch_changes": 1, "placed": {S0: 64, T0: 40}},
    ],
    "a plan pauses a job and the next resumes it from its checkpoint": [
        both, place({A: {}}),
        {"orders": to(order(switch, 2, {}, [], kind=SUSPEND, former=members(A, HALVES, PAIR)), N1, N2)},
        suspended(A, index=3, group=2, epoch=1, step=20), {"phase": "paused"},
        exited(A, code=0), exited(A, rank=1, code=0), place({A: T1}),
        {
            "commands": [
                news("job.starting", A, reason="planned: n2/1, resumes after epoch 1", slots=T1),
                *to(order(run, 3, T1, [(3, 0)], resume=resume_at(1, 2)), N2),
            ],
        },
    ],
    "a plan of what is there changes nothing": [both, place({A: dict(reversed(HALVES.items()))}), NOTHING],
    "a plan that changes one job tells only the nodes of that job": [
        lambda: trio((S0,), T0, U0, n1=2, n2=1, n3=1),
        place({A: ON_N1, B: T0, C: U0}), {"orders": to(order(run, 2, ON_N1, [OLD, NEW], kind=JOIN), N1)},
    ],
    "a plan of a search says what it changed and how the search stands": [
        neighbours, proposes({A: {S0: 64}, B: {T0: 32}}, IDLE),
        {"last": news("policy.plan", changes=2, generations=30, **STATED, **QUARTERS), plans_taken: 3},  # two plans began the jobs
    ],
    "a plan that changes nothing is not counted": [alone, proposes({A: {S0: BATCH}}, IDLE), NOTHING | {plans_taken: 1}],
    "survivors keep the batch and take it in passes": [
        lambda: training(cluster_of(n1=2, n2=2), S0, S1), place({A: {S0: BATCH, S1: BATCH}}),
        formed(A, index=3, group=2), formed(A, rank=1, index=3, group=2), exited(A, rank=1, signal=SIGKILL),
        {targets: [Size((S0, S1), BATCH), Size((S0, S1), 2 * BATCH), Size((S0,), 2 * BATCH)]},
    ],
}  # fmt: skip

SLOTS_MOVE: Final[dict[str, Story]] = {
    "slots move in one plan and the newcomer is prepared beside the leaver": [
        neighbours, place(TO_BOTH),
        {
            "commands": [  # the shrink goes first
                news("job.rescaling", A, reason="planned: 2 -> 1 slots, batch 64 -> 64"),
                *to(order(switch, 2, S0, [OLD], kind=JOIN, former=members(A, ON_N1, PAIR)[1:]), N1),
                news("job.rescaling", B, reason="planned: 1 -> 2 slots, batch 64 -> 64"),
                *to(order(run, 2, {T0: 32, S1: 32}, [OLD, NEW], job=B, kind=JOIN), N1, N2),
            ],
            "owners": {S0: A, S1: A, T0: B}, "claims": {S1: B},
        },
    ],
    "the newcomer has the slot when the leaver is gone": [
        neighbours, place(TO_BOTH), formed(A, index=3, group=2), started(B, 2, rank=1),
        {"owners": {S0: A, S1: A, T0: B}},  # its process lives
        exited(A, rank=1, code=0), {"owners": {S0: A, S1: B, T0: B}, "claims": {}},
        ready(B, 2, rank=1), store(B, index=3, group=2, port=29500), formed(B, 2, rank=1), formed(B, index=4, group=2),
        {"phases": {A: "running", B: "running"}, "placed": {S0: BATCH}, b_on: {T0: 32, S1: 32}},
    ],
    "a paused job gives its slots to one that grows in the same plan": [
        neighbours, place({B: {T0: 22, S0: 21, S1: 21}, A: {}}),
        {"claims": {S0: B, S1: B}, targets: [Size(slots=(S0, S1), batch=64), Size()]},
    ],
    "a start waits until a slot is free": [
        neighbours, submit("c", **ELASTIC), place({C: S1, A: S0}),
        {"asks": True, "phases": {A: "rescaling", B: "running", C: "queued"}},
        formed(A, index=3, group=2), place({C: S1}), REPLAN,  # its process lives
        exited(A, rank=1, code=0), place({C: S1}), {"orders": to(order(run, 1, S1, [(1, 0)], job=C), N1)},
    ],
    "what one job gives up goes to one job only": [
        neighbours, resized(A, 1), {"releasing": {S1: A}}, place({B: {T0: 32, S1: 32}}),
        {
            "releasing": {},
            second_slot: SlotView(slot=S1, node=N1, kind="cpu", usable=False, leaving=False, cores=2, host_cores=2),
        },
    ],
    "a newcomer waits for a worker of an unknown job that comes to light": [
        lambda: training(cluster_of(n1=1, n2=1), S0), submit("b"), place({B: T0}), cancelled(B), place({A: HALVES}),
        greeting(N2, seen(GHOST), boot="boot-2"), (N2, cleared(B, 2)),  # it never began
        {"owners": {S0: A, T0: GHOST}}, (N2, exited(GHOST, code=0)), {"owners": {S0: A, T0: A}}, ready(A, 2, rank=1),
    ],
    "a job does not wait for a slot that it just left": [
        both, place({A: S0}), formed(A, index=3, group=2), {"releasing": {T0: A}}, place({A: HALVES}), REPLAN,
    ],
    "a migration grows first and shrinks by the next plan": [
        alone, place({A: T0}), {"orders": to(order(run, 2, HALVES, [OLD, NEW], kind=JOIN), N2, N1)},
        *GROWN, {"last": RequestPlan()}, place({A: T0}),
        {"orders": to(order(switch, 3, T0, [NEW], kind=JOIN, former=members(A, HALVES, [OLD, NEW])[:1]), N2, N1)},
        formed(A, 2, rank=1, index=3, group=3), {"placed": {T0: BATCH}, "accounting.rescales": 2},
    ],
    "slots that a migration leaves are not promised before it shrinks": [
        lambda: training(training(cluster_of(n1=1, n2=2), S0), T0, name="b"), place({A: {T1: BATCH}, B: {T0: 32, S0: 32}}),
        {"asks": True, "phases": {A: "rescaling", B: "running"}, "releasing": {}},
    ],
}  # fmt: skip

LEFT_ALONE: Final[dict[str, Story]] = {
    "a plan of the moment of the last change is no older than it": [alone, place({A: {}}), {"change": "switching"}],
    "a job grows onto no suspect node and shrinks away from it": [
        both, SUSPECT, place({A: {S0: 22, T0: 21, T1: 21}}), REPLAN, place({A: S0}), {"change": "switching"},
    ],
    "a job that was lost after its training was done is started again": [
        lambda: training(cluster_of(n1=1), S0), finished(A, index=3, reason="its epochs are done"),
        {movable: False}, exited(A, signal=SIGKILL), {movable: True}, place({A: S0}), {"reasons": ["planned: n1/0"]},
    ],
    "a growth that came to nothing is not tried again at once": [
        alone, place({A: HALVES}), refused(A, 2, rank=1, error="no zygote"), place({A: HALVES}), REPLAN,
        0.999, place({A: HALVES}), REPLAN, 0.001, place({A: HALVES}), {"change": "preparing"},
    ],
    "a shrink that came to nothing is not tried again at once": [
        both, place({A: S0}), join_failed(A, index=3, group=2, error="no"), place({A: S0}), REPLAN,
        retry, place({A: S0}), {"change": "switching"},
    ],
    "a job that a proposal does not name is left alone": [neighbours, place({}), NOTHING, place({B: {T0: 32}}), B_SHRINKS],
}  # fmt: skip

SEEN: Final[dict[str, Story]] = {
    "a job is movable while it waits and trains and not in between": [
        lambda: cluster_of(n1=1, n2=1), submit("a", **ELASTIC), {movable: True}, place({A: S0}), {movable: False},
        ready(A), formed(A), {movable: True}, place({A: HALVES}), {movable: False},
        refused(A, 2, rank=1, error="no zygote"), {movable: True}, retry, place({A: {}}), {movable: False},
        suspended(A, index=3, group=3), {movable: True},
    ],
    "a job that changes is seen where it goes to": [alone, place({A: HALVES}), {running_on: HALVES}],
    "a slot is leaving from the order until its process is gone": [
        lambda: training(cluster_of(n1=1, n2=2), S0, T0), {slots: {S0: "taken", T0: "taken", T1: "usable"}},
        place({A: S0}), {slots: {S0: "taken", T0: "leaving", T1: "usable"}},
        formed(A, index=3, group=2), {slots: {S0: "taken", T0: "leaving", T1: "usable"}},
        exited(A, rank=1, code=0), {slots: {S0: "taken", T0: "usable", T1: "usable"}},
    ],
    "a slot that was promised is not leaving for anybody else": [
        neighbours, place(TO_BOTH), {slots: {S0: "taken", S1: "taken", T0: "taken"}},
    ],
    "a slot that a change brings newcomers for is not leaving": [
        alone, place({A: T0}), {slots: {S0: "taken", S1: "usable", T0: "taken", T1: "usable"}},
    ],
    "slots of a lost node are not seen and of a suspect one not leaving": [
        both, place({A: S0}), SUSPECT, {slots: {S0: "taken", S1: "usable", T0: "taken", T1: "taken"}},
        lose(N2), {slots: {S0: "taken", S1: "usable"}},
    ],
    "a slot that an operator waits for is not leaving": [
        lambda: training(training(cluster_of(n1=1, n2=2), S0), T0, T1, name="b"), resized(A, 3),
        {"waits": "waiting for 2 more slots, as ann ordered"}, place({B: T0}), {slots: {S0: "taken", T0: "taken", T1: "taken"}},
    ],
}  # fmt: skip


def judges(placed: Mapping[JobId, Placed]) -> Callable[[Controller], object]:
    """What a plan would move, and what of it is refused."""
    return lambda controller: judged(controller, plan(controller, placed))


REFUSED: Final[dict[str, Story]] = {
    "two growths onto one slot that is left are one": [
        lambda: trio((S0, S1), T0, T1, n1=2, n2=2),
        {
            judges({B: {T0: 32, S1: 32}, C: {T1: 32, S1: 32}, A: {S0: 64}}): (
                {A: {S0: 64}, B: {T0: 32, S1: 32}}, {C: "slot n1/1 is taken"},
            ),
        },
    ],
    "a slot is not promised again before the one that waited for it is gone": [
        lambda: trio((T0, T1), S0, S1, n1=2, n2=2), place({A: T0, B: {S0: 32, T1: 32}}), started(B, 2, rank=1),
        join_failed(A, index=3, group=2, error="no"),
        {"phases": {A: "running", B: "running", C: "running"}, "claims": {T1: B}},  # b's newcomer was told to stop
        retry, {judges({A: {T0: BATCH}, C: {S1: 32, T1: 32}}): ({A: {T0: BATCH}}, {C: "slot n2/1 is taken"})},
    ],
    "a migration never trains with a batch above the limit": [
        lambda: cluster_of(n1=2, n2=2), submit("a", slots=(1, 2), batch_size=2, max_batch_size="keep"),
        place({A: {S0: 1, S1: 1}}), *(report(A, rank=rank) for report in (ready, formed) for rank in (0, 1)),
        place({A: {T0: 1, T1: 1}}), {targets: [Size((S0, S1), 2)], "commands": [RequestPlan()]},
    ],
    "a job whose training is done is left alone": [
        both, finished(A, index=3, reason="its epochs are done"),
        {judges({A: {S0: 64}}): ({}, {A: "the training has finished"}), movable: False},
    ],
}  # fmt: skip

LOSE_ONE = exited(A, rank=1, signal=SIGKILL)
WIDER = place({A: {S0: 32, T0: 22, T1: 10}})
DECIDED: Final[dict[str, Story]] = {
    f"a decision says who decided and what came of it: {what}": [
        both, *happens, {decisions: [(1, "policy", "planned", "formed"), *then]},
    ]
    for what, happens, then in (
        ("a newcomer is lost", (WIDER, refused(A, 2, rank=2, error="no")), [(2, "policy", "planned", "abandoned")]),
        ("it cannot join", (place({A: S0}), join_failed(A, index=3, group=2, error="no")), [(2, "policy", "planned", "abandoned")]),
        ("a member is lost", (LOSE_ONE,), [(2, "cluster", "lost", "")]),
        ("a member is lost in a change", (WIDER, LOSE_ONE), [(2, "policy", "planned", "broken"), (3, "cluster", "lost", "")]),
        ("all are lost", (LOSE_ONE, exited(A, signal=SIGKILL)), [(2, "cluster", "lost", "lost"), (0, "cluster", "lost", "lost")]),
        ("it is paused", (paused(A), suspended(A, index=3, group=2)), [(2, "operator", "operator", "suspended")]),
    )
}  # fmt: skip


def epochs_of(controller: Controller) -> list[tuple[bool, int, int]]:
    """Whether each epoch was whole, and the slots and nodes of its group."""
    return [(one.whole, one.slots, one.nodes) for one in controller.history_of(A).epochs]


def last_numbers(controller: Controller) -> object:
    return controller.history_of(A).decisions[-1].numbers


def times(controller: Controller) -> dict[str, object]:
    seen = controller.view().jobs[A]
    named = ("submitted_at", "start_s", "epoch_at", "moved_at", "ran_s", "waited_s")
    return {name: getattr(seen, name) for name in named}


def served(controller: Controller) -> tuple[float, float]:
    seen = controller.view().jobs[A]
    return seen.slot_s, seen.served(Seconds(controller.now))


MOVE = Reason("move", "closer", {"speed_now": 400.0, "speed_then": 420.0})
GROWS = proposes({A: HALVES}, a_1=FASTER)
OF_EPOCHS: Final[dict[str, Story]] = {
    "an epoch that two groups shared shows nothing": [
        lambda: training(cluster_of(n1=2, n2=2), S0, epochs=1), GROWS, store(A, index=4, group=2, port=29500),
        ready(A, 2, rank=1), formed(A, index=5, group=2, epoch=1, step=20), formed(A, 2, rank=1, epoch=1, step=20),
        epoch_end(A, 2, index=6, group=2), {gains: []}, epoch_end(A, 3, index=7, group=2),
        {epochs_of: [(True, 1, 1), (False, 2, 2), (True, 2, 2)], gains: [(2.0, 500.0 / 400.0)]},
    ],
    "an epoch of the group before shows nothing": [alone, GROWS, epoch_end(A, 1), {gains: [], epochs_of: [(True, 1, 1)]}],
    **{
        f"a change of which no speed was promised has no gain: {numbers}": [
            partial(grown, Reason("grow", "grow", numbers)), epoch_end(A, 1, index=5, group=2), {gains: [], last_numbers: numbers},
        ]
        for numbers in ({}, {"speed_then": 800.0}, {"speed_now": 0.0, "speed_then": 800.0})
    },
    "an epoch after a pause in it was not done by one group": [
        lambda: training(cluster_of(n1=1), S0, epochs=1), place({A: {}}), suspended(A, index=4, group=2, epoch=1, step=20),
        exited(A, code=0), place({A: S0}), ready(A, 3, resumed=1), formed(A, 3, epoch=1, step=20), epoch_end(A, 2, 3, index=3),
        {epochs_of: [(True, 1, 1), (False, 1, 1)]},
    ],
    "an epoch is noted with the size of the group that reported it": [
        alone, place({A: HALVES}), *GROWN[:-1], epoch_end(A, 1, index=5, group=2), {epochs_of: [(False, 2, 2)]},
    ],
    "the first step of a migration is not held against what its end promised": [
        alone, proposes({A: {T0: BATCH}}, a_1=MOVE), *GROWN, epoch_end(A, 1, index=5, group=2, samples_per_s=790.0), {gains: []},
    ],
    "a view has the times of a job": [
        lambda: cluster_of(n1=2), 100.0, submit("a", **ELASTIC), 10.0, place({A: S0}), 3.0, ready(A), formed(A),
        {
            times: {"submitted_at": 1100.0, "start_s": 3.0, "epoch_at": 0.0, "moved_at": 1113.0, "ran_s": 3.0, "waited_s": 10.0},
        },
        7.0, epoch_end(A, 1), 10.0, place({A: ON_N1}), 1.0,
        {
            times: {"submitted_at": 1100.0, "start_s": 3.0, "epoch_at": 1120.0, "moved_at": 1130.0, "ran_s": 20.0, "waited_s": 10.0},
        },
    ],
    "attained service counts the slots that a job had at each time": [alone, 10.0, GROWS, *GROWN, 5.0, {served: (10.0, 20.0)}],
}  # fmt: skip


@stories(ONE_JOB | SLOTS_MOVE | LEFT_ALONE | SEEN | REFUSED | DECIDED | OF_EPOCHS)
def test_plans_move_jobs(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


# --- what is refused, and what differs


def test_a_stale_entry_is_refused_the_rest_is_done_and_a_new_plan_is_asked_for() -> None:
    controller = neighbours()
    stale = plan(controller, {A: {S0: BATCH}, B: {T0: 32}})
    told(controller, place({A: {S0: 32, S1: 16}}))
    told(controller, *(formed(A, rank=rank, index=3, group=2) for rank in (0, 1)))

    verdict = judged(controller, stale)
    commands = controller.take(PlanProposed(plan=stale))

    assert verdict == ({B: {T0: 32}}, {A: "the job changed after the plan was made"})
    assert {"reasons": reasons(commands)} == B_SHRINKS
    assert commands[-1] == RequestPlan()
    assert placed(controller) == {S0: 32, S1: 16}


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
    controller = training(cluster_of(n1=2, n2=2), S0, S1, slots=(2, 3), max_batch_size=150)

    verdict = check(plan(controller, {A: wanted}), controller.state, Seconds(controller.now))

    assert verdict == Verdict(refused={A: why})
    assert controller.place({A: wanted}) == [RequestPlan()]


@pytest.mark.parametrize(
    "then",
    [
        [resized(A, 2)],
        [paused(A)],
        [place({A: {S0: BATCH, T0: BATCH}})],
        [exited(A, signal=SIGKILL), LOSE_ONE, place({A: S1})],
        [raised(A, index=3, error="ValueError", where=""), exited(A, code=1)],
    ],
    ids=["in a hand", "in a pause", "changing", "starting again", "ended"],
)
def test_a_job_in_a_hand_changing_starting_or_ended_is_left_alone(then: list[Any]) -> None:
    controller = told(both(), *then)
    version = controller.job(A).version

    assert controller.place({A: {S0: BATCH}}) == []
    assert controller.place({A: {}}) == []
    assert changed(controller, plan(controller, {})) == plan(controller, {})
    assert controller.job(A).version == version


def test_a_job_that_is_given_back_is_not_moved_by_a_plan_from_before() -> None:
    controller = told(both(), resized(A, 2))
    view = plan(controller, {A: {S0: BATCH}})
    controller.take(resumed(A, auto=True))

    assert controller.take(PlanProposed(plan=view)) == [RequestPlan()]
    assert reasons(controller.place({A: {S0: BATCH}})) != []


def test_the_difference_says_that_jobs_which_a_policy_leaves_out_stop() -> None:
    controller = neighbours()
    whole = plan(controller, {B: {T0: 32}}, a_1=Reason("waits", "b is shorter"))

    assert changed(controller, whole) == msgspec.structs.replace(
        whole, local_batch={A: {}, B: {T0: 32}}
    )


def test_the_difference_leaves_out_what_is_there_and_what_does_not_fit() -> None:
    controller = told(neighbours(), submit("c", **ELASTIC))
    wanted = {A: dict(ON_N1), B: {T0: BATCH, S1: BATCH}, C: {T0: BATCH}}
    why = {"a_1": Reason("stays", "stays"), "c_3": Reason("starts", "starts")}

    assert changed(controller, plan(controller, wanted, **why)) == plan(controller, {})


def test_the_difference_stops_no_job_that_the_policy_could_not_know_of() -> None:
    controller = alone()
    old = plan(controller, {A: {S0: BATCH}})
    training(controller, T0, name="b")

    assert changed(controller, old) == Plan(based_on=old.based_on)


def test_the_difference_leads_to_what_the_whole_plan_asks_for() -> None:
    controller = neighbours()
    whole = plan(controller, {B: {T0: 32, S0: 32}})

    controller.take(PlanProposed(plan=changed(controller, whole)))

    assert changed(controller, whole).local_batch == {}
    assert last_slots(controller) == [(), (T0, S0)]


# --- decisions, and what a change was good for


def test_every_group_is_a_decision_with_its_reason_numbers_and_outcome() -> None:
    controller = told(alone(), 5.0, proposes({A: HALVES}, a_1=FASTER))
    versions = [controller.history_of(A).decisions[0].version, controller.job(A).version]
    alone_on, then_on = Size(slots=(S0,), batch=64), Size(slots=(S0, T0), batch=64)
    first = Decision(
        time=Seconds(1000.0), before=Size(), to=alone_on, reason="planned", code="planned",
        version=versions[0], outcome="formed",
    )  # fmt: skip
    under_way = Decision(
        time=Seconds(1005.0), before=alone_on, to=then_on, reason="two are faster", code="grow",
        numbers={"speed_now": 400.0, "speed_then": 800.0}, version=versions[1],
    )  # fmt: skip
    assert controller.history_of(A).decisions == [first, under_way]

    told(controller, 2.0, *GROWN)

    done = msgspec.structs.replace(
        under_way, outcome="formed", took_s=2.0,
        numbers={"speed_now": 400.0, "speed_then": 800.0, "prepare_s": 2.0},
    )  # fmt: skip
    assert controller.history_of(A).decisions == [first, done]


def test_the_first_whole_epoch_of_a_group_shows_what_the_change_was_good_for() -> None:
    controller = grown()

    commands = controller.tell(N1, epoch_end(A, 1, index=5, group=2, samples_per_s=600.0))

    assert commands[0] == news("job.gain", A, version=2, predicted=2.0, realised=1.5)
    assert controller.history_of(A).decisions[-1].numbers == {
        "speed_now": 400.0,
        "speed_then": 800.0,
        "speed_realised": 600.0,
    }
    assert gains(controller) == [(2.0, 1.5)]
    again = controller.tell(N1, epoch_end(A, 2, index=6, group=2, samples_per_s=700.0))
    assert [command.event.event for command in again if command != RequestPlan()] == ["job.epoch"]  # type: ignore[union-attr]
    assert gains(controller) == [(2.0, 1.5)]


# --- what a policy sees


def test_a_slot_says_which_model_it_is_whatever_happens_to_it() -> None:
    controller = told(cluster_of(), greeting(N1, model="H200"), greeting(N2, slots=2))

    for happens in (lambda _: None, lambda one: training(one, S0) and None, SUSPECT):
        told(controller, happens)
        assert [slot.model for slot in controller.view().slots] == ["H200", "", ""]


def test_a_node_that_returns_with_other_gpus_says_so() -> None:
    controller = told(cluster_of(), greeting(N1, model="V100"))
    before = controller.view().slots

    controller.take(greeting(N1, boot="boot-2", model="H200"))

    assert [slot.model for slot in before] == ["V100"]
    assert controller.view().slots == (msgspec.structs.replace(before[0], model="H200"),)


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
    controller = told(cluster_of(n1=1), submit(name, **spec))

    assert [view.family for view in controller.view().jobs.values()] == [family]


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
    rules = (StopRule(epochs=3), StopRule(samples=2500), None)
    controller = told(cluster_of(n1=1), *(submit("a", stop=rule) for rule in rules))

    jobs = controller.view().jobs.values()
    assert [job.stop_samples for job in jobs] == [None, 2500, None]


@pytest.mark.parametrize(
    ("metrics", "seen"),
    [
        ({}, None),
        ({"noise_scale": 512.5}, 512.5),
        *(({"noise_scale": bad}, None) for bad in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_the_noise_scale_is_seen_if_it_is_a_number_of_samples(
    metrics: dict[str, float], seen: float | None
) -> None:
    controller = told(alone(), epoch_end(A, 1, metrics=metrics))

    assert controller.view().jobs[A].noise_scale == seen


def test_a_view_has_since_when_a_job_has_its_slots_whatever_its_batch() -> None:
    controller = both()
    before = controller.view().jobs[A].placed_at
    told(controller, 10.0, place({A: {S0: 64, T0: 40}}))
    told(controller, *(formed(A, rank=rank, index=3, group=2) for rank in (0, 1)))
    rebatched = controller.view().jobs[A]
    told(controller, 10.0, place({A: T0}), formed(A, rank=1, index=4, group=3))
    shrunk = controller.view().jobs[A]

    assert rebatched.placed_at == before
    assert rebatched.moved_at > before
    assert (shrunk.placed_at, shrunk.moved_at) == (controller.now, controller.now)


def test_the_history_of_plans_gives_the_same_state_again() -> None:
    controller = told(
        neighbours(), proposes(TO_BOTH, IDLE, b_2=FASTER), formed(A, index=3, group=2),
        exited(A, rank=1, code=0), ready(B, 2, rank=1), store(B, index=3, group=2, port=29500),
        formed(B, 2, rank=1), formed(B, index=4, group=2), epoch_end(B, 1, index=5, group=2),
        place({A: {}}),
    )  # fmt: skip

    assert gains(controller) != []
    assert controller.replayed() == controller.state


# --- restarts, and what a job was served


@pytest.mark.parametrize(
    ("begin", "wanted", "moves"),
    [
        (alone, {A: HALVES}, {A: {}}),
        (alone, {A: {S0: 32}}, {A: {S0: 32}}),
        (alone, {A: {S0: 64}}, {}),
        (neighbours, {A: {T0: 64}, B: {S0: 32, S1: 32}}, {A: {}, B: {}}),
    ],
    ids=["elsewhere is a pause", "another batch is none", "the same is none", "a trade is two"],
)
def test_a_job_that_a_plan_restarts_is_paused_instead_of_changed(
    begin: Any, wanted: dict[JobId, Placed], moves: dict[JobId, Placed]
) -> None:
    controller = begin()
    whole = msgspec.structs.replace(plan(controller, wanted), restart=tuple(wanted))

    assert judged(controller, whole) == (moves, {})
    pauses = changed(controller, whole)  # need no further word
    assert (pauses.local_batch, pauses.restart) == (moves, ())


def test_a_plan_of_many_starts_is_carried_out_in_parts_and_the_first_has_all_other_entries() -> (
    None
):
    controller = training(cluster_of(n1=2, n2=3), S0, S1)
    controller.submit("b"), controller.submit("c"), controller.submit("d")
    b, c, d = JobId("b-2"), JobId("c-3"), JobId("d-4")
    t0, t1, t2 = (slot_id(NodeId("n2"), index) for index in range(3))
    placed: dict[JobId, Placed] = {b: {t0: 8}, c: {t1: 8}, A: {S0: 8}, d: {t2: 8}}
    changes = changed(controller, plan(controller, placed, c_3=FASTER))

    parts = list(in_parts(changes, controller.state, 1))

    assert [part.local_batch for part in parts] == [
        {b: {t0: 8}, A: {S0: 8}},
        {c: {t1: 8}},
        {d: {t2: 8}},
    ]
    assert [part.reasons.get(c) for part in parts] == [None, FASTER, None]
    assert list(in_parts(changes, controller.state, 3)) == [changes]
