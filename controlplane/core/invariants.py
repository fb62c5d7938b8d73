"""What must hold after every event; tests check it after each one."""

from __future__ import annotations

from controlplane.core.errors import InvariantBrokenError
from controlplane.core.job import HOLDING, Job, Phase
from controlplane.core.state import State
from controlplane.core.worker import WorkerPhase
from schemas.ids import SlotId, worker_id


def check(state: State) -> None:
    """Raise if `state` is one that must never be.

    Raises:
        InvariantBrokenError: naming what is broken.
    """
    _one_owner_per_slot(state)
    for name, job in state.jobs.items():
        _require(job.job == name, f"{name} is filed under another name")
        _require((name in state.active) != job.ended, f"{name}: active and ended disagree")
        _phase_and_group_agree(job)
        lives = any(worker.phase is not WorkerPhase.GONE for worker in job.workers.values())
        _require(lives <= (name in state.holders), f"{name}: has workers but is no holder")
        _require(
            job.epoch == (job.checkpoint.epoch if job.checkpoint else 0),
            f"{name}: epoch {job.epoch} has no checkpoint",
        )
    for name in state.starts:
        _require(state.jobs[name].phase is Phase.STARTING, f"{name}: a deadline without a start")


def _one_owner_per_slot(state: State) -> None:
    owner: dict[SlotId, str] = {}
    slots = state.slots()
    for job, worker in state.living():
        other = owner.setdefault(worker.slot, worker.worker)
        _require(other == worker.worker, f"{worker.slot} has two owners in {job.job}: {other}")
        _require(worker.slot in slots, f"{worker.worker} is on unknown slot {worker.slot}")


def _phase_and_group_agree(job: Job) -> None:
    holding = job.phase in HOLDING
    _require(holding == (job.group is not None), f"{job.job}: {job.phase} with group {job.group}")
    if job.group is None:
        living = [w for w in job.workers.values() if w.phase is not WorkerPhase.GONE]
        strays = [w.worker for w in living if w.phase is not WorkerPhase.LEAVING]
        _require(not strays, f"{job.job}: {strays} work for no group")
        return
    _require(job.group.version == job.version, f"{job.job}: group and version disagree")
    for member in job.group.members:
        worker = job.workers.get(worker_id(job.job, job.version, member.rank))
        if worker is None:
            raise InvariantBrokenError(f"{job.job}: no worker for rank {member.rank}")
        _require(worker.slot == member.slot, f"{worker.worker} is not on its member's slot")
        formed = worker.phase in {WorkerPhase.MEMBER, WorkerPhase.GONE}
        _require(job.phase is not Phase.RUNNING or formed, f"{worker.worker} is no member yet")


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise InvariantBrokenError(otherwise)
