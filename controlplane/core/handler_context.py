"""What handling one input works with: the state, the time, and the commands that it leads to."""

from __future__ import annotations

from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.core.model import job as jobs
from controlplane.core.model.job import HOLDING, Job, JobTrigger
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker
from controlplane.core.state import State
from schemas.ids import JobId, NodeId, Seconds, node_of
from schemas.messages.feed import Detail, FeedEvent


class HandlerContext:
    """The state and everything that its change makes known."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.out: list[Command] = []
        self.now = Seconds(0.0)
        self.ask = False  # for a plan, when the input is handled
        self.changed_jobs: set[JobId] = set()

    def begin(self, now: Seconds) -> None:
        """The next input comes."""
        self.out, self.now, self.ask, self.changed_jobs = [], now, False, set()
        self.state.slot_index.begin()

    def send_to(self, job: Job, node: NodeId) -> None:
        """Tell `node` what it should run of `job` now."""
        self.out.append(SendDelta(node, self.state.desired(job, node)))

    def send(self, job: Job) -> None:
        """The same to every node of the job's group."""
        if job.group is not None:
            for node in dict.fromkeys(node_of(member.slot) for member in job.group.members):
                self.send_to(job, node)

    def advance(
        self, job: Job, trigger: JobTrigger, why: str, detail: Detail | None = None
    ) -> None:
        """Move `job` along its table, and say so."""
        before = job.phase
        job.changed_at = self.state.version
        self.changed_jobs.add(job.job)
        self.state.slot_index.touch(job.job)
        jobs.advance(job, trigger, why, self.now, detail)
        if job.phase in HOLDING and before not in HOLDING:
            job.exit_code, job.finished_why, job.script_error = None, "", ""
        self.announce(f"job.{job.phase.value}", job, {"reason": why, **(detail or {})})

    def announce(
        self,
        event: str,
        job: Job | None = None,
        detail: Detail | None = None,
        node: Node | None = None,
    ) -> None:
        """Tell everybody who follows."""
        self.state.feed_seq += 1
        news = FeedEvent(
            seq=self.state.feed_seq,
            time=self.now,
            event=event,
            job=job.job if job else None,
            node=node.node if node else None,
            detail=detail or {},
        )
        self.out.append(Announce(news))


def place(worker: Worker) -> Detail:
    """Which worker an announcement is about."""
    return {"rank": worker.rank, "slot": worker.slot, "version": worker.version}
