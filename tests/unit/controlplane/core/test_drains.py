"""A drain is a resize away: what each job of a node that is drained does, and what is left of it."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from controlplane.core.inputs import DrainDue, DrainExpired, DrainRequested, UndrainRequested
from schemas.ids import NodeId, Seconds, SlotId
from schemas.wire.agent import NodeNoticed
from tests.support.builders import (
    N1,
    N2,
    S0,
    T0,
    T1,
    A,
    exited,
    formed,
    greeting,
    join_failed,
    news,
    suspended,
)
from tests.support.controller import Controller, cluster_of, running, starting, training
from tests.unit.controlplane.core.steps import (
    HALVES,
    NEWCOMER,
    STORE_OPENS,
    Story,
    do,
    lose,
    place,
    played,
    replays,
    stories,
    submit,
)

WHY = "n1 is drained by ann: new kernel"
NO_LOSS = {"attempts.losses": 0}
DUE, EXPIRED = DrainDue(node=N1), DrainExpired(node=N1)


def drain(node: NodeId = N1, within_s: float | None = None) -> DrainRequested:
    return DrainRequested(node=node, user="ann", reason="new kernel", within_s=within_s)


def slots_then(controller: Controller) -> list[SlotId]:
    """Where job a is, or where its change leads."""
    job = controller.job(A)
    group = job.change.group if job.change is not None else job.group
    return [member.slot for member in group.members] if group is not None else []


def drained_whole(controller: Controller) -> tuple[bool, bool] | None:
    """Whether the deadline passed, and whether the node was announced to be empty."""
    drained = controller.state.nodes[N1].drain
    return drained and (drained.deadline_passed, drained.announced_empty)


def decisions(controller: Controller) -> list[tuple[str, str, str]]:
    return [(one.code, one.by, one.reason) for one in controller.history_of(A).decisions[1:]]


def one(**spec: int) -> Controller:
    return training(cluster_of(n1=1), S0, **spec)


def pair(slots: tuple[int, int] = (1, 4)) -> Controller:
    """Job a trains on the only slot of each node."""
    return training(cluster_of(n1=1, n2=1), S0, T0, slots=slots)


DRAINS: Final[dict[str, Story]] = {
    "a node that is drained takes no new work until it is given back": [
        lambda: cluster_of(n1=1, n2=1), submit("a"), drain(within_s=60.0),
        {"first": news("node.draining", N1, user="ann", reason="new kernel", within_s=60.0)},
        place({A: S0}), {"usable": {S0: False, T0: True}, "phase": "queued"},
        UndrainRequested(node=N1, user="bob"), {"first": news("node.undrained", N1, user="bob")},
        {"usable": {S0: True, T0: True}, replays: True},
    ],
    "an empty node that is drained again is announced as empty again": [
        lambda: cluster_of(n1=1), drain(), {drained_whole: (False, True)}, UndrainRequested(node=N1, user="bob"), drain(),
        {drained_whole: (False, True), replays: True},
    ],
    "a group grows to free slots elsewhere and then leaves the node": [
        lambda: training(cluster_of(n1=2, n2=2), S0), drain(), {slots_then: [S0, T0]}, STORE_OPENS, *NEWCOMER,
        formed(A, index=4, group=2), formed(A, 2, rank=1, index=2, group=2), {slots_then: [T0]},
        formed(A, 2, rank=1, index=3, group=3), exited(A, code=0),
        {"phase": "running", **NO_LOSS, "news of nodes": [news("node.drained", N1, took_s=0.0)]},
        {
            decisions: [
                ("drain", "operator", f"{WHY}; grows elsewhere first"), ("drain", "operator", f"{WHY}; keeps 1 of 2 slots"),
            ],
        },
    ],
    "without room elsewhere a group keeps what it has there": [pair, drain(), {slots_then: [T0]}],
    "without any slot elsewhere a job pauses with its state and starts where there are": [
        one, drain(), suspended(A, index=3, group=2), exited(A, code=0), greeting(N2), place({A: T0}),
        {"phase": "starting", "progress.step": 20, **NO_LOSS, "override": None},
    ],
    "a group below its least elsewhere pauses": [
        lambda: pair((2, 4)), drain(), {slots_then: [], "change": "switching"},
    ],
    "growth that fails is not tried again": [
        lambda: training(cluster_of(n1=1, n2=2), S0, T0), drain(), {slots_then: [S0, T0, T1]},
        exited(A, 2, rank=2, code=1), {"phase": "running", "due": []}, 60.0, {"due": [DUE]}, DUE, {slots_then: [T0]},
    ],
    "a job that starts there is put back": [
        lambda: starting(cluster_of(n1=1, n2=1)), drain(), {"phase": "paused", **NO_LOSS},
    ],
    "a newcomer that is prepared there is called off": [
        lambda: training(cluster_of(n1=1, n2=1), T0), place({A: HALVES}), drain(), {slots_then: [T0], "phase": "running"},
    ],
    "at the deadline what remains is stopped and waits for slots": [
        lambda: one(epochs=1), drain(within_s=60.0), 60.0, {"due": [EXPIRED]}, EXPIRED, exited(A, signal=9),
        {
            "phase": "paused", "reason": "node n1 is drained by ann: new kernel; resumes after epoch 1", "due": [],
            drained_whole: (True, True),
        },
    ],
    "at the deadline the others go on without those that remain": [
        lambda: training(cluster_of(n1=1, n2=2), S0, T0, slots=(1, 2)), drain(within_s=60.0),
        61.0, EXPIRED, {slots_then: [T0], "phase": "rescaling"},  # its newcomer was never ready
    ],
    "a deadline that was moved does not pass": [
        one, drain(within_s=60.0), drain(within_s=600.0), 61.0, {"version": 2}, EXPIRED, {"due": [], "version": 2},
    ],
    "a drain outlives the node's silence and its next agent": [
        lambda: cluster_of(n1=1, n2=1), drain(), lose(N1), do("start"), greeting(N1, boot="boot-2"),
        {"nodes' phases": {N1: "up", N2: "awaited"}, "usable": {S0: False, T0: False}},
    ],
    "a drain of a node that never joined changes nothing": [
        lambda: cluster_of(n1=1), drain(NodeId("n9")), {"commands": []},
        UndrainRequested(node=N1, user="ann"), {"commands": []},
    ],
    "a join that fails while a node is drained ends nothing": [
        lambda: training(cluster_of(n1=1, n2=1), S0, slots=(1, 2)), drain(), STORE_OPENS, *NEWCOMER,
        join_failed(A, index=4, group=2, error="no route"), {"phase": "running", slots_then: [S0]},
    ],
}  # fmt: skip


@stories(DRAINS)
def test_a_drain_moves_jobs_away(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


def test_jobs_stay_on_a_cordoned_node_and_no_job_starts_there() -> None:
    controller = running(cluster_of(n1=2))
    cordon = DrainRequested(node=N1, user="op", reason="old disk", within_s=None, cordon=True)

    controller.take(cordon)

    assert controller.job(A).phase.value == "running"
    assert controller.due(1e6) == []
    assert [slot.usable for slot in controller.view().slots] == [False, False]
    node = controller.state.nodes[N1]
    assert node.drain is not None
    assert node.drain.text == "cordoned by op: old disk"
    controller.take(UndrainRequested(node=N1, user="op"))
    assert [slot.usable for slot in controller.view().slots] == [False, True]


def test_a_drain_replaces_a_cordon_and_a_cordon_a_drain() -> None:
    controller = running(cluster_of(n1=1))
    ask = DrainRequested(node=N1, user="op", reason="", within_s=None)

    controller.take(replace(ask, cordon=True))
    controller.take(ask)
    assert controller.job(A).phase.value == "rescaling"
    controller.take(replace(ask, cordon=True))
    assert controller.state.draining == {}


def noticed(controller: Controller, within_s: float) -> None:
    controller.tell(N1, NodeNoticed(within_s=within_s, reason="reclaimed"))


def test_a_node_that_gives_notice_is_drained_with_that_deadline() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)

    noticed(controller, 30.0)

    assert slots_then(controller) == [S0, T0]
    node = controller.state.nodes[N1]
    assert node.drain is not None
    assert node.drain.text == "drained by notice of n1: reclaimed"
    assert node.drain.deadline == controller.now + 30.0
    assert controller.replayed() == controller.state


def test_of_two_deadlines_of_a_node_the_earlier_one_counts() -> None:
    controller = running(cluster_of(n1=1))
    controller.take(drain(within_s=60.0))

    noticed(controller, 90.0)
    before = controller.state.nodes[N1].drain
    assert before is not None
    assert (before.user, before.deadline) == ("ann", controller.now + 60.0)
    noticed(controller, 30.0)

    after = controller.state.nodes[N1].drain
    assert after is not None
    assert (after.user, after.reason) == (before.user, before.reason)
    assert (after.deadline, after.noticed) == (controller.now + 30.0, False)


def test_a_notice_ends_with_the_next_agent_of_its_node_unless_an_operator_drains_it() -> None:
    controller = cluster_of(n1=1)
    noticed(controller, 30.0)
    controller.take(greeting(N1, boot="boot-2"))
    assert controller.state.nodes[N1].drain is None
    assert controller.state.draining == {}

    controller.take(drain())
    noticed(controller, 30.0)
    controller.take(greeting(N1, boot="boot-3"))
    assert controller.state.nodes[N1].drain is not None


# --- maintenance


def maintenance(begin: float, end: float) -> DrainRequested:
    asked = drain()
    return replace(asked, begin=Seconds(begin), end=Seconds(end))


def plan_of(controller: Controller) -> list[tuple[float, float]]:
    return [(one.begin, one.end) for one in controller.state.nodes[N1].windows]


def test_maintenance_begins_and_ends_by_itself_and_its_jobs_leave_before() -> None:
    controller = pair()
    begin = controller.now + 1000.0
    controller.take(maintenance(begin, begin + 500.0))
    assert (controller.due(939.0), controller.state.nodes[N1].usable) == ([], True)

    assert controller.due(940.0) == [DUE]
    controller.now = begin - 60.0
    controller.take(DUE)

    node = controller.state.nodes[N1]
    assert node.drain is not None
    assert (node.drain.deadline, node.drain.until) == (begin, begin + 500.0)
    assert (node.usable, plan_of(controller)) == (False, [])
    assert decisions(controller)[-1][0] == "drain"
    assert EXPIRED in controller.due(60.0)
    assert DUE in controller.due(560.0)
    controller.now = begin + 500.0
    controller.take(DUE)
    assert (controller.state.nodes[N1].drain, controller.state.draining) == (None, {})


def test_a_notice_in_maintenance_moves_the_deadline_and_keeps_the_end() -> None:
    controller = cluster_of(n1=1)
    begin = controller.now + 1000.0
    controller.take(maintenance(begin, begin + 500.0))
    controller.now = begin - 60.0
    controller.take(DUE)

    noticed(controller, 30.0)

    found = controller.state.nodes[N1].drain
    assert found is not None
    assert (found.deadline, found.until) == (begin - 30.0, begin + 500.0)


def test_two_plans_are_kept_in_their_order_and_undrain_cancels_them() -> None:
    controller = one()
    later, sooner = controller.now + 5000.0, controller.now + 1000.0
    controller.take(maintenance(later, later + 10.0))
    controller.take(maintenance(sooner, sooner + 10.0))
    assert plan_of(controller) == [(sooner, sooner + 10.0), (later, later + 10.0)]

    controller.take(UndrainRequested(node=N1, user="ann"))

    assert (plan_of(controller), controller.due(5000.0)) == ([], [])


def test_a_node_that_an_operator_drained_stays_drained_after_maintenance() -> None:
    controller = one()
    begin = controller.now + 1000.0
    controller.take(maintenance(begin, begin + 10.0))
    controller.take(replace(drain(), cordon=True))
    controller.now = begin - 60.0

    controller.take(DUE)

    found = controller.state.nodes[N1].drain
    assert found is not None
    assert (found.cordon, found.until) == (False, None)
