"""Connection between the commit loop and the planner, in both directions.

`PlanCoordinator` requests plans when the core needs one, and accepts them. `PolicyObserver`
passes records of the core and telemetry to the policy. `make_planner` builds the planner that the
settings select.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import structlog

from controlplane.core import policy_events
from controlplane.core.history import Record
from controlplane.core.inputs import PlanProposed, PolicyChosen
from controlplane.core.model.job_phases import HOLDING
from controlplane.core.model.report_bounds import times_problem, usage_problem
from controlplane.core.plan_check import difference
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
        self.plan_requested = False  # True while a request is scheduled
        self._clock = clock
        self._next_request_at = 0.0  # event loop time; earlier requests wait until then
        self._reasons: dict[JobId, Reason] = {}  # of waiting jobs, from the latest plan
        self._starts: Mapping[JobId, StartForecast] = {}  # from the latest plan
        self.latest: Plan | None = None  # complete plan, taken or not
        self.latest_at: Seconds | None = None
        self.predicted_loss: Mapping[JobId, float] = {}  # from the latest plan

    def use(self, planner: Planner, *, gangs: bool) -> None:
        """Exchange the planner. Its first plan changes running jobs only where it differs."""
        self.planner = planner
        self._cycle.use(gangs=gangs)
        self._exchanged.set()

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass an event to the policy."""
        if self.planner is not None:
            self.planner.observe(event, now)

    async def run(self) -> None:
        """Run the planner, and each one that replaces it, until cancelled."""
        while self.planner is not None:
            self._exchanged.clear()
            serving = asyncio.create_task(self.planner.run())
            exchanged = asyncio.create_task(self._exchanged.wait())
            try:
                done, _ = await asyncio.wait(
                    {serving, exchanged}, return_when=asyncio.FIRST_COMPLETED
                )
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
        if self.plan_requested:
            return
        self.plan_requested = True
        if self._next_request_at > self._loop.time():
            self._loop.call_at(self._next_request_at, self._request_now)
        else:
            self._loop.call_soon(self._request_now)

    def _request_now(self) -> None:
        self.plan_requested = False
        if self.planner is not None:
            began = self._clock()
            self._serve_claims()
            self.planner.request_plan()
            took_s = self._clock() - began
            self._next_request_at = self._loop.time() + COOLDOWN_RATIO * took_s

    def _serve_claims(self) -> None:
        """Start rigid jobs, and take slots for them, without waiting for the policy."""
        commit_loop = self._commit_loop
        now = commit_loop.now()
        plan = self._cycle.serve_claims(now)
        self._wake_at(plan.wake_at, now)
        if plan.empty:
            return
        changes = difference(plan, commit_loop.reactor.state, now, whole=False)
        if not changes.empty:
            commit_loop.handle(PlanProposed(plan=changes, stats=None))

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
        """Return the view of the current state that the policy should see, and the time."""
        now = self._commit_loop.now()
        return self._cycle.view(now), now

    def propose(self, plan: Plan, stats: SearchStats | None, /, *, complete: bool = True) -> None:
        """Accept a plan if it changes anything. Only the changes are written to the journal.

        `stats` is None if no search made the plan. If `complete` is True, running jobs that the
        plan omits are stopped. Otherwise they continue.
        """
        began = self._clock()
        self._accept(plan, stats, complete=complete)
        pause_s = COOLDOWN_RATIO * (self._clock() - began)
        self._next_request_at = max(self._next_request_at, self._loop.time()) + pause_s

    def _accept(self, plan: Plan, stats: SearchStats | None, *, complete: bool) -> None:
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
        self._commit_loop.handle(PlanProposed(plan=changes, stats=stats))
        if self.planner is not None:
            jobs = map(state.jobs.__getitem__, state.active)
            waiting = [job.job for job in jobs if job.phase not in HOLDING and not job.withheld]
            slots = {name: tuple(placed) for name, placed in changes.local_batch.items()}
            self.planner.observe(PlanTaken(waiting=tuple(waiting), slots=slots), now)
