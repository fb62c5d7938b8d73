"""Running jobs trade slots on a full cluster: one owner at any time, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.handlers.plans import MAX_PAUSE_WAIT_S
from controlplane.core.inputs import NodeHeard, NodeSuspected, PlanProposed
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import check
from controlplane.policy.api import Plan, Reason
from schemas.ids import JobId, SlotId, WorkerId
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
    paused,
    proposal,
    resized,
    resumed,
)
from tests.support.controller import ELASTIC
from tests.support.sizes import examples
from tests.support.world import Places, World

HALF = BATCH // 2


def site(placed: Places, least: int = 1, **slots: int) -> World:
    """Jobs that train on these slots, whatever was there before."""
    found = World(**slots)
    found.train(placed, **{**ELASTIC, "slots": (least, 8), "max_batch_size": 4 * BATCH})
    return found


def codes(found: World, job: JobId) -> list[tuple[str, int]]:
    """Why groups were ordered, and how many slots they had."""
    decisions = found.controller.history_of(job).decisions
    return [(decision.code, len(decision.to.slots)) for decision in decisions[1:]]


# --- who steps aside


def test_on_a_full_cluster_one_pauses_while_the_other_moves() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)

    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    full.settle()

    assert full.where() == {A: {T0: BATCH}, B: {S0: BATCH}}
    assert codes(full, A) == [("swap", 0), ("planned", 1)]
    assert codes(full, B) == [("planned", 2), ("planned", 1)]
    assert full.controller.state.swaps == []


def test_who_has_to_pause_trains_on_until_the_other_one_waits_for_its_slot() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    while full.controller.job(A).phase is Phase.RUNNING:
        seen = {
            worker.slot: worker.awaits_slot for worker in full.controller.job(B).workers.values()
        }
        assert seen[S0] is False
        assert full.round()

    newcomer = full.controller.job(B).workers[WorkerId("b-2.v2.r1")]
    assert (newcomer.slot, newcomer.reserved, newcomer.awaits_slot) == (S0, True, True)


def test_nobody_pauses_for_a_newcomer_that_fails_before() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.world.older = True  # or it is still busy
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    full.settle()

    full.kill(N1, WorkerId("b-2.v2.r1"))
    full.settle()

    assert full.where() == {A: {S0: BATCH}, B: {T0: BATCH}}
    assert (codes(full, A), full.controller.state.swaps) == ([], [])


def test_a_newcomer_of_an_older_library_which_never_says_that_it_waits_is_not_waited_for() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.world.older = True
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    full.settle()
    assert full.controller.job(A).phase is Phase.RUNNING

    full.controller.now += MAX_PAUSE_WAIT_S
    full.take(NodeHeard(node=N2))
    full.settle()

    assert full.where() == {A: {T0: BATCH}, B: {S0: BATCH}}


def test_where_a_slot_is_free_one_waits_there_and_nobody_pauses() -> None:
    roomy = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=2, n2=1)

    roomy.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    roomy.settle()

    assert roomy.where() == {A: {T0: BATCH}, B: {S0: BATCH}}
    aside = [("swap", 2), ("swap", 1), ("planned", 2), ("planned", 1)]
    assert (codes(roomy, A), codes(roomy, B)) == (aside, [("planned", 2), ("planned", 1)])


def test_a_job_that_keeps_enough_slots_goes_on_with_those() -> None:
    full = site({A: {S0: HALF, S1: HALF}, B: {T0: HALF, T1: HALF}}, n1=2, n2=2)

    full.plan({A: {S0: HALF, T0: HALF}, B: {S1: HALF, T1: HALF}})
    full.settle()

    assert full.where() == {A: {S0: HALF, T0: HALF}, B: {T1: HALF, S1: HALF}}
    assert codes(full, A) == [("swap", 1), ("planned", 2)]


def test_the_one_that_starts_fastest_pauses() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.controller.job(A).accounting.last_start_s = 9.0
    full.controller.job(B).accounting.last_start_s = 2.0

    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    full.settle()

    assert codes(full, B) == [("swap", 0), ("planned", 1)]


def test_a_circle_of_three_needs_one_who_steps_aside_and_the_reason_names_the_others() -> None:
    full = site({A: {S0: BATCH}, B: {S1: BATCH}, C: {T0: BATCH}}, n1=2, n2=1)

    full.plan({A: {S1: BATCH}, B: {T0: BATCH}, C: {S0: BATCH}})
    full.settle()

    assert full.where() == {A: {S1: BATCH}, B: {T0: BATCH}, C: {S0: BATCH}}
    moves = [("planned", 2), ("planned", 1)]
    assert [codes(full, job) for job in (A, B, C)] == [[("swap", 0), ("planned", 1)], moves, moves]
    why = full.controller.history_of(A).decisions[1].reason
    assert why == "pauses temporarily, because it trades slots with b-2, c-3: planned"


def test_the_policys_reason_and_expected_speed_belong_to_the_last_step() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    told = {A: Reason("moves", "moves to faster GPUs", {"speed_then": 2.0})}
    target = {A: {T0: BATCH}, B: {S0: BATCH}}

    based_on = full.controller.state.version
    full.take(PlanProposed(plan=Plan(based_on=based_on, local_batch=target, reasons=told)))
    full.settle()

    pause, start = full.controller.history_of(A).decisions[1:]
    assert pause.reason == (
        "pauses temporarily, because it trades slots with b-2: moves to faster GPUs"
    )
    assert (pause.numbers, start.numbers) == ({}, {"speed_then": 2.0})
    assert (pause.code, start.code) == ("swap", "moves")


def test_two_circles_of_one_plan_go_on_beside_each_other() -> None:
    jobs = [JobId(f"a-{number}") for number in range(1, 5)]
    full = site(
        dict(zip(jobs, [{slot: BATCH} for slot in (S0, S1, T0, T1)], strict=True)), n1=2, n2=2
    )

    full.plan(dict(zip(jobs, [{slot: BATCH} for slot in (S1, S0, T1, T0)], strict=True)))

    assert [list(swap.targets) for swap in full.controller.state.swaps] == [jobs[:2], jobs[2:]]
    full.settle()
    assert [[*slots] for slots in full.where().values()] == [[S1], [S0], [T1], [T0]]


# --- what others see of it


def test_policies_see_where_its_jobs_will_be_and_nobody_else_gets_these_slots() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.controller.submit("c", slots=(1, 1))

    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    view = full.controller.view()
    seen = {name: (job.running_on, job.movable) for name, job in view.jobs.items()}
    assert seen == {A: ({T0: BATCH}, False), B: ({S0: BATCH}, False), C: ({}, True)}
    assert [slot for slot in view.slots if slot.usable or slot.leaving] == []
    late = proposal({C: {S0: BATCH}, A: {}}, based_on=full.controller.state.version).plan
    refused = {C: f"slot {S0} is reserved for a swap"}
    assert check(late, full.controller.state, full.controller.now).refused == refused  # type: ignore[arg-type]


def test_who_waits_for_somebody_that_stays_is_refused() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}, C: {T1: BATCH}}, n1=1, n2=2)

    full.plan({A: {T0: BATCH}, B: {T1: BATCH}, C: {T1: BATCH}})

    assert (full.controller.state.swaps, full.controller.asked) == ([], True)


# --- something comes in between


def test_its_jobs_stay_where_they_are_when_one_is_cancelled() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    full.take(cancelled(B))

    assert full.controller.state.swaps == []
    full.settle()
    assert full.where() == {A: {S0: BATCH}}
    assert (codes(full, A), full.controller.asked) == ([], True)


def test_an_order_of_an_operator_comes_first() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    full.take(resized(B, 1, on=(T0,)))
    full.settle()

    assert full.where() == {A: {S0: BATCH}, B: {T0: BATCH}}
    assert full.controller.state.swaps == []


def test_orders_to_each_other_s_slots_are_a_swap_too() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)

    full.take(resized(A, 1, on=(T0,)))
    assert full.controller.job(A).override_wait_reason == f"waiting for {T0}, as ann ordered"
    full.take(resized(B, 1, on=(S0,)))
    full.settle()

    assert full.where() == {A: {T0: BATCH}, B: {S0: BATCH}}
    decisions = full.controller.history_of(A).decisions
    assert [(d.by, d.code) for d in decisions] == [
        ("policy", "planned"),
        ("operator", "order"),
        ("operator", "swap"),
        ("operator", "operator"),
    ]


def test_who_lost_its_group_is_left_to_the_policy() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    full.kill(*full.workers()[1])
    full.settle()

    assert full.controller.job(B).phase is Phase.PAUSED
    assert (full.controller.state.swaps, full.controller.asked) == ([], True)


def test_it_is_given_up_when_a_node_falls_silent() -> None:
    full = site({A: {S0: BATCH}, B: {T0: BATCH}}, n1=1, n2=1)
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})

    full.take(NodeSuspected(node=N2, silent_s=6.0))

    assert full.controller.state.swaps == []
    full.plan({A: {T0: BATCH}, B: {S0: BATCH}})
    assert full.controller.state.swaps == []


@st.composite
def trades(draw: st.DrawFn) -> tuple[dict[str, int], Places, Places, int]:
    """Nodes; a cluster that is full or nearly; the same jobs elsewhere; and their least sizes."""
    nodes = {f"n{at}": draw(st.integers(1, 3)) for at in range(1, draw(st.integers(2, 3)) + 1)}
    slots = [SlotId(f"{name}/{at}") for name, many in nodes.items() for at in range(many)]
    least = draw(st.integers(1, 2))
    room = len(slots) - draw(st.sampled_from([0, 0, 0, 1]))
    sizes: list[int] = [least]
    while sum(sizes) + least <= room and len(sizes) < 5:
        sizes.append(min(draw(st.integers(least, 3)), room - sum(sizes)))
    before, after = (_dealt(draw(st.permutations(slots)), sizes) for _ in range(2))
    return nodes, before, after, least


def _dealt(slots: list[SlotId], sizes: list[int]) -> Places:
    placed: Places = {}
    for number, size in enumerate(sizes, start=1):
        placed[JobId(f"a-{number}")] = dict.fromkeys(slots[:size], BATCH // 4)
        slots = slots[size:]
    return placed


@settings(deadline=None, max_examples=examples(200))
@given(trade=trades())
def test_any_jobs_of_any_full_cluster_come_to_trade_places(
    trade: tuple[dict[str, int], Places, Places, int],
) -> None:
    nodes, before, after, least = trade
    full = site(before, least, **nodes)

    for _ in range(2 * len(before)):  # a move beside a circle takes two plans, and its turn
        full.plan(after)
        full.settle()

    assert full.where() == after
    assert full.controller.state.swaps == []
    assert full.controller.replayed() == full.controller.state


Fault = Callable[[World, int], None]


def somebody_dies(full: World, which: int) -> None:
    living = full.workers()
    full.kill(*living[which % len(living)])


def somebody_cannot_join(full: World, which: int) -> None:
    node, worker = full.workers()[which % len(full.workers())]
    full.nodes[node].processes[worker].fail_to_join()


def nobody_says_that_it_waits(full: World, _: int) -> None:
    full.world.older = True


def a_node_falls_silent_for_a_while(full: World, which: int) -> None:
    node = [*full.nodes][which % len(full.nodes)]
    full.take(NodeSuspected(node=node, silent_s=6.0))
    full.settle()
    full.take(NodeHeard(node=node))


def a_host_goes_down_and_comes_back(full: World, which: int) -> None:
    full.reboot([*full.nodes][which % len(full.nodes)])


def an_operator_orders_something_else(full: World, which: int) -> None:
    job = [*full.where()][which % len(full.where())]
    full.take(paused(job))
    full.settle()
    full.take(resumed(job, auto=True))


FAULTS: tuple[Fault, ...] = (
    somebody_dies,
    somebody_cannot_join,
    nobody_says_that_it_waits,
    a_node_falls_silent_for_a_while,
    a_host_goes_down_and_comes_back,
    an_operator_orders_something_else,
)


@settings(deadline=None, max_examples=examples(200))
@given(
    trade=trades(),
    rounds=st.integers(0, 40),
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 20)), min_size=1, max_size=2),
)
def test_whatever_happens_in_whichever_phase_nobody_waits_for_ever(
    trade: tuple[dict[str, int], Places, Places, int],
    rounds: int,
    faults: list[tuple[Fault, int]],
) -> None:
    nodes, before, after, least = trade
    full = site(before, least, **nodes)
    full.plan(after)
    for fault, which in faults:
        for _ in range(rounds):
            full.round()
        if full.where() and full.workers():
            fault(full, which)
    full.settle()

    for _ in range(2 * (2 * len(before) + 3)):
        full.later(300.0)
        full.settle()
        full.plan(after)
        full.settle()
    assert full.where() == after
    assert full.controller.state.swaps == []
    assert full.controller.replayed() == full.controller.state
