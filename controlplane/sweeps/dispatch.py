"""Which units begin now, where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from controlplane.sweeps.graduation import at_the_end_of_an_epoch
from controlplane.sweeps.hopping.problem import HopProblem, Model, Slot, Unit, Visit, partitions
from controlplane.sweeps.orders import Attempt, RunUnit, StateName
from controlplane.sweeps.sweep_state import Lease, Place, SweepState
from controlplane.sweeps.visit_order import visit_order
from schemas.ids import NodeId, Seconds, WorkerId

PATIENCE: Final = 5.0  # times the expected seconds of a unit
LEAST_PATIENCE_S: Final = 60.0
FIRST_PATIENCE: Final = 20.0  # of a trial of which no unit was measured: others may be cheaper
FIRST_PATIENCE_S: Final = 3600.0  # at least, then
STAGING_PATIENCE_S: Final = 3600.0  # for state and data to be there


def begin_units(state: SweepState, now: Seconds) -> list[RunUnit]:
    """Lease what can begin.

    Args:
        state: of the sweep; the leases are added.
        now: seconds on the controller's clock.
    """
    workers = [name for name, place in state.workers.items() if _takes_units(state, place)]
    if not any(state.workers[name].attempt is None for name in workers):
        return []
    leases = {lease.trial: lease for lease in state.leases.values()}
    numbers = [
        trial.number
        for trial in state.trials
        if not trial.ended and _trains(state, trial.number, leases.get(trial.number))
    ]
    problem = hop_problem(state, workers, numbers, now)
    return [
        _lease(state, numbers[visit.model], visit.partition, workers[visit.slot], now)
        for visit in visit_order(state, problem, numbers, workers).begin_units()
    ]


def _takes_units(state: SweepState, place: Place) -> bool:
    """Whether its worker has a unit that counts, or may take one."""
    if place.revoked:
        return False
    return place.attempt is None or not state.leases[place.attempt].void


def training_limit(state: SweepState, trial: int, worker: WorkerId) -> float:
    """How long a unit may take once state and data are there, seconds."""
    expected = state.times.expected(trial, worker)
    if state.times.knows(trial):
        return max(LEAST_PATIENCE_S, PATIENCE * expected)
    return max(FIRST_PATIENCE_S, FIRST_PATIENCE * expected)


def waits_for_unit(state: SweepState, place: Place, now: Seconds) -> bool:
    """Whether a worker that is revoked may end its unit first.

    Args:
        now: seconds on the controller's clock.
    """
    lease = state.leases[place.attempt] if place.attempt is not None else None
    if lease is None or lease.void or place.within_s <= 0.0:
        return False
    if not state.times.knows(lease.trial):
        return True
    began = lease.began if lease.trains else now
    return began + state.times.expected(lease.trial, lease.order.worker) - now <= place.within_s


def training_trials(state: SweepState) -> list[int]:
    """Trials that have a unit under way, or could have one now."""
    leased = {lease.trial for lease in state.leases.values()}
    return [
        trial.number
        for trial in state.trials
        if not trial.ended and _has_work(state, trial.number, leased=trial.number in leased)
    ]


def _has_work(state: SweepState, number: int, *, leased: bool) -> bool:
    """Whether a trial that has not ended has a unit under way, or could have one now."""
    if not state.models[number].todo(state.trials[number].granted):
        return False
    if number in state.graduating and at_the_end_of_an_epoch(state, number):
        return False
    return leased or number not in state.paused


def hop_problem(
    state: SweepState, workers: list[WorkerId], numbers: list[int], now: Seconds
) -> HopProblem:
    """The sweep as the hopper sees it.

    Args:
        workers: that may take units, in the order of the problem's slots.
        numbers: of the trials that train, in the order of the problem's models.
        now: seconds on the controller's clock.
    """
    slot_of = {worker: at for at, worker in enumerate(workers)}
    model_of = {number: at for at, number in enumerate(numbers)}
    homes = _homes(state, workers)
    slots = []
    for at, worker in enumerate(workers):
        held = partitions(sorted(state.staged.get(state.workers[worker].node, ())))
        own = partitions([p for p, home in enumerate(homes) if home == at])
        slots.append(Slot(own, held & ~own, state.times.slowness(worker)))
    running = [
        Unit(
            Visit(model_of[lease.trial], lease.order.partition, slot_of[lease.order.worker]),
            max(0.0, lease.began + state.times.expected(lease.trial, lease.order.worker) - now),
        )
        for lease in state.leases.values()
        if lease.order.worker in slot_of and lease.trial in model_of
    ]
    first_worker: dict[NodeId, int] = {}
    for at, worker in enumerate(workers):
        first_worker.setdefault(state.workers[worker].node, at)
    return HopProblem(
        models=_models(state, numbers, first_worker),
        slots=slots,
        sizes=[1.0] * state.partitions,
        running=running,
    )


def _trains(state: SweepState, number: int, lease: Lease | None) -> bool:
    """Whether the hopper has to know of it: it has work left, or is at it."""
    if not _has_work(state, number, leased=lease is not None):
        return False
    if lease is not None:
        return not state.workers[lease.order.worker].revoked  # else it is nowhere in the problem
    return True


def _models(
    state: SweepState, numbers: list[int], first_worker: Mapping[NodeId, int]
) -> list[Model]:
    """Trials as the hopper sees them; those of which nothing was trained are alike."""
    usual_s, everything = state.times.usual, (1 << state.partitions) - 1
    fresh: dict[int, Model] = {}  # by granted epochs
    found: list[Model] = []
    for number in numbers:
        granted = state.trials[number].granted
        if state.models[number].visits:
            found.append(_model(state, number, first_worker, usual_s))
        else:
            if granted not in fresh:
                fresh[granted] = Model(usual_s, everything, max(0, granted - 1))
            found.append(fresh[granted])
    return found


def _model(
    state: SweepState, number: int, first_worker: Mapping[NodeId, int], usual_s: float
) -> Model:
    trial, model = state.trials[number], state.models[number]
    nodes = state.stored.nodes(model.names(model.at)) if model.at else ()
    at = min((first_worker[node] for node, _ in nodes if node in first_worker), default=None)
    epochs_left = max(0, trial.granted - model.whole_epochs - 1)
    unit_s = state.times.cost(number) if state.times.knows(number) else usual_s
    return Model(unit_s, model.todo(trial.granted), epochs_left, at)


def _homes(state: SweepState, workers: list[WorkerId]) -> list[int | None]:
    """The slot that each partition is primary at: of those that have it the one with fewest."""
    many = [0] * len(workers)
    homes: list[int | None] = []
    held = [state.staged.get(state.workers[worker].node, set()) for worker in workers]
    for partition in range(state.partitions):
        having = [at for at in range(len(workers)) if partition in held[at]]
        home = min(having, key=lambda at: (many[at], at), default=None)
        homes.append(home)
        if home is not None:
            many[home] += 1
    return homes


def _lease(
    state: SweepState, number: int, partition: int, worker: WorkerId, now: Seconds
) -> RunUnit:
    model, place = state.models[number], state.workers[worker]
    state.attempts += 1
    attempt = Attempt(state.attempts)
    by = model.visits[model.at].trial if model.again else number
    having = state.stored.nodes(model.names(model.at))
    having.sort(key=lambda one: one[0] != place.node)  # its own first
    name = having[0][1] if having else None
    sources: tuple[NodeId, ...] = tuple(node for node, one in having if one == name)
    order = RunUnit(
        attempt=attempt,
        worker=worker,
        trial=by,
        values=state.trials[by].values,
        state=name,
        sources=sources,
        result=StateName(number, model.at + 1),
        epoch=model.epoch,
        partition=partition,
        evaluate=not model.again and (len(model.visits) + 1) % state.partitions == 0,
    )
    place.attempt = attempt
    state.leases[attempt] = Lease(order, number, now, STAGING_PATIENCE_S, model.again)
    return order
