"""One input in, commands out: the only place that changes the cluster's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from controlplane.core import job as jobs
from controlplane.core import node as nodes
from controlplane.core import worker as workers
from controlplane.core.commands import Accept, Announce, AskForPlan, Command, SendDelta
from controlplane.core.commit import Start, check
from controlplane.core.events import (
    CancelRequested,
    ControllerStarted,
    Input,
    InputSkipped,
    JobSubmitted,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeReported,
    NodeSuspected,
    PlanProposed,
    StartExpired,
)
from controlplane.core.job import HOLDING, Job, Turn
from controlplane.core.node import Node, NodeTurn
from controlplane.core.outcome import Outcome, outcome_of
from controlplane.core.state import State
from controlplane.core.worker import Worker, WorkerPhase, WorkerTurn
from schemas.groups import Group, Member, ResumePoint
from schemas.ids import JobId, NodeId, Rank, Seconds, Version, node_of, slot_id, worker_id
from schemas.messages.agent import (
    PREPARE,
    SETTLED,
    SWITCH,
    EpochReported,
    GroupFormed,
    JobCleared,
    ScriptFailed,
    TrainingFinished,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerSeen,
    WorkerStarted,
)
from schemas.messages.client import EpochInfo, VersionInfo
from schemas.messages.feed import Detail, FeedEvent

START_LIMIT_S: Final = 1800.0  # from the order to a formed group
RETRY_FIRST_S: Final = 1.0  # before the first retry of a failed script; doubles
RETRY_LONGEST_S: Final = 60.0
FORMER_BOOTS: Final = 8
MAX_LOSSES: Final = 8  # workers lost in a row without a finished epoch between


class Reactor:
    """Owns the cluster's state; `handle` is the only way to change it."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self._out: list[Command] = []
        self._now = Seconds(0.0)
        self._ask = False

    def handle(self, event: Input, now: Seconds) -> list[Command]:
        """Apply one input and return what the world should now do about it."""
        self._out, self._now, self._ask = [], now, False
        self.state.version += 1
        _HANDLERS[type(event)](self, event)
        if self._ask:
            self._out.append(AskForPlan())
        return self._out

    def due(self, now: Seconds) -> list[Input]:
        """The deadlines that have passed, as inputs."""
        return [
            StartExpired(job=job, version=version)
            for job, (at, version) in self.state.starts.items()
            if at <= now
        ]

    # --- the controller and its users

    def _controller_started(self, event: ControllerStarted) -> None:
        self.state.term = event.term
        self._announce("controller.started", detail={"term": event.term, "release": event.release})
        for node in self.state.nodes.values():
            nodes.advance(node, NodeTurn.CONTROLLER_STARTED, self._now)
        again = Seconds(self._now + START_LIMIT_S)  # nobody could start while nobody ruled
        self.state.starts = {
            job: (again, version) for job, (_, version) in self.state.starts.items()
        }
        self._ask = True

    def _job_submitted(self, event: JobSubmitted) -> None:
        key = f"{event.user}/{event.key}" if event.key else ""
        known = self.state.keys.get(key)
        if known is not None:
            self._out.append(Accept(known))
            return
        self.state.jobs_accepted += 1
        name = JobId(f"{event.spec.name}-{self.state.jobs_accepted}")
        job = Job(
            job=name,
            spec=event.spec,
            snapshot=event.snapshot,
            user=event.user,
            submitted_at=self._now,
            since=self._now,
        )
        self.state.jobs[name] = job
        self.state.active[name] = None
        if key:
            self.state.keys[key] = name
        self._announce("job.submitted", job, {"name": event.spec.name, "user": event.user})
        self._out.append(Accept(name))
        self._ask = True

    def _cancel_requested(self, event: CancelRequested) -> None:
        job = self.state.job(event.job)
        if not job.ended:
            self._end(job, Turn.CANCELLED, f"cancelled by {event.user}")

    # --- plans

    def _plan_proposed(self, event: PlanProposed) -> None:
        verdict = check(event.plan, self.state, self._now)
        for start in verdict.starts:
            self._start(self.state.job(start.job), start)
        if verdict.refused:
            self._ask = True

    def _start(self, job: Job, start: Start) -> None:
        version = Version(job.version + 1)
        members = tuple(
            Member(rank=Rank(rank), slot=slot, local_batch=batch)
            for rank, (slot, batch) in enumerate(start.local_batch.items())
        )
        group = Group(version=version, members=members, lr=job.spec.lr, resume=job.checkpoint)
        job.version, job.stage, job.group = version, PREPARE, group
        job.versions = [*job.versions, VersionInfo(version=version, resumed_epoch=job.epoch)]
        for member in members:
            name = worker_id(job.job, version, member.rank)
            job.workers[name] = Worker(
                worker=name,
                version=version,
                rank=member.rank,
                slot=member.slot,
                local_batch=member.local_batch,
            )
            job.nodes[node_of(member.slot)] = None
        self.state.holders[job.job] = None
        self.state.starts[job.job] = (Seconds(self._now + START_LIMIT_S), version)
        slots = ", ".join(member.slot for member in members)
        resumes = f", resumes after epoch {job.epoch}" if job.epoch else ""
        self._turn(job, Turn.GROUP_ORDERED, f"{start.why}: {slots}{resumes}", {"slots": slots})
        self._send(job)

    def _start_expired(self, event: StartExpired) -> None:
        job = self.state.jobs.get(event.job)
        _, version = self.state.starts.get(event.job, (0.0, None))
        if job is None or version != event.version:
            return
        why = f"its script did not call ScalingAgent.load within {START_LIMIT_S:.0f} s"
        self._fail(job, why)

    # --- nodes

    def _node_greeted(self, event: NodeGreeted) -> None:
        node = self.state.nodes.get(event.node)
        if node is None:
            node = Node(node=event.node, spec=event.spec, boot=event.boot, since=self._now)
            self.state.nodes[event.node] = node
            self._announce("node.joined", node=node, detail={"slots": len(event.spec.slots)})
        else:
            if event.boot in node.former:
                return  # late words of a process that is gone
            if node.boot != event.boot:
                node.former = [*node.former, node.boot][-FORMER_BOOTS:]
                node.boot, node.committed = event.boot, 0
            node.spec = event.spec
            self._turn_node(node, NodeTurn.GREETED, "node.up")
        self._reconcile(node, event.workers)
        self._ask = True

    def _reconcile(self, node: Node, seen: Iterable[WorkerSeen]) -> None:
        """Hold what the node runs against what it should run, and tell it the difference."""
        present = {worker_id(s.job, s.version, s.rank): s for s in seen}
        node.foreign = {
            slot_id(node.node, s.slot): name
            for name, s in present.items()
            if s.job not in self.state.jobs and not s.ended
        }
        here = [
            (job, worker)
            for job, worker in self.state.living()
            if node_of(worker.slot) == node.node
        ]
        for job, worker in here:
            self._reconcile_worker(job, worker, present.get(worker.worker))
        touched = {s.job: None for s in present.values()} | {job.job: None for job, _ in here}
        for name in touched:
            if name in self.state.jobs:
                self._send_to(self.state.jobs[name], node.node)

    def _reconcile_worker(self, job: Job, worker: Worker, seen: WorkerSeen | None) -> None:
        if seen is None:
            # One that was never heard of may not have begun: it is ordered or called off again.
            unheard = worker.phase in {WorkerPhase.ORDERED, WorkerPhase.LEAVING}
            if worker.pid is not None or not unheard:
                self._gone(job, worker, WorkerExited(**_of(worker, job), code=None, signal=None))
            return
        if worker.pid is None and seen.pid is not None:
            self._worker_started(job, worker, seen.pid)
        # One that ended says so in an event of its own, behind the reports it wrote before.

    def _node_heard(self, event: NodeHeard) -> None:
        self._turn_node(self.state.nodes[event.node], NodeTurn.HEARD, "node.up")
        self._ask = True

    def _node_suspected(self, event: NodeSuspected) -> None:
        node = self.state.nodes[event.node]
        self._turn_node(node, NodeTurn.SUSPECTED, "node.suspect", {"silent_s": event.silent_s})

    def _node_lost(self, event: NodeLost) -> None:
        node = self.state.nodes[event.node]
        if not self._turn_node(node, NodeTurn.LOST, "node.lost", {"silent_s": event.silent_s}):
            return
        for job in [self.state.jobs[name] for name in self.state.holders]:
            if job.group and any(node_of(m.slot) == node.node for m in job.group.members):
                self._lose(job, f"node {node.node} has been silent for {event.silent_s:.0f} s")
        self._ask = True

    # --- workers

    def _node_reported(self, event: NodeReported) -> None:
        node = self.state.nodes.get(event.node)
        if node is None or node.boot != event.boot or event.seq <= node.committed:
            return
        node.committed = event.seq
        news = event.event
        job = self.state.jobs.get(news.job)
        if isinstance(news, JobCleared):
            self._job_cleared(job, node, news)
            return
        name = worker_id(news.job, news.version, news.rank)
        worker = job.workers.get(name) if job else None
        if job is None or worker is None:
            gone = isinstance(news, WorkerExited | WorkerRefused)
            if gone and name in node.foreign.values():
                node.foreign = {slot: of for slot, of in node.foreign.items() if of != name}
                self._ask = True
            return
        if isinstance(news, _REPORTS):
            if news.index <= worker.reports:
                return
            worker.reports = news.index
        self._worker_news(job, worker, news)

    def _worker_news(self, job: Job, worker: Worker, news: WorkerNews) -> None:
        current = worker.version == job.version
        match news:
            case WorkerStarted(pid=pid):
                self._worker_started(job, worker, pid)
            case WorkerReady():
                self._worker_ready(job, worker, news)
            case GroupFormed():
                self._group_formed(job, worker, news)
            case EpochReported() if current:
                self._epoch_reported(job, news)
            case TrainingFinished(why=why) if current:
                job.finished_why = why
            case ScriptFailed(error=error, where=where) if current:
                job.script_error = f"{error} ({where})" if where else error
            case WorkerExited():
                self._gone(job, worker, news)
            case WorkerRefused(error=error, hint=hint):
                self._refused(job, worker, f"{error}; {hint}" if hint else error)

    def _job_cleared(self, job: Job | None, node: Node, news: JobCleared) -> None:
        """Processes that were ordered, and called off before they began, never exit."""
        if job is None:
            return
        for worker in job.workers.values():
            if node_of(worker.slot) == node.node and worker.version < news.version:
                workers.advance(worker, WorkerTurn.GONE)
        self._drop_gone(job)
        self._ask = True

    def _worker_started(self, job: Job, worker: Worker, pid: int) -> None:
        if worker.pid is None:
            worker.pid = pid
            job.ran[worker.worker] = node_of(worker.slot)
            workers.advance(worker, WorkerTurn.STARTED)
            self._announce("worker.started", job, {**_place(worker), "pid": pid})

    def _worker_ready(self, job: Job, worker: Worker, news: WorkerReady) -> None:
        if worker.phase is WorkerPhase.ORDERED:
            workers.advance(worker, WorkerTurn.STARTED)
        if not workers.advance(worker, WorkerTurn.READY) or job.group is None:
            return
        job.epoch_samples = news.epoch_samples
        self._announce("worker.ready", job, _place(worker))
        if all(w.phase is WorkerPhase.READY for w in self._group_of(job)):
            job.stage = SWITCH
            self._send(job)

    def _group_formed(self, job: Job, worker: Worker, news: GroupFormed) -> None:
        if not workers.advance(worker, WorkerTurn.FORMED) or job.group is None:
            return
        if not all(w.phase is WorkerPhase.MEMBER for w in self._group_of(job)):
            return
        del self.state.starts[job.job]
        job.versions[-1] = VersionInfo(version=job.version, resumed_epoch=news.epoch)
        job.stage = SETTLED
        slots = len(job.group.members)
        why = f"trains on {slots} slot{'s' * (slots != 1)}, batch {job.group.global_batch}"
        if news.epoch:
            why += f", resumed after epoch {news.epoch}"
        self._turn(job, Turn.GROUP_FORMED, why, {"slots": slots, "epoch": news.epoch})
        self._send(job)

    def _epoch_reported(self, job: Job, news: EpochReported) -> None:
        if job.group is None or news.epoch <= job.epoch:
            return
        job.epoch, job.step, job.samples_done = news.epoch, news.step, news.samples_done
        job.epoch_samples, job.epochs_stated = news.epoch_samples, news.epochs
        job.samples_per_s = news.samples_per_s
        job.train_loss, job.metrics, job.lr = news.train_loss, news.metrics, news.lr
        job.checkpoint = ResumePoint(epoch=news.epoch, version=news.version)
        job.losses = 0
        info = EpochInfo(
            epoch=news.epoch,
            time=self._now,
            step=news.step,
            global_batch=news.global_batch,
            lr=news.lr,
            samples_per_s=news.samples_per_s,
            train_loss=news.train_loss,
            metrics=news.metrics,
        )
        job.epochs = [*job.epochs[-(jobs.KEPT_EPOCHS - 1) :], info]
        detail: Detail = {
            **news.metrics,
            "epoch": news.epoch,
            "train_loss": news.train_loss,
            "samples_per_s": news.samples_per_s,
            "global_batch": news.global_batch,
            "lr": news.lr,
        }
        self._announce("job.epoch", job, detail)

    def _refused(self, job: Job, worker: Worker, why: str) -> None:
        workers.advance(worker, WorkerTurn.GONE)
        if worker.version == job.version and job.group is not None:
            self._fail(job, why)
        self._drop_gone(job)
        self._ask = True

    def _gone(self, job: Job, worker: Worker, news: WorkerExited) -> None:
        if worker.phase is WorkerPhase.GONE:
            return
        workers.advance(worker, WorkerTurn.GONE)
        detail: Detail = {**_place(worker), "code": news.code, "signal": news.signal}
        self._announce("worker.exited", job, detail)
        if worker.version == job.version and job.group is not None:
            self._conclude(job, news)
        self._drop_gone(job)
        self._ask = True

    def _conclude(self, job: Job, news: WorkerExited) -> None:
        """Decide what the end of a group's worker means for its job."""
        outcome, why = outcome_of(job, news)
        if outcome is Outcome.LOST:
            self._lose(job, why)
            return
        job.exit_code = 128 + news.signal if news.signal is not None else news.code
        if outcome is Outcome.FAILED:
            self._fail(job, why)
        elif all(w.phase is WorkerPhase.GONE for w in self._group_of(job)):
            self._end(job, Turn.FINISHED, why)

    def _lose(self, job: Job, why: str) -> None:
        """A worker is gone through no fault of the script: start again from the last epoch."""
        job.losses += 1
        if job.losses >= MAX_LOSSES:
            self._end(job, Turn.GAVE_UP, f"{why}, for the {MAX_LOSSES}th time without an epoch")
            return
        again = f"resumes after epoch {job.epoch}" if job.epoch else "starts again"
        self._withdraw(job)
        self._turn(job, Turn.GROUP_LOST, f"{why}; {again}")
        self._ask = True

    def _fail(self, job: Job, why: str) -> None:
        """The script failed: try again while retries are left."""
        job.failures += 1
        if job.failing_is_final:
            tried = f" (try {job.failures} of {job.failures})" if job.spec.retries else ""
            self._end(job, Turn.GAVE_UP, why + tried)
            return
        pause_s = min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** (job.failures - 1))
        job.ready_at = Seconds(self._now + pause_s)
        job.script_error = ""
        self._withdraw(job)
        left = job.spec.retries - job.failures + 1
        self._turn(job, Turn.SCRIPT_FAILED, f"{why}; tried again in {pause_s:.0f} s, {left} left")
        self._ask = True

    def _end(self, job: Job, turn: Turn, why: str) -> None:
        detail: Detail = {"exit_code": job.exit_code, "epoch": job.epoch}
        nodes_used = dict.fromkeys([*self._dismiss(job), *job.nodes])
        self._turn(job, turn, why, detail)
        del self.state.active[job.job]
        for node in nodes_used:
            self._send_to(job, node)
        self._drop_gone(job)
        self._ask = True

    def _withdraw(self, job: Job) -> None:
        for node in self._dismiss(job):
            self._send_to(job, node)

    def _dismiss(self, job: Job) -> list[NodeId]:
        """Take the group away; returns the nodes that must hear of it."""
        job.version, job.stage, job.group = Version(job.version + 1), SETTLED, None
        self.state.starts.pop(job.job, None)
        for worker in job.workers.values():
            if worker.phase not in {WorkerPhase.LEAVING, WorkerPhase.GONE}:
                workers.advance(worker, WorkerTurn.DISMISSED)
        return list(dict.fromkeys(node_of(worker.slot) for worker in job.workers.values()))

    def _drop_gone(self, job: Job) -> None:
        """Forget processes that were seen gone, but for those of the present group."""
        living = {
            name: worker
            for name, worker in job.workers.items()
            if worker.phase is not WorkerPhase.GONE
            or (job.group is not None and worker.version == job.version)
        }
        job.workers = living
        if not living:
            self.state.holders.pop(job.job, None)

    # --- helpers

    def _input_skipped(self, event: InputSkipped) -> None:
        node = self.state.nodes.get(event.node) if event.node else None
        if node is not None and node.boot == event.boot:
            node.committed = max(node.committed, event.seq)

    def _group_of(self, job: Job) -> list[Worker]:
        return [worker for worker in job.workers.values() if worker.version == job.version]

    def _send(self, job: Job) -> None:
        """Tell every node of the job's group what it should run now."""
        if job.group is not None:
            for node in dict.fromkeys(node_of(member.slot) for member in job.group.members):
                self._send_to(job, node)

    def _send_to(self, job: Job, node: NodeId) -> None:
        self._out.append(SendDelta(node, self.state.desired(job, node)))

    def _turn(self, job: Job, turn: Turn, why: str, detail: Detail | None = None) -> None:
        before = job.phase
        jobs.advance(job, turn, why, self._now, detail)
        if job.phase in HOLDING and before not in HOLDING:
            job.exit_code, job.finished_why, job.script_error = None, "", ""
        self._announce(f"job.{job.phase.value}", job, {"reason": why, **(detail or {})})

    def _turn_node(
        self, node: Node, turn: NodeTurn, event: str, detail: Detail | None = None
    ) -> bool:
        changed = nodes.advance(node, turn, self._now)
        if changed:
            self._announce(event, node=node, detail=detail)
        return changed

    def _announce(
        self,
        event: str,
        job: Job | None = None,
        detail: Detail | None = None,
        node: Node | None = None,
    ) -> None:
        self.state.feed_seq += 1
        news = FeedEvent(
            seq=self.state.feed_seq,
            time=self._now,
            event=event,
            job=job.job if job else None,
            node=node.node if node else None,
            detail=detail or {},
        )
        self._out.append(Announce(news))


def _place(worker: Worker) -> Detail:
    return {"rank": worker.rank, "slot": worker.slot, "version": worker.version}


def _of(worker: Worker, job: Job) -> dict[str, Any]:
    return {"job": job.job, "version": worker.version, "rank": worker.rank}


_REPORTS: Final = (WorkerReady, GroupFormed, EpochReported, TrainingFinished, ScriptFailed)

WorkerNews = (
    WorkerStarted
    | WorkerReady
    | GroupFormed
    | EpochReported
    | TrainingFinished
    | ScriptFailed
    | WorkerExited
    | WorkerRefused
)

_HANDLERS: Final[Mapping[type[Any], Callable[[Reactor, Any], None]]] = {
    ControllerStarted: Reactor._controller_started,  # noqa: SLF001 - this class's own table
    JobSubmitted: Reactor._job_submitted,  # noqa: SLF001
    CancelRequested: Reactor._cancel_requested,  # noqa: SLF001
    NodeGreeted: Reactor._node_greeted,  # noqa: SLF001
    NodeHeard: Reactor._node_heard,  # noqa: SLF001
    NodeSuspected: Reactor._node_suspected,  # noqa: SLF001
    NodeLost: Reactor._node_lost,  # noqa: SLF001
    NodeReported: Reactor._node_reported,  # noqa: SLF001
    PlanProposed: Reactor._plan_proposed,  # noqa: SLF001
    StartExpired: Reactor._start_expired,  # noqa: SLF001
    InputSkipped: Reactor._input_skipped,  # noqa: SLF001
}
