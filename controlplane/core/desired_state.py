"""Desired state of one node, for the processes of a job and the units and states of a sweep."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobStatus, Starting
from controlplane.core.model.node import NodePhase
from controlplane.core.model.rescale import Rescale, RescalePhase
from controlplane.core.model.sweep import JobSweep
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from controlplane.sweeps.orders import RunUnit, StateName
from schemas.ids import NodeId, Rank, WorkerId, node_of
from schemas.jobs import JobSpec
from schemas.nodes import Group
from schemas.wire.agent import PREPARE, RECOVER, SETTLED, SWITCH, WARNED, GroupDelta
from schemas.wire.sweeps import StateRef, StateSource, SweepDelta, UnitOrder, WantedState

BEGUN = frozenset({RescalePhase.SWITCHING, RescalePhase.REJOINING})


def desired(state: State, job: Job, node: NodeId) -> GroupDelta:
    """Return the desired state of `job` on `node`.

    The result has a group only if workers of the job should run on the node.
    """
    status = job.status
    change, group = status.change, status.group
    if change is None:
        version, stage = job.version, _stage(status)
        if stage == SETTLED and group is not None and job.attempts.warned == version:
            stage = WARNED
    elif node in change.notified_nodes or change.kind == RECOVER:
        return _in_change(state, job, change, node)
    else:
        version, stage = change.before, SETTLED  # not notified yet: the old group stays
    if group is not None and _has_member_on(job, group, node):
        return GroupDelta(
            job=job.job,
            journal=job.journal,
            term=state.term,
            version=version,
            stage=stage,
            group=group,
            spec=_current_spec(state, job),
            snapshot=job.snapshot,
            user=job.user,
            store=_store_of(state, job) if stage == SWITCH else "",
        )
    return GroupDelta(
        job=job.job,
        journal=job.journal,
        term=state.term,
        version=version,
        stage=stage,
        group=None,
        spec=None,
        forget=job.ended and not lives_on(state, job),
    )


def lives_on(state: State, job: Job) -> bool:
    """True if a graduated trial of this sweep is an active job and may need the trial's state."""
    if job.sweep is None:
        return False
    trials = (state.jobs[name].spec.stated_trial for name in state.active)
    return any(trial is not None and trial.sweep == job.job for trial in trials)


def _current_spec(state: State, job: Job) -> JobSpec:
    """Return the job's spec; a trial's with the key and the current addresses of its state."""
    trial = job.spec.stated_trial
    former = state.jobs.get(trial.sweep) if trial is not None else None
    if trial is None or former is None or former.sweep is None:
        return job.spec
    name, found = StateName(trial.trial, trial.version), list[str]()
    for node, _ in former.sweep.engine.state.stored.nodes([name]):
        known = state.nodes.get(node)
        if known is not None and known.phase is not NodePhase.LOST and known.spec.states_port:
            found.append(f"{known.spec.address}:{known.spec.states_port}")
    sources = tuple(dict.fromkeys([*found, *trial.sources]))
    own = replace(trial, sources=sources, states_key=former.sweep.states_key)
    return replace(job.spec, trial=own)


def _has_member_on(job: Job, group: Group, node: NodeId) -> bool:
    """True if `node` has a member that has not exited. An exited member is not ordered again."""
    return any(
        node_of(member.slot) == node and job.workers[member.worker].phase is not WorkerPhase.EXITED
        for member in group.members
    )


def _in_change(state: State, job: Job, change: Rescale, node: NodeId) -> GroupDelta:
    group = job.status.group
    former = group.members if group is not None and change.kind != RECOVER else ()
    leaving = tuple(member for member in former if change.group.member(member.worker) is None)
    begun = change.phase in BEGUN
    stage = SWITCH if begun else PREPARE
    if not any(node_of(m.slot) == node for m in (*change.group.members, *leaving)):
        return GroupDelta(
            job=job.job,
            journal=job.journal,
            term=state.term,
            version=change.group.version,
            stage=stage,
            group=None,
            spec=None,
        )
    return GroupDelta(
        job=job.job,
        journal=job.journal,
        term=state.term,
        version=change.group.version,
        stage=stage,
        group=change.group,
        spec=_current_spec(state, job),
        snapshot=job.snapshot,
        user=job.user,
        kind=change.kind,
        former=leaving,
        store=change.store if begun else "",
        source=None if change.source is None else Rank(change.source),
    )


def _stage(status: JobStatus) -> int:
    if isinstance(status, Starting):
        return SWITCH if status.forming else PREPARE
    return SETTLED


def _store_of(state: State, job: Job) -> str:
    """Return HOST:PORT of a starting group's rendezvous store, or "" for a group of one worker."""
    group = job.status.group
    if group is None or len(group.members) == 1:
        return ""
    first = job.workers[group.members[0].worker]
    return address_of(state, first, first.store_port)


def address_of(state: State, worker: Worker, port: int) -> str:
    """Return HOST:PORT of a service of `worker`, on its node's address."""
    node = state.nodes[node_of(worker.slot)]
    return f"{node.spec.address}:{port}"


def desired_sweep(state: State, job: Job, sweep: JobSweep, node: NodeId) -> SweepDelta:
    """Return the units of a sweep that `node` should run, and the states that it should keep.

    The delta has the sweep's current revision.
    """
    engine = sweep.engine.state
    kept = [
        WantedState(state=state_ref(sweep, name), sources=()) for name in engine.stored.on(node)
    ]
    copies = sorted(name for name, at in engine.copying if at == node)
    fetched = [
        WantedState(state=state_ref(sweep, name), sources=sources(state, job, sweep, name))
        for name in copies
    ]
    return SweepDelta(
        job=job.job,
        term=state.term,
        revision=sweep.revision,
        attempts=engine.attempts,
        units=tuple(unit.order for unit in sweep.units.values() if unit.node == node),
        wanted=(*kept, *fetched),
        journal=job.journal,
        states_key=sweep.states_key,
    )


def unit_order(state: State, job: Job, sweep: JobSweep, unit: RunUnit) -> UnitOrder:
    """Return the message that orders a worker to run a unit."""
    name = unit.state
    return UnitOrder(
        attempt=unit.attempt,
        worker=unit.worker,
        trial=unit.trial,
        values=dict(unit.values),
        state=None if name is None else state_ref(sweep, name),
        sources=() if name is None else sources(state, job, sweep, name, unit.worker),
        result=StateRef(trial=unit.result.trial, version=unit.result.version),
        epoch=unit.epoch,
        partition=unit.partition,
        evaluate=unit.evaluate,
    )


def state_ref(sweep: JobSweep, name: StateName) -> StateRef:
    """Return the name of a state with its digest. Some node must have the state."""
    digest = sweep.engine.state.models[name.trial].digest(name.version)
    return StateRef(trial=name.trial, version=name.version, digest=digest)


def sources(
    state: State, job: Job, sweep: JobSweep, name: StateName, asking: WorkerId | None = None
) -> tuple[StateSource, ...]:
    """Return the addresses from which a state can be fetched.

    The memory of the worker that made the state comes first, followed by the agents of nodes.
    `asking` is the worker that needs the state. The address of this worker is left out.
    """
    found = list(_memory(job, sweep, name, asking))
    for node, _ in sweep.engine.state.stored.nodes([name]):
        known = state.nodes.get(node)
        if known is not None and known.phase is not NodePhase.LOST and known.spec.states_port:
            address = f"{known.spec.address}:{known.spec.states_port}"
            found.append(StateSource(node=node, address=address))
    return tuple(found)


def _memory(
    job: Job, sweep: JobSweep, name: StateName, asking: WorkerId | None
) -> Iterable[StateSource]:
    version, owner = sweep.newest_in_memory.get(name.trial, (0, None))
    worker = job.workers.get(owner) if owner is not None else None
    if owner is None or worker is None or version != name.version or owner == asking:
        return
    gone = worker.phase in {WorkerPhase.LEAVING, WorkerPhase.EXITED}
    if not gone and owner in sweep.addresses and owner not in sweep.stopping:
        yield StateSource(node=node_of(worker.slot), address=sweep.addresses[owner])
