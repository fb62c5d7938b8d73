"""Units of a sweep: handed on once, given up with their process, and ended before a worker leaves."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.reconciler import Reconciler
from nodeagent.reconciler_events import (
    Action,
    AwaitExit,
    Connected,
    Desired,
    ForgetJob,
    GraceOver,
    GrantSlot,
    KeepStates,
    Kill,
    LogsStored,
    OrderGroup,
    OrderUnit,
    PublishEvent,
    ReportRead,
    SweepDesired,
    Terminate,
)
from schemas.ids import Rank, Term, Version, WorkerId
from schemas.wire.agent import JOIN, ScriptReport, UnitEnded, UnitFailed, UnitStarted
from schemas.wire.sweeps import StateRef, SweepDelta, UnitOrder
from tests.support.builders import S1, A, group, run, settle, stop, switch
from tests.support.reconciler_events import (
    BOTH,
    FIRST,
    adopted,
    agent,
    alive,
    alive_on_both,
    ended,
)

SECOND = WorkerId(f"{A}.v1.r1")
LEAVER = group(A, BOTH).members[:1]
SHRINKS = switch(A, 2, on={S1: 64}, kind=JOIN, born=[(1, 1)], former=LEAVER)
SHRUNK = settle(A, 2, on={S1: 64}, born=[(1, 1)])


def unit(attempt: int, who: WorkerId = FIRST) -> UnitOrder:
    return UnitOrder(
        attempt=attempt, worker=who, trial=0, values={}, state=None, sources=(),
        result=StateRef(trial=0, version=1), epoch=1, partition=0, evaluate=False,
    )  # fmt: skip


def delta(*units: UnitOrder, revision: int = 1, attempts: int = 0) -> SweepDelta:
    highest = max([attempts, *(one.attempt for one in units)])
    return SweepDelta(
        job=A, term=Term(1), revision=revision, attempts=highest, units=units, wanted=()
    )


def wanted(reconciler: Reconciler, *units: UnitOrder, **words: int) -> list[Action]:
    """What follows of an order of units, beside the states."""
    ordered = delta(*units, **words)
    first, *rest = reconciler.handle(SweepDesired(ordered))
    assert first == KeepStates(ordered)
    return rest


def said(kind: type[ScriptReport], attempt: int, index: int = 1, **fields: Any) -> ReportRead:
    report = kind(job=A, version=Version(1), rank=Rank(0), index=index, attempt=attempt, **fields)
    return ReportRead(FIRST, report)


def begun(attempt: int) -> ReportRead:
    return said(UnitStarted, attempt, samples=24, waited_s=0.0, staged_s=0.0)


def over(attempt: int) -> ReportRead:
    return said(
        UnitEnded, attempt, metrics={}, samples=24, seconds=1.0, scores={}, digest="d", size=9
    )


def test_a_unit_goes_to_its_worker_once_and_again_when_it_greets() -> None:
    reconciler = agent(*alive())

    assert wanted(reconciler, unit(1)) == [OrderUnit(FIRST, unit(1))]
    assert wanted(reconciler, unit(1), revision=2) == []
    again = reconciler.handle(Connected(FIRST))
    assert again == [
        GrantSlot(FIRST), OrderUnit(FIRST, unit(1)), OrderGroup(FIRST, run(A)),
    ]  # fmt: skip


def test_the_next_unit_follows_when_the_first_is_over_and_no_process_ends() -> None:
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))), begun(1))

    assert reconciler.handle(over(1)) == [PublishEvent(over(1).report)]  # type: ignore[arg-type]
    assert wanted(reconciler, unit(3), revision=2) == [OrderUnit(FIRST, unit(3))]


@pytest.mark.parametrize("units", [(), (unit(2),)], ids=["none", "another"])
def test_who_trains_what_is_given_up_is_killed(units: tuple[UnitOrder, ...]) -> None:
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))), begun(1))

    assert wanted(reconciler, *units, revision=2, attempts=2) == [Kill(FIRST)]


def test_a_unit_that_was_handed_on_and_has_not_begun_is_given_up_with_its_process_too() -> None:
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))))

    assert wanted(reconciler, revision=2, attempts=1) == [Kill(FIRST)]


@pytest.mark.parametrize("kind", [UnitEnded, UnitFailed])
def test_who_is_through_is_not_killed(kind: type[ScriptReport]) -> None:
    through = over(1) if kind is UnitEnded else said(UnitFailed, 1, reason="no", fault="trial")
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))), begun(1), through)

    assert wanted(reconciler, revision=2, attempts=1) == []


def test_an_order_that_cannot_know_of_a_unit_does_not_give_it_up() -> None:
    reconciler = agent(*alive(), begun(7))

    assert wanted(reconciler, attempts=6) == []


def test_an_adopted_worker_keeps_the_unit_that_it_said_it_trains() -> None:
    reconciler = agent(adopted(run(A)), Desired(settle(A)), begun(4))

    assert wanted(reconciler, unit(4)) == [OrderUnit(FIRST, unit(4))]  # which it ignores
    assert wanted(reconciler, revision=2, attempts=4) == [Kill(FIRST)]


def test_who_leaves_its_group_ends_its_unit_first_however_long_it_takes() -> None:
    reconciler = agent(*alive_on_both(), SweepDesired(delta(unit(1))), begun(1))
    reconciler.handle(Desired(SHRINKS))

    left = reconciler.handle(Desired(SHRUNK))

    assert AwaitExit(FIRST) not in left
    assert Terminate(FIRST) not in left
    assert reconciler.handle(over(1)) == [PublishEvent(over(1).report), AwaitExit(FIRST)]  # type: ignore[arg-type]
    assert reconciler.handle(GraceOver(FIRST)) == [Terminate(FIRST)]


def test_who_leaves_and_trains_what_is_given_up_is_killed() -> None:
    reconciler = agent(*alive_on_both(), SweepDesired(delta(unit(1))), begun(1))
    reconciler.handle(Desired(SHRINKS))
    reconciler.handle(Desired(SHRUNK))

    assert wanted(reconciler, revision=2, attempts=1) == [Kill(FIRST)]


def test_a_job_that_is_cancelled_does_not_wait_for_units() -> None:
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))), begun(1))

    assert reconciler.handle(Desired(stop(A, 2))) == [Terminate(FIRST)]


def test_what_comes_of_a_sweep_that_is_forgotten_only_keeps_states() -> None:
    reconciler = agent(*alive(), SweepDesired(delta(unit(1))), ended(), LogsStored(FIRST))
    forgotten = reconciler.handle(Desired(stop(A, 2, forget=True)))

    assert forgotten[-1] == ForgetJob(A)
    assert wanted(reconciler, revision=9) == []
    assert A not in reconciler.jobs


def test_a_sweep_that_is_over_leaves_only_states_to_keep_until_it_is_given_a_group() -> None:
    reconciler = agent()
    reconciler.forgotten.add(A)
    assert wanted(reconciler, unit(1)) == []
    assert reconciler.jobs == {}

    for event in alive():
        reconciler.handle(event)

    assert wanted(reconciler, unit(1), revision=2) == [OrderUnit(FIRST, unit(1))]


def test_units_go_to_workers_of_their_own_sweep() -> None:
    reconciler = agent(*alive_on_both())

    assert wanted(reconciler, unit(1), unit(2, SECOND)) == [
        OrderUnit(FIRST, unit(1)),
        OrderUnit(SECOND, unit(2, SECOND)),
    ]
