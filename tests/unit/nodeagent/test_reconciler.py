"""Actions of the reconciler: processes, devices, groups, units of sweeps, and what a hello names."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL, SIGTERM
from typing import Any, Final

import pytest
from msgspec.structs import replace

from nodeagent.reconciler import (
    AwaitExit,
    Connected,
    Desired,
    Ended,
    Event,
    FetchWorkspace,
    ForgetJob,
    GraceOver,
    GrantSlot,
    KeepStates,
    Kill,
    LogsStored,
    OrderGroup,
    OrderUnit,
    PublishEvent,
    Reconciler,
    RemoveWorker,
    ReportedAgain,
    ReportRead,
    Started,
    StartFailed,
    StartWorker,
    SweepDesired,
    Terminate,
    Warn,
    WorkspaceFailed,
    WorkspaceReady,
)
from schemas.ids import JobId, Rank, Term, Version, WorkerId
from schemas.jobs import EndWarning
from schemas.wire import Message
from schemas.wire.agent import (
    JOIN,
    RECOVER,
    SETTLED,
    SUSPEND,
    WARNED,
    GroupDelta,
    ScriptReport,
    UnitEnded,
    UnitFailed,
    UnitStarted,
    WorkerExited,
    WorkerRefused,
)
from schemas.wire.sweeps import StateRef, SweepDelta, UnitOrder
from tests.support.builders import (
    BATCH,
    N1,
    S0,
    S1,
    SNAPSHOT,
    T0,
    A,
    B,
    C,
    cleared,
    epoch_end,
    exited,
    finished,
    formed,
    members,
    ready,
    refused,
    run,
    seen,
    settle,
    started,
    stop,
    switch,
)
from tests.support.reconciler_events import (
    BOTH,
    FIRST,
    adopted,
    agent,
    alive,
    alive_on_both,
    ended,
    laid_out,
    worker,
)

# A step is an event, or a delta or report in its place, with the actions that it leads to; events
# that are published stand for `PublishEvent`, and `...` for actions that do not matter.
Step = tuple[Any, Any]
Case = tuple[Sequence[Any], list[Step]]

NEW: Final = worker(A, 3)  # of the third version
OF_B: Final = worker(B)
SECOND: Final = WorkerId(f"{A}.v1.r1")
NEWCOMER: Final = worker(A, 2, 1)
FETCH: Final = FetchWorkspace(A, SNAPSHOT, "ann")
KILLED: Final = Ended(FIRST, None, SIGKILL, unseen=False)
TWO: Final = [(1, 0), (1, 1)]
GROWS: Final[dict[str, Any]] = {"on": BOTH, "born": [(1, 0), (2, 1)], "kind": JOIN}
ONE_LEAVES: Final[dict[str, Any]] = {"on": S0, "born": [(1, 0)]}
LEAVER: Final = members(A, BOTH, TWO)[1:]
ORDER: Final = switch(A, 2, store="127.0.0.1:29100", **GROWS)
LEAVES: Final = switch(A, 2, kind=JOIN, former=LEAVER, **ONE_LEAVES)
LEFT: Final = settle(A, 2, **ONE_LEAVES)
KEPT: Final = settle(A, 2, on=BOTH, born=TWO)
SUSPENDS: Final = switch(
    A, 2, on={}, born=[], kind=SUSPEND, former=members(A, {S0: BATCH}, [(1, 0)])
)
FORGED: Final = replace(epoch_end(A, 777), job=B, version=Version(9), rank=Rank(3))
OTHER_SNAPSHOT: Final = run(A, 2, snapshot="6" * 64, **GROWS)
ACROSS: Final = run(A, on={T0: 32, S1: 32})


def unit(attempt: int, on: WorkerId = FIRST) -> UnitOrder:
    return UnitOrder(
        attempt=attempt, worker=on, trial=0, values={}, state=None, sources=(),
        result=StateRef(trial=0, version=1), epoch=1, partition=0, evaluate=False,
    )  # fmt: skip


def units(*units: UnitOrder, revision: int = 1, attempts: int = 0) -> SweepDelta:
    highest = max([attempts, *(one.attempt for one in units)])
    return SweepDelta(
        job=A, term=Term(1), revision=revision, attempts=highest, units=units, wanted=()
    )


def report(kind: type[ScriptReport], attempt: int, **fields: Any) -> ScriptReport:
    return kind(job=A, version=Version(1), rank=Rank(0), index=1, attempt=attempt, **fields)


def begun(attempt: int) -> ScriptReport:
    return report(UnitStarted, attempt, samples=24, waited_s=0.0, staged_s=0.0)


DONE: Final = report(
    UnitEnded, 1, metrics={}, samples=24, seconds=1.0, scores={}, digest="d", size=9
)
FAILED: Final = report(UnitFailed, 1, reason="no", fault="trial")
SHRINKS: Final = switch(
    A, 2, on={S1: 64}, kind=JOIN, born=[(1, 1)], former=members(A, BOTH, TWO)[:1]
)
SHRUNK: Final = settle(A, 2, on={S1: 64}, born=[(1, 1)])
TRAINS: Final = [*alive(), units(unit(1)), begun(1)]
LEAVES_TRAINING: Final = [*alive_on_both(), units(unit(1)), begun(1), SHRINKS]

STARTS: Final[dict[str, Case]] = {
    "a worker starts after its working directory is unpacked": (
        [], [(run(A), [FETCH]), (laid_out(A), [StartWorker(FIRST, 0, run(A))])],
    ),
    "a working directory is fetched once": (
        [],
        [
            (run(A, on=BOTH), [FETCH]), (switch(A, on=BOTH), []),
            (laid_out(A), [StartWorker(worker(A, rank=rank), rank, switch(A, on=BOTH)) for rank in (0, 1)]),
        ],
    ),
    "a working directory serves the next version": (
        [*alive(), ended(), LogsStored(FIRST)],
        [(run(A, 3), [RemoveWorker(FIRST), StartWorker(NEW, 0, run(A, 3)), cleared(A, 3)])],
    ),
    "members on slots of other nodes are not started": (
        [ACROSS], [(laid_out(A), [StartWorker(worker(A, rank=1), 1, ACROSS)])],
    ),
    "a group on other nodes leads to nothing": ([], [(run(A, on=T0), [])]),
    "a started worker is reported and gets its order": (
        [run(A), laid_out(A)], [(Started(FIRST, 100, 7), [started(A, pid=100), OrderGroup(FIRST, run(A))])],
    ),
    "a worker starts once for each version": (
        [*alive(), ended(), LogsStored(FIRST)], [(switch(A), []), (settle(A), [cleared(A, 2)])],
    ),
    "a worker that cannot start is refused, removed and not tried again": (
        [run(A), laid_out(A)],
        [
            (StartFailed(FIRST, "no zygote", "install torch"), [refused(A, error="no zygote", hint="install torch"), RemoveWorker(FIRST)]),
            (switch(A), []),
        ],
    ),
    "a worker without a working directory is refused": (
        [run(A)], [(WorkspaceFailed(A, SNAPSHOT, "no snapshot"), [refused(A, error="no snapshot")]), (laid_out(A), [])],
    ),
    "a working directory that failed is fetched for the next version": (
        [run(A), WorkspaceFailed(A, SNAPSHOT, "no snapshot")], [(run(A, 3), [FETCH, cleared(A, 3)])],
    ),
}  # fmt: skip

DEVICES: Final[dict[str, Case]] = {
    "a worker starts beside the process before, and gets the device after its exit": (
        [*alive(A), stop(A, 2), run(B)],
        [
            (laid_out(B), [StartWorker(OF_B, 0, run(B), granted=False)]),
            (Started(OF_B, 101, 7), [started(B, pid=101), OrderGroup(OF_B, run(B))]),
            (Connected(OF_B), [OrderGroup(OF_B, run(B))]),
            (ended(A, code=15), [exited(A, code=15), GrantSlot(OF_B), cleared(A, 3)]),
        ],
    ),
    "a worker that is being started gets the device when it has started": (
        [*alive(A), stop(A, 2), run(B), laid_out(B), ended(A, code=15)],
        [(Started(OF_B, 101, 7), [started(B, pid=101), GrantSlot(OF_B), OrderGroup(OF_B, run(B))])],
    ),
    "the next version of a job gets the device after the one before": (
        alive(),
        [
            (run(A, 3), [Terminate(FIRST), StartWorker(NEW, 0, run(A, 3), granted=False)]),
            (Started(NEW, 101, 7), ...),
            (ended(code=0), [exited(A, code=0), GrantSlot(NEW), cleared(A, 3)]),
        ],
    ),
    "another slot is used at once": (
        [*alive(A), run(B, on=S1)], [(laid_out(B), [StartWorker(OF_B, 0, run(B, on=S1))])],
    ),
    "a failed start frees the device for the next worker": (
        [run(A), laid_out(A), stop(A, 2), run(B), laid_out(B), Started(OF_B, 101, 7)],
        [(StartFailed(FIRST, "no zygote"), [refused(A, error="no zygote"), RemoveWorker(FIRST), GrantSlot(OF_B), cleared(A, 3)])],
    ),
    "a worker that never had the device frees nothing": (
        [*alive(A), *alive(B), stop(B, 2), run(C), laid_out(C), Started(worker(C), 102, 7)],
        [(ended(B, code=15), [exited(B, code=15), cleared(B, 3)])],
    ),
    "a worker that connects again gets the device and the newest order again": (
        [*alive(), switch(A)], [(Connected(FIRST), [GrantSlot(FIRST), OrderGroup(FIRST, switch(A))])] * 2,
    ),
}  # fmt: skip

STOPS: Final[dict[str, Case]] = {
    "a worker is terminated, and killed after the grace period": (
        alive(),
        [(stop(A, 2), [Terminate(FIRST)]), (GraceOver(FIRST), [Kill(FIRST)]), (KILLED, [exited(A, signal=SIGKILL), cleared(A, 3)])],
    ),
    "a worker that stopped in time is not killed": (
        [*alive(), stop(A, 2), Ended(FIRST, None, SIGTERM, unseen=False)], [(GraceOver(FIRST), [])],
    ),
    "a worker is terminated once": ([*alive(), stop(A, 2)], [(stop(A, 3, forget=True), [])]),
    "a worker that is withdrawn while it starts is terminated afterwards": (
        [run(A), laid_out(A)], [(stop(A, 2), []), (Started(FIRST, 100, 7), [started(A, pid=100), Terminate(FIRST)])],
    ),
    "a worker that is withdrawn before its start clears the job": (
        [run(A)], [(stop(A, 2), [cleared(A, 3)]), (laid_out(A), [])],
    ),
    "a cleared job is reported once for each version": (
        [run(A), stop(A, 2)], [(laid_out(A), []), (stop(A, 2, term=2), []), (stop(A, 4), [cleared(A, 5)])],
    ),
    "a job with a process that is leaving is not cleared": (
        [*alive(), run(A, 3), Started(NEW, 101, 7)],
        [
            (stop(A, 4), [Terminate(NEW)]), (ended(code=0), [exited(A, code=0)]),
            (ended(A, 3, code=0), [exited(A, 3, code=0), cleared(A, 5)]),
        ],
    ),
    "a newcomer that is withdrawn before its start clears the job": (
        [*alive(), settle(A)],
        [
            (OTHER_SNAPSHOT, [OrderGroup(FIRST, OTHER_SNAPSHOT), FetchWorkspace(A, "6" * 64, "ann")]),
            (LEFT, [OrderGroup(FIRST, LEFT), cleared(A, 3)]), (WorkspaceReady(A, "6" * 64), []),
        ],
    ),
}  # fmt: skip

GROUPS: Final[dict[str, Case]] = {
    "each stage of a group is ordered once": (
        [*alive(), Connected(FIRST), ready(A)],
        [
            (switch(A), [OrderGroup(FIRST, switch(A))]), (formed(A), [formed(A)]),
            (settle(A), [OrderGroup(FIRST, settle(A)), cleared(A, 2)]), (settle(A, term=2), []),
        ],
    ),
    "a report that names another worker counts for its writer": (alive(), [(FORGED, [epoch_end(A, 777)])]),
    "a worker that starts after the order switches at once": (
        [switch(A), laid_out(A)], [(Started(FIRST, 100, 7), [started(A, pid=100), OrderGroup(FIRST, switch(A))])],
    ),
    "a worker that is to stop gets no order": (
        [*alive(), switch(A), stop(A, 2)], [(Connected(FIRST), [GrantSlot(FIRST)])],
    ),
    "incumbent and newcomer get the order to switch": (
        [*alive(), settle(A)],
        [
            (run(A, 2, **GROWS), [OrderGroup(FIRST, run(A, 2, **GROWS)), StartWorker(NEWCOMER, 1, run(A, 2, **GROWS))]),
            (Started(NEWCOMER, 101, 7), ...),
            (ORDER, [OrderGroup(FIRST, ORDER), OrderGroup(NEWCOMER, ORDER)]),
        ],
    ),
    "a member of an older version that failed to start is not started again": (
        [run(A, 1), laid_out(A), StartFailed(FIRST, "no zygote")],
        [(run(A, 2, **ONE_LEAVES | {"kind": RECOVER}), [cleared(A, 2)])],
    ),
    "a leaving worker gets the order and the grace period": (
        alive_on_both(),
        [
            (LEAVES, [OrderGroup(FIRST, LEAVES), OrderGroup(SECOND, LEAVES)]),
            (LEFT, [AwaitExit(SECOND), OrderGroup(FIRST, LEFT)]),
            (GraceOver(SECOND), [Terminate(SECOND)]), (GraceOver(SECOND), [Kill(SECOND)]),
            (Ended(SECOND, None, SIGKILL, unseen=False), [exited(A, rank=1, signal=SIGKILL), cleared(A, 3)]),
        ],
    ),
    "a worker that has left is neither terminated nor killed": (
        [*alive_on_both(), switch(A, 2, **ONE_LEAVES)],
        [(Ended(SECOND, 0, None, unseen=False), [exited(A, rank=1, code=0)]), (GraceOver(SECOND), [])],
    ),
    "a leaving worker that stays is an incumbent again": (
        [*alive_on_both(), switch(A, 2, former=LEAVER, **ONE_LEAVES)],
        [
            (KEPT, [OrderGroup(FIRST, KEPT), OrderGroup(SECOND, KEPT), cleared(A, 3)]),
            (switch(A, 3, on=BOTH, born=TWO), ...), (stop(A, 4), [Terminate(FIRST), Terminate(SECOND)]),
        ],
    ),
    "the members of a suspended group get the order": (
        alive(), [(SUSPENDS, [OrderGroup(FIRST, SUSPENDS), cleared(A, 2)]), (stop(A, 2), [AwaitExit(FIRST)])],
    ),
}  # fmt: skip

WARNING: Final = EndWarning(signal="USR2")
SOON_OVER: Final = replace(settle(A, 1), stage=WARNED)
SOON_OVER_WARNED: Final = replace(SOON_OVER, spec=replace(SOON_OVER.spec, warn=WARNING))
WARNS: Final[dict[str, Case]] = {
    "a worker is warned when its time is over soon, and again if it connects again": (
        alive(), [(SOON_OVER_WARNED, [Warn(FIRST, WARNING), cleared(A, 2)]), (SOON_OVER_WARNED, [])],
    ),
    "a job without a warning has no order for it": (alive(), [(SOON_OVER, [cleared(A, 2)])]),
}  # fmt: skip

ENDS: Final[dict[str, Case]] = {
    "reports are published as they are read, and the exit after them": (
        alive(),
        [
            *((one, [one]) for one in (ready(A), formed(A), epoch_end(A, 1), finished(A, index=4, reason="done"))),
            (ended(code=0), [exited(A, code=0)]), (ended(code=0), []),
        ],
    ),
    "an unseen exit is published as such": (alive(), [(ended(code=None), [exited(A)])]),
    "a folder is removed when its output is stored": (
        [*alive(), ended()], [(stop(A, 2), [cleared(A, 3)]), (LogsStored(FIRST), [RemoveWorker(FIRST)])],
    ),
    "a folder with stored output is removed when it is not wanted": (
        [*alive(), ended()], [(LogsStored(FIRST), []), (stop(A, 2), [RemoveWorker(FIRST), cleared(A, 3)])],
    ),
    "an ended job is forgotten when nothing of it is left": (
        [*alive(), ended()],
        [
            (stop(A, 2, forget=True), [cleared(A, 3)]), (LogsStored(FIRST), [RemoveWorker(FIRST), ForgetJob(A)]),
            (laid_out(A), []), (WorkspaceFailed(A, SNAPSHOT, "no"), []),
        ],
    ),
    "an unknown job is forgotten at once": ([], [(stop(A, 2, forget=True), [cleared(A, 3), ForgetJob(A)])]),
    "events of unknown workers change nothing": (
        [],
        [
            (event, [])
            for event in (
                Started(FIRST, 100, 7), StartFailed(FIRST, "no"), Connected(FIRST), ready(A), ended(),
                GraceOver(FIRST), LogsStored(FIRST), laid_out(A), WorkspaceFailed(A, SNAPSHOT, "no"),
            )
        ],
    ),
}  # fmt: skip

ADOPTED: Final[dict[str, Case]] = {
    "an adopted worker that is wanted continues": (
        [adopted(run(A))],
        [
            (settle(A), [OrderGroup(FIRST, settle(A)), cleared(A, 2)]), (formed(A), [formed(A)]),
            (ended(code=0), [exited(A, code=0)]),
        ],
    ),
    "an adopted worker that is not wanted is terminated": ([adopted(run(A))], [(stop(A, 2), [Terminate(FIRST)])]),
    "an adopted worker that was replaced keeps the device until its exit": (
        [adopted(run(A))],
        [
            (run(A, 3), [Terminate(FIRST), FETCH]), (laid_out(A), [StartWorker(NEW, 0, run(A, 3), granted=False)]),
            (Started(NEW, 101, 7), ...), (ended(code=15), [exited(A, code=15), GrantSlot(NEW), cleared(A, 3)]),
        ],
    ),
    "an adopted worker without a delta keeps its device": (
        [adopted(run(A)), run(B)],
        [
            (laid_out(B), [StartWorker(OF_B, 0, run(B), granted=False)]), (Started(OF_B, 101, 7), ...),
            (epoch_end(A, 1), [epoch_end(A, 1)]), (ended(), [exited(A, code=0), GrantSlot(OF_B)]),
        ],
    ),
    **{
        f"an adopted worker that was prepared beside another, adopted {place}, waits for the device": (
            both,
            [
                (Connected(OF_B), []), (run(B), [OrderGroup(OF_B, run(B))]), (stop(A, 2), ...),
                (ended(A, code=15), [exited(A, code=15), GrantSlot(OF_B), cleared(A, 3)]),
            ],
        )
        for place, both in (
            ("second", [adopted(run(A)), adopted(run(B), granted=False)]),
            ("first", [adopted(run(B), granted=False), adopted(run(A))]),
        )
    },
    "an adopted worker that is alone on its slot may have the device": (
        [adopted(run(A), granted=False), stop(A, 2), run(B)], [(laid_out(B), [StartWorker(OF_B, 0, run(B), granted=False)])],
    ),
    "an adopted worker that has exited is reported and not started again": (
        [adopted(run(A))], [(ended(), [exited(A, code=0)]), (settle(A), [cleared(A, 2)])],
    ),
}  # fmt: skip

SWEEPS: Final[dict[str, Case]] = {
    "a unit is sent once, and again when its worker connects": (
        alive(),
        [
            (units(unit(1)), [OrderUnit(FIRST, unit(1))]), (units(unit(1), revision=2), []),
            (Connected(FIRST), [GrantSlot(FIRST), OrderUnit(FIRST, unit(1)), OrderGroup(FIRST, run(A))]),
        ],
    ),
    "the next unit follows the end of the first": (
        TRAINS, [(DONE, [DONE]), (units(unit(3), revision=2), [OrderUnit(FIRST, unit(3))])],
    ),
    "a worker whose unit is withdrawn is killed": (TRAINS, [(units(revision=2, attempts=2), [Kill(FIRST)])]),
    "a worker whose unit is replaced is killed": (TRAINS, [(units(unit(2), revision=2), [Kill(FIRST)])]),
    "a worker whose unit is withdrawn before it began is killed": (
        [*alive(), units(unit(1))], [(units(revision=2, attempts=1), [Kill(FIRST)])],
    ),
    "a worker whose unit has ended is not killed": ([*TRAINS, DONE], [(units(revision=2, attempts=1), [])]),
    "a worker whose unit has failed is not killed": ([*TRAINS, FAILED], [(units(revision=2, attempts=1), [])]),
    "an order that is older than a unit does not withdraw it": ([*alive(), begun(7)], [(units(attempts=6), [])]),
    "an adopted worker keeps the unit that it reported": (
        [adopted(run(A)), settle(A), begun(4)],
        [(units(unit(4)), [OrderUnit(FIRST, unit(4))]), (units(revision=2, attempts=4), [Kill(FIRST)])],
    ),
    "a leaving worker ends its unit before the grace period": (
        LEAVES_TRAINING,
        [
            (SHRUNK, [OrderGroup(SECOND, SHRUNK)]), (DONE, [DONE, AwaitExit(FIRST)]),
            (GraceOver(FIRST), [Terminate(FIRST)]),
        ],
    ),
    "a leaving worker whose unit is withdrawn is killed": (
        [*LEAVES_TRAINING, SHRUNK], [(units(revision=2, attempts=1), [Kill(FIRST)])],
    ),
    "a cancelled job does not wait for units": (TRAINS, [(stop(A, 2), [Terminate(FIRST)])]),
    "a delta of a forgotten sweep only keeps states": (
        [*alive(), units(unit(1)), ended(), LogsStored(FIRST)],
        [(stop(A, 2, forget=True), [RemoveWorker(FIRST), cleared(A, 3), ForgetJob(A)]), (units(revision=9), [])],
    ),
    "units are sent to workers of their own": (
        alive_on_both(),
        [(units(unit(1), unit(2, SECOND)), [OrderUnit(FIRST, unit(1)), OrderUnit(SECOND, unit(2, SECOND))])],
    ),
}  # fmt: skip

CASES: Final = {**STARTS, **DEVICES, **STOPS, **GROUPS, **WARNS, **ENDS, **ADOPTED, **SWEEPS}


def event_of(given: Any) -> Event:
    match given:
        case GroupDelta():
            return Desired(given)
        case SweepDelta():
            return SweepDesired(given)
        case ScriptReport():
            return ReportRead(FIRST, given)  # type: ignore[arg-type]
    return given  # type: ignore[no-any-return]


@pytest.mark.parametrize(("before", "steps"), CASES.values(), ids=CASES)
def test_an_event_leads_to_these_actions(before: Sequence[Any], steps: list[Step]) -> None:
    reconciler = agent(*map(event_of, before))
    for number, (given, expected) in enumerate(steps, start=1):
        actions = reconciler.handle(event_of(given))
        if expected is not ...:
            kept = [KeepStates(given)] if isinstance(given, SweepDelta) else []
            found = [PublishEvent(one) if isinstance(one, Message) else one for one in expected]
            assert actions == [*kept, *found], f"step {number}"


def test_events_of_unknown_jobs_and_workers_leave_no_state() -> None:
    forgotten = (run(A), stop(A, 2, forget=True), laid_out(A), WorkspaceFailed(A, SNAPSHOT, "no"))
    unknown = (given for given, _ in ENDS["events of unknown workers change nothing"][1])

    for events in (forgotten, unknown):
        assert agent(*map(event_of, events)) == Reconciler(N1)


def test_a_paused_job_is_not_forgotten() -> None:
    reconciler = agent(*alive(), ended(), LogsStored(FIRST), Desired(stop(A, 2)))

    assert list(reconciler.jobs) == [A]


def test_an_ended_sweep_only_keeps_states_until_it_has_a_group() -> None:
    reconciler = agent()
    reconciler.forgotten.add(A)
    reconciler.handle(SweepDesired(units(unit(1))))
    assert reconciler.jobs == {}

    for event in alive():
        reconciler.handle(event)

    ordered = units(unit(1), revision=2)
    assert reconciler.handle(SweepDesired(ordered)) == [
        KeepStates(ordered),
        OrderUnit(FIRST, unit(1)),
    ]


def test_a_hello_names_every_process_that_was_started() -> None:
    reconciler = agent(
        *alive(A), *map(event_of, (run(B, on=S1), laid_out(B), run(JobId("c-3")), ended(A, code=3)))
    )

    assert agent().seen() == ()
    assert reconciler.seen() == (seen(A, pid=100, ended=True, code=3), seen(B, slot=1, pid=None))


# --- jobs of another journal


def test_a_delta_of_a_namesake_changes_nothing_and_its_worker_is_refused() -> None:
    reconciler = agent(*alive())
    before = reconciler.seen()
    stop_it = GroupDelta(
        job=A, term=Term(9), version=Version(1), stage=SETTLED, group=None, spec=None, journal="2"
    )

    assert reconciler.handle(Desired(stop_it)) == []
    (refused,) = reconciler.handle(Desired(replace(run(A, 1), journal="2")))

    assert isinstance(refused, PublishEvent)
    assert isinstance(refused.event, WorkerRefused)
    assert (refused.event.journal, refused.event.node_fault) == ("2", True)
    assert reconciler.seen() == before


def test_an_exit_is_reported_again_after_the_reports_before_it() -> None:
    reconciler = agent(*alive(), ended(code=3))

    again = reconciler.handle(ReportedAgain(FIRST))

    assert again == [
        PublishEvent(WorkerExited(job=A, version=Version(1), rank=Rank(0), code=3, signal=None))
    ]
