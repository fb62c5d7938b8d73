"""What handling one input works with: the state, the time, and the commands that it leads to."""

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
from controlplane.core.history import GroupConcluded, PhaseChanged, Record
from controlplane.core.model import job as jobs
from controlplane.core.model import worker as workers
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobStatus, JobTrigger
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker, WorkerTrigger
from controlplane.core.state import State, Totals
from schemas.ids import JobId, NodeId, Seconds, node_of
from schemas.wire.agent import GroupFormed
from schemas.wire.client import Change
from schemas.wire.feed import Detail, FeedEvent
from schemas.wire.sweeps import SweepDelta


class HandlerContext:
    """The state and everything that its change makes known."""

    def __init__(self, state: State, totals: Totals) -> None:
        """Work on `state`.

        Args:
            state: that handlers decide on and change.
            totals: that they count, and never read.
        """
        self.state = state
        self.totals = totals
        self.records: list[Record] = []  # of what happened, for people
        self.out: list[Command] = []
        self.now = Seconds(0.0)
        self.ask = False  # for a plan, when the input is handled
        self.changed_jobs: dict[JobId, None] = {}  # of which a policy may see something else

    def begin(self, now: Seconds) -> None:
        """The next input comes.

        Args:
            now: when, in seconds since the epoch. What the input before led to is forgotten.
        """
        self.out, self.now, self.ask, self.changed_jobs = [], now, False, {}
        self.records = []

    def send_to(self, job: Job, nodes: Iterable[NodeId]) -> None:
        """Send each of `nodes` what it should run of `job` now.

        Args:
            nodes: each gets one message, even if nothing of the job is to run there.
        """
        self.out += [SendDelta(node, desired(self.state, job, node)) for node in nodes]

    def send(self, job: Job) -> None:
        """The same to every node of the job's group.

        Args:
            job: without a group, nothing is sent.
        """
        if job.group is not None:
            self.send_to(job, dict.fromkeys(node_of(member.slot) for member in job.group.members))

    def send_sweep(self, node: NodeId, delta: SweepDelta) -> None:
        """Send `node` what it should do and keep of a sweep now."""
        self.out.append(SendSweepDelta(node, delta))

    def advance(
        self,
        job: Job,
        trigger: JobTrigger,
        status: JobStatus,
        why: str,
        detail: Detail | None = None,
    ) -> None:
        """Move `job` along its table, and announce it.

        Args:
            job: it is changed in place.

        Raises:
            IllegalTransitionError: if the arrow is not drawn.
        """
        self.move(job, trigger, status, why, detail)
        self.announce_phase(job, detail)

    def move(
        self,
        job: Job,
        trigger: JobTrigger,
        status: JobStatus,
        why: str,
        detail: Detail | None = None,
    ) -> None:
        """The same, silently: `announce_phase` has to follow.

        Args:
            job: it is changed in place.
            detail: numbers for programs, kept in its history.

        Raises:
            IllegalTransitionError: if the arrow is not drawn.
        """
        before, counts = job.status.phase, self.state.living_counts
        jobs.advance(job, trigger, status, why, self.now)
        counts.moved(job, before)
        job.changed_at = self.state.version
        self.changed_jobs[job.job] = None
        self.state.slot_index.touch(job.job)
        change = Change(
            time=self.now,
            from_state=before.value,
            to_state=status.phase.value,
            why=why,
            detail=detail or {},
        )
        self.records.append(PhaseChanged(job=job.job, change=change))

    def advance_worker(self, job: Job, worker: Worker, trigger: WorkerTrigger) -> bool:
        """Move a worker along its table.

        Args:
            worker: it is changed in place.

        Returns:
            False when that is known: the worker is already there, further, or leaving.

        Raises:
            IllegalTransitionError: if the arrow is not drawn.
        """
        moved = workers.advance(worker, trigger)
        if moved:
            self.state.slot_index.touch(job.job)
        return moved

    def hear_worker(self, job: Job, worker: Worker, trigger: WorkerTrigger) -> bool:
        """Move a worker along its table because it says so itself.

        Args:
            worker: it is changed in place, unless it cannot be where it says.

        Returns:
            False when that is known, or cannot be; what cannot be is announced as ignored.
        """
        try:
            return self.advance_worker(job, worker, trigger)
        except IllegalTransitionError:
            self.ignore(job, worker, trigger.value)
            return False

    def ignore(self, job: Job, worker: Worker, what: str) -> None:
        """Announce that a worker's report is passed over: it cannot be, where things stand."""
        reason = f"it {what}, but the worker is {worker.phase.value} and its job {job.phase.value}"
        self.announce("worker.report_ignored", job, {**place(worker), "reason": reason})

    def conclude(
        self,
        job: Job,
        outcome: str,
        formed: GroupFormed | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Record what became of the group that was ordered last; the first word counts.

        Args:
            job: whose group it was; nothing is recorded if it never had one.
            outcome: formed, abandoned, broken, suspended, or how the job lost it.
            formed: the report of its last member, for where it goes on from.
            numbers: measured results to add to the decision, such as pause_ms.
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
        """Announce which phase `job` came to, and why.

        Args:
            detail: numbers for programs, beside the reason.
        """
        self.announce(f"job.{job.status.phase.value}", job, {"reason": job.why, **(detail or {})})

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
    """Which worker an announcement is about.

    Returns:
        Its rank, slot and version, as numbers and names of the announcement.
    """
    return {"rank": worker.rank, "slot": worker.slot, "version": worker.version}
