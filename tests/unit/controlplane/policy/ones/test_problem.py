"""Problem of a view: sizes, values, jobs that are kept, and caches."""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    SlotView,
    StepsSeen,
)
from controlplane.policy.ones.problem import CLOSED, FREE, Problem
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import ClusterIndex
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from tests.support.builders import N1, S0, S1, T0, T1, A, B, C, changed_job, job_view, slot_view
from tests.support.sizes import examples
from tests.support.views import (
    FAMILIES,
    IN_FOUR,
    NOW,
    builder_of,
    epoch_seen,
    events_of,
    problem_of,
    row_of,
    surrounded,
    view_of,
    views,
)
from tests.unit.controlplane.policy.tables import cases

EIGHT = [slot_id(N1, index) for index in range(8)]
WARM = StepsSeen(
    job=A, family="f", group=1, slots=1, nodes=1, global_batch=64, step=10, samples_done=640
)


def a_job(job: JobId = A, on: tuple[SlotId, ...] = (), **changes: Any) -> JobView:
    """1 to 8 slots, first batch 64, up to 512; moved long ago."""
    batch = 64 // len(on) if on else 0
    held = dict.fromkeys(on, batch)
    view = job_view(job, slots=(1, 8), family="f", batch_limit=512, local_limit=512)
    return changed_job(view, running_on=held, **changes)


def ran_on(slots: int) -> EpochSeen:
    """A relative's epoch."""
    return epoch_seen(C, family="f", slots=slots)


def choices(problem: Problem, job: JobId = A) -> list[int]:
    """The sizes that a job may have; 0 if it may wait."""
    row = [job_row.job.job for job_row in problem.job_rows].index(job)
    allowed = np.isfinite(problem.value[row])
    return [int(size) for size in problem.sizes[row][allowed]]


# --- sizes


HELD = (S0, S1, T0, T1, slot_id(NodeId("n2"), 2))


@cases(
    "nodes, job, events, sizes",
    start=((8,), a_job(), [ran_on(4)], [0, 1]),
    not_warm=((8,), a_job(on=(S0,)), [ran_on(4)], [0, 1]),
    least_slots=((8,), a_job(least=3), [], [0, 3]),
    twice_one=((8,), a_job(on=(S0,)), [WARM, ran_on(1)], [0, 1, 2]),
    twice_a_relatives_size=((8,), a_job(on=(S0,)), [WARM, ran_on(3)], [0, 1, 2, 3, 4, 5, 6]),
    whole_nodes_and_the_present_size=(
        (4, 4, 4), a_job(on=HELD, epoch=1), [], [0, 1, 2, 3, 4, 5, 8]),
    no_more_slots_than_samples=(
        (8,), a_job(on=(S0,), epoch=1, batch_size=3, batch_limit=3), [ran_on(4)], [0, 1, 2, 3]),
)  # fmt: skip
def test_the_sizes_of_a_job_follow_the_start_rule_and_the_growth_of_its_family(
    nodes: tuple[int, ...], job: JobView, events: list[PolicyEvent], sizes: list[int]
) -> None:
    events_at = [(1.0, event) for event in events]
    problem = problem_of(view_of(row_of(*nodes), job), events=events_at)

    assert choices(problem) == sizes


# --- who is left alone


@pytest.mark.parametrize(
    ("others", "sizes"), [([a_job(B)], [1, 2]), ([], [2, 3])], ids=["a job waits", "no job waits"]
)
def test_a_gated_job_only_shrinks_for_waiting_jobs_or_grows_onto_idle_slots(
    others: list[JobView], sizes: list[int]
) -> None:
    moved = a_job(on=(S0, S1), epoch=1, moved_at=Seconds(99.0))

    problem = problem_of(view_of(row_of(3), moved, *others))

    assert choices(problem) == sizes
    assert problem.job_rows[0].gated


def test_a_job_is_left_alone_until_its_retry_time_its_gate_or_the_end_of_its_back_off() -> None:
    retries = a_job(on=(S0, S1), epoch=1, retry_at=Seconds(101.0))
    moved = a_job(on=(S0,), epoch=3, epoch_at=Seconds(99.9), moved_at=Seconds(98.0))
    (before, at_retry), (gated, opened), (backs_off, ready) = (
        [problem_of(view_of(row_of(8), job), now=Seconds(now)) for now in (100.0, 101.0)]
        for job in (retries, moved, a_job(ready_at=Seconds(101.0)))
    )

    assert (before.kept, choices(at_retry)) == ({A: retries.running_on}, [0, 1, 2, 3, 4])
    assert (gated.job_rows[0].gated, gated.gates) == (True, (101.0,))
    assert not opened.job_rows[0].gated
    assert (backs_off.job_rows, backs_off.backing_off) == ((), {A: 101.0})
    assert choices(ready) == [0, 1]


AWAY = msgspec.structs.replace(slot_view(T0, usable=False), up=False)


@cases(
    "slots, kept, capacity",
    not_movable=(row_of(4), a_job(on=(S0, S1), movable=False), 2),
    node_down=([*row_of(1), AWAY], a_job(on=(S0, T0), epoch=1), 0),
    slot_no_longer_offered=(row_of(2), a_job(on=(S0, EIGHT[7]), epoch=1), 1),
)
def test_a_job_that_may_not_be_moved_keeps_its_slots_out_of_play(
    slots: list[SlotView], kept: JobView, capacity: int
) -> None:
    problem = problem_of(view_of(slots, kept, a_job(B)))

    assert (problem.kept, problem.capacity) == ({A: kept.running_on}, capacity)
    assert [job_row.job.job for job_row in problem.job_rows] == [B]
    closed = [slot in kept.running_on for slot in problem.slots]
    assert (problem.owner == CLOSED).tolist() == closed


def test_returned_slots_are_not_taken_again_for_a_while() -> None:
    estimates, builder = builder_of()
    before = view_of(row_of(4), a_job(on=(S0, S1), epoch=1))
    after = view_of(row_of(4), a_job(on=(S0,), epoch=1), version=2)

    builder.build(before, Seconds(50.0))

    assert choices(builder.build(after, Seconds(60.0))) == [0, 1]
    assert choices(builder.build(after, Seconds(90.1))) == [0, 1, 2]
    assert estimates.max_slots_after_return(before.jobs[A], Seconds(90.1)) is None


@pytest.mark.parametrize(
    ("start_s", "left"), [(60.0, 1.0 - 150 / 900), (6.0, 0.9)], ids=["a long start", "the margin"]
)
def test_a_stop_and_a_resume_cost_the_start_or_the_margin(start_s: float, left: float) -> None:
    known: Any = {"epoch": 1, "start_s": start_s, "stop_samples": 90_000, "batch_limit": 64}
    runs, waits = (
        problem_of(view_of(row_of(1), a_job(on=on, **known)), events=[(1.0, ran_on(1))])
        for on in ((S0,), ())
    )

    assert runs.value[0, 0] == pytest.approx(runs.value[0, 1] * (left**0.8 - 1.0 - 1.5))
    assert waits.job_rows[0].change_factor[0] == pytest.approx(left)


def test_a_job_larger_than_the_cluster_is_out_of_play() -> None:
    moved = a_job(B, on=(S0,), epoch=1, moved_at=Seconds(99.0))

    problem = problem_of(view_of(row_of(4), a_job(least=5), moved))

    assert problem.too_large == {A: 5}
    assert choices(problem, B) == [1, 2]  # it may grow: nobody waits


def test_leaving_slots_are_in_play() -> None:
    leaving = msgspec.structs.replace(slot_view(S0, usable=False), leaving=True)
    view = view_of([leaving, slot_view(S1), slot_view(T0, usable=False)], a_job())

    problem = problem_of(view)

    assert problem.owner.tolist() == [FREE, FREE, CLOSED]
    assert problem.early.tolist() == [False, True, False]
    assert problem.capacity == 2


# --- the table


def test_waiting_has_no_value_and_a_first_start_no_cost() -> None:
    problem = problem_of(view_of(row_of(1), a_job()))

    assert problem.value[0].tolist() == [0.0, pytest.approx(75.0**-0.55)]  # 60 s are assumed
    assert (problem.present.tolist(), problem.sizes.tolist()) == ([0], [[0, 1]])


def test_other_sizes_lose_the_cost_of_the_change() -> None:
    events = [(1.0, ran_on(1)), (1.0, ran_on(2))]
    view = view_of(row_of(4), a_job(on=(S0,), epoch=1, stop_samples=90_000, batch_limit=64))
    options = OnesOptions(rescale_stall_s=60.0)

    problem = problem_of(view, events=events, options=options)

    change_factor = problem.job_rows[0].change_factor
    assert problem.job_rows[0].remaining_s == pytest.approx(900.0)
    assert problem.job_rows[0].table.gains[:2].tolist() == pytest.approx([1.0, 1.0])
    assert change_factor[:2].tolist() == pytest.approx([1.0, 1.0 - 150 / 900])
    assert problem.value[0, 1:3].tolist() == pytest.approx(
        (problem.value[0, 1] * change_factor[:2] ** 0.8).tolist()
    )


# --- where jobs are


def test_slots_nodes_and_types_are_numbered_by_the_view() -> None:
    slots = [slot_view(T0, model="L"), slot_view(S0, model="H"), slot_view(T1, model="L")]

    cluster = ClusterIndex.of(view_of(slots))

    assert cluster.slots == (T0, S0, T1)
    assert (cluster.node_of.tolist(), cluster.type_of.tolist()) == ([0, 1, 0], [0, 1, 0])
    assert [places.tolist() for places in cluster.slots_on] == [[0, 2], [1]]
    assert (cluster.types, cluster.widest) == (("L", "H"), 2)
    empty = ClusterIndex.of(view_of([]))
    assert (empty.slots, empty.slots_on, empty.types, empty.widest) == ((), (), (), 1)


def test_movable_jobs_on_too_many_nodes_are_scattered() -> None:
    spread, whole = a_job(on=(S0, T0), epoch=1), a_job(B, on=(S1,), epoch=1)
    late = a_job(C, on=(slot_id(N1, 2), T1), epoch=1, moved_at=Seconds(99.0))

    problem = problem_of(view_of(row_of(3, 3), spread, whole, late))

    assert problem.scattered_rows(problem.owner).tolist() == [0]


def test_a_schedule_is_scattered_by_a_changing_job_on_too_many_nodes() -> None:
    problem = problem_of(view_of(row_of(2, 2), a_job(on=(S0, T0), epoch=1), a_job(B, epoch=1)))
    more = np.array([problem.present[0] + 1, 0])
    less, other = (problem.present + np.array(step) for step in ([-1, 0], [0, 2]))

    assert not problem.is_scattered(problem.present, problem.owner)
    assert problem.is_scattered(other, np.array([0, 1, 0, 1]))
    assert not problem.is_scattered(more, np.array([0, 0, 0, FREE]))  # three need two nodes
    assert not problem.is_scattered(less, np.array([0, FREE, FREE, FREE]))


def test_the_cost_of_a_node_is_that_of_its_gpus() -> None:
    view = view_of(row_of(2, 2), a_job(on=(S0,)), a_job(B, on=(T0,)), a_job(C))
    problem = problem_of(view)

    found = surrounded(problem, types=(0, 1), slow=[(1.0, 2.0)] * 3)

    assert problem.node_costs(2, problem.owner).tolist() == [0.0, 0.0]
    assert found.node_costs(2, problem.owner).tolist() == pytest.approx([0.0, np.log(2.0)])
    assert (problem.places_matter, found.places_matter) == (False, True)


@cases(
    "changes, expected",
    free_to_move=({}, [False, False, False, False]),
    three_samples=({"batch_size": 3, "batch_limit": 3}, [True, False, False, False]),
    moved_just_now=({"moved_at": Seconds(99.0)}, [True, True, False, False]),
)
def test_a_move_is_barred_for_gated_jobs_and_small_batches(
    changes: dict[str, Any], expected: list[bool]
) -> None:
    problem = problem_of(view_of(row_of(2, 2), a_job(on=(S0, S1), epoch=1, **changes)))
    whole, half = [FREE, FREE, 0, 0], [0, FREE, 0, FREE]
    grows, stops = [0, 0, 0, 0], [FREE, FREE, FREE, FREE]

    found = [problem.has_barred_move(np.array(owner)) for owner in (whole, half, grows, stops)]

    assert found == expected


def test_only_running_jobs_with_open_gates_are_free_to_move() -> None:
    late = a_job(B, on=(S1,), epoch=1, moved_at=Seconds(99.0))

    problem = problem_of(view_of(row_of(3), a_job(on=(S0,), epoch=1), late, a_job(C)))

    assert problem.free_to_move.tolist() == [True, False, False]


# --- what is remembered


def rows_of(problem: Problem) -> list[tuple[object, ...]]:
    return [
        (
            row.job, row.now, row.level, row.limit, row.gated, row.move_factor, row.restart_factor,
            None if math.isnan(row.remaining_s) else row.remaining_s, row.moves_to,
            row.change_factor.tolist(), row.table.batches.tolist(), row.table.goodputs.tolist(),
            row.table.nodes.tolist(), row.table.sizes.tolist(), row.table.gains.tolist(),
            row.table.noise_scale,
        )
        for row in problem.job_rows
    ]  # fmt: skip


def told(problem: Problem) -> list[object]:
    """Return everything that a search sees of a problem, to be compared."""
    arrays = [
        problem.sizes, problem.spans, problem.value, problem.present, problem.move_factor,
        problem.free_to_move, problem.owner, problem.early, problem.node_of, problem.cluster.type_of,
    ]  # fmt: skip
    plain = [
        problem.kept, problem.slots, problem.cluster.types, problem.backing_off,
        problem.too_large, problem.widest, problem.capacity, problem.gates,
    ]  # fmt: skip
    return [[array.tolist() for array in arrays], rows_of(problem), plain]


def test_the_row_of_an_unchanged_job_is_cached() -> None:
    _, builder = builder_of()
    view = view_of(row_of(4), a_job(on=(S0,)), a_job(B, on=(S1,)))
    other = msgspec.structs.replace(view.jobs[B], samples_done=7)
    later = msgspec.structs.replace(view, version=2, jobs={**view.jobs, B: other})

    before, after = builder.build(view, NOW), builder.build(later, NOW)

    assert after.job_rows[0] is before.job_rows[0]
    assert after.job_rows[1] is not before.job_rows[1]


RELATIVE = JobId("old-9")


def of_family(job: JobId, **changes: Any) -> EpochSeen:
    known = {"samples_per_s": 100.0, "global_batch": 32, "epoch": 1, "samples_done": 500, **changes}
    return epoch_seen(job, family="f", **known)


@cases(
    "news, pause_s",
    a_relative_finished=(
        JobEnded(job=RELATIVE, family="f", samples_done=90_000, succeeded=True), 0.0),
    noise_of_a_relative=(of_family(RELATIVE, noise_scale=900.0), 0.0),
    the_speed_of_a_relative=(of_family(RELATIVE, samples_per_s=37.0), 0.0),
    its_limit_changed=(msgspec.structs.replace(WARM, group_steps=10), 0.0),
    its_gate_opened=(None, 31.0),
)  # fmt: skip
def test_news_of_relatives_limits_and_open_gates_renew_a_row(
    news: PolicyEvent | None, pause_s: float
) -> None:
    known: Any = {"epoch": 1, "samples_done": 500, "batch_size": 32, "batch_limit": 4000}
    runs = msgspec.structs.replace(
        a_job(moved_at=NOW, **known), running_on={S0: 32}, local_limit=4000
    )
    view, later = view_of(row_of(4), runs), Seconds(NOW + pause_s)
    former = JobEnded(job=JobId("old-8"), family="f", samples_done=5000, succeeded=True)
    estimates, builder = builder_of(events=[(NOW, of_family(A)), (NOW, former)])
    before = rows_of(builder.build(view, NOW))
    if news is not None:
        estimates.observe(news, NOW)

    after = rows_of(builder.build(view, later))

    assert after == rows_of(ProblemBuilder(estimates, OnesOptions()).build(view, later))
    assert after != before


def test_a_doubled_limit_is_in_the_row() -> None:
    estimates, builder = builder_of()
    view = view_of(row_of(4), a_job(on=(S0,), moved_at=NOW))
    before = builder.build(view, NOW).job_rows[0].limit

    estimates.observe(msgspec.structs.replace(WARM, group_steps=10), NOW)

    assert (before, builder.build(view, NOW).job_rows[0].limit) == (64, 128)


def test_a_new_node_renumbers_the_slots() -> None:
    _, builder = builder_of()
    job = a_job(on=(T0,))
    two = view_of([slot_view(S0), slot_view(T0)], job)
    more = view_of([slot_view(S0), slot_view(S1), slot_view(T0)], job, version=2)

    assert builder.build(two, NOW).job_rows[0].now == (1,)
    assert builder.build(more, NOW).job_rows[0].now == (2,)


Life = list[tuple[ClusterView, list[PolicyEvent], float]]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    """Views of one cluster; most jobs stay as they are, while families learn and limits move."""
    view, at = draw(views(nodes=(2, 3))), 100.0
    found = [(view, draw(events_of(view)), at)]
    for version in range(2, 5):
        jobs = {
            name: msgspec.structs.replace(job, epoch=1 + job.epoch) if draw(IN_FOUR) else job
            for name, job in view.jobs.items()
        }
        slots = view.slots
        if draw(IN_FOUR):  # a node comes, which is before the others
            slots = (slot_view(SlotId(f"m{version}/0")), *slots)
        if draw(st.booleans()):
            view = ClusterView(version=version, slots=slots, jobs=jobs)
        of_slots = st.builds(
            EpochSeen, job=st.sampled_from([*jobs, C]), family=st.sampled_from(FAMILIES),
            slots=st.integers(1, 4), nodes=st.just(1), global_batch=st.sampled_from([8, 64, 300]),
            samples_per_s=st.sampled_from([10.0, 100.0, 1000.0]), whole=st.booleans(),
        )  # fmt: skip
        noise = draw(st.sampled_from([None, 3.0, 300.0]))
        heard = [
            msgspec.structs.replace(event, noise_scale=noise)
            if isinstance(event, EpochSeen | StepsSeen) else event
            for event in (*draw(st.lists(of_slots, max_size=3)), *draw(events_of(view, at_most=3)))
        ]  # fmt: skip
        at += draw(st.sampled_from([0.0, 1.0, 6.0, 31.0, 40.0]))
        found.append((view, heard, at))
    return found


@settings(max_examples=examples(80), deadline=None)
@given(life=lives(), shared=st.booleans())
def test_caches_never_change_a_problem(*, life: Life, shared: bool) -> None:
    options = OnesOptions(share_family=shared)
    estimates, builder = builder_of(options=options)
    for view, events, at in life:
        for event in events:
            estimates.observe(event, Seconds(at))
        same = {id(job): job for job in view.jobs.values()}  # estimates compare views by identity
        known = copy.deepcopy(estimates, same)
        lived = builder.build(view, Seconds(at))
        fresh = ProblemBuilder(known, options).build(view, Seconds(at))

        assert told(lived) == told(fresh)
