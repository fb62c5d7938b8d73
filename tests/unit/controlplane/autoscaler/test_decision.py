"""Decisions of the autoscaler, without an engine."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.autoscaler.decision import (
    Action,
    Allocation,
    Bounds,
    Drain,
    Forget,
    Memory,
    Release,
    Request,
    Undrain,
    decide,
)
from controlplane.core.model.node import Drain as NodeDrain
from schemas.ids import JobId, Seconds
from schemas.wire.client import JobSummary, NodeInfo
from tests.support.client_examples import summary

BOUNDS: Final = Bounds(min_nodes=1, max_nodes=3)
UP: Final = Allocation(id="1", node="slurm-n1")
PENDING: Final = Allocation(id="2", note="Priority")
NOW: Final = 1_000.0


def node(name: str = "slurm-n1", state: str = "up", **fields: Any) -> NodeInfo:
    return NodeInfo(
        node=name, state=state, reason=fields.pop("reason", ""), host="", address="", slots=2,
        free=fields.pop("free", 0), kind="cpu", model="CPU", release="",
        jobs=fields.pop("jobs", ("a",)), **fields,
    )  # type: ignore[arg-type]  # fmt: skip


def drained(reason: str) -> str:
    """Return the reason of a node that somebody drained, as the controller reports it."""
    return NodeDrain(user="root", reason=reason, since=Seconds(0.0), deadline=None).text


NOTICED: Final = NodeDrain(
    user="notice of slurm-n1",
    reason="end-of-time-limit appeared",
    since=Seconds(0.0),
    deadline=None,
).text


def waits(slots: int = 1, code: str = "waits", kind: str = "elastic") -> JobSummary:
    said = {"state": "queued", "slots": 0, "min_slots": slots, "code": code, "kind": kind}
    return summary(JobId("b"), **said)


JOINED: Final = Memory(joined=frozenset({"1"}))


def decided(
    allocations: tuple[Allocation, ...] = (UP,),
    nodes: tuple[NodeInfo, ...] = (node(),),
    jobs: tuple[JobSummary, ...] = (),
    memory: Memory = JOINED,
) -> tuple[Action, ...]:
    named = {str(one.node): one for one in nodes}
    return decide(allocations, named, jobs, BOUNDS, memory, now=NOW).actions


WAITED: Final = Memory(waiting_since=NOW - 70.0, joined=frozenset({"1"}))
IDLE: Final = Memory(idle_since={"slurm-n1": NOW - 400.0}, joined=frozenset({"1"}))
TWO: Final = (UP, Allocation(id="3", node="slurm-n3"))
OF_1: Final = "autoscaler: allocation 1: Slurm: draining, new disk"


@pytest.mark.parametrize(
    ("said", "actions"),
    [
        ({"allocations": (), "nodes": ()}, (Request(1, (), "0 of at least 1 nodes"),)),
        ({}, ()),
        ({"jobs": (waits(),)}, ()),  # has not waited for long
        (
            {"jobs": (waits(2), waits(1)), "memory": WAITED},
            (Request(2, (), "2 jobs wait for 3 slots since 70 s, 0 are free"),),
        ),
        (
            {"jobs": (waits(9),), "memory": WAITED},  # as many as there may be
            (Request(2, (), "1 job waits for 9 slots since 70 s, 0 are free"),),
        ),
        ({"jobs": (waits(code="budget"),), "memory": WAITED}, ()),  # more nodes do not help
        ({"jobs": (waits(3, kind="command"),), "memory": WAITED}, ()),  # larger than a node
        ({"allocations": (UP, PENDING), "jobs": (waits(2),), "memory": WAITED}, ()),
        (
            {"allocations": (UP, PENDING), "jobs": (waits(3),), "memory": WAITED},
            (Request(1, (), "1 job waits for 3 slots since 70 s, 0 are free"),),
        ),
        (
            {"allocations": (UP, PENDING)},
            (Release("2", "more than 1 nodes, and no job waits for slots"),),
        ),
        ({"nodes": (node(jobs=()),), "memory": IDLE}, ()),  # the least number
        (
            {"allocations": TWO, "nodes": (node(jobs=()), node("slurm-n3")), "memory": IDLE},
            (Drain("slurm-n1", "autoscaler: allocation 1: idle for 400 s"),),
        ),
        (
            {"nodes": (node(state="drained", reason=drained("autoscaler: allocation 1: idle for 400 s")),)},
            (
                Release("1", "slurm-n1 has no jobs: idle for 400 s"),
                Request(1, (), "0 of at least 1 nodes"),
            ),
        ),
        (
            {"allocations": (Allocation(id="1", node="slurm-n1", ends_at=NOW + 60, leaves="Slurm: draining, new disk"),)},
            (Drain("slurm-n1", OF_1, 60.0), Request(1, (), "0 of at least 1 nodes")),
        ),
        (
            {"nodes": (node(state="draining", reason=drained("new disk")),)},  # by an operator
            (Request(1, ("slurm-n1",), "0 of at least 1 nodes"),),
        ),
        (
            {"allocations": (Allocation(id="4", node="slurm-n1"),),
             "nodes": (node(state="drained", reason=drained(OF_1)),)},
            (Undrain("slurm-n1", "slurm-n1 is allocation 4 now"),),
        ),
        (
            {"nodes": (node(state="drained", reason=NOTICED),)},
            (
                Release("1", "slurm-n1 has no jobs: end-of-time-limit appeared"),
                Request(1, (), "0 of at least 1 nodes"),
            ),
        ),
        (
            {"allocations": (Allocation(id="4", node="slurm-n1"),),
             "nodes": (node(state="drained", reason=NOTICED),)},
            (),  # the notice was of allocation 1, and the agent of 4 has yet to join
        ),
        (
            {"nodes": (node("slurm-n2", "lost"),), "jobs": (waits(4),),
             "memory": Memory(waiting_since=NOW - 70.0)},
            (
                Forget("slurm-n2", "the machine of slurm-n2 was returned"),
                Request(1, (), "1 job waits for 4 slots since 70 s, 0 are free"),  # two slots on each
            ),
        ),
        (
            {"nodes": (node(state="lost"),)},
            (Release("1", "slurm-n1 is lost"), Request(1, (), "0 of at least 1 nodes")),
        ),
        (
            {"nodes": (node(), node("slurm-n2", "lost"))},
            (Forget("slurm-n2", "the machine of slurm-n2 was returned"),),
        ),
    ],
)  # fmt: skip
def test_a_decision_follows_from_the_reports(
    said: dict[str, Any], actions: tuple[Action, ...]
) -> None:
    assert decided(**said) == actions


def test_requests_exclude_only_machines_that_operators_have_drained() -> None:
    nodes = (
        node("slurm-n1", "drained", reason=NOTICED),
        node("slurm-n2", "drained", reason=drained(OF_1)),
        node("slurm-n3", "cordoned", reason=drained("new disk")),
        node("slurm-n4", "lost"),
    )

    *_, request = decided(allocations=(), nodes=nodes)

    assert request == Request(1, ("slurm-n3",), "0 of at least 1 nodes")


def test_allocations_without_an_agent_are_returned_and_requests_pause() -> None:
    nobody: dict[str, NodeInfo] = {}
    first = decide([UP], nobody, [], BOUNDS, Memory(), now=NOW)
    late = decide([UP], nobody, [], BOUNDS, first.memory, now=NOW + 121.0)
    gone = decide([], nobody, [], BOUNDS, late.memory, now=NOW + 130.0)
    again = decide([], nobody, [], BOUNDS, gone.memory, now=NOW + 137.0)

    assert first.actions == ()
    assert late.actions == (Release("1", "no agent joined from slurm-n1 within 120 s"),)
    assert gone.actions == ()
    assert gone.note == "0 of at least 1 nodes; next request in 6 s, as no agent joined"
    assert again.actions == (Request(1, (), "0 of at least 1 nodes"),)


def test_each_failure_doubles_the_pause_and_a_join_ends_it() -> None:
    memory, pauses = Memory(), []
    for number in range(3):
        one = Allocation(id=str(number), node="slurm-n1")
        memory = decide([one], {}, [], BOUNDS, memory, now=NOW).memory
        memory = decide([], {}, [], BOUNDS, memory, now=NOW).memory  # it ended before it joined
        pauses.append(memory.not_before - NOW)
    joined = decide([UP], {"slurm-n1": node()}, [], BOUNDS, memory, now=NOW).memory

    assert pauses == [15.0, 30.0, 60.0]
    assert joined.failures == 0


states = st.sampled_from(["up", "draining", "drained", "cordoned", "lost", "unhealthy"])
reasons = st.sampled_from(
    ["", *map(drained, ("new disk", OF_1, "autoscaler: allocation 9: idle for 400 s"))]
)


@given(
    hosts=st.lists(st.tuples(states, reasons, st.booleans()), max_size=5),
    pending=st.integers(0, 3),
    jobs=st.lists(st.builds(waits, st.integers(1, 9)), max_size=3),
    memory=st.sampled_from([Memory(), Memory(waiting_since=NOW - 70.0)]),
)
def test_a_request_stays_within_the_bounds_and_no_node_with_jobs_is_returned(
    hosts: list[tuple[str, str, bool]], pending: int, jobs: list[JobSummary], memory: Memory
) -> None:
    names = [f"slurm-n{number}" for number in range(len(hosts))]
    nodes = {
        name: node(name, state, reason=reason, jobs=("a",) if busy else ())
        for name, (state, reason, busy) in zip(names, hosts, strict=True)
    }
    held = [Allocation(id=str(number), node=name) for number, name in enumerate(names)]
    held += [Allocation(id=f"p{number}") for number in range(pending)]

    actions = decide(held, nodes, jobs, BOUNDS, memory, now=NOW).actions

    requested = sum(one.count for one in actions if isinstance(one, Request))
    released = {one.allocation for one in actions if isinstance(one, Release)}
    stay = [
        one
        for one in held
        if one.id not in released
        and (not one.node or nodes[one.node].state not in {"draining", "drained", "cordoned"})
    ]
    assert requested <= max(0, BOUNDS.max_nodes - len(stay))
    assert all(
        nodes[one.node].state in {"drained", "lost"}
        for one in held
        if one.node and one.id in released
    )
    assert not requested or not any(isinstance(one, Drain) and "idle" in one.why for one in actions)
