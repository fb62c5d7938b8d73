"""Between commit loop and planner: asks when the core wants a plan, and takes plans in.

What the policy learns while jobs run: from records of the core, and from telemetry.

Which planner the settings ask for.

When a waiting job is expected to start, from now on: plans say it by the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog

from controlplane.core import policy_events
from controlplane.core.history import Record
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job_phases import HOLDING
from controlplane.core.model.report_bounds import unbelievable_passes, unbelievable_usage
from controlplane.core.plan_check import difference
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
from controlplane.policy.registry import check_for_cluster, check_options, entry, make
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.planner.planner import InlinePlanner, Planner, Propose, ViewNow
from controlplane.service.planner.search_planner import SearchPlanner
from controlplane.service.settings import PolicyChoice
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import JobId, Seconds
from schemas.wire.agent import StepsReported

log = structlog.get_logger("policy_event_delivery")


class PolicyObserver:
    """Tells the planner what happened, and the telemetry table what workers report.

    Args:
        commit_loop: its state says which job an event is about, its clock when it was.
        telemetry: holds the latest report of each job.
    """

    def __init__(
        self, commit_loop: CommitLoop, planner: Planner, telemetry: TelemetryTable
    ) -> None:
        self._commit_loop = commit_loop
        self._planner = planner
        self._telemetry = telemetry
        self._warned: set[JobId] = set()  # of figures that make no sense: once for each job

    def recorded(self, record: Record) -> None:
        """Tell the policy what a record teaches; of an ended job nothing more is shown.

        Args:
            record: of the input that was committed last; most teach nothing.
        """
        learnt = policy_events.of_record(record, self._commit_loop.committed.state)
        if learnt is not None:
            self._planner.observe(learnt, self._commit_loop.now())
        if isinstance(learnt, JobEnded):
            self._telemetry.forget(learnt.job)
            self._warned.discard(learnt.job)

    def steps_reported(self, steps: StepsReported) -> None:
        """Take telemetry of a running job; what arrives after its job's end is passed over.

        Args:
            steps: of a group's rank 0, about once a second.
        """
        state = self._commit_loop.committed.state
        job = state.jobs.get(steps.job)
        if job is None or job.ended:
            return
        self._telemetry.take(steps, self._commit_loop.now())
        dropped = (unbelievable_usage(steps), unbelievable_passes(steps))
        reason = "; ".join(filter(None, dropped))
        if reason and job.job not in self._warned:
            self._warned.add(job.job)
            log.warning("figures dropped", job=job.job, rank=steps.rank, reason=reason)
        learnt = policy_events.of_steps(steps, state)
        if learnt is not None:
            self._planner.observe(learnt, self._commit_loop.now())


def planner_for(
    choice: PolicyChoice,
    *,
    history: Callable[[], list[tuple[Seconds, PolicyEvent]]],
    view_now: ViewNow,
    propose: Propose,
) -> Planner:
    """Whoever plans: a quick policy in this process, a search in one of its own.

    Args:
        choice: the policy's name and options, from the settings file.
        history: what a search learns from again when it begins anew, oldest first.
        view_now: what a policy may see at the moment, and the time.
        propose: takes every plan, with how the search stands (None: there is none, or it is away).

    Raises:
        SettingsError: if there is no such policy or option.
    """
    if not entry(choice.name).searches:
        return InlinePlanner(make(choice.name, choice.options), view_now, propose)
    check_for_cluster(choice.name, choice.options)
    check_options(choice.name, choice.options)
    return SearchPlanner(
        policy=choice.name,
        options=choice.options,
        seed=int(choice.options.get("seed", 0)),
        admits=entry(choice.name).admits,
        history=history,
        view_now=view_now,
        propose=propose,
    )


MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
MANY: Final = 10.0  # minutes or hours, from which no decimal is said


def with_start(reason: Reason, start: StartForecast, now: Seconds) -> Reason:
    """Why a job waits, and for how long that is expected to last.

    Args:
        now: seconds since the epoch; what is past by then is expected at any moment.

    Returns:
        The reason with `start_s`, `start_earliest_s` and `start_latest_s` among its numbers,
        seconds from `now` on; four of five starts shall lie between the last two.
    """
    middle, low, high = (max(0.0, at - now) for at in (start.at, start.earliest, start.latest))
    numbers = {"start_s": middle, "start_earliest_s": low, "start_latest_s": high}
    if high <= 0.0:
        words = "expected to start at any moment"
    else:
        words = f"expected to start in {_about(middle)} (80%: {_about(low)} to {_about(high)})"
    return msgspec.structs.replace(
        reason, text=f"{reason.text}; {words}", numbers={**reason.numbers, **numbers}
    )


def _about(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < HOUR_S:
        return _rounded(seconds / MINUTE_S, "min")
    return _rounded(seconds / HOUR_S, "h")


def _rounded(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= MANY else f"{value:.1f} {unit}"


SLOW_S: Final = 0.005  # an answer that took longer holds up sessions
OTHERS: Final = 4.0  # of its time is theirs then


class PlanExchange:
    """Asks the planner, once for all that happens at a moment, and takes in what it proposes.

    Args:
        commit_loop: what the planner sees, and where its plans go.
        clock: seconds, to tell how long planning holds up the loop.
    """

    def __init__(
        self, commit_loop: CommitLoop, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._commit_loop = commit_loop
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.TimerHandle | None = None  # when the latest plan wants to be asked
        self.planner: Planner | None = None
        self.asking = False  # a question is about to be put
        self._clock = clock
        self._rested_at = 0.0  # of the loop: when the next question may be put
        self._reasons: dict[JobId, Reason] = {}  # the latest plan's, for jobs that wait
        self._starts: Mapping[JobId, StartForecast] = {}  # the latest plan's
        self.predicted_loss: Mapping[JobId, float] = {}  # the latest plan's

    def request(self) -> None:
        """Have the planner asked when all that is happening now has happened.

        A planner that holds up the loop is asked again when the others have had their turn: where
        a thousand nodes come back, each of them is a reason to ask.
        """
        if self.asking:
            return
        self.asking = True
        if self._rested_at > self._loop.time():
            self._loop.call_at(self._rested_at, self._ask)
        else:
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self.asking = False
        if self.planner is not None:
            began = self._clock()
            self.planner.ask()
            took_s = self._clock() - began
            self._rested_at = self._loop.time() + (OTHERS * took_s if took_s > SLOW_S else 0.0)

    def reason(self, job: JobId) -> Reason | None:
        """What the latest plan said of a job, and when it expects it to start; None: nothing."""
        reason, start = self._reasons.get(job), self._starts.get(job)
        if reason is None or start is None:
            return reason
        return with_start(reason, start, self._commit_loop.now())

    def view_now(self) -> tuple[ClusterView, Seconds]:
        """What a policy may see, and the time."""
        return self._commit_loop.reactor.view(), self._commit_loop.now()

    def propose(self, plan: Plan, stats: SearchStats | None, /, *, whole: bool = True) -> None:
        """Take a plan, if it changes anything; only its changes enter the history.

        Args:
            plan: based on a view of this moment or of an earlier one.
            stats: how the search stood with it; None if no search made it.
            whole: whether it is complete; else it says nothing of jobs that it leaves out.
        """
        now, state = self._commit_loop.now(), self._commit_loop.reactor.state
        if whole:
            self._reasons, self._starts = plan.reasons, plan.starts
            self.predicted_loss = plan.predicted_loss
        if plan.wake_at is not None:
            if self._wake:
                self._wake.cancel()
            self._wake = self._loop.call_later(max(0.05, plan.wake_at - now), self.request)
        changes = difference(plan, state, now, whole=whole)
        if changes.empty:
            return
        self._commit_loop.handle(PlanProposed(plan=changes, stats=stats))
        if self.planner is not None:
            left = [name for name in state.active if state.jobs[name].phase not in HOLDING]
            slots = {name: tuple(placed) for name, placed in changes.local_batch.items()}
            self.planner.observe(PlanTaken(waiting=tuple(left), slots=slots), now)
