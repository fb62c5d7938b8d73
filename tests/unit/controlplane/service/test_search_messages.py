"""What goes over the pipes comes out the same, however the pipe cuts it."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import ClusterView, EpochSeen, JobView, Plan, Reason, SearchStats
from controlplane.service.pipes import HEADER, MAX_FRAME_BYTES, FrameDecoder, encode_frame
from controlplane.service.planner.search_messages import (
    FROM_SEARCH,
    TO_SEARCH,
    BatchesChosen,
    Converged,
    EventObserved,
    FindPlan,
    FromSearch,
    FullView,
    PlanFound,
    Ready,
    StartSearch,
    ToSearch,
    ViewDelta,
    apply_delta,
    view_delta,
)
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, A, B, C, cluster_view, job_view, slot_view
from tests.support.sizes import examples
from tests.support.views import row_of, view_of, views

VIEW = cluster_view(slot_view(S0), slot_view(S1), job_view(A), job_view(B), version=3)
SEEN = EpochSeen(
    job=A, family="f", slots=1, nodes=1, global_batch=64, samples_per_s=1.5, whole=True
)
STATS = SearchStats(generations=3, best_fitness=1.5, diversity=0.25)
PLAN = Plan(based_on=3, local_batch={A: {S0: 64}}, reasons={A: Reason("start", "starts", {"x": 1})})
TO: tuple[ToSearch, ...] = (
    StartSearch(policy="ones", options={"seed": 1}, seed=1, history=[(Seconds(1.0), SEEN)]),
    FullView(view=VIEW),
    ViewDelta(version=4, slots={S0: slot_view(S0)}, jobs={A: job_view(A)}, removed=[B]),
    EventObserved(event=SEEN, at=Seconds(2.0)),
    FindPlan(number=1, now=Seconds(2.5)),
)
FROM: tuple[FromSearch, ...] = (
    Ready(),
    PlanFound(number=1, plan=PLAN, stats=STATS),
    BatchesChosen(plan=PLAN),
    Converged(stats=STATS),
)


# --- views


@st.composite
def successors(draw: st.DrawFn) -> tuple[ClusterView, ClusterView]:
    """A view and a later one: slots and jobs changed, jobs went, and new ones came at the end."""
    before, other = draw(views(nodes=(2, 3))), draw(views(nodes=(2, 3), version=2))
    stays = [job for job in before.jobs.values() if draw(st.booleans())]
    jobs: dict[JobId, JobView] = {
        job.job: msgspec.structs.replace(job, epoch=draw(st.integers(0, 3))) for job in stays
    }
    arrived = {f"{name}0": job for name, job in other.jobs.items()}
    jobs |= {JobId(n): msgspec.structs.replace(job, job=JobId(n)) for n, job in arrived.items()}
    slots = other.slots if draw(st.booleans()) else before.slots
    return before, ClusterView(version=2, slots=slots, jobs=jobs)


@settings(max_examples=examples(60), deadline=None)
@given(pair=successors())
def test_a_view_and_its_delta_make_the_next_view(pair: tuple[ClusterView, ClusterView]) -> None:
    before, after = pair

    delta = view_delta(before, after)

    assert delta is not None
    made = apply_delta(before, delta)
    assert made == after
    assert list(made.jobs) == list(after.jobs)
    assert msgspec.msgpack.encode(made) == msgspec.msgpack.encode(after)


def test_a_delta_contains_only_changes() -> None:
    closed, other = slot_view(S1, usable=False), job_view(B, running_on={S1: 64})
    after = cluster_view(slot_view(S0), closed, other, job_view(C), version=4)

    assert view_delta(VIEW, after) == ViewDelta(
        version=4, slots={S1: closed}, jobs={B: other, C: job_view(C)}, removed=[A]
    )


def test_a_changed_gpu_model_is_a_change() -> None:
    before = view_of(row_of(1, 1, models=("V100", "H200")), version=3)
    after = view_of(row_of(1, 1, models=("V100", "B200")), version=4)

    delta = view_delta(before, after)

    assert delta == ViewDelta(
        version=4, slots={T0: slot_view(T0, model="B200")}, jobs={}, removed=[]
    )
    (body,) = FrameDecoder().feed(encode_frame(delta))
    assert TO_SEARCH.decode(body) == delta
    assert apply_delta(before, delta) == after


def test_a_job_that_comes_back_in_the_middle_needs_a_snapshot() -> None:
    before = cluster_view(slot_view(S0), job_view(A), job_view(C))
    after = cluster_view(slot_view(S0), job_view(A), job_view(B), job_view(C), version=4)

    assert view_delta(before, after) is None


def test_unchanged_parts_stay_the_same_object() -> None:
    after = cluster_view(*VIEW.slots, job_view(A), job_view(B, epoch=1), version=4)
    delta = view_delta(VIEW, after)
    assert delta is not None

    made = apply_delta(VIEW, delta)

    assert made.jobs[A] is VIEW.jobs[A]
    assert made.slots is VIEW.slots


@pytest.mark.parametrize(
    "slots", [(S0,), (S1, S0), (S0, S1, S1)], ids=["one less", "another order", "one more"]
)
def test_changed_slots_require_the_full_view(slots: tuple[SlotId, ...]) -> None:
    after = cluster_view(*map(slot_view, slots), job_view(A), version=4)

    assert view_delta(VIEW, after) is None


# --- frames


@pytest.mark.parametrize("message", [*TO, *FROM], ids=lambda m: type(m).__name__)
def test_each_message_arrives_as_it_was_sent(message: ToSearch | FromSearch) -> None:
    decoder = TO_SEARCH if message in TO else FROM_SEARCH

    assert [decoder.decode(body) for body in FrameDecoder().feed(encode_frame(message))] == [
        message
    ]


@given(
    cuts=st.lists(st.integers(0, sum(len(encode_frame(message)) for message in TO)), max_size=12)
)
def test_frames_decode_in_order_for_any_split(cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, TO))
    ends = [0, *sorted(cuts), len(stream)]
    frames = FrameDecoder()

    bodies = [
        body for begin, end in itertools.pairwise(ends) for body in frames.feed(stream[begin:end])
    ]

    assert [TO_SEARCH.decode(body) for body in bodies] == list(TO)


def test_an_incomplete_frame_is_not_decoded() -> None:
    frames = FrameDecoder()
    data = encode_frame(TO[1])

    assert list(frames.feed(data[:-1])) == []
    assert [TO_SEARCH.decode(body) for body in frames.feed(data[-1:])] == [TO[1]]


def test_a_frame_of_absurd_size_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=f"frame of {MAX_FRAME_BYTES + 1} bytes exceeds"):
        list(FrameDecoder().feed(HEADER.pack(MAX_FRAME_BYTES + 1)))
    assert list(FrameDecoder().feed(HEADER.pack(MAX_FRAME_BYTES))) == []
