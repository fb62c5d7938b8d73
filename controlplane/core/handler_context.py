"""What handling one input works with: the state, the time, and the commands that it leads to."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.commands import Announce, Command, SendDelta, SendSweepDelta
from controlplane.core.desired_state import desired
from controlplane.core.errors import IllegalTransitionError
from controlplane.core.history_read_model import JobHistories
from controlplane.core.model import job as jobs
from controlplane.core.model import worker as workers
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobStatus, JobTrigger
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker, WorkerTrigger
from controlplane.core.state import State
from schemas.ids import JobId, NodeId, Seconds, node_of
from schemas.messages.client import Change
from schemas.messages.feed import Detail, FeedEvent
from schemas.messages.hopping import SweepDelta

SHOWN_CHANGES = 5  # in an error


class HandlerContext:
    """The state and everything that its change makes known."""

    def __init__(self, state: State, histories: JobHistories) -> None:
        """Work on `state`.

        Args:
            state: that handlers decide on and change.
            histories: that they write, and never read.
        """
        self.state = state
        self.histories = histories
        self.out: list[Command] = []
        self.now = Seconds(0.0)
        self.ask = False  # for a plan, when the input is handled
        self.changed_jobs: dict[JobId, None] = {}  # of which a policy may see something else

    def begin(self, now: Seconds) -> None:
        """The next input comes.

        Args:
            now: when, in seconds since the epoch. Commands of the input before are forgotten.
        """
        self.out, self.now, self.ask, self.changed_jobs = [], now, False, {}

    def send_to(self, job: Job, nodes: Iterable[NodeId]) -> None:
        """Send each of `nodes` what it should run of `job` now.

        Args:
            job: as it is after the change.
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
        """Send `node` what it should do and keep of a sweep now.

        Args:
            node: that it is for.
            delta: with a revision of its own.
        """
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
            trigger: what happened.
            status: what it is afterwards.
            why: in words, for users.
            detail: numbers for programs.

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
            trigger: what happened.
            status: what it is afterwards.
            why: in words, for users.
            detail: numbers for programs, kept in its history.

        Raises:
            IllegalTransitionError: if the arrow is not drawn; its text has the last changes.
        """
        before = job.status.phase
        try:
            jobs.advance(job, trigger, status, why, self.now)
        except IllegalTransitionError as error:
            latest = self.histories.of(job.job).changes[-SHOWN_CHANGES:]
            story = "; ".join(f"{change.to_state}: {change.why}" for change in latest)
            raise IllegalTransitionError(error.who, error.phase, error.happening, story) from None
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
        self.histories.phase_changed(job.job, change)

    def advance_worker(self, job: Job, worker: Worker, trigger: WorkerTrigger) -> bool:
        """Move a worker along its table.

        Args:
            job: of the worker.
            worker: it is changed in place.
            trigger: what happened.

        Returns:
            False when that is known: the worker is already there, further, or leaving.

        Raises:
            IllegalTransitionError: if the arrow is not drawn.
        """
        moved = workers.advance(worker, trigger)
        if moved:
            self.state.slot_index.touch(job.job)
        return moved

    def announce_phase(self, job: Job, detail: Detail | None = None) -> None:
        """Announce which phase `job` came to, and why.

        Args:
            job: that was moved already.
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
        """Add an event to the feed.

        Args:
            event: such as job.epoch.
            job: that it is about.
            detail: numbers and names.
            node: that it is about.
        """
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

    Args:
        worker: of any phase.

    Returns:
        Its rank, slot and version, as numbers and names of the announcement.
    """
    return {"rank": worker.rank, "slot": worker.slot, "version": worker.version}
