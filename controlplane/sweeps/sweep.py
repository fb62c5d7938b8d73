"""A sweep that runs: reports in, orders out.

The only way to change a sweep. The same reports in the same order lead to the same orders: what was
written down of them is the ledger, and to read it again is recovery.

Which units begin now, where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from controlplane.sweeps.hopping import HopProblem, Model, Slot, Unit, Visit, partitions
from controlplane.sweeps.orders import (
    Attempt,
    Order,
    RunUnit,
    StateDiffers,
    StateName,
    UnitReport,
)
from controlplane.sweeps.replicas import keep_states, partition_holders
from controlplane.sweeps.search import epochs_of_new, next_decisions
from controlplane.sweeps.sweep_state import Lease, Place, SweepState
from controlplane.sweeps.trial_changes import (
    Fault,
    add_score,
    at_the_end_of_an_epoch,
    can_hold,
    crash,
    decide,
    give_up_late_units,
    graduate_last_trials,
    refuse_data,
    release_late_leavers,
    score_graduate,
    unit_fault,
)
from controlplane.sweeps.trials import Add, Decision, Stop, merged, score
from controlplane.sweeps.visit_order import visit_order
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, Values, VisitOrder

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


@dataclass(slots=True, init=False)
class Sweep:
    """One sweep; its workers and nodes come, go and are lost while it runs."""

    state: SweepState

    def __init__(
        self,
        spec: SearchSpec,
        partitions: int,
        keep: int = 1,
        order: VisitOrder = "greedy",
        graduate_slots: int = 0,
    ) -> None:
        """Nothing has begun.

        Args:
            keep: best trials whose states are kept.
            order: who visits which partition next.
            graduate_slots: trials that are fewer than half of these go on as elastic jobs; 0: they
                stay.
        """
        self.state = SweepState(spec, partitions, keep, order, graduate_slots=graduate_slots)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.state.trials) and all(trial.ended for trial in self.state.trials)

    @property
    def can_train(self) -> int:
        """Trials that have a unit under way, or could have one now."""
        return len(training_trials(self.state))

    @property
    def deadline(self) -> Seconds | None:
        """When `deadline_passed` has to be called."""
        leases = [lease.deadline for lease in self.state.leases.values()]
        places = [place.leaves_by for place in self.state.workers.values()]
        return min([*leases, *(by for by in places if by is not None)], default=None)

    # --- workers and nodes

    def begin(self, now: Seconds) -> list[Order]:
        """The search makes its first trials."""
        return self._go_on(now)

    def worker_came(self, worker: WorkerId, node: NodeId, now: Seconds) -> list[Order]:
        """A worker is ready to take units."""
        self.state.workers[worker] = Place(node)
        return self._go_on(now)

    def worker_gone(
        self, worker: WorkerId, now: Seconds, why: str = "", *, fault: bool = False
    ) -> list[Order]:
        """Its process is no more; what its node has stays.

        Args:
            now: seconds on the controller's clock.
            why: how it ended; empty: nobody is to blame.
            fault: by itself; else it was killed.
        """
        lease, found = self._lose(worker), list[Order]()
        if lease is not None and why:
            found += crash(self.state, lease.trial, why, fault=fault)
        return [*found, *self._go_on(now)]

    def worker_revoked(self, worker: WorkerId, now: Seconds, within_s: float) -> list[Order]:
        """Its slot is wanted: it ends its unit first, if that is over in time.

        Args:
            now: seconds on the controller's clock.
            within_s: it has to be gone; 0: at once. A unit that is expected to take longer is
                given up now, and one that does take longer is given up then.
        """
        place = self.state.workers.get(worker)
        if place is None:
            return []
        place.revoked, place.revoked_at, place.within_s = True, now, within_s
        if waits_for_unit(self.state, place, now):
            return []
        return [*self.state.release(worker), *self._go_on(now)]

    def worker_kept(self, worker: WorkerId, now: Seconds) -> list[Order]:
        """A worker that was revoked stays after all."""
        place = self.state.workers.get(worker)
        if place is None or not place.revoked:
            return []
        place.revoked = False
        return self._go_on(now)

    def share_partitions(
        self, workers: Mapping[NodeId, int], replicas: int, now: Seconds
    ) -> list[Order]:
        """Nodes with workers share the partitions.

        Args:
            workers: of each node, those that take units.
            replicas: nodes that hold each partition.
            now: seconds on the controller's clock.
        """
        state = self.state
        for partition in range(state.partitions):
            if not any(can_hold(state, node, partition) for node in workers):
                for node in workers:  # nobody is left: they try again, and fail if it is no better
                    state.data.failed.pop((node, partition), None)
        held = partition_holders(
            workers, state.partitions, replicas, state.staged, partial(can_hold, state)
        )
        return self.nodes_hold(held, now)

    def nodes_hold(self, held: Mapping[NodeId, Collection[int]], now: Seconds) -> list[Order]:
        """Which partitions each node has; one that is not named has none."""
        self.state.staged = {node: set(some) for node, some in held.items()}
        return self._go_on(now)

    def node_lost(self, node: NodeId, now: Seconds) -> list[Order]:
        """It is gone with its workers and partitions; whether its states are, will be seen."""
        state = self.state
        state.staged.pop(node, None)
        names = state.stored.on(node)
        away = {name: state.models[name.trial].digest(name.version) for name in names}
        state.away[node] = {**state.away.get(node, {}), **away}
        state.stored.lose(node)
        state.copying = {(name, at) for name, at in state.copying if at != node}
        for worker, place in list(state.workers.items()):
            if place.node == node:
                self._lose(worker)
        return self._go_on(now)

    def node_back(self, node: NodeId, now: Seconds) -> list[Order]:
        """It speaks again: states that it had count, if they are those that there are now."""
        state = self.state
        for name, digest in state.away.pop(node, {}).items():
            if state.models[name.trial].digest(name.version) == digest:
                state.stored.add(name, node)
        return self._go_on(now)

    # --- units and states

    def unit_begun(self, attempt: Attempt, samples: int, now: Seconds) -> list[Order]:
        """State and data are there: its time counts from now on.

        Args:
            attempt: of an older one nothing is heard.
            samples: of the partition; another number than elsewhere ends the unit.
            now: seconds on the controller's clock.
        """
        state = self.state
        lease = state.leases.get(attempt)
        if lease is None or lease.trains:
            return []
        node, partition = state.workers[lease.order.worker].node, lease.order.partition
        known, first = state.data.sizes.setdefault(partition, (samples, node))
        if known != samples:
            found: list[Order] = [*state.release(lease.order.worker)]
            why = f"{node} has {samples} samples, {first} has {known}: give input_fn the same data"
            found += refuse_data(state, node, partition, why, for_good=True)
            return [*found, *self._go_on(now)]
        lease.trains, lease.began = True, now
        lease.limit_s = training_limit(state, lease.trial, lease.order.worker)
        return []

    def unit_done(self, attempt: Attempt, report: UnitReport, now: Seconds) -> list[Order]:
        """A unit is through and its state is on the worker's node; of an older attempt: nothing."""
        state = self.state
        ended = state.end_lease(attempt)
        if ended is None:
            return []
        lease, place, released = ended
        order, model = lease.order, state.models[lease.trial]
        state.times.measured(order.trial, order.worker, report.seconds)
        if lease.void:
            return [*released, *self._go_on(now)]
        found: list[Order] = [*released]
        state.full_disks = 0
        state.crashes.pop(lease.trial, None)
        if order.state is not None:
            state.unreadable.pop(order.state, None)
        differs = model.again and model.visits[model.at].digest != report.digest
        first = model.visited(order.partition, report.digest)
        state.stored.add(order.result, place.node)
        if first:
            model.metrics.append((report.metrics, report.samples))
            if order.evaluate:
                found += add_score(state, lease.trial, {**merged(model.metrics), **report.scores})
                model.metrics.clear()
        elif differs:
            found.append(StateDiffers(order.result))
        return [*found, *self._go_on(now)]

    def unit_failed(self, attempt: Attempt, why: str, fault: Fault, now: Seconds) -> list[Order]:
        """A unit came to nothing: whose fault that is decides what follows."""
        ended = self.state.end_lease(attempt)
        if ended is None:
            return []
        lease, place, released = ended
        found = unit_fault(self.state, lease, place.node, why, fault)
        return [*released, *found, *self._go_on(now)]

    def state_stored(self, name: StateName, node: NodeId, now: Seconds) -> list[Order]:
        """A copy is complete; one that nobody ordered any more is dropped again."""
        if (name, node) not in self.state.copying:
            return []
        self.state.copying.discard((name, node))
        self.state.stored.add(name, node)
        return self._go_on(now)

    def state_missing(self, name: StateName, node: NodeId, now: Seconds) -> list[Order]:
        """A node has not what it was thought to have, or a copy that was ordered failed."""
        state = self.state
        if (name, node) in state.copying:
            state.copying.discard((name, node))
            state.failed_copies[name] = state.failed_copies.get(name, 0) + 1
        else:
            state.stored.lose(node, name)
        return self._go_on(now)

    def deadline_passed(self, now: Seconds) -> list[Order]:
        """Give up units that take far too long, and those of workers that had to leave by now."""
        found = [*release_late_leavers(self.state, now), *give_up_late_units(self.state, now)]
        return [*found, *self._go_on(now)] if found else []

    def begin_anew(self, now: Seconds) -> None:
        """Nothing could be heard while no controller was there: every unit's time begins again."""
        for lease in self.state.leases.values():
            lease.began = now
        for place in self.state.workers.values():
            place.revoked_at = now

    # --- what users ask

    def add(self, values: Values, now: Seconds, parent: int | None = None) -> list[Order]:
        """A configuration joins; with a parent it goes on from the parent's state."""
        state = self.state
        begun = 0 if parent is None else state.models[parent].whole_epochs
        granted = epochs_of_new(state.spec, begun)
        said: list[Decision] = [Add(dict(values), granted, parent, begun)]
        if begun >= state.spec.epochs:
            why = f"trial {parent} has trained all {begun} epochs: nothing is left to train"
            said.append(Stop(len(state.trials), why))
        return [*decide(state, said), *self._go_on(now)]

    def stop(self, trial: int, why: str, now: Seconds) -> list[Order]:
        """A user ends a trial; its unit runs to its end, and counts for nothing."""
        if self.state.trials[trial].ended:
            return []
        return [*decide(self.state, [Stop(trial, why)]), *self._go_on(now)]

    def delete(self, trial: int, why: str, now: Seconds) -> list[Order]:
        """A user ends a trial and has its states dropped."""
        self.state.deleted.add(trial)
        return [*self.stop(trial, why, now), *self._go_on(now)]

    def pause(self, trial: int) -> list[Order]:
        """It takes no further unit; the one that runs ends."""
        self.state.paused.add(trial)
        return []

    def resume(self, trial: int, now: Seconds) -> list[Order]:
        """It goes on."""
        self.state.paused.discard(trial)
        return self._go_on(now)

    def graduate_ended_epoch(self, trial: int, metrics: Mapping[str, float]) -> None:
        """A trial that graduated trained an epoch in its job.

        Args:
            metrics: of the epoch; without the one that counts, or one that is not finite, its score
                stays what it was.
        """
        score_graduate(self.state, trial, score(self.state.spec, metrics)[0])

    def close(self, why: str) -> list[Order]:
        """All ends here: trials that have not ended are stopped, the best states stay."""
        state = self.state
        left = [Stop(trial.number, why) for trial in state.trials if not trial.ended]
        found = decide(state, left)
        for worker in list(state.workers):
            self._lose(worker)
        state.staged.clear()
        return [*found, *keep_states(state)]

    # --- what follows

    def _go_on(self, now: Seconds) -> list[Order]:
        """Ask the searcher until it has no more to say, then order what can be ordered."""
        found = [*self._ask_searcher(), *keep_states(self.state)]
        if left := graduate_last_trials(self.state):  # of states that are there now
            found += [*left, *self._ask_searcher(), *keep_states(self.state)]
        return [*found, *begin_units(self.state, now)]

    def _ask_searcher(self) -> list[Order]:
        found: list[Order] = []
        while decisions := next_decisions(self.state.spec, self.state.trials, self.state.paused):
            found += decide(self.state, decisions)
        return found

    def _lose(self, worker: WorkerId) -> Lease | None:
        place = self.state.workers.pop(worker, None)
        self.state.times.forget(worker)
        if place is None or place.attempt is None:
            return None
        return self.state.leases.pop(place.attempt)
