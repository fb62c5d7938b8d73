"""Starts of rigid jobs, what elastic jobs give up for them, and reservations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.sharing.claim_order import Standing
from controlplane.policy.sharing.claim_room import Kind, Room
from controlplane.policy.sharing.claims import mask, without_kept
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import at_once
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from tests.support.builders import A, B, C, job_view
from tests.support.views import decide, row_of, view_of

G, H = JobId("g-7"), JobId("h-8")
NOW = Seconds(10_000.0)
HOUR = 3600.0


def n(node: int, *indices: int) -> tuple[SlotId, ...]:
    """Slots of a node."""
    return tuple(slot_id(NodeId(f"n{node}"), index) for index in indices)


def claim(job: JobId = G, slots: int = 1, at: float = 9_000.0, **fields: Any) -> RigidView:
    return RigidView(job=job, submitted_at=Seconds(at), slots=slots, **fields)


def holder(job: JobId, *slots: SlotId, ends_at: float | None) -> RigidView:
    ends = None if ends_at is None else Seconds(ends_at)
    return claim(job, len(slots), at=1.0, waits=False, holds=slots, ends_at=ends)


def elastic(job: JobId, *slots: SlotId, least: int = 1, at: float = 1.0, **fields: Any) -> JobView:
    placed = dict.fromkeys(slots, 8)
    usual = {"running_on": placed, "moved_at": NOW - 60.0, "most": 8}
    return job_view(job, at, slots=(least, 8), **{**usual, **fields})


def placed(view: ClusterView, *rigid: RigidView) -> dict[JobId, dict[SlotId, int]]:
    return dict(decide(view, rigid, NOW).plan.local_batch)


def test_a_claim_takes_free_slots_on_one_node_and_leaves_the_emptier_node_alone() -> None:
    view = view_of(row_of(4, 2))

    assert placed(view, claim(G, 2)) == {G: dict.fromkeys(n(2, 0, 1), 1)}


def test_a_gang_may_lie_on_several_nodes_and_a_command_may_not() -> None:
    view = view_of(row_of(2, 2))

    assert placed(view, claim(G, 3)) == {G: dict.fromkeys((*n(1, 0, 1), *n(2, 0)), 1)}
    decision = decide(view, [claim(G, 3, one_node=True)], NOW)
    assert decision.reasons == {
        G: Reason(
            "too_large",
            "needs 3 slots on one node, the largest has 2",
            {"needs": 3.0, "slots": 2.0},
        )
    }


def test_elastic_jobs_give_up_what_they_have_above_their_minimum() -> None:
    view = view_of(row_of(4), elastic(A, *n(1, 0, 1, 2, 3)))

    decision = decide(view, [claim(G, 2)], NOW)

    assert decision.plan.local_batch == {A: dict.fromkeys(n(1, 0, 1), 16)}
    assert decision.plan.reasons[A].text == "gives slots to g-7, which needs 2 slots; keeps 2"
    assert decision.kept == set(n(1, 2, 3))
    assert decision.reasons[G].text == "gets 2 slots as soon as they are free; a-1 gives them up"


def test_the_claim_starts_when_the_slots_that_were_kept_for_it_are_free() -> None:
    view = view_of(row_of(4), elastic(A, *n(1, 0, 1)))

    assert placed(view, claim(G, 2)) == {G: dict.fromkeys(n(1, 2, 3), 1)}


def test_nothing_is_taken_for_a_claim_that_could_not_start() -> None:
    view = view_of(row_of(4), elastic(A, *n(1, 0, 1), least=1), elastic(B, *n(1, 2, 3), least=2))

    decision = decide(view, [claim(G, 4)], NOW)

    assert (decision.plan.local_batch, decision.kept) == ({}, frozenset())
    assert decision.reasons[G].code == "reserved"


def test_the_surplus_of_a_job_on_two_nodes_counts_once_for_a_gang() -> None:
    """Job a may give up 2 of its 4 slots, which are any 2."""
    view = view_of(row_of(2, 2), elastic(A, *n(1, 0, 1), *n(2, 0, 1), least=2))

    decision = decide(view, [claim(G, 3)], NOW)

    assert (decision.plan.local_batch, decision.kept) == ({}, frozenset())
    assert decision.reasons[G].text == "needs 3 slots, could have 2; has them at once, after a-1"


def test_a_job_that_came_later_or_had_its_turn_is_paused_for_a_claim() -> None:
    """Else a stream of small jobs could keep a gang from ever starting."""
    later = elastic(A, *n(1, 0), at=9_500.0)
    rested = elastic(B, *n(1, 1), at=1.0, moved_at=NOW - 1801.0)
    view = view_of(row_of(2), later, rested)

    assert placed(view, claim(G, 2)) == {A: {}, B: {}}


def test_a_job_that_is_changing_gives_nothing_up() -> None:
    view = view_of(row_of(2), elastic(A, *n(1, 0, 1), movable=False))

    decision = decide(view, [claim(G, 1)], NOW)

    assert decision.plan.local_batch == {}
    assert decision.reasons[G].text == "needs 1 slot, could have 0; has them at once, after a-1"


def test_a_reservation_waits_for_time_limits() -> None:
    held = holder(A, *n(1, 0, 1), ends_at=NOW + 600.0)

    decision = decide(view_of(row_of(4)), [held, claim(G, 4)], NOW)

    assert decision.reasons[G] == Reason(
        "reserved",
        "needs 4 slots, could have 2; has them within 10 min, after a-1",
        {"needs": 4.0, "could_have": 2.0, "wait_s": 600.0},
    )
    assert decision.plan.wake_at == NOW + 600.0


@pytest.mark.parametrize(
    ("run_limit_s", "starts"),
    [(500.0, True), (700.0, False), (None, False)],
)
def test_a_later_claim_starts_before_the_reservation_only_if_it_ends_before(
    run_limit_s: float | None, *, starts: bool
) -> None:
    held = holder(A, *n(1, 0, 1), ends_at=NOW + 600.0)
    later = claim(H, 2, at=9_999.0, run_limit_s=run_limit_s)

    decision = decide(view_of(row_of(4)), [held, claim(G, 4), later], NOW)

    assert (H in decision.plan.local_batch) is starts
    assert decision.reasons.get(H) == (
        None
        if starts
        else Reason("turn", "waits for 2 slots behind g-7, which it would delay", {"needs": 2.0})
    )


def test_a_later_claim_may_use_what_the_reservation_leaves_over() -> None:
    held = holder(A, *n(1, 0, 1), ends_at=NOW + 600.0)

    decision = decide(view_of(row_of(5)), [held, claim(G, 4), claim(H, 1), claim(C, 1)], NOW)

    assert decision.plan.local_batch == {H: dict.fromkeys(n(1, 2), 1)}
    assert decision.reasons.keys() == {G, C}


def test_nobody_waits_behind_a_claim_that_waits_for_a_job_without_a_time_limit() -> None:
    held = holder(A, *n(1, 0), ends_at=None)

    decision = decide(view_of(row_of(2)), [held, claim(G, 2), claim(H, 1)], NOW)

    assert decision.plan.local_batch == {H: dict.fromkeys(n(1, 1), 1)}
    assert (
        decision.reasons[G].text
        == "needs 2 slots, could have 1; what holds the others has no time limit"
    )


def test_a_claim_that_backs_off_is_asked_about_again() -> None:
    decision = decide(view_of(row_of(1)), [claim(G, 1, ready_at=Seconds(NOW + 4.0))], NOW)

    assert (decision.plan.local_batch, decision.plan.wake_at) == ({}, NOW + 4.0)
    assert decision.reasons[G].code == "backing_off"


def test_kept_slots_are_hidden_from_policies_and_from_their_older_plans() -> None:
    view = view_of(row_of(3), elastic(A, *n(1, 0)))
    kept = frozenset(n(1, 1))

    assert [slot.usable for slot in mask(view, kept).slots] == [False, False, True]
    plan = Plan(based_on=1, local_batch={A: dict.fromkeys(n(1, 0, 1), 4), B: {n(1, 1)[0]: 4}})
    assert without_kept(plan, view, kept).local_batch == {A: {n(1, 0)[0]: 8}, B: {}}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterView, list[RigidView]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    slots = row_of(*sizes)
    names = draw(st.permutations([slot.slot for slot in slots]))
    jobs: list[JobView] = []
    rigid: list[RigidView] = []
    left = list(names)
    for number in range(draw(st.integers(0, 5))):
        many = min(len(left), draw(st.integers(1, 4)))
        if not many:
            break
        mine, left = left[:many], left[many:]
        at, name = draw(st.floats(0, NOW)), JobId(f"j-{number + 1}")
        if draw(st.booleans()):
            jobs.append(
                elastic(
                    name, *mine, least=draw(st.integers(1, many)), at=at,
                    movable=draw(st.booleans()), moved_at=draw(st.sampled_from([NOW, NOW - HOUR])),
                )
            )  # fmt: skip
        else:
            ends = draw(st.none() | st.floats(NOW, NOW + HOUR))
            rigid.append(holder(name, *mine, ends_at=ends))
    rigid += [
        claim(
            JobId(f"c-{number + 20}"), draw(st.integers(1, 6)), draw(st.floats(0, NOW)),
            one_node=draw(st.booleans()), run_limit_s=draw(st.none() | st.floats(1, HOUR)),
        )
        for number in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    return view_of(slots, *jobs), rigid


def _holds(view: ClusterView, rigid: Sequence[RigidView]) -> dict[SlotId, JobId]:
    held = {slot: job.job for job in view.jobs.values() for slot in job.running_on}
    return held | {slot: job.job for job in rigid for slot in job.holds}


@given(clusters())
def test_every_decision_can_be_carried_out(case: tuple[ClusterView, list[RigidView]]) -> None:
    """Starts use free slots; givers keep at least their minimum or pause; nothing is taken twice."""
    view, rigid = case
    claims = {job.job: job for job in rigid if job.waits}
    decision = decide(view, rigid, NOW)
    held = _holds(view, rigid)

    started = [
        slot for name, on in decision.plan.local_batch.items() if name in claims for slot in on
    ]
    assert len(set(started)) == len(started)
    assert not held.keys() & set(started)
    assert not decision.kept & set(started)
    for name, on in decision.plan.local_batch.items():
        if name in claims:
            assert len(on) == claims[name].slots
        else:
            job = view.jobs[name]
            assert job.movable
            assert on.keys() < job.running_on.keys()
            assert not on or len(on) >= job.least
            assert decision.plan.reasons[name].code in {"shrink", "pause"}
    given_up = {
        slot
        for name, on in decision.plan.local_batch.items()
        if name not in claims
        for slot in view.jobs[name].running_on.keys() - on.keys()
    }
    assert decision.kept <= given_up | {
        slot.slot for slot in view.slots if slot.usable or slot.leaving
    }
    assert claims.keys() == decision.reasons.keys() | (
        claims.keys() & decision.plan.local_batch.keys()
    )


@given(clusters())
def test_the_first_claim_never_waits_while_free_slots_and_surplus_suffice(
    case: tuple[ClusterView, list[RigidView]],
) -> None:
    view, rigid = case
    first = next(job for job in rigid if job.waits)
    decision = decide(view, rigid, NOW)
    held = _holds(view, rigid)
    free = [slot for slot in view.slots if slot.slot not in held and slot.usable]
    surplus = sum(
        len(job.running_on) - job.least
        for job in view.jobs.values()
        if job.running_on and job.movable
    )

    if not first.one_node and len(free) + surplus >= first.slots:
        waits = decision.reasons.get(first.job)
        assert waits is None or waits.code == "promised"


# --- maintenance, and reservations for others

MAINTENANCE = {NodeId("n1"): (Seconds(NOW + 600.0), "maintenance")}
VISION = "reservation r-1 for project vision"


@pytest.mark.parametrize(
    ("run_limit_s", "node"),
    [(500.0, "n1"), (700.0, "n2"), (None, "n2")],
)
def test_a_claim_starts_where_it_ends_before_maintenance(
    run_limit_s: float | None, node: str
) -> None:
    one = claim(G, 2, one_node=True, run_limit_s=run_limit_s, closes=MAINTENANCE)

    decision = decide(view_of(row_of(2, 3)), [one], NOW)

    assert [slot.partition("/")[0] for slot in decision.plan.local_batch[G]] == [node, node]


def test_a_claim_that_fits_nowhere_else_waits_for_maintenance_and_delays_no_other() -> None:
    large = claim(G, 3, closes=MAINTENANCE)
    small = claim(H, 1, at=9_500.0, closes=MAINTENANCE)

    decision = decide(view_of(row_of(2, 2)), [large, small], NOW)

    assert decision.plan.local_batch == {H: dict.fromkeys(n(2, 0), 1)}
    text = (
        "would run into the maintenance of n1, and waits for its end; a smaller max_run_s would "
        "let it start before"
    )
    assert decision.reasons == {G: Reason("maintenance", text, {"needs": 3.0})}


def test_a_reservation_counts_no_slots_that_the_claim_may_not_use() -> None:
    held = holder(A, *n(2, 0, 1), ends_at=NOW + 900.0)

    decision = decide(view_of(row_of(2, 2)), [held, claim(G, 2, closes=MAINTENANCE)], NOW)

    assert decision.plan.local_batch == {}
    text = "needs 2 slots, could have 0; has them within 15 min, after a-1"
    assert decision.reasons[G].text == text


def test_a_program_without_slots_starts_only_where_it_ends_before_maintenance() -> None:
    shares = {NodeId("n1"): 0.1, NodeId("n2"): 0.5}
    one = claim(G, 0, shares=shares, run_limit_s=700.0, closes=MAINTENANCE)
    places = {NodeId("n1"): {}, NodeId("n2"): {}}

    decision = decide(view_of(row_of(1, 1)), [one], NOW, places=places)

    assert decision.plan.local_batch == {G: {slot_id(NodeId("n2"), -1): 1}}


@pytest.mark.parametrize(
    ("at", "limit_s", "remedy"),
    [
        (0.0, None, ""),
        (NOW + 600.0, 900.0, ""),
        (NOW + 600.0, None, "; a smaller max_run_s would let it start before"),
    ],
)
def test_a_claim_that_waits_for_the_end_of_a_reservation_names_it(
    at: float, limit_s: float | None, remedy: str
) -> None:
    closes = dict.fromkeys(map(NodeId, ("n1", "n2")), (Seconds(at), VISION))
    one = claim(G, 2, run_limit_s=limit_s, closes=closes)

    decision = decide(view_of(row_of(1, 1)), [one], NOW)

    assert decision.plan.local_batch == {}
    text = f"would run into the {VISION} of n1, n2, and waits for its end{remedy}"
    assert decision.reasons == {G: Reason("reservation", text, {"needs": 2.0})}


# --- requests for slots and nodes


def on(*slots: SlotId) -> dict[str, Any]:
    """Fields of a claim that these slots fit."""
    return {"fits": frozenset(slots)}


def test_a_claim_takes_only_slots_that_fit_it() -> None:
    view = view_of(row_of(2, 2), elastic(A, *n(2, 0, 1)))

    decision = decide(view, [claim(G, 1, **on(*n(2, 0, 1)))], NOW)

    assert decision.plan.local_batch == {A: {n(2, 0)[0]: 16}}
    assert decision.kept == set(n(2, 1))


def test_a_claim_that_fits_nowhere_says_what_is_missing_and_delays_nobody() -> None:
    missing = "no node has label nvlink = yes; nodes report: no labels"

    decision = decide(view_of(row_of(2)), [claim(G, **on(), missing=missing), claim(H)], NOW)

    assert decision.reasons == {G: Reason("shape", missing, {"needs": 1.0, "slots": 0.0})}
    assert decision.plan.local_batch == {H: {n(1, 0)[0]: 1}}


def test_a_claim_that_needs_more_fitting_slots_than_there_are_says_how_many_fit() -> None:
    decision = decide(view_of(row_of(2, 2)), [claim(G, 3, **on(*n(2, 0, 1)))], NOW)

    text = "needs 3 slots; 2 fit its requests"
    assert decision.reasons == {G: Reason("shape", text, {"needs": 3.0, "slots": 2.0})}


def test_a_reservation_of_one_type_delays_no_claim_of_another() -> None:
    held = holder(A, *n(1, 0), ends_at=NOW + 600.0)
    first = claim(G, 2, **on(*n(1, 0, 1)))
    other = claim(H, 2, at=9_999.0, **on(*n(2, 0, 1)))

    decision = decide(view_of(row_of(2, 2)), [held, first, other], NOW)

    assert decision.plan.local_batch == {H: dict.fromkeys(n(2, 0, 1), 1)}
    assert decision.reasons[G].code == "reserved"


def test_a_claim_without_requests_uses_the_slots_that_do_not_fit_the_first_one() -> None:
    held = holder(A, *n(1, 0), ends_at=NOW + 600.0)
    first = claim(G, 2, **on(*n(1, 0, 1)))

    assert placed(view_of(row_of(2, 1)), held, first, claim(H, 1, at=9_999.0)) == {
        H: {n(2, 0)[0]: 1}
    }
    assert placed(view_of(row_of(2, 1)), held, first, claim(H, 2, at=9_999.0)) == {}


def test_two_claims_that_fit_no_common_slot_have_a_reservation_each() -> None:
    held = holder(A, *n(1, 0), ends_at=NOW + 600.0), holder(B, *n(2, 0), ends_at=NOW + 900.0)
    claims = claim(G, 2, **on(*n(1, 0, 1))), claim(H, 2, at=9_999.0, **on(*n(2, 0, 1)))

    decision = decide(view_of(row_of(2, 2)), [*held, *claims], NOW)

    assert {name: one.numbers["wait_s"] for name, one in decision.reasons.items()} == {
        G: 600.0, H: 900.0,
    }  # fmt: skip


def test_a_slot_that_needs_the_share_of_another_keeps_that_one_empty() -> None:
    view = view_of(row_of(4))

    assert placed(view, claim(G, 1, shares={NodeId("n1"): 1.5})) == {
        G: {n(1, 0)[0]: 1, n(1, 1)[0]: 0}
    }
    assert placed(view, claim(G, 2, shares={NodeId("n1"): 1.5})) == {
        G: dict.fromkeys(n(1, 0, 1), 1) | {n(1, 2)[0]: 0}
    }
    assert decide(view, [claim(G, 3, shares={NodeId("n1"): 1.5})], NOW).reasons[G].code == "shape"


def test_an_exclusive_claim_has_its_node_alone() -> None:
    view = view_of(row_of(2, 2), elastic(A, n(1, 0)[0]))

    assert placed(view, claim(G, 1, exclusive=True)) == {G: {n(2, 0)[0]: 1, n(2, 1)[0]: 0}}


def test_an_exclusive_gang_has_whole_nodes() -> None:
    assert placed(view_of(row_of(2, 2)), claim(G, 3, exclusive=True)) == {
        G: dict.fromkeys((*n(1, 0, 1), *n(2, 0)), 1) | {n(2, 1)[0]: 0}
    }


def test_an_exclusive_claim_waits_until_a_node_is_empty() -> None:
    held = holder(A, *n(1, 0), ends_at=NOW + 600.0), holder(B, *n(2, 0), ends_at=NOW + 60.0)

    decision = decide(view_of(row_of(2, 2)), [*held, claim(G, 1, exclusive=True)], NOW)

    text = "needs 1 slot, could have 0; has them within 1 min, after b-2"
    numbers = {"needs": 1.0, "could_have": 0.0, "wait_s": 60.0}
    assert decision.reasons[G] == Reason("reserved", text, numbers)


def test_jobs_without_slots_share_what_their_node_sets_aside_in_order() -> None:
    first = claim(G, 0, shares={NodeId("n1"): 0.5})
    large = claim(H, 0, shares={NodeId("n1"): 0.75})
    small = claim(C, 0, shares={NodeId("n1"): 0.25})
    places = {NodeId("n1"): {}}

    decision = decide(view_of(row_of(1)), [first, large, small], NOW, places=places)

    assert decision.plan.local_batch == {G: {slot_id(NodeId("n1"), -1): 1}}
    assert decision.plan.reasons[G].text == "starts without slots"
    assert {name: one.text for name, one in decision.reasons.items()} == {
        H: "waits for cores and memory beside the slots",
        C: "waits for cores and memory beside the slots",
    }


def test_a_job_without_slots_gets_the_next_place_of_the_emptiest_node() -> None:
    taken = {slot_id(NodeId("n2"), -1): 0.25}
    job = claim(G, 0, shares={NodeId("n1"): 0.75, NodeId("n2"): 0.25})
    places = {NodeId("n1"): {}, NodeId("n2"): taken}

    decision = decide(view_of(row_of(1, 1)), [job], NOW, places=places)

    assert decision.plan.local_batch == {G: {slot_id(NodeId("n2"), -2): 1}}


NEEDS = st.fixed_dictionaries(
    {
        "slots": st.integers(0, 4),
        "exclusive": st.booleans(),
        "one_node": st.booleans(),
        "share": st.sampled_from([1.0, 1.5, 2.0, 3.0]),
        "fits": st.none() | st.sets(st.sampled_from([*n(1, 0, 1, 2), *n(2, 0, 1, 2)])),
    }
)


@given(needs=st.lists(NEEDS, max_size=6))
def test_no_node_is_oversubscribed(needs: list[dict[str, Any]]) -> None:
    nodes = NodeId("n1"), NodeId("n2")
    claims = []
    for number, one in enumerate(needs, 1):
        share = one.pop("share")
        shares = dict.fromkeys(nodes, share / 4) if not one["slots"] else {}
        shares = dict.fromkeys(nodes, share) if one["slots"] and share > 1 else shares
        one["fits"] = None if one["fits"] is None else frozenset(one["fits"])
        claims.append(claim(JobId(f"j-{number}"), at=float(number), shares=shares, **one))
    places = {node: {} for node in nodes}

    plan = decide(view_of(row_of(3, 3)), claims, NOW, places=places).plan.local_batch

    given_out = [slot for slots in plan.values() for slot in slots]
    assert len(given_out) == len(set(given_out))
    for job in claims:
        got = plan.get(job.job, {})
        used = [slot for slot, batch in got.items() if batch]
        assert len(used) == (max(1, job.slots) if got else 0)
        if job.slots:
            assert job.fits is None or job.fits.issuperset(used)
            for node in nodes:
                here = [slot for slot in used if slot.startswith(node)]
                taken = [slot for slot in got if slot.startswith(node)]
                assert len(taken) >= len(here) * job.shares.get(node, 1.0)
                assert not (job.exclusive and here) or len(taken) == 3
    for node in nodes:
        parts = [
            job.shares[node] for job in claims
            for slot in plan.get(job.job, {}) if slot.startswith(f"{node}/-")
        ]  # fmt: skip
        assert sum(parts) <= 1.0


# --- many claims


def test_after_the_first_claim_that_waits_256_more_are_tried() -> None:
    view = view_of(row_of(4))
    large, *others = [
        claim(JobId(f"c-{number}"), 4 if number < 258 else 1, 9_000.0 + number)
        for number in range(1, 259)
    ]
    held = holder(A, *n(1, 0), ends_at=None)

    assert placed(view, held, large, *others[1:]) == {JobId("c-258"): {n(1, 1)[0]: 1}}
    decision = decide(view, [held, large, *others], NOW)
    assert decision.plan.local_batch == {}
    assert decision.reasons[JobId("c-258")] == Reason(
        "turn", "waits behind c-1 and at least 256 others", {"others": 256.0}
    )


def test_a_claim_with_other_requests_is_tried_however_many_wait() -> None:
    view = view_of(row_of(2, 1))
    first = [claim(JobId(f"c-{number}"), 2, fits=frozenset(n(1, 0, 1))) for number in range(1, 300)]
    held = holder(A, *n(1, 0), ends_at=None)

    other = claim(H, 1, fits=frozenset(n(2, 0)))
    assert placed(view, held, *first, other) == {H: {n(2, 0)[0]: 1}}
    assert placed(view, held, *first, claim(H, 1)) == {H: {n(1, 1)[0]: 1}}


def test_a_reason_names_three_jobs() -> None:
    view = view_of(row_of(8))
    holders = [
        holder(JobId(f"p-{number}"), *n(1, number), ends_at=NOW + number) for number in range(8)
    ]

    assert decide(view, [*holders, claim(G, 8)], NOW).reasons[G].text == (
        "needs 8 slots, could have 0; has them within 7 s, after p-0, p-1, p-2 and 5 more"
    )


@given(clusters(), st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_what_is_counted_once_stays_right_while_claims_take_slots(
    case: tuple[ClusterView, list[RigidView]], sizes: list[int]
) -> None:
    view, rigid = case
    room = at_once(Room.of(view, rigid, NOW, Standing(borrowed={})))
    fits = frozenset(slot.slot for slot in view.slots[::2])
    for number, size in enumerate(sizes):
        fields = ({}, {"fits": fits}, {"exclusive": True}, {"shares": {NodeId("n1"): 2.0}})[size]
        job = claim(JobId(f"t-{number}"), size, NOW, **fields)
        kind = room.kind(job)
        kind.counts(), kind.best_node(size)
        room.take(job, (), pauses=number % 2 == 0)
        again = Kind(room, job, frozenset(), ())

        assert kind.counts() == again.counts()
        assert kind.best_node(size) == again.best_node(size)
