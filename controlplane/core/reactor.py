"""One input in, commands out: the only place that changes the cluster's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from controlplane.core.commands import Accept, AskForPlan, Command
from controlplane.core.events import (
    CancelRequested,
    ControllerStarted,
    HandDue,
    Input,
    InputSkipped,
    JobSubmitted,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeReported,
    NodeSuspected,
    PauseRequested,
    PlanProposed,
    RescaleExpired,
    ResizeRequested,
    ResumeRequested,
    StartExpired,
)
from controlplane.core.handler_context import HandlerContext, place
from controlplane.core.handlers import lifecycle, overrides, plans, rescale
from controlplane.core.model import job as jobs
from controlplane.core.model import node as nodes
from controlplane.core.model import worker as workers
from controlplane.core.model.job import Job, JobTrigger
from controlplane.core.model.node import Node, NodeTrigger
from controlplane.core.model.rescale import LIMITS, Hand
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from controlplane.core.policy_events import first_noise_scale
from controlplane.core.policy_view import ViewBuilder
from controlplane.core.state import State
from controlplane.policy.api import ClusterView
from schemas.groups import ResumePoint
from schemas.ids import JobId, Seconds, SlotId, node_of, slot_id, worker_id
from schemas.messages.agent import (
    EpochReported,
    GroupBroken,
    GroupFormed,
    JobCleared,
    JoinFailed,
    Quiesced,
    ScriptFailed,
    ScriptReport,
    StoreOpened,
    Suspended,
    TrainingFinished,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerSeen,
    WorkerStarted,
)
from schemas.messages.client import EpochInfo
from schemas.messages.feed import Detail

FORMER_BOOTS: Final = 8
KEPT_GAINS: Final = 1000
NOISE_SMOOTHING: Final = 0.3  # weight of the newest epoch's
REALISED: Final = "speed_realised"
NODE_EVENTS: Final = (ControllerStarted, NodeGreeted, NodeHeard, NodeSuspected, NodeLost)
SPEAKING: Final = frozenset({WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.RETIRING})


class Reactor:
    """Owns the cluster's state; `handle` is the only way to change it."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self._ctx = HandlerContext(self.state)
        self._views = ViewBuilder(self.state)

    def view(self) -> ClusterView:
        """What a policy may see now."""
        return self._views.view()

    def handle(self, event: Input, now: Seconds) -> list[Command]:
        """Apply one input and return what the world should now do about it."""
        ctx = self._ctx
        ctx.begin(now)
        self.state.version += 1
        if isinstance(event, NodeReported):
            self.state.slot_index.touch(event.event.job)
        elif isinstance(event, NODE_EVENTS):
            self.state.slot_index.touch_phases()
        _HANDLERS[type(event)](self, event)
        if self.state.hands:
            overrides.steer_all(ctx)
        touched = _touched(event)
        if touched is None:
            self._views.touch_all()
        else:
            self._views.touch(*touched, *ctx.changed_jobs)
        if ctx.ask:
            ctx.out.append(AskForPlan())
        return ctx.out

    def due(self, now: Seconds) -> list[Input]:
        """The deadlines that have passed, as inputs."""
        starts: list[Input] = [
            StartExpired(job=job, version=version)
            for job, (at, version) in self.state.starts.items()
            if at <= now
        ]
        jobs_with_processes = [self.state.jobs[name] for name in self.state.jobs_with_processes]
        late: list[Input] = [
            RescaleExpired(job=job.job, version=job.change.group.version)
            for job in jobs_with_processes
            if job.change is not None and job.change.deadline <= now
        ]
        waiting = [self.state.jobs[name] for name in self.state.hands]
        again: list[Input] = [
            HandDue(job=job.job) for job in waiting if overrides.ready_again(job, now)
        ]
        return [*starts, *late, *again]

    # --- the controller and its users

    def _controller_started(self, event: ControllerStarted) -> None:
        self.state.term = event.term
        self._ctx.announce(
            "controller.started", detail={"term": event.term, "release": event.release}
        )
        for node in self.state.nodes.values():
            nodes.advance(node, NodeTrigger.CONTROLLER_STARTED, self._ctx.now)
        again = Seconds(
            self._ctx.now + lifecycle.START_LIMIT_S
        )  # nobody could start while nobody ruled
        self.state.starts = {
            job: (again, version) for job, (_, version) in self.state.starts.items()
        }
        for name in self.state.jobs_with_processes:
            change = self.state.jobs[name].change
            if change is not None:
                change.deadline = Seconds(self._ctx.now + LIMITS[change.phase])
        self._ctx.ask = True

    def _job_submitted(self, event: JobSubmitted) -> None:
        key = f"{event.user}/{event.key}" if event.key else ""
        known = self.state.keys.get(key)
        if known is not None:
            self._ctx.out.append(Accept(known))
            return
        self.state.jobs_accepted += 1
        name = JobId(f"{event.spec.name}-{self.state.jobs_accepted}")
        job = Job(
            job=name,
            spec=event.spec,
            snapshot=event.snapshot,
            user=event.user,
            submitted_at=self._ctx.now,
            since=self._ctx.now,
        )
        self.state.jobs[name] = job
        self.state.active[name] = None
        self._ctx.changed_jobs.add(name)
        if key:
            self.state.keys[key] = name
        self._ctx.announce("job.submitted", job, {"name": event.spec.name, "user": event.user})
        self._ctx.out.append(Accept(name))
        self._ctx.ask = True

    def _cancel_requested(self, event: CancelRequested) -> None:
        job = self.state.job(event.job)
        if not job.ended:
            lifecycle.end(self._ctx, job, JobTrigger.CANCELLED, f"cancelled by {event.user}")

    # --- plans

    def _plan_proposed(self, event: PlanProposed) -> None:
        plans.follow(self._ctx, event.plan, event.stats)

    def _start_expired(self, event: StartExpired) -> None:
        job = self.state.jobs.get(event.job)
        _, version = self.state.starts.get(event.job, (0.0, None))
        if job is None or version != event.version:
            return
        limit = f"{lifecycle.START_LIMIT_S:.0f} s"
        lifecycle.fail(self._ctx, job, f"its script did not come to its first epoch within {limit}")

    def _rescale_expired(self, event: RescaleExpired) -> None:
        job = self.state.jobs.get(event.job)
        if job and job.change and job.change.group.version == event.version:
            rescale.expired(self._ctx, job)

    # --- an operator's hand

    def _resize_requested(self, event: ResizeRequested) -> None:
        job = self.state.job(event.job)
        if job.ended:
            return
        slots, before = event.slots, job.hand
        if slots is None and not event.on:
            slots = before.slots if before else None
        on = event.on
        if before is not None and not on and not event.slots:
            on = tuple(
                SlotId(slot) for slot in before.on
            )  # an order for the batch, or a pause, is none to move
        paused = event.slots == 0 or (event.slots is None and bool(before and before.paused))
        if event.slots == 0:
            slots = before.slots if before else None
        batch = event.batch if event.batch is not None else (before.batch if before else None)
        self._take_in_hand(
            job, Hand(user=event.user, slots=slots, batch=batch, on=on, paused=paused)
        )

    def _pause_requested(self, event: PauseRequested) -> None:
        job = self.state.job(event.job)
        if job.ended:
            return
        was = job.hand or Hand(user=event.user)
        hand = Hand(user=event.user, slots=was.slots, batch=was.batch, on=was.on, paused=True)
        self._take_in_hand(job, hand)

    def _resume_requested(self, event: ResumeRequested) -> None:
        job = self.state.job(event.job)
        was = job.hand
        if job.ended or was is None:
            return
        if event.auto or (was.slots is None and was.batch is None and not was.on):
            job.hand, job.hand_waits, job.changed_at = None, "", self.state.version
            self.state.hands.pop(job.job, None)
            self._ctx.announce("job.hand", job, {"user": event.user, "hand": "off"})
            self._ctx.ask = True
            return
        hand = Hand(user=event.user, slots=was.slots, batch=was.batch, on=was.on)
        self._take_in_hand(job, hand)

    def _take_in_hand(self, job: Job, hand: Hand) -> None:
        job.hand, job.retry_at, job.tries = hand, Seconds(0.0), 0
        self.state.hands[job.job] = None
        slots = ", ".join(hand.on) or hand.slots
        order = "pause" if hand.paused else "resize"
        detail: Detail = {"user": hand.user, "hand": order, "slots": slots, "batch": hand.batch}
        self._ctx.announce("job.hand", job, detail)
        self._ctx.ask = True  # what it leaves free may be used

    def _hand_due(self, event: HandDue) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            job.retry_at = Seconds(0.0)

    # --- nodes

    def _node_greeted(self, event: NodeGreeted) -> None:
        node = self.state.nodes.get(event.node)
        if node is None:
            node = Node(node=event.node, spec=event.spec, boot=event.boot, since=self._ctx.now)
            self.state.nodes[event.node] = node
            self._ctx.announce("node.joined", node=node, detail={"slots": len(event.spec.slots)})
        else:
            if event.boot in node.former:
                return  # late words of a process that is gone
            if node.boot != event.boot:
                node.former = [*node.former, node.boot][-FORMER_BOOTS:]
                node.boot, node.committed = event.boot, 0
            node.spec = event.spec
            self._advance_node(node, NodeTrigger.GREETED, "node.up")
        self._reconcile(node, event.workers)
        self._ctx.ask = True

    def _reconcile(self, node: Node, seen: Iterable[WorkerSeen]) -> None:
        """Hold what the node runs against what it should run, and tell it the difference."""
        present = {worker_id(s.job, s.version, s.rank): s for s in seen}
        node.foreign = {
            slot_id(node.node, s.slot): name
            for name, s in present.items()
            if s.job not in self.state.jobs and not s.ended
        }
        self.state.slot_index.touch_node(node.node)
        for slot in [slot_id(node.node, s.index) for s in node.spec.slots]:
            rescale.slot_freed(self._ctx, slot)
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
                self._ctx.send_to(self.state.jobs[name], node.node)

    def _reconcile_worker(self, job: Job, worker: Worker, seen: WorkerSeen | None) -> None:
        self.state.slot_index.touch(job.job)
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
        self._advance_node(self.state.nodes[event.node], NodeTrigger.HEARD, "node.up")
        self._ctx.ask = True

    def _node_suspected(self, event: NodeSuspected) -> None:
        node = self.state.nodes[event.node]
        self._advance_node(
            node, NodeTrigger.SUSPECTED, "node.suspect", {"silent_s": event.silent_s}
        )
        self._ctx.ask = True  # nothing new goes there

    def _node_lost(self, event: NodeLost) -> None:
        node = self.state.nodes[event.node]
        if not self._advance_node(
            node, NodeTrigger.LOST, "node.lost", {"silent_s": event.silent_s}
        ):
            return
        why = f"node {node.node} has been silent for {event.silent_s:.0f} s"
        for job in [self.state.jobs[name] for name in self.state.jobs_with_processes]:
            rescale.on_node_lost(self._ctx, job, node.node, why)
        self._ctx.ask = True

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
            ended = isinstance(news, WorkerExited | WorkerRefused)
            if ended and name in node.foreign.values():
                was = list(node.foreign)
                node.foreign = {slot: of for slot, of in node.foreign.items() if of != name}
                self.state.slot_index.touch_node(node.node)
                for slot in was:
                    rescale.slot_freed(self._ctx, slot)
                self._ctx.ask = True
            return
        if isinstance(news, ScriptReport):
            if news.index <= worker.reports:
                return
            worker.reports = news.index
        self._worker_news(job, worker, news)

    def _worker_news(self, job: Job, worker: Worker, news: WorkerNews) -> None:
        ctx = self._ctx
        speaks = worker.phase in SPEAKING and job.group is not None
        match news:
            case WorkerStarted(pid=pid):
                self._worker_started(job, worker, pid)
            case WorkerReady():
                self._worker_ready(job, worker, news)
            case StoreOpened():
                rescale.store_opened(ctx, job, worker, news)
            case GroupFormed():
                rescale.formed(ctx, job, worker, news)
            case JoinFailed(group=version, error=error) if speaks:
                rescale.join_failed(ctx, job, version, error)
            case GroupBroken(group=version, error=error) if speaks:
                rescale.broken(ctx, job, version, error)
            case Quiesced() if speaks:
                rescale.quiesced(ctx, job, worker, news)
            case Suspended() if speaks:
                rescale.suspended(ctx, job, news)
            case EpochReported() if speaks:
                self._epoch_reported(job, news)
            case TrainingFinished(why=why) if speaks:
                job.finished_why = why
            case ScriptFailed(error=error, where=where) if worker.phase is not WorkerPhase.LEAVING:
                job.script_error = f"{error} ({where})" if where else error
            case WorkerExited():
                self._gone(job, worker, news)
            case WorkerRefused(error=error, hint=hint):
                self._refused(job, worker, f"{error}; {hint}" if hint else error)

    def _job_cleared(self, job: Job | None, node: Node, news: JobCleared) -> None:
        """Processes that were ordered, and called off before they began, never exit.

        One that began says so before; of those that the node counted as members when it said
        this, it says nothing.
        """
        if job is None:
            return
        counted = {member.worker for member in job.members()}
        for worker in job.workers.values():
            here = node_of(worker.slot) == node.node and worker.version < news.version
            if here and worker.pid is None and worker.worker not in counted:
                workers.advance(worker, WorkerTrigger.GONE)
                rescale.slot_freed(self._ctx, worker.slot)
        lifecycle.drop_gone(self._ctx, job)
        self._ctx.ask = True

    def _worker_started(self, job: Job, worker: Worker, pid: int) -> None:
        if worker.pid is None:
            worker.pid = pid
            job.ran[worker.worker] = node_of(worker.slot)
            workers.advance(worker, WorkerTrigger.STARTED)
            self._ctx.announce("worker.started", job, {**place(worker), "pid": pid})

    def _worker_ready(self, job: Job, worker: Worker, news: WorkerReady) -> None:
        if worker.phase is WorkerPhase.ORDERED:
            workers.advance(worker, WorkerTrigger.STARTED)
        if not workers.advance(worker, WorkerTrigger.READY) or job.group is None:
            return
        job.epoch_samples, worker.store_port = news.epoch_samples, news.store_port
        self._ctx.announce("worker.ready", job, place(worker))
        lifecycle.start_ready(self._ctx, job)
        rescale.prepared(self._ctx, job)

    def _epoch_reported(self, job: Job, news: EpochReported) -> None:
        if job.group is None or news.epoch <= job.epoch:
            return
        group = job.group
        if job.change is not None and job.change.group.version == news.group:
            group = job.change.group
        slots = [member.slot for member in group.members]
        whole = _whole(job, news)
        if whole:
            self._note_gain(job, news)
        job.epoch_at, job.epoch_step = self._ctx.now, news.step
        job.epoch, job.step, job.samples_done = news.epoch, news.step, news.samples_done
        job.epoch_samples, job.epochs_stated = news.epoch_samples, news.epochs
        job.samples_per_s = news.samples_per_s
        job.train_loss, job.metrics, job.lr = news.train_loss, news.metrics, news.lr
        # What the script says itself, as the metric of that name, else what was measured.
        noise_scale = first_noise_scale(news.metrics.get("noise_scale"), news.noise_scale)
        if noise_scale is not None:  # smoothed: the first measurements of a group are rough
            before = job.noise_scale or noise_scale
            job.noise_scale = before * (noise_scale / before) ** NOISE_SMOOTHING
            job.noise_epochs += 1
        job.checkpoint = ResumePoint(epoch=news.epoch, version=news.group)
        job.losses, job.tries = 0, 0
        info = EpochInfo(
            epoch=news.epoch,
            time=self._ctx.now,
            step=news.step,
            global_batch=news.global_batch,
            lr=news.lr,
            samples_per_s=news.samples_per_s,
            train_loss=news.train_loss,
            metrics=news.metrics,
            slots=len(slots),
            nodes=len({node_of(slot) for slot in slots}),
            whole=whole,
            noise_scale=noise_scale,
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
        self._ctx.announce("job.epoch", job, detail)
        self._ctx.ask = True

    def _note_gain(self, job: Job, news: EpochReported) -> None:
        """Hold the speed of the first whole epoch of a group against what was promised of it."""
        last = job.decisions[-1] if job.decisions else None
        if last is None or last.version != news.group or "speed_then" not in last.numbers:
            return
        if REALISED in last.numbers or not last.numbers.get("speed_now"):
            return
        numbers = {**last.numbers, REALISED: news.samples_per_s}
        job.decisions[-1] = msgspec.structs.replace(last, numbers=numbers)
        predicted = numbers["speed_then"] / numbers["speed_now"]
        realised = news.samples_per_s / numbers["speed_now"]
        self.state.gains.append((predicted, realised))
        del self.state.gains[:-KEPT_GAINS]
        detail: Detail = {"version": last.version, "predicted": predicted, "realised": realised}
        self._ctx.announce("job.gain", job, detail)

    def _refused(self, job: Job, worker: Worker, why: str) -> None:
        was = worker.phase
        workers.advance(worker, WorkerTrigger.GONE)
        rescale.slot_freed(self._ctx, worker.slot)
        if job.group is not None and was not in {WorkerPhase.LEAVING, WorkerPhase.GONE}:
            rescale.refused(self._ctx, job, worker, why)
        lifecycle.drop_gone(self._ctx, job)
        self._ctx.ask = True

    def _gone(self, job: Job, worker: Worker, news: WorkerExited) -> None:
        was = worker.phase
        if was is WorkerPhase.GONE:
            return
        workers.advance(worker, WorkerTrigger.GONE)
        rescale.slot_freed(self._ctx, worker.slot)
        detail: Detail = {**place(worker), "code": news.code, "signal": news.signal}
        self._ctx.announce("worker.exited", job, detail)
        rescale.on_worker_exited(self._ctx, job, worker, was, news)
        lifecycle.drop_gone(self._ctx, job)
        self._ctx.ask = True

    # --- helpers

    def _input_skipped(self, event: InputSkipped) -> None:
        node = self.state.nodes.get(event.node) if event.node else None
        if node is not None and node.boot == event.boot:
            node.committed = max(node.committed, event.seq)

    def _advance_node(
        self, node: Node, trigger: NodeTrigger, event: str, detail: Detail | None = None
    ) -> bool:
        changed = nodes.advance(node, trigger, self._ctx.now)
        if changed:
            self._ctx.announce(event, node=node, detail=detail)
        return changed


def _whole(job: Job, news: EpochReported) -> bool:
    """Whether one group, with one batch, did all of an epoch."""
    group = job.group
    if group is None or news.group != group.version or news.epoch != job.epoch + 1:
        return False
    return all(
        worker.formed == group.version and worker.formed_step <= job.epoch_step
        for worker in job.group_workers()
    )


def _touched(event: Input) -> Iterable[JobId] | None:
    """The jobs that an input is about, beside those that it turns; None: any."""
    match event:
        case NodeReported(event=news):
            return (news.job,)
        case PlanProposed(plan=plan):
            return plan.local_batch
        case (
            CancelRequested(job=job)
            | StartExpired(job=job)
            | RescaleExpired(job=job)
            | ResizeRequested(job=job)
            | PauseRequested(job=job)
            | ResumeRequested(job=job)
            | HandDue(job=job)
        ):
            return (job,)
        case JobSubmitted():
            return ()
        case _:
            return None


def _of(worker: Worker, job: Job) -> dict[str, Any]:
    return {"job": job.job, "version": worker.version, "rank": worker.rank}


WorkerNews = (
    WorkerStarted
    | WorkerReady
    | StoreOpened
    | GroupFormed
    | JoinFailed
    | GroupBroken
    | Quiesced
    | Suspended
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
    RescaleExpired: Reactor._rescale_expired,  # noqa: SLF001
    ResizeRequested: Reactor._resize_requested,  # noqa: SLF001
    PauseRequested: Reactor._pause_requested,  # noqa: SLF001
    ResumeRequested: Reactor._resume_requested,  # noqa: SLF001
    HandDue: Reactor._hand_due,  # noqa: SLF001
    InputSkipped: Reactor._input_skipped,  # noqa: SLF001
}
