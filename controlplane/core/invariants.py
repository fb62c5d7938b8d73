"""Invariants of the state, checked by tests after every input."""

from __future__ import annotations

from controlplane.core.commands import InvariantBrokenError
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.rescale import OPEN
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.slot_index import SlotIndex
from controlplane.core.state import JobCounters, State
from schemas.ids import JobId, SlotId, is_place, node_of
from schemas.nodes import Group


def check(state: State) -> None:
    """Check every invariant of `state`, which must be between two inputs.

    Raises:
        InvariantBrokenError: if an invariant is violated. The message names the invariant.
    """
    _one_owner_per_slot(state)
    _index_is_right(state)
    for name, job in state.jobs.items():
        _require(job.job == name, f"{name} has another key in the state")
        _require((name in state.active) != job.ended, f"{name}: active and ended disagree")
        _group_and_workers_agree(job)
        lives = any(worker.phase is not WorkerPhase.EXITED for worker in job.workers.values())
        _require(
            lives <= (name in state.jobs_with_processes),
            f"{name}: missing in jobs_with_processes",
        )
        _require(
            job.sweep is not None or job.progress.epoch == _checkpointed(job),
            f"{name}: epoch {job.progress.epoch} has no checkpoint",
        )
    kept, fresh = state.job_counters, JobCounters(state.jobs[name] for name in state.active)
    same = (kept.phases, kept.promised) == (fresh.phases, fresh.promised)
    same = same and kept.shaped == fresh.shaped
    same = same and (kept.queued, kept.bytes) == (fresh.queued, fresh.bytes)
    _require(same, "the job counters are out of date")
    _deadlines_have_their_reason(state)
    _children_are_right(state)
    _gates_are_right(state)
    _drains_are_right(state)


def _checkpointed(job: Job) -> int:
    return job.progress.checkpoint.epoch if job.progress.checkpoint else 0


def _children_are_right(state: State) -> None:
    """Check that live jobs wait for live jobs only, and that these jobs know them."""
    fresh: dict[JobId, set[JobId]] = {}
    for name, job in state.jobs.items():
        for parent in job.waits_for:
            fresh.setdefault(parent, set()).add(name)
            _require(not job.ended and parent in state.active, f"{name} waits for {parent}")
    _require(
        {parent: set(children) for parent, children in state.children.items()} == fresh,
        "the index of children is out of date",
    )


def _drains_are_right(state: State) -> None:
    """Check the nodes that are reserved, and that no draining node with jobs is forgotten."""
    keeping = {name for name in state.draining if state.nodes[name].keeps}
    _require(state.reserved_nodes.keys() == keeping, "the index of reserved nodes is out of date")
    changed = {node_of(slot) for slot in state.slots_of_drains.slots}
    for name in state.draining.keys() - state.unchecked_drains.keys() - changed:
        _require(not state.slot_index.jobs_on(name), f"jobs on {name} would stay")


def _gates_are_right(state: State) -> None:
    """Check early jobs, that live elements are active jobs, and that each index is in one place."""
    for name, job in state.jobs.items():
        is_early = bool(job.starts_at) and not job.ended
        _require((name in state.early) == is_early, f"{name}: the index of early jobs is wrong")
        array = job.array
        if array is None:
            continue
        _require(all(each in state.active for each in array.live), f"{name}: an element has ended")
        begun = array.following - array.first
        _require(begun == len(array.live) + array.finished, f"{name}: indices are lost")
        left = not job.ended and array.following <= array.last
        _require((name in state.arrays) == left, f"{name}: the index of arrays is out of date")


def _deadlines_have_their_reason(state: State) -> None:
    """Check that exactly the jobs that are starting or changing have deadlines."""
    waits = [(name, state.jobs[name]) for name in state.active]
    starting = {name: job.version for name, job in waits if job.phase is Phase.STARTING}
    changing = {name: job.change.group.version for name, job in waits if job.change is not None}
    kept = state.deadlines
    starts = {name: deadline.version for name, deadline in kept.starts.items()}
    rescales = {name: deadline.version for name, deadline in kept.rescales.items()}
    _require(starts == starting, f"starts {starting} with deadlines {starts}")
    _require(rescales == changing, f"changes {changing} with deadlines {rescales}")


def _one_owner_per_slot(state: State) -> None:
    owner: dict[SlotId, str] = {}
    heir: dict[SlotId, str] = {}
    slots = state.slot_index.slots()
    for job, worker in state.live_workers():
        other = (heir if worker.reserved else owner).setdefault(worker.slot, worker.worker)
        _require(other == worker.worker, f"{worker.slot} has two owners in {job.job}: {other}")
        known = worker.slot in slots or is_place(worker.slot)
        _require(known, f"{worker.worker} is on unknown slot {worker.slot}")
        early = worker.reserved and worker.phase in {WorkerPhase.READY, WorkerPhase.MEMBER}
        _require(
            not early, f"{worker.worker} has the device of {worker.slot} before its owner left"
        )
    for _, worker in state.live_workers():
        for slot in worker.beside:
            _require(slot not in owner, f"{slot} is kept empty and has an owner")
    owned = state.slot_index.owners() if heir else {}  # includes foreign processes
    for slot, name in heir.items():
        _require(slot in owned, f"{name} reserves {slot}, which has no owner")


def _index_is_right(state: State) -> None:
    """Check that the incremental indexes equal freshly built ones."""
    fresh = SlotIndex(state.jobs, state.jobs_with_processes, state.nodes)
    kept = state.slot_index
    _require(kept.slots() == fresh.slots(), "the index of slots is out of date")
    _require(kept.owners() == fresh.owners(), "the index of owners is out of date")
    _require(
        kept.reservations() == fresh.reservations(), "the index of reservations is out of date"
    )
    _require(kept.allocations() == fresh.allocations(), "the index of groups is out of date")
    for node in state.nodes:
        _require(
            kept.workers_on(node) == fresh.workers_on(node), f"the index of {node} is out of date"
        )
    _require(
        kept.releasing() == fresh.releasing(), "the index of slots that are released is out of date"
    )


def _group_and_workers_agree(job: Job) -> None:
    counted = {member.worker for member in job.members()}
    for worker in job.workers.values():
        going = worker.phase in {WorkerPhase.LEAVING, WorkerPhase.RETIRING, WorkerPhase.EXITED}
        _require(going or worker.worker in counted, f"{worker.worker} is in no group")
    if job.change is not None:
        _require(job.change.phase in OPEN, f"{job.job}: its change is over")
        _require(
            job.change.group.version == job.version, f"{job.job}: the change has an old version"
        )
        _members_are_there(job, job.change.group)
    if job.group is None:
        return
    _require(
        job.group.version <= job.version, f"{job.job}: the group has a later version than the job"
    )
    _members_are_there(job, job.group)
    for worker in job.group_workers():
        formed = worker.phase not in {WorkerPhase.ORDERED, WorkerPhase.STARTED, WorkerPhase.READY}
        _require(job.phase is Phase.STARTING or formed, f"{worker.worker} is no member yet")


def _members_are_there(job: Job, group: Group) -> None:
    slots = [member.slot for member in group.members]
    _require(len(set(slots)) == len(slots), f"{job.job}: two members on one slot")
    for rank, member in enumerate(group.members):
        _require(member.rank == rank, f"{job.job}: rank {rank} is {member.rank}")
        worker = job.workers.get(member.worker)
        if worker is None:
            raise InvariantBrokenError(f"{job.job}: no worker for rank {member.rank}")
        _require(worker.slot == member.slot, f"{worker.worker} is not on its member's slot")


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise InvariantBrokenError(otherwise)
