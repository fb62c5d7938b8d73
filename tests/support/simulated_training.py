"""Imaginary workers in real time: what the training library does about its orders, and how far jobs are."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nodeagent.reconciler_events import (
    Ended,
    LogsStored,
    ReportRead,
)
from schemas.codec import encode
from schemas.epochs import EpochFacts
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.nodes import Group
from schemas.wire.agent import (
    JOIN,
    RECOVER,
    SETTLED,
    SUSPEND,
    SWITCH,
    EpochReported,
    GroupDelta,
    GroupFormed,
    Quiesced,
    ScriptReport,
    SlotAwaited,
    StepsReported,
    StoreOpened,
    Suspended,
    Telemetry,
    TrainingFinished,
    WorkerReady,
)

if TYPE_CHECKING:
    from tests.support.training_agent import TrainingAgent


@dataclass
class Job:
    """How far a job's training is; all of its members are at the same place."""

    job: JobId
    epoch_samples: int
    epochs: int
    epoch: int = 0
    step: int = 0
    group_step: int = 0  # at which its group began to train
    samples: float = 0.0
    said_at: float = 0.0  # telemetry
    epoch_at: float = 0.0
    group: Group | None = None
    over: bool = False

    def speed(self, slots: int) -> float:
        """Samples per second: a further slot is worth a little less."""
        return float(1000.0 * slots**0.85)


class Training:
    """All workers of the fleet, and what the members of a group agree on among themselves."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a load, not a secret
        self.workers: dict[WorkerId, Worker] = {}
        self.jobs: dict[JobId, Job] = {}
        self.frozen = False
        self.finished = 0
        self.recoveries = 0

    def job(self, job: JobId) -> Job:
        if job not in self.jobs:
            samples, epochs = self.rng.randint(800, 2400), self.rng.randint(10, 20)
            self.jobs[job] = Job(job, samples, epochs)
        return self.jobs[job]

    def later(self, least_s: float, most_s: float, act: Callable[..., object], *args: Any) -> None:
        delay_s = self.rng.uniform(least_s, most_s)
        asyncio.get_running_loop().call_later(delay_s, act, *args)

    @property
    def busy(self) -> int:
        """Slots with a process."""
        return len({(worker.agent.node, worker.slot) for worker in self.workers.values()})

    def leaders(self) -> Iterator[tuple[Job, Worker]]:
        """Every job that trains, and the worker that is rank 0 of its group."""
        for job in list(self.jobs.values()):
            if job.group is not None and not job.over:
                first = self.workers.get(job.group.members[0].worker)
                if first is not None:
                    yield job, first

    def arm(self, delta: GroupDelta) -> None:
        """Let all members pass into the next group if every one of them waits for it."""
        group = delta.group
        if group is None:
            return
        involved = [member.worker for member in (*group.members, *delta.former)]
        found = [self.workers[name] for name in involved if name in self.workers]
        if len(found) < len(involved) or not all(delta.version in w.armed for w in found):
            return
        job = self.job(delta.job)
        job.group, job.group_step = (group if group.members else None), job.step
        if job.said_at == 0.0:
            job.said_at = job.epoch_at = time.monotonic()
        for worker in found:
            del worker.armed[delta.version]
            worker.quiescing = False
            self.later(0.0, 0.01, worker.swap, delta)

    async def run(self, tick_s: float = 0.05) -> None:
        """Train, for ever."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if not self.frozen:
                for job, first in self.leaders():
                    self._train(job, first, now - before, now)
            before = now

    def _train(self, job: Job, first: Worker, passed_s: float, now: float) -> None:
        group = job.group
        members = [self.workers.get(member.worker) for member in group.members] if group else []
        if group is None or any(worker is None or worker.quiescing for worker in members):
            return
        gained = job.speed(len(members)) * passed_s
        job.samples += gained
        job.step += max(1, round(gained / group.global_batch))
        if job.samples >= (job.epoch + 1) * job.epoch_samples:
            job.epoch += 1
            first.report(EpochReported, **self.epoch_of(job, group, now))
            job.epoch_at = now
        if job.epoch >= job.epochs:
            if any(worker and worker.armed for worker in members):
                return  # they go on to the boundary that they agreed on
            job.over = True
            self.finished += 1
            self.later(5.0, 5.0, self.jobs.pop, job.job, None)
            first.report(TrainingFinished, reason="its epochs are done")
            for worker in members:
                if worker is not None:
                    self.later(0.0, 0.02, worker.end, 0)
        elif now - job.said_at >= 1.0:
            job.said_at = now
            first.say_steps(job, group)

    def epoch_of(self, job: Job, group: Group, now: float) -> dict[str, Any]:
        """The fields of a report of the epoch that just ended."""
        facts = EpochFacts(
            epoch=job.epoch,
            step=job.step,
            samples_done=job.epoch * job.epoch_samples,
            epoch_samples=job.epoch_samples,
            samples_per_s=job.epoch_samples / max(0.001, now - job.epoch_at),
            train_loss=1.0 / job.epoch,
            metrics={"accuracy": 0.5},
            global_batch=group.global_batch,
            lr=0.1,
        )
        return {
            "group": group.version,
            "stated_epochs": job.epochs,
            "duration_s": now - job.epoch_at,
            "facts": facts,
        }


@dataclass
class Worker:
    """A worker's process: what it does about its orders."""

    agent: TrainingAgent
    name: WorkerId
    job: JobId
    version: Version
    rank: Rank
    slot: int
    training: Training
    reports: int = 0
    ready: bool = False
    in_group: bool = False
    quiescing: bool = False
    opened: Version = Version(0)  # the newest version that it opened a store for
    armed: dict[Version, GroupDelta] = field(default_factory=dict)

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Write the next report."""
        if self.name in self.training.workers:
            self.reports += 1
            who: dict[str, Any] = {"job": self.job, "version": self.version, "rank": self.rank}
            self.agent.tell(ReportRead(self.name, kind(**who, index=self.reports, **fields)))

    def say_steps(self, job: Job, group: Group) -> None:
        """Telemetry, which nobody numbers."""
        steps = StepsReported(
            job=self.job,
            version=self.version,
            rank=self.rank,
            group=group.version,
            epoch=job.epoch + 1,
            step=job.step,
            samples_done=int(job.samples),
            samples_per_s=job.speed(len(group.members)),
            train_loss=0.5,
            global_batch=group.global_batch,
            lr=0.1,
            group_steps=job.step - job.group_step,
        )
        self.agent.events.send(
            self.agent.node.encode(), encode(Telemetry(node=self.agent.node, steps=steps))
        )

    def waits(self) -> None:
        """All is built that needs no device, if that is not its own by now."""
        if not self.ready:
            self.report(SlotAwaited)

    def granted(self) -> None:
        """The device is its own: model, optimizer and data can be built."""
        if not self.ready:
            self.ready = True
            self.training.later(0.01, 0.05, self._built)

    def _built(self) -> None:
        job = self.training.job(self.job)
        self.report(
            WorkerReady,
            epoch_samples=job.epoch_samples,
            resumed_epoch=job.epoch,
            parameters=1000,
            store_port=29000,
        )

    def order(self, delta: GroupDelta) -> None:
        """Do what the training library does about a new delta."""
        group = delta.group
        if group is None:
            return
        if delta.stage == SWITCH:
            self.armed[delta.version] = delta
            self.training.arm(delta)
        elif delta.stage >= SETTLED:
            self.armed = {v: armed for v, armed in self.armed.items() if v > delta.version}
        elif delta.kind == RECOVER:
            self._quiesce(delta)
        elif delta.kind == JOIN and self._serves(group):
            self.opened = group.version
            self.training.later(0.0, 0.01, self._open)

    def _serves(self, group: Group) -> bool:
        """Whether a group meets at the store of this incumbent, and it has none open for it."""
        first = group.members[0].worker == self.name and len(group.members) > 1
        return first and self.in_group and self.opened < group.version

    def _open(self) -> None:
        self.report(StoreOpened, group=self.opened, port=29001)

    def _quiesce(self, delta: GroupDelta) -> None:
        job = self.training.job(self.job)
        self.training.recoveries += 1
        self.quiescing = True
        self.armed.clear()
        self.report(
            Quiesced,
            group=delta.version,
            step=job.step,
            epoch=job.epoch,
            has_full_state=self.in_group,
            port=29002,
        )

    def swap(self, delta: GroupDelta) -> None:
        """Pass the boundary into `delta`'s group, or leave at it."""
        job, group = self.training.job(self.job), delta.group
        if group is not None and group.member(self.name) is not None:
            self.in_group = True
            self.report(GroupFormed, group=group.version, epoch=job.epoch, step=job.step)
            return
        if delta.kind == SUSPEND and delta.former and delta.former[0].worker == self.name:
            done = {"step": job.step, "samples_done": int(job.samples)}
            self.report(Suspended, group=delta.version, epoch=job.epoch, **done)
        self.training.later(0.0, 0.02, self.end, 0)

    def end(self, code: int | None, signal: int | None = None) -> None:
        """The process is gone."""
        if self.training.workers.pop(self.name, None) is not None:
            self.agent.tell(Ended(self.name, code, signal, unseen=False))
            self.agent.tell(LogsStored(self.name))
