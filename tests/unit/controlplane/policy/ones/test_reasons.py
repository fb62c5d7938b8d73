"""Reasons of plans: codes, texts and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from controlplane.policy.api import EpochSeen, JobView, Reason
from controlplane.policy.ones.evolution import Candidate, score
from controlplane.policy.ones.policy import PlanReasons
from controlplane.policy.ones.problem import FREE, Problem
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, T0, A, B, C, job_view
from tests.support.views import NOW, problem_of, row_of, view_of


def on(job: JobId, *slots: SlotId, family: str = "f", limit: int = 64) -> JobView:
    """1 to 4 slots and a batch of 64; moved long ago, with an hour to go."""
    return job_view(
        job, slots=(1, 4), epoch=1, family=family, batch_limit=limit, local_limit=limit,
        running_on={slot: 64 // len(slots) for slot in slots},
        stop_samples=4_000_000, samples_done=1000,
    )  # fmt: skip


def posed(
    *jobs: JobView, options: OnesOptions | None = None, reported: Sequence[EpochSeen] = ()
) -> Problem:
    """Two nodes of two slots; relatives were measured on one and two slots, and on two nodes."""
    events = [
        EpochSeen(job=JobId("old-9"), family=job.family, slots=slots, nodes=nodes,
                  global_batch=64, samples_per_s=speed, whole=True)
        for job in jobs
        for slots, nodes, speed in ((1, 1, 1000.0), (2, 1, 1800.0), (2, 2, 1200.0))
    ]  # fmt: skip
    view = view_of(row_of(2, 2), *jobs)
    events += reported
    return problem_of(view, events=[(1.0, event) for event in events], now=NOW, options=options)


def planned(problem: Problem, where: Mapping[JobId, tuple[SlotId, ...]]) -> Candidate:
    """The schedule in which each job has these slots."""
    owner = np.where(problem.owner >= 0, FREE, problem.owner)
    levels = problem.present.copy()
    for row, job_row in enumerate(problem.job_rows):
        slots = where[job_row.job.job]
        owner[[problem.slots.index(slot) for slot in slots]] = row
        sizes = job_row.table.sizes.tolist()
        levels[row] = 1 + sizes.index(len(slots)) if slots else 0
    return score(problem, levels, owner)


def why(problem: Problem, where: Mapping[JobId, tuple[SlotId, ...]], job: JobId = A) -> Reason:
    best = planned(problem, where)
    row = [job_row.job.job for job_row in problem.job_rows].index(job)
    level = int(best.levels[row])
    batch = int(problem.job_rows[row].table.batches[level - 1]) if level else 0
    slots = where[job]
    placed = {slot: batch // len(slots) for slot in slots}
    reason = PlanReasons(problem, best).of(row, placed)
    assert reason is not None
    return reason


def text(problem: Problem, where: Mapping[JobId, tuple[SlotId, ...]], job: JobId = A) -> str:
    return why(problem, where, job).text


# --- moves at the same size


def typed(problem: Problem, types: list[int], slow: list[tuple[float, float]]) -> Problem:
    """`problem` with GPU types by slot."""
    cluster = replace(problem.cluster, types=("a", "b"), type_of=np.array(types))
    return replace(problem, cluster=cluster, slow=np.array(slow))


@pytest.mark.parametrize(
    ("problem", "where", "code", "text", "speeds"),
    [
        (
            posed(on(A, S0, T0)), {A: (S0, S1)}, "pack", "moved together to fewer nodes (expected: 1.50",
            (1200.0, 1800.0),
        ),
        (
            typed(posed(on(A, S0)), [0, 0, 1, 1], [(2.0, 1.0)]), {A: (T0,)}, "move",
            "moved to faster GPUs (expected: 2.00", (500.0, 1000.0),
        ),
        (
            posed(on(A, S1), on(B, S0)), {A: (T0,), B: (S0, S1)}, "move",
            f"moved to make room for {B} (expected: 1.00", None,
        ),
        (posed(on(A, S0)), {A: (T0,)}, "move", "moved to other slots (expected: 1.00", None),
        (
            posed(on(A, S0, S1), on(B, T0)), {A: (S0, T0), B: (S1,)}, "move",
            f"moved to make room for {B} (expected: 0.67", None,
        ),
    ],
    ids=[
        "fewer nodes", "faster GPUs", "room",
        "no known reason", "spread over nodes",
    ],
)  # fmt: skip
def test_a_move_has_the_first_reason_that_holds_and_the_expected_speed(
    problem: Problem,
    where: Mapping[JobId, tuple[SlotId, ...]],
    code: str,
    text: str,
    speeds: tuple[float, float] | None,
) -> None:
    reason = why(problem, where)

    assert (reason.code, reason.text) == (code, f"{text} x its present speed)")
    if speeds is not None:
        numbers = [reason.numbers[name] for name in ("speed_now", "speed_then")]
        assert numbers == pytest.approx(speeds, rel=0.02)


def test_the_partner_of_a_move_gets_a_reason_too() -> None:
    room, where = posed(on(A, S1), on(B, S0)), {A: (T0,), B: (S0, S1)}

    assert text(room, where, B).endswith(f": from {A}")


def test_the_reason_of_a_move_includes_a_new_batch() -> None:
    grown = EpochSeen(job=A, family="other", slots=2, nodes=2, global_batch=128,
                      samples_per_s=1.0, whole=True)  # fmt: skip
    problem = posed(on(A, S0, T0, limit=256), reported=[grown])

    reason = why(problem, {A: (S0, S1)})

    batch = int(reason.numbers["batch_then"])
    assert batch > reason.numbers["batch_now"] == 64.0
    assert reason.text.startswith(
        f"moved together to fewer nodes, with batch {batch} (expected: 1."
    )


# --- other sizes, and none


def test_the_gain_of_a_growth_depends_on_the_nodes() -> None:
    near, far = posed(on(A, S0)), posed(on(A, S0), on(B, S1))

    assert text(near, {A: (S0, S1)}).startswith("grows to 2 slots")
    one, other = (
        why(problem, where).numbers["speed_then"]
        for problem, where in ((near, {A: (S0, S1)}), (far, {A: (S0, T0), B: (S1,)}))
    )
    assert other / one == pytest.approx(2 / 3, rel=0.02)


def test_a_shrink_names_the_recipient() -> None:
    problem = posed(on(A, S0, S1), on(B, T0))

    reason = why(problem, {A: (S0,), B: (T0, S1)})

    assert reason.code == "shrink"
    assert reason.text.startswith(f"gives 1 slot to {B}, goes on with 1 slot")


def test_a_pause_names_the_recipient() -> None:
    problem = posed(on(A, S0), on(B, T0), on(C))

    assert why(problem, {A: (), B: (T0,), C: (S0,)}) == Reason(
        "pause",
        f"paused: {C} can use its 1 slot better",
        why(problem, {A: (), B: (T0,), C: (S0,)}).numbers,
    )
    assert text(problem, {A: (), B: (T0,), C: (S0,)}, C) == "resumes on 1 slot"


def test_a_wait_includes_the_least_value_of_a_slot() -> None:
    problem = posed(on(A, S0), on(B, T0), on(C))
    best = planned(problem, {A: (S0,), B: (T0,), C: ()})
    reasons = PlanReasons(problem, best)

    reason = reasons.of(2, {})

    assert reason is not None
    assert (reason.code, reason.text) == (
        "waits",
        "waits for 1 slot: other jobs gain more from them",
    )
    assert reason.numbers["least_value_of_a_slot"] == reasons.least_value > 0.0
