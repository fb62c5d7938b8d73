"""Connection between the commit loop and the planner, in both directions.

`PlanCoordinator` requests plans when the core needs one, and accepts them. `PolicyObserver`
passes records of the core and telemetry to the policy. `make_planner` builds the planner that the
settings select.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog

from controlplane.core import policy_events
from controlplane.core.history import Record
from controlplane.core.inputs import PlanProposed, PolicyChosen
from controlplane.core.model.job_phases import HOLDING
from controlplane.core.model.report_bounds import times_problem, usage_problem
from controlplane.core.plan_check import difference, in_parts
from controlplane.core.plan_cycle import PlanCycle
from controlplane.policy.api import (
    ClusterView,
    JobEnded,
    Plan,
    PlanTaken,
    PolicyEvent,
    Reason,
    SearchStats,
    StartForecast,
)
from controlplane.policy.registry import make
from controlplane.policy.sharing.start_times import Present
from controlplane.policy.sharing.turns import Turns, at_once
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.planner.planner import InlinePlanner, Planner, ProposePlan, ViewNow
from controlplane.service.planner.policy_check import CheckedPolicy
from controlplane.service.planner.search_planner import SearchPlanner
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import JobId, Seconds
from schemas.jobs import JobSpec
from schemas.wire.agent import StepsReported, WorkerStalled, WorkerUsed

log = structlog.get_logger("policy_event_delivery")


@dataclass(eq=False)
class PolicyObserver:
    """Passes events to the planner, and worker reports to the telemetry table."""

    commit_loop: CommitLoop
    planner: Planner | PlanCoordinator
    telemetry: TelemetryTable
    _warned: set[JobId] = field(default_factory=set)  # jobs with logged implausible telemetry

    def recorded(self, record: Record) -> None:
        """Pass a record's policy event, if any, to the planner. Drop telemetry of an ended job."""
        event = policy_events.event_of_record(record, self.commit_loop.committed.state)
        if event is not None:
            self.planner.observe(event, self.commit_loop.now())
        if isinstance(event, JobEnded):
            self.telemetry.forget(event.job)
            self._warned.discard(event.job)

    def steps_reported(self, steps: StepsReported) -> None:
        """Record the telemetry that rank 0 of a group sends about once a second.

        A report that arrives after the end of its job is ignored.
        """
        state = self.commit_loop.committed.state
        job = state.jobs.get(steps.job)
        if job is None or job.ended:
            return
        self.telemetry.take(steps, self.commit_loop.now())
        dropped = (usage_problem(steps), times_problem(steps))
        reason = "; ".join(filter(None, dropped))
        if reason and job.job not in self._warned:
            self._warned.add(job.job)
            log.warning(
                "implausible telemetry dropped", job=job.job, rank=steps.rank, reason=reason
            )
        event = policy_events.event_of_steps(steps, state)
        if event is not None:
            self.planner.observe(event, self.commit_loop.now())

    def stall_reported(self, report: WorkerStalled) -> None:
        """Record that a worker makes no step. Ignore a report that arrives after its job's end."""
        job = self.commit_loop.committed.state.jobs.get(report.job)
        if job is not None and not job.ended:
            self.telemetry.take_stall(report, self.commit_loop.now())

    def usage_reported(self, used: WorkerUsed) -> None:
        """Record what a worker uses. Ignore a report that arrives after its job's end."""
        job = self.commit_loop.committed.state.jobs.get(used.job)
        if job is not None and not job.ended:
            self.telemetry.take_usage(used, self.commit_loop.now())


def make_planner(
    choice: PolicyChosen,
    checked: CheckedPolicy,
    *,
    history: Callable[[], list[tuple[Seconds, PolicyEvent]]],
    view_now: ViewNow,
    propose: ProposePlan,
    request_again: Callable[[], None],
    code: Path | None = None,
) -> Planner:
    """Return a planner of a policy that `check_policy` accepted.

    A fast policy of this package runs in this process, any other one in a child process. A new
    policy first observes the events that `history` returns, oldest first. The child runs `code`, a
    zip file, or the installed code if `code` is None.
    """
    if not checked.apart:
        policy = make(choice.name, choice.options)
        for at, event in history():
            policy.observe(event, at)
        return InlinePlanner(policy, view_now, propose)
    seed = choice.options.get("seed", 0)
    return SearchPlanner(
        policy=choice.name,
        options=choice.options,
        seed=seed if isinstance(seed, int) and seed >= 0 else 0,
        admits="utility" in checked.needs,
        history=history,
        view_now=view_now,
        propose=propose,
        request_again=request_again,
        code=code,
    )


MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
DECIMAL_LIMIT: Final = 10.0  # minutes or hours; longer durations are shown without decimals


def with_start_forecast(reason: Reason, start: StartForecast, now: Seconds) -> Reason:
    """Add the expected start time of a waiting job to the reason why the job waits.

    The numbers of the reason get `start_s`, `start_earliest_s` and `start_latest_s`, in seconds
    from `now`. 80% of all starts should be between the last two. Times in the past become 0.
    """
    middle, low, high = (max(0.0, at - now) for at in (start.at, start.earliest, start.latest))
    numbers = {"start_s": middle, "start_earliest_s": low, "start_latest_s": high}
    if high <= 0.0:
        words = "expected to start at any moment"
    else:
        most_likely, first, last = map(_format_duration, (middle, low, high))
        words = f"expected to start in {most_likely} (80%: {first} to {last})"
    return msgspec.structs.replace(
        reason, text=f"{reason.text}; {words}", numbers={**reason.numbers, **numbers}
    )


def _format_duration(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    value, unit = (seconds / MINUTE_S, "min") if seconds < HOUR_S else (seconds / HOUR_S, "h")
    return f"{value:.0f} {unit}" if value >= DECIMAL_LIMIT else f"{value:.1f} {unit}"


COOLDOWN_RATIO: Final = 4.0  # pause after a plan, as a multiple of its time in this process
TURN_S: Final = 0.002  # after which a plan gives way to other work of the event loop
MAX_STARTS: Final = 16  # jobs that one input starts
T = TypeVar("T")


class PlanCoordinator:
    """Coordinator that requests one plan for all events of a moment, and accepts proposals.

    `gangs` is True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(
        self,
        commit_loop: CommitLoop,
        clock: Callable[[], float] = time.perf_counter,
        *,
        gangs: bool = False,
    ) -> None:
        self._commit_loop = commit_loop
        self._cycle = PlanCycle(lambda: commit_loop.reactor, gangs=gangs)
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.TimerHandle | None = None  # timer of the next `wake_at`
        self.planner: Planner | None = None
        self._exchanged = asyncio.Event()
        self._requested = False  # True while a request waits
        self._timer: asyncio.Handle | None = None  # of the request
        self._clock = clock
        self._next_request_at = 0.0  # event loop time; earlier requests wait until then
        self._works: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._serving: asyncio.Task[None] | None = None  # serves `_works`
        self._spent_s, self._resumed_at = 0.0, 0.0  # of the present work, before and since a pause
        self._interrupted = False  # True: `run` ended while there was work
        self._fatal: Exception | None = None  # after which the state must not be used
        # Latest view for the policy, with its time.
        self._view = ClusterView(version=0, slots=(), jobs={}), Seconds(0.0)
        self._viewing = False  # True while the next view is made
        self._reasons: dict[JobId, Reason] = {}  # of waiting jobs, from the latest plan
        self._starts: Mapping[JobId, StartForecast] = {}  # from the latest plan
        self.latest: Plan | None = None  # complete plan, taken or not
        self.latest_at: Seconds | None = None
        self.predicted_loss: Mapping[JobId, float] = {}  # from the latest plan

    def use(self, planner: Planner, *, gangs: bool) -> None:
        """Exchange the planner. Its first plan changes running jobs only where it differs.

        Plans of the former planner that are not accepted yet are dropped.
        """
        if self._works:
            self._works.clear()
            self.request_plan()
        self.planner = planner
        self._cycle.use(gangs=gangs)
        self._exchanged.set()

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass an event to the policy."""
        if self.planner is not None:
            self.planner.observe(event, now)

    async def run(self) -> None:
        """Run the planner, and each one that replaces it, until cancelled."""
        try:
            if self._interrupted:
                self.request_plan()
            while self.planner is not None:
                await self._run_one(self.planner)
        finally:
            await self._end_work()

    async def _end_work(self) -> None:
        self._interrupted = self._serving is not None
        self._works.clear()
        if (serving := self._serving) is not None:
            serving.cancel()
            await asyncio.wait({serving})
            self._serving = None  # also if it had not begun

    async def _run_one(self, planner: Planner) -> None:
        self._exchanged.clear()
        serving = asyncio.create_task(planner.run())
        exchanged = asyncio.create_task(self._exchanged.wait())
        try:
            done, _ = await asyncio.wait({serving, exchanged}, return_when=asyncio.FIRST_COMPLETED)
            if (fatal := self._fatal) is not None:
                self._fatal = None
                raise fatal
            if exchanged not in done:
                serving.result()
        finally:
            serving.cancel()
            exchanged.cancel()
            await asyncio.wait({serving, exchanged})

    def request_plan(self) -> None:
        """Request a plan once all events of this moment have been handled.

        After a plan the next request is delayed, so that the event loop can do other work. When a
        thousand nodes reconnect, for example, each of them requests a plan.
        """
        if not self._requested:
            self._requested = True
            if self._serving is None:  # else the pause after the present work comes first
                self._schedule_request()

    @property
    def plan_requested(self) -> bool:
        """True while a request waits or is served, or a plan is accepted."""
        return self._requested or self._serving is not None

    def _schedule_request(self) -> None:
        """Serve the request after the pause. Plans that come before do not delay it any more."""
        if self._next_request_at > self._loop.time():
            self._timer = self._loop.call_at(self._next_request_at, self._request_now)
        else:
            self._timer = self._loop.call_soon(self._request_now)

    def _request_now(self) -> None:
        self._requested, self._timer = False, None
        self._begin(self._serve_request)

    async def _serve_request(self) -> None:
        await self._serve_claims()
        planner = self.planner
        if planner is None:
            return
        if planner.busy:
            planner.request_plan()
            return
        began, now = self._used_s(), self._commit_loop.now()
        self._viewing = True
        try:
            self._view = await self._in_turns(self._cycle.view(now)), now
            if planner is self.planner:
                planner.request_plan(self._used_s() - began)
            else:
                self.request_plan()
        finally:
            self._viewing = False

    async def _serve_claims(self) -> None:
        """Start rigid jobs, and take slots for them, without waiting for the policy."""
        plan = await self._in_turns(self._cycle.serve_claims(self._commit_loop.now()))
        now = self._commit_loop.now()
        self._wake_at(plan.wake_at, now)
        if plan.empty:
            return
        changes, is_outdated = self._cycle.changes_for_claims(now)
        if is_outdated:
            self.request_plan()
        if not changes.empty:
            await self._propose(changes, None)

    async def _propose(self, changes: Plan, stats: SearchStats | None) -> None:
        """Carry out a plan in parts, because thousands of starts in one input would take long."""
        later = len(changes.local_batch)
        for part in in_parts(changes, self._commit_loop.reactor.state, MAX_STARTS):
            later -= len(part.local_batch)
            announced = 0 if stats is None else later
            self._commit_loop.handle(PlanProposed(plan=part, stats=stats, later=announced))
            stats = None
            if self._is_turn_over():
                await self._pause()

    # --- work that gives way to other work of the event loop

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` after all work that was begun earlier."""
        self._works.append(work)
        if self._serving is None:
            self._serving = self._loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._works:
                work = self._works.popleft()
                self._spent_s, self._resumed_at = 0.0, self._clock()
                try:
                    await work()
                except Exception as error:
                    if self._commit_loop.is_torn:
                        self._fatal = error
                        self._exchanged.set()
                        return
                    log.exception("plan failed")  # the next request begins anew
                now, pause_s = self._loop.time(), COOLDOWN_RATIO * self._used_s()
                # The pauses of many plans must not add up over several requests.
                earliest = now if work == self._serve_request else max(self._next_request_at, now)
                self._next_request_at = earliest + pause_s
        finally:
            self._serving = None
            if self._requested and self._timer is None:
                self._schedule_request()

    def _used_s(self) -> float:
        """Return the time that the present work has taken, without its pauses."""
        return self._spent_s + self._clock() - self._resumed_at

    def _is_turn_over(self) -> bool:
        return self._clock() - self._resumed_at >= TURN_S

    async def _pause(self) -> None:
        """Let the event loop do other work."""
        self._spent_s = self._used_s()
        await asyncio.sleep(0.0)
        self._resumed_at = self._clock()

    async def _in_turns(self, work: Turns[T]) -> T:
        """Return the result of a computation, with pauses."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            if self._is_turn_over():
                await self._pause()

    def _wake_at(self, at: Seconds | None, now: Seconds) -> None:
        """Request a plan at this time, unless an earlier request is scheduled."""
        if at is None or not math.isfinite(at):
            return
        when = self._loop.time() + max(0.05, at - now)
        if self._wake is not None and self._loop.time() < self._wake.when() <= when:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(when, self.request_plan)

    def reason(self, job: JobId) -> Reason | None:
        """Return why a job waits and when it should start. Return None if it does not wait."""
        if paused := self._commit_loop.reactor.state.scheduling_paused:
            return Reason("paused_scheduling", f"scheduling is {paused}")
        if (reason := self._cycle.claim_reasons.get(job)) is not None:
            return reason
        reason, start = self._reasons.get(job), self._starts.get(job)
        if reason is None or start is None:
            return reason
        return with_start_forecast(reason, start, self._commit_loop.now())

    def present_with(self, spec: JobSpec, user: str, project: str) -> Present:
        """Return the present state with a job that is not submitted, to predict its start."""
        return self._cycle.present_with(spec, user, project, self._commit_loop.now())

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most slots of each account that is bounded now."""
        return self._cycle.budgets

    def view_now(self) -> tuple[ClusterView, Seconds]:
        """Return a view for the policy, and its time. It is older while another one is made."""
        if not self._viewing:
            now = self._commit_loop.now()
            self._view = at_once(self._cycle.view(now)), now
        return self._view

    def propose(self, plan: Plan, stats: SearchStats | None, /, *, complete: bool = True) -> None:
        """Accept a plan if it changes anything. Only the changes are written to the journal.

        `stats` is None if no search made the plan. If `complete` is True, running jobs that the
        plan omits are stopped. Otherwise they continue.
        """
        self._begin(partial(self._accept, plan, stats, complete=complete))

    async def _accept(self, plan: Plan, stats: SearchStats | None, *, complete: bool) -> None:
        now, state = self._commit_loop.now(), self._commit_loop.reactor.state
        plan = self._cycle.merged(plan)
        if complete:
            self.latest, self.latest_at = plan, now
            self._reasons, self._starts = plan.reasons, plan.starts
            self.predicted_loss = plan.predicted_loss
        self._wake_at(plan.wake_at, now)
        began = self._clock()
        changes = difference(plan, state, now, whole=complete)
        if changes.empty:
            return
        if stats is not None:
            check_ms = (self._clock() - began) * 1000.0
            stats = msgspec.structs.replace(stats, check_ms=check_ms)
        await self._propose(changes, stats)
        if self.planner is not None:
            state = self._commit_loop.reactor.state
            jobs = map(state.jobs.__getitem__, state.active)
            waiting = [job.job for job in jobs if job.phase not in HOLDING and not job.withheld]
            slots = {name: tuple(placed) for name, placed in changes.local_batch.items()}
            self.planner.observe(PlanTaken(waiting=tuple(waiting), slots=slots), now)
