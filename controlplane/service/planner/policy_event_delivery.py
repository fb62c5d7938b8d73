"""What the policy learns while jobs run: from records of the core, and from telemetry."""

from __future__ import annotations

import structlog

from controlplane.core import policy_events
from controlplane.core.history_records import Record
from controlplane.core.model.pass_times import unbelievable_passes
from controlplane.core.model.worker_usage import unbelievable_usage
from controlplane.policy.api import JobEnded
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.planner.planner_interface import Planner
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import JobId
from schemas.messages.agent import StepsReported

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
