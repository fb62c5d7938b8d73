"""Context in which one input is handled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.core.commands import (
    Announce,
    Command,
    IllegalTransitionError,
    SendDelta,
    SendSweepDelta,
)
from controlplane.core.desired_state import desired
from controlplane.core.history import GroupConcluded, PhaseChanged, Record, slots_used
from controlplane.core.model import job as jobs
from controlplane.core.model import worker as workers
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import HOLDING, JobStatus, JobTrigger
from controlplane.core.model.node import Node
from controlplane.core.model.usage import charge
from controlplane.core.model.worker import Worker, WorkerTrigger
from controlplane.core.state import State, Totals
from schemas.ids import JobId, NodeId, Seconds, node_of
from schemas.wire.agent import GroupFormed
from schemas.wire.client import Change
from schemas.wire.feed import Detail, FeedEvent
from schemas.wire.sweeps import SweepDelta


class HandlerContext:
    """Context of one input, with the state, the time, and the resulting commands and records.

    Handlers read and change `state`. They add to `totals`, and never read `totals`.
    """

    def __init__(self, state: State, totals: Totals) -> None:
        self.state = state
        self.totals = totals
        self.records: list[Record] = []  # for the history of jobs
        self.out: list[Command] = []
        self.now = Seconds(0.0)
        self.ended: list[Job] = []  # by this input
        self.plan_needed = False  # request a plan after this input
        self.changed_jobs: dict[JobId, None] = {}  # their views may have changed

    def begin(self, now: Seconds) -> None:
        """Start the next input at `now`, and discard the results of the previous input."""
        self.out, self.now, self.plan_needed, self.changed_jobs = [], now, False, {}
        self.records, self.ended = [], []

    def send_to(self, job: Job, nodes: Iterable[NodeId]) -> None:
        """Send each of `nodes` its desired state of `job`, even if the node should run nothing."""
        self.out += [SendDelta(node, desired(self.state, job, node)) for node in nodes]

    def send(self, job: Job) -> None:
        """Send every node of the job's group its desired state. Do nothing without a group."""
        if job.group is not None:
            self.send_to(job, dict.fromkeys(node_of(member.slot) for member in job.group.members))

    def send_sweep(self, node: NodeId, delta: SweepDelta) -> None:
        """Send `node` its desired state of a sweep."""
        self.out.append(SendSweepDelta(node, delta))

    def advance(
        self,
        job: Job,
        trigger: JobTrigger,
        status: JobStatus,
        reason: str,
        detail: Detail | None = None,
    ) -> None:
        """Move `job` along its transition table and announce the new phase."""
        self.move(job, trigger, status, reason, detail)
        self.announce_phase(job, detail)

    def move(
        self,
        job: Job,
        trigger: JobTrigger,
        status: JobStatus,
        reason: str,
        detail: Detail | None = None,
    ) -> None:
        """Move `job` along its table without announcing this. `announce_phase` must follow.

        Args:
            detail: numbers for programs, kept in the job's history.
        """
        before, counts = job.status.phase, self.state.job_counters
        used = slots_used(job, self.now)
        if self.state.sharing is not None:
            charge(self.state.usage, job, self.now, self.state.sharing.half_life_s)
        jobs.advance(job, trigger, status, reason, self.now)
        if self.state.sharing is not None:
            self._note_turn(job)
        if used is not None:
            self.records.append(used)
        counts.move(job, before)
        job.changed_version = self.state.version
        self.changed_jobs[job.job] = None
        self.state.slot_index.touch(job.job)
        change = Change(
            time=self.now,
            from_state=before.value,
            to_state=status.phase.value,
            reason=reason,
            detail=detail or {},
        )
        self.records.append(PhaseChanged(job=job.job, change=change))

    def _note_turn(self, job: Job) -> None:
        """Record when a job without slots gets some, which is when its turn begins."""
        if job.phase in HOLDING:
            self.state.began_at.setdefault(job.job, self.now)
        else:
            self.state.began_at.pop(job.job, None)

    def advance_worker(self, job: Job, worker: Worker, trigger: WorkerTrigger) -> bool:
        """Move a worker along its transition table. Return True if it moved.

        Return False if the worker is already in the new phase or in a later phase, or is stopping.
        """
        moved = workers.advance(worker, trigger)
        if moved:
            self.state.slot_index.touch(job.job)
        return moved

    def advance_reported(self, job: Job, worker: Worker, trigger: WorkerTrigger) -> bool:
        """Move a worker along its transition table because of its own report.

        Return True if the worker moved, and False if the report is already recorded or is
        impossible. An impossible report is announced as ignored.
        """
        try:
            return self.advance_worker(job, worker, trigger)
        except IllegalTransitionError:
            self.ignore(job, worker, trigger.value)
            return False

    def ignore(self, job: Job, worker: Worker, what: str) -> None:
        """Announce that a report is ignored, because it is impossible in the current phases."""
        phases = f"the worker is {worker.phase.value} and the job is {job.phase.value}"
        reason = f'report "{what}" is impossible: {phases}'
        self.announce("worker.report_ignored", job, {**place(worker), "reason": reason})

    def conclude(
        self,
        job: Job,
        outcome: str,
        formed: GroupFormed | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Record the outcome of the group that was ordered last. A later outcome has no effect.

        Args:
            outcome: formed, abandoned, broken, suspended, or how the job lost the group.
            formed: report of the group's last member, with the position from which it continued.
            numbers: measured results to add to the decision, such as `pause_ms`.
        """
        if job.version:
            concluded = GroupConcluded(
                job=job.job,
                outcome=outcome,
                at=self.now,
                resumed_epoch=formed.epoch if formed else None,
                resumed_step=formed.step if formed else None,
                numbers=dict(numbers or {}),
            )
            self.records.append(concluded)

    def announce_phase(self, job: Job, detail: Detail | None = None) -> None:
        """Announce the job's phase and its reason, with `detail` as numbers for programs."""
        self.announce(
            f"job.{job.status.phase.value}", job, {"reason": job.reason, **(detail or {})}
        )

    def announce(
        self,
        event: str,
        job: Job | None = None,
        detail: Detail | None = None,
        node: Node | None = None,
    ) -> None:
        """Add an event to the feed."""
        self.state.feed_seq += 1
        announced = FeedEvent(
            seq=self.state.feed_seq,
            time=self.now,
            event=event,
            job=job.job if job else None,
            node=node.node if node else None,
            detail=detail or {},
        )
        self.out.append(Announce(announced))


def place(worker: Worker) -> Detail:
    """Return the rank, slot and version of a worker, for announcements."""
    return {"rank": worker.rank, "slot": worker.slot, "version": worker.version}
