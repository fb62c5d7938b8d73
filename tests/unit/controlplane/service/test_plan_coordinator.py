"""Requests for plans, events for the policy, telemetry, and the expected start of waiting jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
import pytest
import structlog
import structlog.testing

from controlplane.core.history import Record
from controlplane.core.inputs import SchedulingPaused, SharingChanged
from controlplane.policy.api import JobEnded, Plan, PolicyEvent, Reason, StartForecast, StepsSeen
from controlplane.policy.min_slots import fallback_plan
from controlplane.service.api.replies import job_summary
from controlplane.service.planner.plan_coordinator import (
    COOLDOWN_RATIO,
    MAX_STARTS,
    PlanCoordinator,
    PolicyObserver,
    with_start_forecast,
)
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.epochs import StepTimes
from schemas.ids import JobId, Rank, Seconds, Version, slot_id
from schemas.sharing import Sharing
from schemas.wire.agent import StepsReported
from tests.support import builders
from tests.support.builders import N1, S0, A
from tests.support.controller import Controller, cluster_of, running, training


class Service:
    """A job that trains, its telemetry, and all that the policy hears."""

    def __init__(self) -> None:
        self.controller: Controller = running()
        self.telemetry = TelemetryTable()
        self.heard: list[type[PolicyEvent]] = []
        commit_loop = SimpleNamespace(
            committed=self.controller.reactor, now=lambda: Seconds(self.controller.now)
        )
        planner = SimpleNamespace(observe=lambda event, _: self.heard.append(type(event)))
        self.observer = PolicyObserver(
            cast("Any", commit_loop), cast("Any", planner), self.telemetry
        )

    def end(self) -> list[Record]:
        """The job ends; what that teaches has not been delivered."""
        self.controller.take(builders.cancelled(A))
        ended = self.controller.reactor.records
        self.controller.tell(N1, builders.exited(A, code=0))
        return ended + self.controller.reactor.records


def steps(step: int, *, job: JobId = A, group: int = 1) -> StepsReported:
    return StepsReported(
        job=job, version=Version(1), rank=Rank(0), group=Version(group), epoch=1, step=step,
        samples_done=step * 64, samples_per_s=100.0, train_loss=0.5, global_batch=64, lr=0.1,
        noise_scale=None,
    )  # fmt: skip


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_running_job_without_steps_for_a_minute_gets_a_note(service: Service) -> None:
    controller = service.controller

    def told(step: int, after_s: float) -> str:
        controller.now += after_s
        service.observer.steps_reported(steps(step))
        now = Seconds(controller.now)
        return job_summary(controller.job(A), None, service.telemetry, now).reason

    moves = told(5, 0.0)
    said = [told(5, 59.0), told(5, 121.0), told(6, 1.0)]

    stands = (
        "no step for 3 min: its script evaluates, waits or hangs, and changes of its slots wait "
        "for its next step; "
    )
    assert said == [moves, stands + moves, moves]


def test_a_resumed_job_is_not_reported_as_stuck(service: Service) -> None:
    controller = service.controller
    service.observer.steps_reported(steps(5))
    controller.now += 3600.0
    controller.job(A).accounting.since = Seconds(controller.now)

    summary = job_summary(controller.job(A), None, service.telemetry, Seconds(controller.now))

    assert not summary.reason.startswith("no step")


def test_the_latest_report_of_a_running_job_is_shown(service: Service) -> None:
    for report in (steps(5), steps(6), steps(9, group=0)):
        service.observer.steps_reported(report)

    assert service.telemetry.of(A) == steps(6)
    assert service.heard == [StepsSeen, StepsSeen]


def test_late_telemetry_of_an_ended_job_is_dropped(service: Service) -> None:
    service.observer.steps_reported(steps(5))
    ended = service.end()
    service.observer.steps_reported(steps(6))
    for record in ended:
        service.observer.recorded(record)
    service.observer.steps_reported(steps(7))

    assert service.telemetry.of(A) is None
    assert service.heard == [StepsSeen, JobEnded]


@pytest.mark.parametrize(
    ("nonsense", "problem"),
    [
        (
            {"cpu_cores": -2.0, "sent_bytes_per_s": 1e300},
            "cpu_cores -2 is not 0 to 65536; sent_bytes_per_s 1e+300 is not 0 to 1e+13",
        ),
        (
            {"step_times": StepTimes(1.0, 2.0, 64, 1), "cpu_cores": -2.0},
            "cpu_cores -2 is not 0 to 65536; sync_s 2 is not 0 to pass_s 1",
        ),
    ],
)
def test_implausible_telemetry_is_dropped_with_one_warning_for_each_job(
    service: Service, nonsense: dict[str, Any], problem: str
) -> None:
    report = msgspec.structs.replace(steps(5), **nonsense)
    with structlog.testing.capture_logs() as lines:
        service.observer.steps_reported(report)
        service.observer.steps_reported(report)

    event = {"log_level": "warning", "event": "implausible telemetry dropped"}
    assert lines == [{**event, "job": A, "rank": 0, "reason": problem}]
    assert service.heard == [StepsSeen, StepsSeen]


def test_telemetry_of_an_unknown_job_is_dropped(service: Service) -> None:
    service.observer.steps_reported(steps(5, job=JobId("z-9")))

    assert service.telemetry.of(JobId("z-9")) is None
    assert service.heard == []


class Planner:
    """Takes so many seconds of a clock for an answer."""

    busy = True  # it needs no view

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.clock = 100.0
        self.asked: list[float] = []  # of the loop
        self.news = asyncio.Event()

    def request_plan(self, _: float = 0.0) -> None:
        self.clock += self.took_s
        self.asked.append(asyncio.get_running_loop().time())
        self.news.set()

    async def next(self) -> None:
        """When it was asked once more."""
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), 60.0)


def coordinator_of(planner: Planner) -> PlanCoordinator:
    reactor = SimpleNamespace(rigid_views=list, refresh_views=tuple)
    commit_loop = SimpleNamespace(reactor=reactor, now=lambda: Seconds(0.0))
    coordinator = PlanCoordinator(cast("Any", commit_loop), clock=lambda: planner.clock)
    coordinator.planner = cast("Any", planner)
    return coordinator


async def test_events_of_a_moment_cause_a_single_request() -> None:
    planner = Planner(0.001)
    coordinator = coordinator_of(planner)

    for _ in range(3):
        coordinator.request_plan()
    await planner.next()

    assert len(planner.asked) == 1


async def test_a_slow_planner_is_asked_again_after_a_pause() -> None:
    planner = Planner(0.02)
    coordinator = coordinator_of(planner)

    for _ in range(2):
        coordinator.request_plan()
        await planner.next()

    assert planner.asked[1] - planner.asked[0] >= COOLDOWN_RATIO * 0.02


async def test_a_request_during_a_plan_is_served_after_the_pause_too() -> None:
    planner = Planner(0.02)
    coordinator = coordinator_of(planner)
    ask = planner.request_plan

    def ask_and_request(*_: float) -> None:
        ask()
        if len(planner.asked) == 1:
            coordinator.request_plan()

    cast("Any", planner).request_plan = ask_and_request
    coordinator.request_plan()
    await planner.next()
    await planner.next()

    assert planner.asked[1] - planner.asked[0] >= COOLDOWN_RATIO * 0.02


async def test_a_policy_sees_the_cluster_as_it_is_divided_and_its_plans_get_the_reasons() -> None:
    controller = cluster_of(n1=2)
    controller.take(SharingChanged(sharing=Sharing()))
    for user in ("ann", "ann", "bob"):
        controller.submit("a", user=user)
    loop = SimpleNamespace(
        reactor=controller.reactor,
        now=lambda: Seconds(controller.now),
        handle=controller.take,
        is_torn=False,
    )
    plans = PlanCoordinator(cast("Any", loop))
    view, now = plans.view_now()
    planner = Planner(0.0)
    plans.planner = cast("Any", SimpleNamespace(observe=lambda *_: None, request_plan=planner))

    plans.propose(fallback_plan(view, now), None)
    while plans.plan_requested:
        await asyncio.sleep(0.0)

    starting = [job.job for job in controller.state.jobs.values() if job.group is not None]
    assert starting == ["a-1", "a-3"]
    assert plans.reason(JobId("a-2")) == Reason(
        "budget",
        "waits: user ann has 0 of its 1 slot; user bob wants the rest",
        {"account_slots": 0.0, "account_budget": 1.0, "slots_now": 0.0, "slots_then": 0.0},
    )


WAITS = Reason("waits", "waits for 1 slot", {"needs": 1.0})
SAID = StartForecast(at=Seconds(400.0), earliest=Seconds(220.0), latest=Seconds(100.0 + 7200.0))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (100.0, "expected to start in 5.0 min (80%: 2.0 min to 2.0 h)"),
        (390.0, "expected to start in 10 s (80%: 0 s to 1.9 h)"),
        (8000.0, "expected to start at any moment"),
    ],
)
def test_a_reason_includes_the_expected_start(now: float, words: str) -> None:
    found = with_start_forecast(WAITS, SAID, Seconds(now))

    assert found == Reason(
        "waits",
        f"waits for 1 slot; {words}",
        {
            "needs": 1.0,
            "start_s": max(0.0, 400.0 - now),
            "start_earliest_s": max(0.0, 220.0 - now),
            "start_latest_s": max(0.0, 7300.0 - now),
        },
    )


PROGRAM: Final = {
    "kind": "torchrun", "command": ("python", "train.py"), "slots": 1, "script": "", "batch_size": 1
}  # fmt: skip


ROW: Final = (S0, slot_id(N1, 1))


class Crowded:
    """A cluster where programs wait, and a coordinator whose every look at the clock takes 1 ms."""

    def __init__(self, programs: int) -> None:
        self.controller = cluster_of(n1=programs)
        for _ in range(programs):
            self.controller.submit("p", **PROGRAM)
        self.taken: list[Plan] = []
        self._clock = 0.0
        loop = SimpleNamespace(
            reactor=self.controller.reactor,
            now=lambda: Seconds(self.controller.now),
            handle=self._handle,
            is_torn=False,
        )
        self.plans = PlanCoordinator(cast("Any", loop), clock=self._tick)
        planner = SimpleNamespace(
            busy=True,
            request_plan=lambda *_: None,
            observe=lambda *_: None,
            run=asyncio.Event().wait,
        )
        self.plans.use(cast("Any", planner), gangs=False)

    def _tick(self) -> float:
        self._clock += 0.001
        return self._clock

    def _handle(self, event: Any) -> None:
        self.taken.append(event.plan)
        self.controller.take(event)

    async def turns(self) -> int:
        """The number of turns of the loop until nothing is left to do."""
        count = 0
        while self.plans.plan_requested:
            count += 1
            await asyncio.sleep(0.0)
        return count

    @property
    def running(self) -> list[JobId]:
        return [job.job for job in self.controller.state.jobs.values() if job.group is not None]


async def test_programs_start_in_parts_and_the_loop_turns_meanwhile() -> None:
    crowded = Crowded(MAX_STARTS * 2 + 3)

    crowded.plans.request_plan()
    turns = await crowded.turns()

    assert [len(plan.local_batch) for plan in crowded.taken] == [MAX_STARTS, MAX_STARTS, 3]
    assert turns > MAX_STARTS * 2
    assert len(crowded.running) == MAX_STARTS * 2 + 3


async def requests_if_cancelled(turn: int) -> int:
    """The number of requests for plans if a program is cancelled after so many turns, or 0."""
    crowded, asked = Crowded(3), list[None]()
    cast("Any", crowded.plans.planner).request_plan = lambda *_: asked.append(None)
    crowded.plans.request_plan()
    for _ in range(turn):
        await asyncio.sleep(0.0)
    if crowded.running:
        return 0
    crowded.controller.take(builders.cancelled(JobId("p-2")))
    await crowded.turns()

    assert crowded.running == ["p-1", "p-3"]
    return len(asked)


async def test_a_decision_about_a_program_that_is_cancelled_meanwhile_is_made_again() -> None:
    found = [await requests_if_cancelled(turn) for turn in range(60)]

    assert sorted(found, key=[1, 2, 0].index) == found  # cancelled before, meanwhile, or after
    assert {*found} == {0, 1, 2}


async def test_a_view_that_is_asked_for_meanwhile_is_the_latest_one() -> None:
    crowded = Crowded(0)
    crowded.controller.take(SharingChanged(sharing=Sharing()))
    before, _ = crowded.plans.view_now()
    for user in ("ann", "bob"):
        crowded.controller.submit("a", user=user)
    cast("Any", crowded.plans.planner).busy = False

    crowded.plans.request_plan()
    while not crowded.plans._viewing:
        await asyncio.sleep(0.0)
    meanwhile, _ = crowded.plans.view_now()
    await crowded.turns()
    after, _ = crowded.plans.view_now()

    assert meanwhile is before
    assert list(after.jobs) == ["a-1", "a-2"]


async def test_work_that_is_left_ends_with_the_planner() -> None:
    crowded = Crowded(MAX_STARTS)
    running = asyncio.create_task(crowded.plans.run())
    crowded.plans.request_plan()
    while crowded.plans._serving is None:
        await asyncio.sleep(0.0)

    running.cancel()
    await asyncio.wait({running})
    await crowded.turns()

    assert crowded.running == []


@contextmanager
def failing(crowded: Crowded) -> Iterator[None]:
    """No input can be handled meanwhile."""
    loop: Any = crowded.plans._commit_loop
    handle, loop.handle = loop.handle, None
    yield
    loop.handle = handle


async def test_a_failed_plan_is_told_and_the_next_one_is_made() -> None:
    crowded = Crowded(1)

    with failing(crowded), structlog.testing.capture_logs() as lines:
        crowded.plans.request_plan()
        await crowded.turns()
    crowded.plans.request_plan()
    await crowded.turns()

    assert [line["event"] for line in lines] == ["plan failed"]
    assert crowded.running == ["p-1"]


async def test_a_plan_that_tears_the_state_ends_the_daemon() -> None:
    crowded = Crowded(1)
    cast("Any", crowded.plans._commit_loop).is_torn = True
    running = asyncio.create_task(crowded.plans.run())

    with failing(crowded):
        crowded.plans.request_plan()
        await asyncio.wait({running}, timeout=60.0)

    assert isinstance(running.exception(), TypeError)


async def test_work_that_ends_before_it_begins_is_done_when_the_planner_runs_again() -> None:
    crowded = Crowded(1)
    crowded.plans._request_now()
    await crowded.plans._end_work()

    running = asyncio.create_task(crowded.plans.run())
    await asyncio.sleep(0.0)
    await crowded.turns()
    running.cancel()
    await asyncio.wait({running})

    assert crowded.running == ["p-1"]


async def test_plans_that_keep_coming_delay_no_request() -> None:
    crowded = Crowded(1)
    crowded.plans._next_request_at = asyncio.get_running_loop().time() + 0.02
    crowded.plans.request_plan()
    plan = fallback_plan(*crowded.plans.view_now())

    while not crowded.running:
        crowded.plans.propose(plan, None)
        await asyncio.sleep(0.001)

    assert crowded.plans._next_request_at > asyncio.get_running_loop().time() + 0.02


async def test_while_scheduling_is_paused_nothing_is_decided_again_or_journalled() -> None:
    found = [await requests_if_paused(turn) for turn in range(30)]

    assert {*found} == {1}


async def requests_if_paused(turn: int) -> int:
    """The number of requests if a job is submitted after so many turns of a decision."""
    crowded, asked = Crowded(2), list[None]()
    cast("Any", crowded.plans.planner).request_plan = lambda *_: asked.append(None)
    crowded.controller.take(SchedulingPaused(paused=True, user="root"))
    crowded.plans.request_plan()
    for _ in range(turn):
        await asyncio.sleep(0.0)
    crowded.controller.submit("late")
    await crowded.turns()

    assert (crowded.taken, crowded.running) == ([], [])
    return len(asked)


async def slots_of_an_elastic_job(turn: int) -> int:
    """Its slots, if the program that needs one of them is cancelled after so many turns."""
    crowded = Crowded(0)
    controller = crowded.controller = training(cluster_of(n1=2), *ROW)
    cast("Any", crowded.plans._commit_loop).reactor = controller.reactor
    controller.submit("p", **PROGRAM)
    crowded.plans.request_plan()
    for _ in range(turn):
        await asyncio.sleep(0.0)
    if crowded.taken:
        return 0
    controller.take(builders.cancelled(JobId("p-2")))
    await crowded.turns()

    return min((len(plan.local_batch.get(A, ROW)) for plan in crowded.taken), default=len(ROW))


async def test_a_job_gives_up_no_slot_for_a_program_that_is_cancelled_meanwhile() -> None:
    found = [await slots_of_an_elastic_job(turn) for turn in range(60)]

    assert {*found} == {len(ROW), 0}
