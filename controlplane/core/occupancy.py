"""Who has which slot, kept up to date job by job; only what was touched is looked at again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakSet

from controlplane.core.job import Job
from controlplane.core.node import Node, NodePhase
from controlplane.core.worker import Worker, WorkerPhase
from schemas.ids import JobId, NodeId, SlotId, slot_id

if TYPE_CHECKING:
    from controlplane.core.state import State

_GOING = frozenset({WorkerPhase.RETIRING, WorkerPhase.LEAVING})


@dataclass(frozen=True, slots=True)
class _Part:
    """One job's part in it."""

    owned: tuple[SlotId, ...] = ()
    claimed: tuple[SlotId, ...] = ()
    left: tuple[SlotId, ...] = ()
    trains_on: dict[SlotId, int] = field(default_factory=dict)  # slot -> local batch


@dataclass(slots=True, eq=False, weakref_slot=True)
class Changes:
    """What changed since its reader last looked; it empties this itself."""

    slots: dict[SlotId, None] = field(default_factory=dict)
    everything: bool = True  # nodes came, went or changed


class Occupancy:
    """An index of `State`: derived, never written down.

    What a turn touches stays *hot* until the next turn, because it may change again; invariants
    hold all of it against a look at every worker.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._parts: dict[JobId, _Part] = {}
        self._placed: dict[JobId, dict[SlotId, int]] = {}
        self._owner: dict[SlotId, JobId] = {}
        self._claim: dict[SlotId, tuple[Job, Worker]] = {}
        self._left: dict[SlotId, JobId] = {}
        self._slots: dict[SlotId, Node] = {}
        self._slots_of: dict[NodeId, dict[SlotId, Node]] = {}
        self._foreign: dict[SlotId, JobId] = {}
        self._dirty: dict[JobId, None] = dict.fromkeys(state.holders)
        self._hot: dict[JobId, None] = {}
        self._strange: dict[NodeId, dict[SlotId, JobId]] = {}  # slots of unknown processes
        self._nodes: dict[NodeId, None] = dict.fromkeys(state.nodes)  # to be looked at again
        self._readers: WeakSet[Changes] = WeakSet()

    # --- what happens

    def begin(self) -> None:
        """Another turn: what the last one touched is looked at once more."""
        if self._hot:
            self._dirty |= self._hot
            self._hot = {}

    def touch(self, job: JobId) -> None:
        """Workers, group or change of `job` may be different in this turn."""
        self._hot[job] = None

    def touch_node(self, node: NodeId) -> None:
        """A node came, changed its phase, or what strange processes it has."""
        self._nodes[node] = None
        self.touch_phases()

    def touch_phases(self) -> None:
        """Nodes may be up that were not, or the other way round."""
        for reader in self._readers:
            reader.everything = True

    def changes(self) -> Changes:
        """For a reader: what changes from now on."""
        reader = Changes()
        self._readers.add(reader)
        return reader

    # --- what is

    def owners(self) -> Mapping[SlotId, JobId]:
        """Who owns each slot that has an owner."""
        self._sync()
        return self._owner | self._foreign if self._foreign else self._owner

    def claims(self) -> Mapping[SlotId, tuple[Job, Worker]]:
        """Who is prepared beside the owner of a slot, to have it next."""
        self._sync()
        return self._claim

    def promised(self) -> dict[SlotId, JobId]:
        """Slots that may be prepared for somebody, and who leaves them.

        The owner leaves already and waits for nobody: no circle can come of these.
        """
        self._sync()
        return {
            slot: job
            for slot, job in self._left.items()
            if slot not in self._claim and slot in self._slots
            and self._slots[slot].phase is NodePhase.UP
        }  # fmt: skip

    def slots(self) -> Mapping[SlotId, Node]:
        """Every slot and its node."""
        self._sync()
        return self._slots

    def placed(self) -> Mapping[JobId, Mapping[SlotId, int]]:
        """Slots and local batches of every job's group; not of jobs that have none."""
        self._sync()
        return self._placed

    def is_taken(self, slot: SlotId) -> bool:
        """Whether somebody has a slot or is to have it next; after one of the above."""
        return slot in self._owner or slot in self._claim or slot in self._foreign

    # --- keeping it

    def _sync(self) -> None:
        if self._nodes:
            self._look_at_nodes()
        for name in (*self._dirty, *self._hot):
            self._look_at(name)
        self._dirty.clear()

    def _look_at_nodes(self) -> None:
        for name in self._nodes:
            node = self._state.nodes.get(name)
            if node is None:
                continue
            slots = {slot_id(name, slot.index): node for slot in node.spec.slots}
            for gone in self._slots_of.get(name, {}).keys() - slots.keys():
                del self._slots[gone]
            self._slots_of[name] = slots
            self._slots.update(slots)
            self._strange.pop(name, None)
            if node.foreign:
                self._strange[name] = {
                    slot: JobId(worker.rpartition(".v")[0]) for slot, worker in node.foreign.items()
                }
        self._foreign = {slot: job for each in self._strange.values() for slot, job in each.items()}
        self._nodes.clear()

    def _look_at(self, name: JobId) -> None:
        was = self._parts.get(name, _NONE)
        job = self._state.jobs.get(name) if name in self._state.holders else None
        part = _part(job) if job is not None else _NONE
        if part == was and not part.claimed:
            return
        for slot in was.owned:
            if self._owner.get(slot) == name:
                del self._owner[slot]
        for slot in was.claimed:
            if slot in self._claim and self._claim[slot][0].job == name:
                del self._claim[slot]
        for slot in was.left:
            if self._left.get(slot) == name:
                del self._left[slot]
        if job is not None:
            self._owner.update(dict.fromkeys(part.owned, name))
            self._left.update(dict.fromkeys(part.left, name))
            self._claim.update(_claims(job, part.claimed))
        parts = (was.owned, was.claimed, was.left, part.owned, part.claimed, part.left)
        for reader in self._readers:
            reader.slots |= dict.fromkeys(chain(*parts))
        if part is _NONE:
            self._parts.pop(name, None)
        else:
            self._parts[name] = part
        if part.trains_on:
            self._placed[name] = part.trains_on
        else:
            self._placed.pop(name, None)


_NONE = _Part()


def _claims(job: Job, slots: Iterable[SlotId]) -> dict[SlotId, tuple[Job, Worker]]:
    if not slots:
        return {}
    return {
        worker.slot: (job, worker)
        for worker in job.workers.values()
        if _lives(worker) and worker.claims
    }


def _lives(worker: Worker) -> bool:
    return worker.phase is not WorkerPhase.GONE


def _part(job: Job) -> _Part:
    owned, claimed, left = [], [], []
    for worker in job.workers.values():
        phase = worker.phase
        if phase is WorkerPhase.GONE:
            continue
        if worker.claims:
            claimed.append(worker.slot)
            continue
        owned.append(worker.slot)
        if phase in _GOING or (phase is WorkerPhase.MEMBER and is_left(job, worker)):
            left.append(worker.slot)
    members = job.group.members if job.group else ()
    placed = {member.slot: member.local_batch for member in members}
    return _Part(tuple(owned), tuple(claimed), tuple(left), placed)


def is_left(job: Job, worker: Worker) -> bool:
    """Whether a change takes `worker` out of its group, and brings nobody new."""
    change = job.change
    if change is None or change.group.member(worker.worker) is not None:
        return False
    return not any(
        job.workers[member.worker].version == change.group.version
        for member in change.group.members
    )
