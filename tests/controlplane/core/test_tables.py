"""Every cell of the four tables."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from enum import Enum
from typing import Any

import pytest

from controlplane.core.errors import IllegalTransitionError
from controlplane.core.model import job, node, rescale, worker
from controlplane.core.model.job import Job, JobTrigger, Phase
from controlplane.core.model.node import Node, NodePhase, NodeTrigger
from controlplane.core.model.rescale import Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import WorkerPhase, WorkerTrigger
from schemas.ids import BootId, Seconds, Version
from schemas.messages.agent import JOIN
from tests.support import tables
from tests.support.builders import N1, S0, SNAPSHOT, A, group, job_spec, node_spec
from tests.support.tables import worker_in

LEFT = {WorkerPhase.RETIRING, WorkerPhase.LEAVING, WorkerPhase.GONE}
MENDS = {RescalePhase.QUIESCING, RescalePhase.REJOINING}
OLD_NEWS = {
    (phase, turn)
    for phase, turn in itertools.product(WorkerPhase, WorkerTrigger)
    if phase in LEFT or turn is WorkerTrigger.STARTED
} - worker.NEXT.keys()


def job_in(phase: Phase) -> Job:
    return Job(
        job=A,
        spec=job_spec(),
        snapshot=SNAPSHOT,
        user="ann",
        submitted_at=Seconds(0.0),
        phase=phase,
        why="so far",
    )


def change_in(phase: RescalePhase) -> Rescale:
    return Rescale(
        group=group(A, {S0: 64}, 2),
        kind=JOIN,
        before=Version(1),
        phase=phase,
        why="ann asked for 1 slot",
        began=Seconds(1.0),
        deadline=Seconds(301.0),
    )


def node_in(phase: NodePhase) -> Node:
    return Node(node=N1, spec=node_spec(), boot=BootId("boot-1"), phase=phase, since=Seconds(1.0))


def drawn(table: Mapping[Any, object]) -> list[object]:
    return [pytest.param(*cell, after, id=_name(*cell)) for cell, after in table.items()]


def not_drawn(phases: type[Enum], turns: type[Enum], table: Container[object]) -> list[object]:
    cells = [cell for cell in itertools.product(phases, turns) if cell not in table]
    return [pytest.param(*cell, id=_name(*cell)) for cell in cells]


def _name(phase: Enum, turn: Enum) -> str:
    return f"{phase.value}-{turn.value}".replace(" ", "_")


# --- jobs


@pytest.mark.parametrize(("phase", "turn", "after"), drawn(job.NEXT))
def test_a_job_follows_each_arrow_and_writes_it_down(
    phase: Phase, turn: JobTrigger, after: Phase
) -> None:
    moved = job_in(phase)

    job.advance(moved, turn, "because", Seconds(5.0), {"slots": 1})

    assert (moved.phase, moved.since, moved.why) == (after, 5.0, "because")
    (change,) = moved.history
    assert (change.time, change.from_state, change.to_state) == (5.0, phase.value, after.value)
    assert (change.why, change.detail) == ("because", {"slots": 1})


@pytest.mark.parametrize(("phase", "turn"), not_drawn(Phase, JobTrigger, job.NEXT))
def test_a_job_takes_no_other_arrow(phase: Phase, turn: JobTrigger) -> None:
    stays = job_in(phase)
    before = job_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        job.advance(stays, turn, "because", Seconds(5.0))

    error = raised.value
    assert (error.who, error.phase, error.happening) == (A, phase.value, turn.value)
    assert str(error) == f"{A} is {phase.value} and cannot take {turn.value}; before: "
    assert stays == before


def test_an_arrow_that_is_not_drawn_names_what_came_before() -> None:
    lost = job_in(Phase.QUEUED)
    job.advance(lost, JobTrigger.GROUP_ORDERED, "its turn", Seconds(1.0))
    job.advance(lost, JobTrigger.CANCELLED, "cancelled by ann", Seconds(2.0))

    with pytest.raises(IllegalTransitionError, match="starting: its turn; cancelled: cancelled by"):
        job.advance(lost, JobTrigger.GROUP_FORMED, "", Seconds(3.0))


def test_an_ended_job_takes_nothing_and_every_other_can_be_cancelled() -> None:
    assert not [cell for cell in job.NEXT if cell[0] in job.ENDED]
    assert {phase for phase, turn in job.NEXT if turn is JobTrigger.CANCELLED} == set(
        Phase
    ) - job.ENDED


def test_time_counts_as_running_only_while_slots_are_held() -> None:
    timed = job_in(Phase.QUEUED)
    for at, turn in (
        (10.0, JobTrigger.GROUP_ORDERED),
        (11.0, JobTrigger.GROUP_FORMED),
        (31.0, JobTrigger.GROUP_LOST),
        (34.0, JobTrigger.GROUP_ORDERED),
        (36.0, JobTrigger.FINISHED),
    ):
        job.advance(timed, turn, "", Seconds(at))

    assert job.times(timed, Seconds(99.0)) == (13.0, 23.0)


# --- changes of a group


@pytest.mark.parametrize(("phase", "turn", "after"), drawn(rescale.NEXT))
def test_a_change_follows_each_arrow(
    phase: RescalePhase, turn: RescaleTrigger, after: RescalePhase
) -> None:
    moved = change_in(phase)

    assert rescale.advance(A, moved, turn) is after

    assert moved == change_in(after)


@pytest.mark.parametrize(("phase", "turn"), not_drawn(RescalePhase, RescaleTrigger, rescale.NEXT))
def test_a_change_takes_no_other_arrow(phase: RescalePhase, turn: RescaleTrigger) -> None:
    stays = change_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        rescale.advance(A, stays, turn)

    error = raised.value
    assert (error.who, error.phase, error.happening) == (A, phase.value, turn.value)
    assert stays == change_in(phase)


def test_a_change_that_is_over_takes_nothing_and_one_under_way_can_always_end() -> None:
    assert {phase for phase, _ in rescale.NEXT} == rescale.OPEN
    for end in (RescaleTrigger.EXPIRED, RescaleTrigger.MEMBER_LOST):
        assert {phase for phase, turn in rescale.NEXT if turn is end} == rescale.OPEN


def test_only_a_mend_can_lose_the_state_of_the_job() -> None:
    loses = {phase for (phase, _), after in rescale.NEXT.items() if after is RescalePhase.LOST}
    abandons = {
        phase for (phase, _), after in rescale.NEXT.items() if after is RescalePhase.ABANDONED
    }

    assert loses == MENDS
    assert not abandons & MENDS


# --- workers


@pytest.mark.parametrize(("phase", "turn", "after"), drawn(worker.NEXT))
def test_a_worker_follows_each_arrow(
    phase: WorkerPhase, turn: WorkerTrigger, after: WorkerPhase
) -> None:
    moved = worker_in(phase)

    assert worker.advance(moved, turn) is True

    assert moved == worker_in(after)


@pytest.mark.parametrize(
    ("phase", "turn"), [pytest.param(*cell, id=_name(*cell)) for cell in sorted(OLD_NEWS, key=str)]
)
def test_old_news_of_a_worker_changes_nothing(phase: WorkerPhase, turn: WorkerTrigger) -> None:
    stays = worker_in(phase)

    assert worker.advance(stays, turn) is False

    assert stays == worker_in(phase)


@pytest.mark.parametrize(
    ("phase", "turn"), not_drawn(WorkerPhase, WorkerTrigger, worker.NEXT.keys() | OLD_NEWS)
)
def test_a_worker_takes_no_other_arrow(phase: WorkerPhase, turn: WorkerTrigger) -> None:
    stays = worker_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        worker.advance(stays, turn)

    error = raised.value
    assert (error.who, error.phase, error.happening) == (stays.worker, phase.value, turn.value)
    assert stays == worker_in(phase)


def test_a_worker_that_left_is_at_most_told_to_stop_until_it_is_seen_gone() -> None:
    from_left = {cell: after for cell, after in worker.NEXT.items() if cell[0] in LEFT}

    assert from_left == {
        (WorkerPhase.RETIRING, WorkerTrigger.DISMISSED): WorkerPhase.LEAVING,
        (WorkerPhase.RETIRING, WorkerTrigger.GONE): WorkerPhase.GONE,
        (WorkerPhase.LEAVING, WorkerTrigger.GONE): WorkerPhase.GONE,
    }


# --- nodes


@pytest.mark.parametrize(("phase", "turn", "after"), drawn(node.NEXT))
def test_a_node_follows_each_arrow_and_says_whether_it_moved(
    phase: NodePhase, turn: NodeTrigger, after: NodePhase
) -> None:
    moved = node_in(phase)

    changed = node.advance(moved, turn, Seconds(5.0))

    assert changed is (after is not phase)
    assert (moved.phase, moved.since) == (after, 5.0 if changed else 1.0)


@pytest.mark.parametrize(("phase", "turn"), not_drawn(NodePhase, NodeTrigger, node.NEXT))
def test_a_node_takes_no_other_arrow(phase: NodePhase, turn: NodeTrigger) -> None:
    stays = node_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        node.advance(stays, turn, Seconds(5.0))

    error = raised.value
    assert (error.who, error.phase, error.happening) == (N1, phase.value, turn.value)
    assert stays == node_in(phase)


def test_whatever_happened_to_a_node_a_greeting_brings_it_up() -> None:
    greeted = {phase: after for (phase, turn), after in node.NEXT.items() if turn.name == "GREETED"}

    assert greeted == dict.fromkeys(NodePhase, NodePhase.UP)


# --- the room's README


@pytest.mark.parametrize("table", tables.TABLES)
def test_the_readme_shows_the_table_as_it_is(table: str) -> None:
    readme = tables.README.read_text(encoding="utf-8")

    assert tables.section(readme, table) == tables.TABLES[table](), (
        "run `python -m tests.support.tables`"
    )


def test_the_marked_sections_of_a_readme_are_rewritten_and_nothing_else() -> None:
    readme = (
        "# Core\n<!-- table: job -->\nold\n<!-- end -->\ntext\n<!-- table: node -->\n<!-- end -->\n"
    )

    assert tables.rewritten(readme) == (
        f"# Core\n<!-- table: job -->\n{tables.job_table()}<!-- end -->\n"
        f"text\n<!-- table: node -->\n{tables.node_table()}<!-- end -->\n"
    )
