"""Index of slots, with owners, reservations and the jobs on each node."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar
from weakref import WeakSet

import msgspec

from controlplane.core.model.job import Job
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker, WorkerPhase
from schemas.ids import JobId, NodeId, SlotId, WorkerId, node_of, slot_id
from schemas.jobs import JobSpec, Shape, words_of
from schemas.nodes import NodeSpec, SlotSpec

K = TypeVar("K")
V = TypeVar("V")
_NO_REQUESTS = (msgspec.UNSET,) * 6
EPSILON: Final = 1e-6  # rounding of shares
PLACE_CPUS: Final = 1.0  # cores of a job without slots that states none
GIB: Final = 1 << 30
PLACE_USER: Final = "a job without slots"
_LEAVING_PHASES = frozenset({WorkerPhase.RETIRING, WorkerPhase.LEAVING})


@dataclass(frozen=True, slots=True)
class Fit:
    """Slots that a job may use."""

    slots: frozenset[SlotId] | None = None  # None: all
    shares: Mapping[NodeId, float] = field(default_factory=dict)  # of a slot, if it takes more
    missing: str = ""  # why nothing fits


_ANY: Final = Fit()


@dataclass(frozen=True, slots=True)
class AvailableSlots:
    """Slots that a job could get now."""

    free: list[SlotId]  # on usable nodes, neither owned nor reserved
    releasing: dict[SlotId, JobId]  # slot -> job that leaves it; workers may be prepared on it


@dataclass(frozen=True, slots=True)
class JobSlots:
    """Entries of one job in the index."""

    owned: tuple[SlotId, ...] = ()
    reserved: tuple[Worker, ...] = ()
    releasing: tuple[SlotId, ...] = ()
    allocation: dict[SlotId, int] = field(default_factory=dict)  # slot -> local batch

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """Slots where the job has processes. `releasing` is part of `owned`."""
        return (*self.owned, *(worker.slot for worker in self.reserved))


@dataclass(frozen=True, slots=True)
class IndexOrder:
    """Insertion order of an index's entries, which some decisions follow."""

    slots: list[SlotId] = field(default_factory=list)
    owned: list[SlotId] = field(default_factory=list)
    reserved: list[SlotId] = field(default_factory=list)
    releasing: list[SlotId] = field(default_factory=list)
    allocations: list[JobId] = field(default_factory=list)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DirtySlots:
    """Slots that changed since a reader's last query. The reader clears this record."""

    slots: dict[SlotId, None] = field(default_factory=dict)
    everything: bool = True  # True: nodes came, went or changed their hardware


class SlotIndex:
    """Slots, their owners and the workers of each node, derived from the state and never stored.

    Code that changes a job's workers, group or change must call `touch`. The next query then
    updates the entries of this job. Invariants compare the index with an index that is built from
    scratch. The index keeps the three mappings and reads them later. `jobs_with_processes` has the
    jobs with a process that may still exist.
    """

    def __init__(
        self,
        jobs: Mapping[JobId, Job],
        jobs_with_processes: Mapping[JobId, None],
        nodes: Mapping[NodeId, Node],
    ) -> None:
        self._jobs = jobs
        self._jobs_with_processes = jobs_with_processes
        self._all_nodes = nodes
        self._parts: dict[JobId, JobSlots] = {}
        self._allocations: dict[JobId, dict[SlotId, int]] = {}
        self._owner: dict[SlotId, JobId] = {}
        self._reservation: dict[SlotId, tuple[Job, Worker]] = {}
        self._releasing: dict[SlotId, JobId] = {}
        self._slots: dict[SlotId, Node] = {}
        self._slots_of: dict[NodeId, dict[SlotId, Node]] = {}
        self._foreign: dict[SlotId, JobId] = {}
        self._dirty: dict[JobId, None] = dict.fromkeys(jobs_with_processes)
        self._foreign_of: dict[NodeId, dict[SlotId, JobId]] = {}  # slots of foreign processes
        self._nodes: dict[NodeId, None] = dict.fromkeys(nodes)  # changed since the last query
        self._specs: dict[NodeId, NodeSpec] = {}  # specs from which `_slots` was built
        self._jobs_on: dict[NodeId, dict[JobId, None]] = {}
        # Order in which jobs got their first process.
        self._start_order = dict(zip(jobs_with_processes, count(), strict=False))
        self._next = count(len(self._start_order))
        self._readers: WeakSet[DirtySlots] = WeakSet()
        self._fits: dict[
            tuple[Shape, bool, bool, tuple[NodeId, ...]], Fit
        ] = {}  # of the present nodes

    # --- changes

    def touch(self, job: JobId) -> None:
        """Mark a job after a modification of its workers, its group or its `change`."""
        self._dirty[job] = None

    def job_starts(self, job: JobId) -> None:
        """Order a job after all jobs that have processes. Call this before adding its processes."""
        if job not in self._jobs_with_processes:
            self._start_order[job] = next(self._next)

    def touch_node(self, node: NodeId) -> None:
        """Mark a new node, or a node with a new phase, hardware or set of foreign processes."""
        self._nodes[node] = None

    def touch_all(self) -> None:
        """Mark everything as changed for readers, after a node became lost or returned."""
        for reader in self._readers:
            reader.everything = True

    def dirty_slots(self) -> DirtySlots:
        """Return a new reader, which collects changes from now on."""
        reader = DirtySlots()
        self._readers.add(reader)
        return reader

    # --- queries

    def owners(self) -> Mapping[SlotId, JobId]:
        """Return the owner of each owned slot."""
        self._sync()
        return ChainMap(self._foreign, self._owner) if self._foreign else self._owner

    def reservations(self) -> Mapping[SlotId, tuple[Job, Worker]]:
        """Return the worker that is prepared for each reserved slot while the owner still runs."""
        self._sync()
        return self._reservation

    def is_releasing(self, slot: SlotId) -> bool:
        """True if `releasing` has the slot. Call another query first."""
        node = self._slots.get(slot)
        if slot not in self._releasing or slot in self._reservation:
            return False
        return node is not None and node.usable

    def releasing(self) -> dict[SlotId, JobId]:
        """Return the slots for which a worker may be prepared, with the jobs that leave them.

        The owner is leaving already and waits for no other job, so no cycle of waits can arise.
        """
        self._sync()
        return {slot: job for slot, job in self._releasing.items() if self.is_releasing(slot)}

    def available(self) -> AvailableSlots:
        """Return the free slots, and the slots that their owners are leaving."""
        releasing = self.releasing()
        free = [
            slot for slot, node in self._slots.items() if node.usable and not self.is_taken(slot)
        ]
        return AvailableSlots(free, releasing)

    def slots(self) -> Mapping[SlotId, Node]:
        """Return every slot with its node."""
        self._sync()
        return self._slots

    def allocations(self) -> Mapping[JobId, Mapping[SlotId, int]]:
        """Return slots and local batches of every job that has a group."""
        self._sync()
        return self._allocations

    def jobs_by_node(self) -> Mapping[NodeId, Mapping[JobId, None]]:
        """Return the jobs with a process that may exist on each node. Other nodes may be absent."""
        self._sync()
        return self._jobs_on

    def jobs_on(self, node: NodeId) -> list[Job]:
        """Return the jobs with a process that may exist on `node`, in the order of their starts."""
        self._sync()
        names = sorted(self._jobs_on.get(node, ()), key=self._start_order.__getitem__)
        return [self._jobs[name] for name in names]

    def workers_on(self, node: NodeId) -> list[tuple[Job, Worker]]:
        """Return every process that may exist on `node`, with its job."""
        return [
            (job, worker)
            for job in self.jobs_on(node)
            for worker in job.workers.values()
            if _is_alive(worker) and node_of(worker.slot) == node
        ]

    def fit(self, spec: JobSpec, closed: tuple[NodeId, ...] = ()) -> Fit:
        """Return the slots that fit the requests of a job, without those of closed nodes."""
        if not has_requests(spec) and not closed:
            return _ANY
        self._sync()
        places = spec.slots[1] == 0
        key = (shape := spec.shape, spec.rigid, places, closed)
        if (found := self._fits.get(key)) is None:
            nodes = [one.spec for name, one in self._all_nodes.items() if name not in closed]
            found = self._fits[key] = _fit_of(shape, nodes, rigid=spec.rigid, places=places)
        return found

    def is_taken(self, slot: SlotId) -> bool:
        """True if a slot is owned, reserved or has a foreign process. Call another query first."""
        return slot in self._owner or slot in self._reservation or slot in self._foreign

    # --- replacing an index

    def order(self) -> IndexOrder:
        """Return the order of the entries, for an index that replaces this one."""
        self._sync()
        return IndexOrder(
            slots=list(self._slots),
            owned=list(self._owner),
            reserved=list(self._reservation),
            releasing=list(self._releasing),
            allocations=list(self._allocations),
        )

    def arrange(self, order: IndexOrder) -> None:
        """Reorder the entries as in `order`, from an earlier index over the same jobs and nodes."""
        self._sync()
        _arrange(self._slots, order.slots)
        _arrange(self._owner, order.owned)
        _arrange(self._reservation, order.reserved)
        _arrange(self._releasing, order.releasing)
        _arrange(self._allocations, order.allocations)

    # --- updates

    def keep_up(self) -> None:
        """Process touched jobs now, so that the order of entries follows the order of inputs."""
        self._sync()

    def _sync(self) -> None:
        if self._nodes:
            self._update_nodes()
        if self._dirty:
            for name in self._dirty:
                self._update_job(name)
            self._dirty.clear()

    def _update_nodes(self) -> None:
        for name in self._nodes:
            node = self._all_nodes.get(name)
            if node is None:  # it was removed
                for slot in self._slots_of.pop(name, {}):
                    del self._slots[slot]
                self._specs.pop(name, None)
                self._fits.clear()
                self._foreign_of.pop(name, None)
                self.touch_all()
                continue
            slots = {slot_id(name, slot.index): node for slot in node.spec.slots}
            for removed in self._slots_of.get(name, {}).keys() - slots.keys():
                del self._slots[removed]
            self._slots_of[name] = slots
            self._slots.update(slots)
            if node.spec == self._specs.get(name):
                for reader in self._readers:
                    reader.slots |= dict.fromkeys(slots)
            else:
                self._specs[name] = node.spec
                self._fits.clear()
                self.touch_all()
            self._foreign_of.pop(name, None)
            if node.foreign_workers:
                self._foreign_of[name] = {
                    slot: JobId(worker.rpartition(".v")[0])
                    for slot, worker in node.foreign_workers.items()
                }
        self._foreign = {
            slot: job for each in self._foreign_of.values() for slot, job in each.items()
        }
        self._nodes.clear()

    def _update_job(self, name: JobId) -> None:
        before = self._parts.get(name, _NONE)
        job = self._jobs.get(name) if name in self._jobs_with_processes else None
        part = slots_of_job(job) if job is not None else _NONE
        if job is None:
            self._start_order.pop(name, None)
        if part == before:
            return
        self._remove(name, before)
        if job is not None:
            self._insert(job, part)
        slots = dict.fromkeys((*before.slots, *part.slots))
        for reader in self._readers:
            reader.slots |= slots

    def _remove(self, name: JobId, part: JobSlots) -> None:
        for slot in part.owned:
            if self._owner.get(slot) == name:
                del self._owner[slot]
        for worker in part.reserved:
            slot = worker.slot
            if slot in self._reservation and self._reservation[slot][0].job == name:
                del self._reservation[slot]
        for slot in part.releasing:
            if self._releasing.get(slot) == name:
                del self._releasing[slot]
        for node in {node_of(slot) for slot in part.slots}:
            del self._jobs_on[node][name]
        self._parts.pop(name, None)
        self._allocations.pop(name, None)

    def _insert(self, job: Job, part: JobSlots) -> None:
        name = job.job
        self._owner.update(dict.fromkeys(part.owned, name))
        self._releasing.update(dict.fromkeys(part.releasing, name))
        self._reservation.update({worker.slot: (job, worker) for worker in part.reserved})
        for node in map(node_of, part.slots):
            self._jobs_on.setdefault(node, {})[name] = None
        if part != _NONE:
            self._parts[name] = part
        if part.allocation:
            self._allocations[name] = part.allocation


_NONE = JobSlots()


def _arrange(entries: dict[K, V], order: Iterable[K]) -> None:
    for key in order:
        if key in entries:
            entries[key] = entries.pop(key)


def _is_alive(worker: Worker) -> bool:
    return worker.phase is not WorkerPhase.EXITED


def slots_of_job(job: Job) -> JobSlots:
    """Return the slots that a job owns, reserves and leaves, derived from the job's workers."""
    group, staying = job.status.group, _staying(job)
    owned, reserved, releasing = list[SlotId](), [], []
    for worker in job.workers.values():
        phase = worker.phase
        if phase is WorkerPhase.EXITED:
            continue
        if worker.reserved:
            reserved.append(worker)
            continue
        owned.extend((worker.slot, *worker.beside))
        released = staying is not None and worker.worker not in staying
        if phase in _LEAVING_PHASES or (phase is WorkerPhase.MEMBER and released):
            releasing.append(worker.slot)
    placed = {m.slot: m.local_batch for m in group.members} if group else {}
    return JobSlots(tuple(owned), tuple(reserved), tuple(releasing), placed)


def _staying(job: Job) -> set[WorkerId] | None:
    """Return the workers that stay in a change without newcomers, or None if there is none."""
    change = job.status.change
    if change is None:
        return None
    members = change.group.members
    if any(job.workers[m.worker].version == change.group.version for m in members):
        return None  # the change waits for newcomers
    return {member.worker for member in members}


# --- slots and nodes that fit the requests of a job


def has_requests(spec: JobSpec) -> bool:
    """True if a job may not use every slot, or has none."""
    needs = spec.image, spec.requirements
    stated = (spec.gpu_type, spec.constraints, spec.cpus, spec.memory_bytes, *needs)
    return stated != _NO_REQUESTS or spec.slots[1] == 0


def _fit_of(shape: Shape, nodes: Sequence[NodeSpec], *, rigid: bool, places: bool) -> Fit:
    """Return the slots that fit a request.

    Args:
        shape: what is requested.
        nodes: all known nodes.
        rigid: a slot may take the shares of others on its node, which stay empty. A slot of an
            elastic job has its own share.
        places: the job has no slots. `shares` has the part of what each fitting node has set
            aside, and `slots` is empty.
    """
    named = [node for node in nodes if _has_all(node, shape)]
    if places:
        cpus = shape.cpus or PLACE_CPUS
        parts = {node.node: node.place_part(cpus, shape.memory_bytes) for node in named}
        parts = {node: part for node, part in parts.items() if part <= 1 + EPSILON}
        return Fit(frozenset(), parts, "" if parts else _missing(shape, nodes, named, PLACE_USER))
    found: set[SlotId] = set()
    shares: dict[NodeId, float] = {}
    for node in named:
        share = node.shares(shape.cpus, shape.memory_bytes)
        if share > (len(node.slots) if rigid else 1) + EPSILON:
            continue
        found.update(slot_id(node.node, one.index) for one in node.slots if _is_of(one, shape))
        if share > 1 + EPSILON:
            shares[node.node] = share
    return Fit(
        frozenset(found), shares, "" if found else _missing(shape, nodes, named, "a slot of it")
    )


def _has_all(node: NodeSpec, shape: Shape) -> bool:
    if (shape.image and not node.containers) or (shape.requirements and not node.environments):
        return False
    return all(node.labels.get(name) == value for name, value in shape.labels)


def _is_of(slot: SlotSpec, shape: Shape) -> bool:
    return words_of(shape.gpu_type) <= words_of(slot.model)


def _missing(shape: Shape, nodes: Sequence[NodeSpec], named: Sequence[NodeSpec], user: str) -> str:
    """Return which request no node meets, and what the nodes report instead."""
    if shape.image and not any(one.containers for one in nodes):
        return "no node runs containers, which its image needs"
    if shape.requirements and not any(one.environments for one in nodes):
        return "no node has uv, which its requirements need"
    for name, value in shape.labels:
        has = sorted({f"{name} = {one.labels[name]}" for one in nodes if name in one.labels})
        if f"{name} = {value}" not in has:
            others = sorted({label for one in nodes for label in one.labels})
            report = ", ".join(has or others) or "no labels"
            return f"no node has label {name} = {value}; nodes report: {report}"
    models = sorted({slot.model for one in nodes for slot in one.slots if slot.model})
    if shape.gpu_type and not any(_is_of(slot, shape) for one in nodes for slot in one.slots):
        return f"no slot is of type {shape.gpu_type}; slots report: {', '.join(models) or 'none'}"
    stated = [
        f"{name} = {value:g}" if name == "cpus" else f"{name} = {value} ({value / GIB:.3g} GiB)"
        for name, value in (("cpus", shape.cpus), ("memory_bytes", shape.memory_bytes))
        if value
    ]
    if named and stated:
        return f"no node has {' and '.join(stated)} for {user}"
    if user == PLACE_USER and not any(one.place_cores for one in nodes):
        return "no node has cores for jobs without slots"
    return "no node has all that it requests"
