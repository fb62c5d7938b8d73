"""Imaginary workers that do what the training library does about their orders, one act at a time.

What their collective operations would tell them, they learn from the `World` that they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.ids import (
    JobId,
    Version,
    WorkerId,
    worker_id,
)
from schemas.nodes import Group
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    GroupDelta,
    ScriptReport,
)
from schemas.wire.worker import Assignment
from tests.support.builders import (
    awaits,
    broken,
    epoch_end,
    finished,
    formed,
    join_failed,
    quiesced,
    ready,
    store,
    suspended,
)

Place = tuple[int, int]  # (epochs finished, steps taken)
NONE = Version(0)


class World:
    """All processes, and what the members of a group agree on without the controller."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole  # every node is in it; else those that are not do as they are told
        self.older = False  # their library is, and never says that it waits for a slot
        self.processes: dict[WorkerId, Process] = {}
        self.passed: dict[tuple[JobId, Version], Place] = {}  # boundaries, and where they were
        self.trained: dict[tuple[JobId, Version], Place] = {}
        self.done: set[tuple[JobId, Version]] = set()  # groups that met their stop rule

    def arm(self, delta: GroupDelta) -> None:
        """Let the boundary of a version pass if everybody who has a part in it waits for it."""
        if delta.group is None or (delta.job, delta.version) in self.passed:
            return
        parts = [member.worker for member in (*delta.group.members, *delta.former)]
        known = [self.processes[name] for name in parts if name in self.processes]
        if self.whole and len(known) < len(parts):
            return
        if all(process.alive and delta.version in process.armed for process in known):
            resume = delta.group.resume
            places = [(resume.epoch, resume.epoch * 16) if resume else (0, 0)]
            places += [process.place for process in known]
            self.passed[delta.job, delta.version] = max(places)

    def lives(self, worker: WorkerId) -> bool:
        return self.processes[worker].alive if worker in self.processes else not self.whole


@dataclass(slots=True)
class Process:
    """A worker's process and its folder; both outlive the agent, the folder also the process."""

    assignment: Assignment
    pid: int
    world: World
    granted: bool = True  # its device is its own, as far as it was told
    alive: bool = True
    code: int | None = None
    signal: int | None = None
    stopping: bool = False  # was sent TERM
    connected_to: str = ""  # the life of the agent
    reports: list[ScriptReport] = field(default_factory=list)  # its file
    read: int = 0  # by the present agent
    stored: bool = False  # all of its output
    order: GroupDelta | None = None  # the newest that it was told
    armed: dict[Version, GroupDelta] = field(default_factory=dict)  # boundaries that it waits for
    group: Group | None = None  # that it takes its steps in
    quiesced_for: Version = Version(0)  # stands still, as this version asked
    said: set[tuple[str, Version]] = field(default_factory=set)

    @property
    def name(self) -> WorkerId:
        return worker_id(self.assignment.job, self.assignment.version, self.assignment.rank)

    @property
    def place(self) -> Place:
        """Where its parameters are."""
        key = (self.assignment.job, self.group.version if self.group else Version(0))
        return self.world.trained.get(key, (0, 0))

    @property
    def in_group(self) -> Version:
        """That it takes its next step in; a boundary is passed by all at once."""
        job = self.assignment.job
        passed = [version for version in self.armed if (job, version) in self.world.passed]
        return max([*passed, self.group.version if self.group else Version(0)])

    @property
    def progress(self) -> object:
        """Changes whenever an act changed anything."""
        return (
            len(self.reports),
            self.alive,
            sorted(self.armed),
            self.in_group,
            self.place,
            (self.assignment.job, self.in_group) in self.world.done,
        )

    def act(self, epochs: int | None) -> None:
        """Do the next thing that the training library would do; None: everything but train."""
        if ("ready", NONE) not in self.said:
            if self.granted or not self.world.older:
                self._say("ready" if self.granted else "waits for its slot")
            return
        if self._swap():
            return
        self._obey()
        if self._swap() or self.quiesced_for:
            return
        if self.group is None:
            self._waits_for_nobody()
            return
        if self._meets_a_fault():
            self._say("broken", self.group.version)
        else:
            self._train(self.group, epochs)

    def fail_to_join(self) -> None:
        """It cannot build a group that it was told of."""
        waits = [v for v in self.armed if (self.assignment.job, v) not in self.world.passed]
        if waits:
            del self.armed[waits[-1]]
            self._say("cannot join", waits[-1])

    def waits_in_vain(self) -> bool:
        """Whether it waits for a boundary with somebody who is gone: it fails to join, in time."""
        job, delta = self.assignment.job, next(reversed(self.armed.values()), None)
        if not self.alive or delta is None or (job, delta.version) in self.world.passed:
            return False
        members = delta.group.members if delta.group else ()
        return not all(self.world.lives(member.worker) for member in members)

    def die(self, code: int | None = None, signal: int | None = None) -> None:
        self.alive, self.code, self.signal = False, code, signal

    def _obey(self) -> None:
        order = self.order
        if order is None or order.group is None:
            return
        if order.stage >= SETTLED or order.kind == RECOVER:
            self.armed = {
                version: delta
                for version, delta in self.armed.items()
                if (order.job, version) in self.world.passed or version == order.version
            }
        if order.kind == RECOVER and order.stage == PREPARE and self.quiesced_for < order.version:
            self.quiesced_for = order.version
            self._say("quiesced", order.version)
        if order.stage == PREPARE and order.kind == JOIN and self.group is not None:
            first = order.group.members[0].worker
            if first == self.name and len(order.group.members) > 1:
                self._say("store", order.version)
        in_time = self.in_group < order.version and ("cannot join", order.version) not in self.said
        if order.stage == SWITCH and in_time:
            self.armed[order.version] = order
            self.world.arm(order)

    def _swap(self) -> bool:
        """Pass a boundary that all have agreed on."""
        job = self.assignment.job
        for version in sorted(self.armed):
            if (job, version) not in self.world.passed:
                continue
            delta = self.armed.pop(version)
            assert delta.group is not None
            old, self.quiesced_for = self.group, Version(0)
            if delta.group.member(self.name) is None:
                if delta.kind == SUSPEND and old is not None and old.members[0].worker == self.name:
                    self._say("suspended", version)
                self.die(code=0)
            else:
                self.group = delta.group
                self.world.trained.setdefault((job, version), self.world.passed[job, version])
                self._say("formed", version)
            return True
        return False

    def _waits_for_nobody(self) -> None:
        """The first group of a job cannot form without one of its members."""
        for version, delta in self.armed.items():
            members = delta.group.members if delta.group and delta.kind == START else ()
            if not all(self.world.lives(member.worker) for member in members):
                self._say("broken", version)

    def _meets_a_fault(self) -> bool:
        group, job = self.group, self.assignment.job
        if group is None or (job, group.version) in self.world.done:
            return False
        processes = self.world.processes
        return any(
            not self.world.lives(member.worker)
            or (member.worker in processes and processes[member.worker].in_group != group.version)
            for member in group.members
        )

    def _train(self, group: Group, epochs: int | None) -> None:
        key = (self.assignment.job, group.version)
        if key in self.world.done:
            self._say("finished")
            self.die(code=0)
        elif epochs is None or any(
            self.world.processes[member.worker].quiesced_for
            for member in group.members
            if member.worker in self.world.processes
        ):
            return
        elif group.members[0].worker == self.name:
            epoch, step = self.place
            if epoch < epochs:
                self.world.trained[key] = (epoch + 1, step + 16)
                self._say("epoch", group.version)
            else:
                self.world.done.add(key)

    def _say(self, what: str, version: Version = NONE) -> None:
        """Write a report, once about each version."""
        if what != "epoch" and (what, version) in self.said:
            return
        self.said.add((what, version))
        self.reports.append(self._report(what, version))

    def _report(self, what: str, version: Version) -> ScriptReport:
        job, index = self.assignment.job, len(self.reports) + 1
        who = (job, self.assignment.version)
        rank, port = self.assignment.rank, 29000 + self.pid
        epoch, step = self.place
        match what:
            case "ready":
                resume = self.assignment.group.resume
                resumed = resume.epoch if resume else 0
                return ready(*who, rank=rank, index=index, resumed=resumed, port=port)
            case "waits for its slot":
                return awaits(*who, rank=rank, index=index)
            case "store":
                return store(*who, rank=rank, index=index, group=version, port=port)
            case "formed":
                return formed(*who, rank=rank, index=index, group=version, epoch=epoch, step=step)
            case "cannot join":
                return join_failed(*who, rank=rank, index=index, group=version, error="no")
            case "broken":
                return broken(*who, rank=rank, index=index, group=version, error="reset")
            case "quiesced":
                behind = step > 0 and (self.pid + version) % 3 == 0  # the last step was half done
                return quiesced(
                    *who,
                    rank=rank,
                    index=index,
                    group=version,
                    step=step - behind,
                    epoch=epoch,
                    has_full_state=self.group is not None,
                    port=port,
                )
            case "suspended":
                return suspended(
                    *who, rank=rank, index=index, group=version, epoch=epoch, step=step
                )
            case "epoch":
                return epoch_end(
                    job, epoch, who[1], rank=rank, index=index, group=version, step=step
                )
            case _:
                return finished(*who, rank=rank, index=index, reason="its epochs are done")
