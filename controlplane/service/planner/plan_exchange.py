"""Between commit loop and planner: asks when the core wants a plan, and takes plans in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job_phases import HOLDING
from controlplane.core.plan_check import difference
from controlplane.policy.api import (
    ClusterView,
    Plan,
    PlanTaken,
    Reason,
    SearchStats,
    StartForecast,
)
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.planner.expected_starts import with_start
from controlplane.service.planner.planner_interface import Planner
from schemas.ids import JobId, Seconds

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
