"""What a node should do and keep of a sweep now, in full."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep
from controlplane.core.model.node import NodePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.state import State
from controlplane.sweeps.orders import RunUnit, StateName
from schemas.ids import NodeId, WorkerId, node_of
from schemas.messages.hopping import (
    StateRef,
    StateSource,
    SweepDelta,
    UnitOrder,
    WantedState,
)


def desired_sweep(state: State, job: Job, sweep: JobSweep, node: NodeId) -> SweepDelta:
    """What `node` should do and keep of `job` now.

    Args:
        sweep: of the job, with the revision that the delta is to have.
        node: may have nothing of it; then it is told so.
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
    )


def unit_order(state: State, job: Job, sweep: JobSweep, unit: RunUnit) -> UnitOrder:
    """A unit as its worker is told.

    Args:
        unit: that was ordered just now.
    """
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
    """A state as nodes are told, with its digest.

    Args:
        name: of a state that some node has.
    """
    digest = sweep.engine.state.models[name.trial].digest(name.version)
    return StateRef(trial=name.trial, version=name.version, digest=digest)


def sources(
    state: State, job: Job, sweep: JobSweep, name: StateName, asking: WorkerId | None = None
) -> tuple[StateSource, ...]:
    """Where a state can be had: the memory of the worker that made it, then agents of nodes.

    Args:
        asking: a worker that wants it; it needs no way to its own memory.
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
    version, owner = sweep.memory.get(name.trial, (0, None))
    worker = job.workers.get(owner) if owner is not None else None
    if owner is None or worker is None or version != name.version or owner == asking:
        return
    gone = worker.phase in {WorkerPhase.LEAVING, WorkerPhase.EXITED}
    if not gone and owner in sweep.addresses and owner not in sweep.stopping:
        yield StateSource(node=node_of(worker.slot), address=sweep.addresses[owner])
