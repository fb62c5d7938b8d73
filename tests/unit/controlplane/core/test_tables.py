"""Every cell of the four tables."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from enum import Enum
from typing import Any

import pytest

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.handler_context import HandlerContext
from controlplane.core.history import PhaseChanged
from controlplane.core.model import job, job_phases, node, rescale, worker
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import (
    Ended,
    JobStatus,
    JobTrigger,
    Paused,
    Phase,
    Queued,
    Rescaling,
    Running,
    Starting,
)
from controlplane.core.model.node import Node, NodePhase, NodeTrigger
from controlplane.core.model.rescale import Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import WorkerPhase, WorkerTrigger
from controlplane.core.state import State, Totals
from schemas.ids import BootId, Seconds, Version
from schemas.wire.agent import JOIN
from schemas.wire.client import Change
from tests.support import tables
from tests.support.builders import N1, S0, SNAPSHOT, A, group, job_spec, news, node_spec
from tests.support.tables import worker_in

LEFT = {WorkerPhase.RETIRING, WorkerPhase.LEAVING, WorkerPhase.EXITED}
MENDS = {RescalePhase.QUIESCING, RescalePhase.REJOINING}
OLD_NEWS = {
    (phase, trigger)
    for phase, trigger in itertools.product(WorkerPhase, WorkerTrigger)
    if phase in LEFT or trigger is WorkerTrigger.STARTED
} - worker.NEXT.keys()


def status_in(phase: Phase) -> JobStatus:
    """Of a job with one worker, if it has any."""
    one = group(A, {S0: 64}, 1)
    match phase:
        case Phase.QUEUED:
            return Queued()
        case Phase.STARTING:
            return Starting(group=one)
        case Phase.RUNNING:
            return Running(group=one)
        case Phase.RESCALING:
            return Rescaling(group=one, change=change_in(RescalePhase.PREPARING))
        case Phase.PAUSED:
            return Paused()
        case _:
            return Ended(phase=phase)


def job_in(phase: Phase) -> Job:
    return Job(
        job=A,
        spec=job_spec(),
        snapshot=SNAPSHOT,
        user="ann",
        submitted_at=Seconds(0.0),
        status=status_in(phase),
        reason="so far",
    )


def change_in(phase: RescalePhase) -> Rescale:
    return Rescale(
        group=group(A, {S0: 64}, 2),
        kind=JOIN,
        before=Version(1),
        phase=phase,
        reason="ann asked for 1 slot",
        started_at=Seconds(1.0),
    )


def node_in(phase: NodePhase) -> Node:
    return Node(node=N1, spec=node_spec(), boot=BootId("boot-1"), phase=phase, since=Seconds(1.0))


def drawn(table: Mapping[Any, object]) -> list[object]:
    return [pytest.param(*cell, after, id=_name(*cell)) for cell, after in table.items()]


def not_drawn(phases: type[Enum], triggers: type[Enum], table: Container[object]) -> list[object]:
    cells = [cell for cell in itertools.product(phases, triggers) if cell not in table]
    return [pytest.param(*cell, id=_name(*cell)) for cell in cells]


def _name(phase: Enum, trigger: Enum) -> str:
    return f"{phase.value}-{trigger.value}".replace(" ", "_")


# --- jobs


@pytest.mark.parametrize(("phase", "trigger", "after"), drawn(job_phases.NEXT))
def test_a_job_follows_each_arrow(phase: Phase, trigger: JobTrigger, after: Phase) -> None:
    moved = job_in(phase)

    job.advance(moved, trigger, status_in(after), "because", Seconds(5.0))

    assert (moved.phase, moved.accounting.since, moved.reason) == (after, 5.0, "because")
    assert moved.status == status_in(after)


@pytest.mark.parametrize(("phase", "trigger"), not_drawn(Phase, JobTrigger, job_phases.NEXT))
@pytest.mark.parametrize("status", Phase)
def test_a_job_takes_no_other_arrow(phase: Phase, trigger: JobTrigger, status: Phase) -> None:
    stays = job_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        job.advance(stays, trigger, status_in(status), "because", Seconds(5.0))

    error = raised.value
    assert (error.subject, error.phase, error.trigger) == (A, phase.value, trigger.value)
    assert stays == job_in(phase)


@pytest.mark.parametrize(("phase", "trigger", "after"), drawn(job_phases.NEXT))
def test_an_arrow_leads_nowhere_else(phase: Phase, trigger: JobTrigger, after: Phase) -> None:
    for other in set(Phase) - {after}:
        with pytest.raises(IllegalTransitionError):
            job.advance(job_in(phase), trigger, status_in(other), "because", Seconds(5.0))


def test_a_job_that_moves_is_announced_and_its_change_written_down() -> None:
    ctx, moved = HandlerContext(State(), Totals()), job_in(Phase.QUEUED)
    ctx.begin(Seconds(5.0))

    ctx.advance(
        moved, JobTrigger.GROUP_ORDERED, status_in(Phase.STARTING), "its trigger", {"slots": 1}
    )

    assert ctx.out == [news("job.starting", A, seq=1, at=5.0, reason="its trigger", slots=1)]
    change = Change(
        time=Seconds(5.0),
        from_state="queued",
        to_state="starting",
        reason="its trigger",
        detail={"slots": 1},
    )
    assert ctx.records == [PhaseChanged(job=A, change=change)]


def test_an_arrow_that_is_not_drawn_names_what_came_before() -> None:
    ctx, lost = HandlerContext(State(), Totals()), job_in(Phase.QUEUED)
    ctx.begin(Seconds(1.0))
    ctx.advance(lost, JobTrigger.GROUP_ORDERED, status_in(Phase.STARTING), "its trigger")
    ctx.advance(lost, JobTrigger.CANCELLED, status_in(Phase.CANCELLED), "cancelled by ann")

    with pytest.raises(IllegalTransitionError, match="cancelled by ann"):
        ctx.advance(lost, JobTrigger.GROUP_FORMED, status_in(Phase.RUNNING), "")


def test_an_ended_job_takes_nothing_and_every_other_can_be_cancelled() -> None:
    assert not [cell for cell in job_phases.NEXT if cell[0] in job_phases.ENDED]
    cancelled = {phase for phase, trigger in job_phases.NEXT if trigger is JobTrigger.CANCELLED}
    assert cancelled == set(Phase) - job_phases.ENDED


def test_a_job_has_a_group_in_phases_that_hold_slots_and_a_change_while_it_rescales() -> None:
    assert {phase for phase in Phase if job_in(phase).group is not None} == job_phases.HOLDING
    assert [phase for phase in Phase if job_in(phase).change is not None] == [Phase.RESCALING]


def test_time_counts_as_running_only_while_slots_are_held() -> None:
    timed = job_in(Phase.QUEUED)
    for at, trigger, after in (
        (10.0, JobTrigger.GROUP_ORDERED, Phase.STARTING),
        (11.0, JobTrigger.GROUP_FORMED, Phase.RUNNING),
        (31.0, JobTrigger.GROUP_LOST, Phase.PAUSED),
        (34.0, JobTrigger.GROUP_ORDERED, Phase.STARTING),
        (36.0, JobTrigger.FINISHED, Phase.SUCCEEDED),
    ):
        job.advance(timed, trigger, status_in(after), "", Seconds(at))

    assert job.times(timed, Seconds(99.0)) == (13.0, 23.0)
    assert timed.accounting.slot_s == 23.0


# --- changes of a group


@pytest.mark.parametrize(("phase", "trigger", "after"), drawn(rescale.NEXT))
def test_a_change_follows_each_arrow(
    phase: RescalePhase, trigger: RescaleTrigger, after: RescalePhase
) -> None:
    moved = change_in(phase)

    assert rescale.advance(A, moved, trigger) is after

    assert moved == change_in(after)


@pytest.mark.parametrize(
    ("phase", "trigger"), not_drawn(RescalePhase, RescaleTrigger, rescale.NEXT)
)
def test_a_change_takes_no_other_arrow(phase: RescalePhase, trigger: RescaleTrigger) -> None:
    stays = change_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        rescale.advance(A, stays, trigger)

    error = raised.value
    assert (error.subject, error.phase, error.trigger) == (A, phase.value, trigger.value)
    assert stays == change_in(phase)


def test_a_change_that_is_over_takes_nothing_and_one_under_way_can_always_end() -> None:
    assert {phase for phase, _ in rescale.NEXT} == rescale.OPEN
    for end in (RescaleTrigger.EXPIRED, RescaleTrigger.MEMBER_LOST):
        assert {phase for phase, trigger in rescale.NEXT if trigger is end} == rescale.OPEN


def test_only_a_mend_can_lose_the_state_of_the_job() -> None:
    loses = {phase for (phase, _), after in rescale.NEXT.items() if after is RescalePhase.LOST}
    abandons = {
        phase for (phase, _), after in rescale.NEXT.items() if after is RescalePhase.ABANDONED
    }

    assert loses == MENDS
    assert not abandons & MENDS


# --- workers


@pytest.mark.parametrize(("phase", "trigger", "after"), drawn(worker.NEXT))
def test_a_worker_follows_each_arrow(
    phase: WorkerPhase, trigger: WorkerTrigger, after: WorkerPhase
) -> None:
    moved = worker_in(phase)

    assert worker.advance(moved, trigger) is True

    assert moved == worker_in(after)


@pytest.mark.parametrize(
    ("phase", "trigger"),
    [pytest.param(*cell, id=_name(*cell)) for cell in sorted(OLD_NEWS, key=str)],
)
def test_old_news_of_a_worker_changes_nothing(phase: WorkerPhase, trigger: WorkerTrigger) -> None:
    stays = worker_in(phase)

    assert worker.advance(stays, trigger) is False

    assert stays == worker_in(phase)


@pytest.mark.parametrize(
    ("phase", "trigger"), not_drawn(WorkerPhase, WorkerTrigger, worker.NEXT.keys() | OLD_NEWS)
)
def test_a_worker_takes_no_other_arrow(phase: WorkerPhase, trigger: WorkerTrigger) -> None:
    stays = worker_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        worker.advance(stays, trigger)

    error = raised.value
    assert (error.subject, error.phase, error.trigger) == (stays.worker, phase.value, trigger.value)
    assert stays == worker_in(phase)


def test_a_worker_that_left_is_at_most_told_to_stop_until_it_is_seen_gone() -> None:
    from_left = {cell: after for cell, after in worker.NEXT.items() if cell[0] in LEFT}

    assert from_left == {
        (WorkerPhase.RETIRING, WorkerTrigger.DISMISSED): WorkerPhase.LEAVING,
        (WorkerPhase.RETIRING, WorkerTrigger.EXITED): WorkerPhase.EXITED,
        (WorkerPhase.LEAVING, WorkerTrigger.EXITED): WorkerPhase.EXITED,
    }


# --- nodes


@pytest.mark.parametrize(("phase", "trigger", "after"), drawn(node.NEXT))
def test_a_node_follows_each_arrow_and_says_whether_it_moved(
    phase: NodePhase, trigger: NodeTrigger, after: NodePhase
) -> None:
    moved = node_in(phase)

    changed = node.advance(moved, trigger, Seconds(5.0))

    assert changed is (after is not phase)
    assert (moved.phase, moved.since) == (after, 5.0 if changed else 1.0)


@pytest.mark.parametrize(("phase", "trigger"), not_drawn(NodePhase, NodeTrigger, node.NEXT))
def test_a_node_takes_no_other_arrow(phase: NodePhase, trigger: NodeTrigger) -> None:
    stays = node_in(phase)

    with pytest.raises(IllegalTransitionError) as raised:
        node.advance(stays, trigger, Seconds(5.0))

    error = raised.value
    assert (error.subject, error.phase, error.trigger) == (N1, phase.value, trigger.value)
    assert stays == node_in(phase)


def test_whatever_happened_to_a_node_a_greeting_brings_it_up() -> None:
    greeted = {
        phase: after for (phase, trigger), after in node.NEXT.items() if trigger.name == "GREETED"
    }

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
