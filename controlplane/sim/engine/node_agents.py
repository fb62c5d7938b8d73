"""Plays every node's agent and every worker: deltas in, what they would report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from controlplane.sim.engine.kernel import Kernel
from controlplane.sim.engine.training_progress import Training
from controlplane.sim.models.job_model import Costs
from schemas.groups import Group, Member
from schemas.ids import JobId, NodeId, Rank, SlotId, Version, WorkerId, node_of
from schemas.messages.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    START,
    SUSPEND,
    SWITCH,
    AgentEvent,
    EpochReported,
    GroupBroken,
    GroupDelta,
    GroupFormed,
    JobCleared,
    Quiesced,
    ScriptFailed,
    StoreOpened,
    Suspended,
    TrainingFinished,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)

PORT = 29_500
KILLED, ENDED_BY_TERM = 9, 15
Say = Callable[[NodeId, AgentEvent], None]


class Watcher(Protocol):
    """Whoever keeps the books on training."""

    def trains(self, crew: Crew, stall_s: float) -> None:
        """`crew.group` trains from now on, after a stall."""
        ...

    def rests(self, crew: Crew) -> None:
        """Nobody trains this job any more."""
        ...


@dataclass(slots=True)
class Process:
    """One worker."""

    slot: SlotId
    version: Version  # that it was born with
    rank: Rank
    index: int = 0  # of its last report
    ready_at: float = 0.0
    ready: bool = False

    def next(self) -> int:
        """The index of its next report."""
        self.index += 1
        return self.index


@dataclass(slots=True)
class Crew:
    """The workers of one job, wherever they are."""

    job: JobId
    training: Training
    costs: Costs
    group: Group | None = None  # that trains
    processes: dict[WorkerId, Process] = field(default_factory=dict)
    seen: tuple[int, int] = (0, 0)  # newest version and stage that was acted on
    started: bool = False  # at least once
    crashed: bool = False  # as its trace wanted
    over: bool = False  # the job ended

    def placement(self) -> tuple[int, ...]:
        """Slots on each node, in rank order."""
        counts: dict[NodeId, int] = {}
        for member in self.group.members if self.group else ():
            node = node_of(member.slot)
            counts[node] = counts.get(node, 0) + 1
        return tuple(counts.values())


class Agents:
    """All nodes' agents at once.

    With `at_once`, slots change hands in no time and every change is followed by a stall, as in
    the published simulators; else newcomers start beside a group that trains on.
    """

    def __init__(
        self, kernel: Kernel, say: Say, watcher: Watcher, crews: MutableMapping[JobId, Crew], *,
        at_once: bool,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._say = say
        self._watcher = watcher
        self._crews = crews
        self._at_once = at_once
        self._on: dict[SlotId, WorkerId] = {}  # whose process is on a slot
        self._queue: dict[SlotId, tuple[Crew, WorkerId]] = {}  # waits until it is free
        self._down: set[NodeId] = set()

    # --- orders

    def obey(self, node: NodeId, delta: GroupDelta) -> None:
        """Do what `node` should do about one job."""
        if node in self._down:
            return
        if delta.group is None:
            self._soon(self._clears, node, delta)
        crew = self._crews.get(delta.job)
        if crew is None:
            return
        wanted = _wanted(delta, node)
        self._end_others(crew, node, wanted, delta)
        if delta.group is None:
            return
        if delta.stage == PREPARE and delta.kind != RECOVER:
            self._prepare(crew, delta, wanted)
        if delta.kind == RECOVER and delta.stage == PREPARE:
            self._come_to_rest(crew, delta, wanted)
        first = crew.seen < (delta.version, delta.stage)
        crew.seen = max(crew.seen, (delta.version, delta.stage))
        if delta.stage == SWITCH and first:
            self._switch(crew, delta)

    def _end_others(
        self, crew: Crew, node: NodeId, wanted: Mapping[WorkerId, Member], delta: GroupDelta
    ) -> None:
        for name, process in list(crew.processes.items()):
            if node_of(process.slot) == node and name not in wanted:
                newer = process.version > delta.version
                if not newer:
                    self._soon(self._exit, crew, name, None, ENDED_BY_TERM)

    def _clears(self, node: NodeId, delta: GroupDelta) -> None:
        """Say so when nothing older than `delta` is left: orders may have been lost on the way."""
        crew = self._crews.get(delta.job)
        here = crew.processes.values() if crew is not None else ()
        if not any(node_of(p.slot) == node and p.version < delta.version for p in here):
            self._say(node, JobCleared(job=delta.job, version=delta.version))

    def _soon(self, what: Callable[..., None], *arguments: object) -> None:
        """At this time, behind what is under way."""
        self._kernel.at(self._kernel.now, what, *arguments, urgency=self._kernel.urgency)

    def _prepare(self, crew: Crew, delta: GroupDelta, wanted: Mapping[WorkerId, Member]) -> None:
        now = self._kernel.now
        for name, member in wanted.items():
            version, rank = _born(name)
            if name in crew.processes or version != delta.version:
                continue
            process = Process(slot=member.slot, version=version, rank=rank)
            process.ready_at = now + self._start_s(crew, delta.kind)
            crew.processes[name] = process
            self._say(node_of(member.slot), WorkerStarted(
                job=crew.job, version=version, rank=rank, pid=len(crew.processes), started_ticks=1
            ))  # fmt: skip
            if member.slot in self._on:
                self._queue[member.slot] = (crew, name)
            else:
                self._on[member.slot] = name
                self._kernel.at(process.ready_at, self._get_ready, crew, name)
        members = delta.group.members if delta.group else ()
        first = members[0].worker if members else None
        if delta.kind == JOIN and first in wanted and first in crew.processes:
            process = crew.processes[first]
            if process.version < delta.version and len(members) > 1:
                self._soon(self._open_store, crew, first, delta.version)

    def _stall_s(self, crew: Crew, kind: str) -> float:
        costs = crew.costs
        if kind != START:
            return costs.switch_s
        return costs.restart_s if crew.started else costs.start_s

    def _start_s(self, crew: Crew, kind: str) -> float:
        if self._at_once:
            return 0.0
        return crew.costs.prepare_s if kind == JOIN else self._stall_s(crew, kind)

    def _get_ready(self, crew: Crew, name: WorkerId) -> None:
        process = crew.processes.get(name)
        if process is None or process.ready:
            return
        process.ready = True
        self._tell(crew, name, partial(
            WorkerReady,
            epoch_samples=crew.training.work.epoch_samples,
            resumed_epoch=crew.training.epoch,
            parameters=1,
            store_port=PORT,
        ))  # fmt: skip

    def _resume(self, crew: Crew, group: Group) -> None:
        """What was not saved is lost."""
        training = crew.training
        training.catch_up(self._kernel.now)
        training.fall_back(training.saved if group.resume else 0.0)
        training.steps = training.saved_steps

    def _open_store(self, crew: Crew, name: WorkerId, version: Version) -> None:
        self._tell(crew, name, partial(StoreOpened, group=version, port=PORT))

    def _switch(self, crew: Crew, delta: GroupDelta) -> None:
        now = self._kernel.now
        if delta.kind == SUSPEND:
            self._soon(self._suspend, crew, delta)
        elif delta.kind == START or self._at_once or self._same_members(crew, delta.group):
            self._soon(self._form, crew, delta)
        else:
            crew.training.stall(now + crew.costs.switch_s, now)
            self._kernel.at(now + crew.costs.switch_s, self._form, crew, delta)

    def _same_members(self, crew: Crew, group: Group | None) -> bool:
        """Whether only the batch changes: that happens between two steps."""
        before = crew.group
        if before is None or group is None:
            return False
        return [member.worker for member in before.members] == [m.worker for m in group.members]

    def _form(self, crew: Crew, delta: GroupDelta) -> None:
        group = delta.group
        if group is None or any(member.worker not in crew.processes for member in group.members):
            return  # somebody died meanwhile
        if crew.seen > (delta.version, SWITCH):
            return  # it was called off, or something newer came
        stall_s = 0.0
        if self._at_once and not self._same_members(crew, group):
            stall_s = self._stall_s(crew, delta.kind)
        if delta.kind == START:
            self._resume(crew, group)
        crew.group, crew.started = group, True
        self._watcher.trains(crew, stall_s)
        training = crew.training
        for member in group.members:
            self._tell(crew, member.worker, partial(
                GroupFormed, group=group.version, epoch=training.epoch, step=int(training.steps)
            ))  # fmt: skip
        for member in delta.former:
            self._soon(self._exit, crew, member.worker, 0, None)

    def _suspend(self, crew: Crew, delta: GroupDelta) -> None:
        group = crew.group
        if group is None or crew.seen > (delta.version, SWITCH):
            return
        training = crew.training
        training.stop(self._kernel.now)
        training.save()
        self._watcher.rests(crew)
        self._tell(crew, group.members[0].worker, partial(
            Suspended,
            group=delta.version,
            epoch=training.epoch,
            step=int(training.steps),
            samples_done=int(training.progress),
        ))  # fmt: skip
        crew.group = None
        for name in list(crew.processes):
            self._exit(crew, name, 0, None)

    def _come_to_rest(
        self, crew: Crew, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        self._watcher.rests(crew)
        training = crew.training
        training.stop(self._kernel.now)
        for name in wanted:
            if name in crew.processes:
                self._soon(self._tell, crew, name, partial(
                    Quiesced,
                    group=delta.version,
                    step=int(training.steps),
                    epoch=training.epoch,
                    full=crew.processes[name].ready and crew.group is not None,
                    port=PORT,
                ))  # fmt: skip

    # --- what happens to processes

    def epoch_over(self, crew: Crew, samples_per_s: float) -> None:
        """Rank 0 reports an epoch; after the last one all end."""
        group, training = crew.group, crew.training
        if group is None:
            return
        work, first = training.work, group.members[0].worker
        training.save()
        told = work.report(training.epoch, group.global_batch)
        stop = work.spec.stop
        self._tell(crew, first, partial(
            EpochReported,
            group=group.version,
            epoch=training.epoch,
            step=int(training.steps),
            samples_done=round(training.progress),
            epoch_samples=work.epoch_samples,
            epochs=stop.epochs if stop is not None else None,
            samples_per_s=samples_per_s,
            duration_s=0.0,
            train_loss=told.train_loss,
            metrics=told.metrics,
            global_batch=group.global_batch,
            lr=group.lr or 0.0,
            noise_scale=told.noise_scale,
        ))  # fmt: skip
        if training.epoch >= work.epochs:
            self._watcher.rests(crew)
            crew.group = None
            self._tell(crew, first, partial(TrainingFinished, why="its stop rule is met"))
            for name in [member.worker for member in group.members]:
                self._exit(crew, name, 0, None)

    def crash(self, crew: Crew) -> None:
        """The script raises on every worker of the group."""
        group = crew.group
        if group is None:
            return
        crew.crashed = True
        crew.training.stop(self._kernel.now)
        self._watcher.rests(crew)
        crew.group = None
        why = partial(ScriptFailed, error="RuntimeError: as its trace says", where="train.py:1")
        self._tell(crew, group.members[0].worker, why)
        for member in group.members:
            self._exit(crew, member.worker, 1, None)

    def is_down(self, node: NodeId) -> bool:
        """Whether a node is gone, and has not come back yet."""
        return node in self._down

    def node_dies(self, node: NodeId) -> list[Crew]:
        """A node is gone; whose groups had workers there."""
        self._down.add(node)
        hit = []
        for crew in list(self._crews.values()):
            here = [name for name, p in crew.processes.items() if node_of(p.slot) == node]
            if not here:
                continue
            for name in here:
                self._clear(crew, name)
            group = crew.group
            if group is not None and any(member.worker in here for member in group.members):
                hit.append(crew)
        return hit

    def break_group(self, crew: Crew) -> None:
        """The group lost a member: the others stand still and say so."""
        group = crew.group
        crew.training.stop(self._kernel.now)
        self._watcher.rests(crew)
        left = [m.worker for m in group.members if m.worker in crew.processes] if group else []
        if group is not None and left:
            self._tell(crew, left[0], partial(GroupBroken, group=group.version, error="peer gone"))
        else:
            crew.group = None

    def node_returns(self, node: NodeId) -> None:
        """It is empty, and obeys again."""
        self._down.discard(node)

    # --- helpers

    def _exit(self, crew: Crew, name: WorkerId, code: int | None, signal: int | None) -> None:
        process = crew.processes.get(name)
        if process is None:
            return
        group = crew.group
        if signal is not None and group is not None and group.member(name) is not None:
            crew.training.stop(self._kernel.now)
            self._watcher.rests(crew)
            crew.group = None
        self._clear(crew, name)
        exited = WorkerExited(
            job=crew.job, version=process.version, rank=process.rank, code=code, signal=signal
        )
        self._say(node_of(process.slot), exited)

    def _clear(self, crew: Crew, name: WorkerId) -> None:
        """Its slot is free for whoever waits for it."""
        process = crew.processes.pop(name)
        if crew.over and not crew.processes:
            del self._crews[crew.job]
        slot = process.slot
        if self._on.get(slot) == name:
            del self._on[slot]
            heir = self._queue.pop(slot, None)
            if heir is not None and heir[1] in heir[0].processes:
                other, its_name = heir
                self._on[slot] = its_name
                ready_at = other.processes[its_name].ready_at
                self._kernel.at(ready_at, self._get_ready, other, its_name)
        elif self._queue.get(slot, (None, ""))[1] == name:
            del self._queue[slot]

    def _tell(self, crew: Crew, name: WorkerId, report: Callable[..., AgentEvent]) -> None:
        process = crew.processes.get(name)
        if process is None:
            return
        event = report(
            job=crew.job, version=process.version, rank=process.rank, index=process.next()
        )
        self._say(node_of(process.slot), event)


def _wanted(delta: GroupDelta, node: NodeId) -> dict[WorkerId, Member]:
    """The workers that may be on `node`."""
    members = (*(delta.group.members if delta.group else ()), *delta.former)
    return {member.worker: member for member in members if node_of(member.slot) == node}


def _born(name: WorkerId) -> tuple[Version, Rank]:
    """The version and rank that a worker is named after."""
    _, version, rank = name.rsplit(".", 2)
    return Version(int(version[1:])), Rank(int(rank[1:]))
