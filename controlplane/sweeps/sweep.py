"""Sweep as a state machine that takes in reports and gives out orders.

Only `Sweep` changes a sweep. Equal reports in equal order lead to equal orders, so the journalled
reports are the ledger. Times are in seconds on the controller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
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
from controlplane.sweeps.sweep_state import Lease, SweepState, SweepWorker
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
    unit_fault,
)
from controlplane.sweeps.trials import Add, Decision, Stop, merged, score
from controlplane.sweeps.visit_order import visit_order
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, Values, VisitOrder

PATIENCE_FACTOR: Final = 5.0  # time limit of a unit, as a multiple of its expected seconds
MIN_PATIENCE_S: Final = 60.0
FIRST_PATIENCE_FACTOR: Final = 20.0  # the same multiple for trials without a measured unit
MIN_FIRST_PATIENCE_S: Final = 3600.0  # least time limit for trials without a measured unit
STAGING_TIMEOUT_S: Final = 3600.0  # time limit for the arrival of state and data


def begin_units(state: SweepState, now: Seconds) -> list[RunUnit]:
    """Lease all units that can begin now, and return the orders to run them."""
    workers = [name for name, record in state.workers.items() if _takes_units(state, record)]
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


def _takes_units(state: SweepState, record: SweepWorker) -> bool:
    ignored = record.attempt is not None and state.leases[record.attempt].ignored
    return not record.revoked and not ignored


def training_limit(state: SweepState, trial: int, worker: WorkerId) -> float:
    """Return the time limit of a unit in seconds, from the arrival of its state and data."""
    expected = state.times.expected(trial, worker)
    if state.times.knows(trial):
        return max(MIN_PATIENCE_S, PATIENCE_FACTOR * expected)
    return max(MIN_FIRST_PATIENCE_S, FIRST_PATIENCE_FACTOR * expected)


def waits_for_unit(state: SweepState, record: SweepWorker, now: Seconds) -> bool:
    """True if a revoked worker may finish its unit before it leaves."""
    lease = state.leases[record.attempt] if record.attempt is not None else None
    if lease is None or lease.ignored or record.within_s <= 0.0:
        return False
    if not state.times.knows(lease.trial):
        return True
    began = lease.started_at if lease.training else now
    return began + _expected_s(state, lease) - now <= record.within_s


def _expected_s(state: SweepState, lease: Lease) -> float:
    return state.times.expected(lease.trial, lease.order.worker)


def _has_work(state: SweepState, number: int, *, leased: bool) -> bool:
    if not state.models[number].todo(state.trials[number].granted):
        return False
    if number in state.graduating and at_the_end_of_an_epoch(state, number):
        return False
    return leased or number not in state.paused


def hop_problem(
    state: SweepState, workers: list[WorkerId], numbers: list[int], now: Seconds
) -> HopProblem:
    """Return the scheduling problem with `workers` as slots and the trials `numbers` as models."""
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
            max(0.0, lease.started_at + _expected_s(state, lease) - now),
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
    """True if the trial has work, and has no unit on a revoked worker."""
    revoked = lease is not None and state.workers[lease.order.worker].revoked
    return not revoked and _has_work(state, number, leased=lease is not None)


def _models(
    state: SweepState, numbers: list[int], first_worker: Mapping[NodeId, int]
) -> list[Model]:
    """Return the models of the trials; untrained trials with equal grants share a model."""
    usual_s, everything = state.times.usual, (1 << state.partitions) - 1
    fresh = cache(lambda granted: Model(usual_s, everything, max(0, granted - 1)))
    return [
        _model(state, number, first_worker, usual_s)
        if state.models[number].finished_units
        else fresh(state.trials[number].granted)
        for number in numbers
    ]


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
    """Return the primary slot of each partition: the holder with the fewest primaries, or None."""
    counts = [0] * len(workers)
    homes: list[int | None] = []
    held = [state.staged.get(state.workers[worker].node, set()) for worker in workers]
    for partition in range(state.partitions):
        holders = [at for at in range(len(workers)) if partition in held[at]]
        home = min(holders, key=lambda at: (counts[at], at), default=None)
        homes.append(home)
        if home is not None:
            counts[home] += 1
    return homes


def _lease(
    state: SweepState, number: int, partition: int, worker: WorkerId, now: Seconds
) -> RunUnit:
    model, record = state.models[number], state.workers[worker]
    state.attempts += 1
    attempt = Attempt(state.attempts)
    by = model.finished_units[model.at].trial if model.again else number
    holders = state.stored.nodes(model.names(model.at))
    holders.sort(key=lambda one: one[0] != record.node)  # the worker's own node first
    name = holders[0][1] if holders else None
    order = RunUnit(
        attempt=attempt,
        worker=worker,
        trial=by,
        values=state.trials[by].values,
        state=name,
        sources=tuple(node for node, one in holders if one == name),
        result=StateName(number, model.at + 1),
        epoch=model.epoch,
        partition=partition,
        evaluate=not model.again and (len(model.finished_units) + 1) % state.partitions == 0,
    )
    record.attempt = attempt
    state.leases[attempt] = Lease(order, number, now, STAGING_TIMEOUT_S, model.again)
    return order


@dataclass(slots=True, init=False)
class Sweep:
    """State machine of one sweep; workers and nodes may be added or lost while the sweep runs."""

    state: SweepState

    def __init__(
        self,
        spec: SearchSpec,
        partitions: int,
        keep: int = 1,
        order: VisitOrder = "greedy",
        graduate_slots: int = 0,
    ) -> None:
        """Create a sweep that has not started.

        The states of the `keep` best trials are kept. When fewer than half of
        `graduate_slots` trials are left, these trials continue as elastic jobs; 0: they never do.
        """
        self.state = SweepState(spec, partitions, keep, order, graduate_slots=graduate_slots)

    @property
    def over(self) -> bool:
        """True if the sweep has trials and all of them have ended."""
        return bool(self.state.trials) and all(trial.ended for trial in self.state.trials)

    @property
    def trainable(self) -> int:
        """Number of trials that have a running unit, or could have one now."""
        leased = {lease.trial for lease in self.state.leases.values()}
        return sum(
            not trial.ended and _has_work(self.state, trial.number, leased=trial.number in leased)
            for trial in self.state.trials
        )

    @property
    def deadline(self) -> Seconds | None:
        """Earliest time at which `deadline_passed` has to be called, or None without deadlines."""
        times = [lease.deadline for lease in self.state.leases.values()]
        leave = (record.must_leave_by for record in self.state.workers.values())
        return min(times + [by for by in leave if by is not None], default=None)

    # --- workers and nodes

    def begin(self, now: Seconds) -> list[Order]:
        """Create the first trials of the search."""
        return self._advance(now)

    def worker_came(self, worker: WorkerId, node: NodeId, now: Seconds) -> list[Order]:
        """Add a worker that is ready to take units."""
        self.state.workers[worker] = SweepWorker(node)
        return self._advance(now)

    def worker_gone(
        self, worker: WorkerId, now: Seconds, reason: str = "", *, fault: bool = False
    ) -> list[Order]:
        """Remove a worker after its process has exited; the node's states and partitions stay.

        An empty `reason` blames no trial. `fault` is False if the process was killed.
        """
        lease, found = self._lose(worker), list[Order]()
        if lease is not None and reason:
            found += crash(self.state, lease.trial, reason, fault=fault)
        return [*found, *self._advance(now)]

    def worker_revoked(self, worker: WorkerId, now: Seconds, within_s: float) -> list[Order]:
        """Revoke a worker, which has to be gone within `within_s` seconds (0 means at once).

        A unit that is expected to take longer is given up now, any other unit at the end of this
        time.
        """
        record = self.state.workers.get(worker)
        if record is None:
            return []
        record.revoked, record.revoked_at, record.within_s = True, now, within_s
        if waits_for_unit(self.state, record, now):
            return []
        return [*self.state.release(worker), *self._advance(now)]

    def worker_kept(self, worker: WorkerId, now: Seconds) -> list[Order]:
        """Undo the revocation of a worker."""
        record = self.state.workers.get(worker)
        if record is None or not record.revoked:
            return []
        record.revoked = False
        return self._advance(now)

    def share_partitions(
        self, workers: Mapping[NodeId, int], replicas: int, now: Seconds
    ) -> list[Order]:
        """Distribute the partitions over nodes with workers, each partition to `replicas` nodes."""
        state = self.state
        for partition in range(state.partitions):
            if not any(can_hold(state, node, partition) for node in workers):
                for node in workers:  # no node can provide the partition: all nodes try again
                    state.data.failed.pop((node, partition), None)
        able = partial(can_hold, state)
        held = partition_holders(workers, state.partitions, replicas, state.staged, able)
        return self.nodes_hold(held, now)

    def nodes_hold(self, held: Mapping[NodeId, Collection[int]], now: Seconds) -> list[Order]:
        """Set the partitions of each node; a node that is not named has none."""
        self.state.staged = {node: set(some) for node, some in held.items()}
        return self._advance(now)

    def node_lost(self, node: NodeId, now: Seconds) -> list[Order]:
        """Remove a node with its workers and partitions; its states may return with the node."""
        state = self.state
        state.staged.pop(node, None)
        names = state.stored.on(node)
        away = {name: state.models[name.trial].digest(name.version) for name in names}
        state.lost_states[node] = {**state.lost_states.get(node, {}), **away}
        state.stored.lose(node)
        state.copying = {(name, at) for name, at in state.copying if at != node}
        for worker, record in list(state.workers.items()):
            if record.node == node:
                self._lose(worker)
        return self._advance(now)

    def node_back(self, node: NodeId, now: Seconds) -> list[Order]:
        """Restore the states of a returned node that still have the current digest."""
        state = self.state
        for name, digest in state.lost_states.pop(node, {}).items():
            if state.models[name.trial].digest(name.version) == digest:
                state.stored.add(name, node)
        return self._advance(now)

    # --- units and states

    def unit_begun(self, attempt: Attempt, samples: int, now: Seconds) -> list[Order]:
        """Start the timer of a unit that has received its state and data; ignore an old attempt.

        If another node reported another number of `samples` in the partition, the unit ends and
        this node does not get the partition again.
        """
        state = self.state
        lease = state.leases.get(attempt)
        if lease is None or lease.training:
            return []
        node, partition = state.workers[lease.order.worker].node, lease.order.partition
        known, first = state.data.sizes.setdefault(partition, (samples, node))
        if known != samples:
            found: list[Order] = [*state.release(lease.order.worker)]
            sizes = f"{node} has {samples} samples of the partition, {first} has {known}"
            reason = f"{sizes}; input_fn must return the same data on every node"
            found += refuse_data(state, node, partition, reason, for_good=True)
            return [*found, *self._advance(now)]
        lease.training, lease.started_at = True, now
        lease.limit_s = training_limit(state, lease.trial, lease.order.worker)
        return []

    def unit_done(self, attempt: Attempt, report: UnitReport, now: Seconds) -> list[Order]:
        """Record a finished unit, and its state on the worker's node. Ignore an old attempt."""
        state = self.state
        ended = state.end_lease(attempt)
        if ended is None:
            return []
        lease, record, released = ended
        order, model = lease.order, state.models[lease.trial]
        state.times.measured(order.trial, order.worker, report.seconds)
        if lease.ignored:
            return [*released, *self._advance(now)]
        found: list[Order] = [*released]
        state.full_disks = 0
        state.crashes.pop(lease.trial, None)
        if order.state is not None:
            state.unreadable.pop(order.state, None)
        differs = model.again and model.finished_units[model.at].digest != report.digest
        first = model.finish_unit(order.partition, report.digest)
        state.stored.add(order.result, record.node)
        if first:
            model.metrics.append((report.metrics, report.samples))
            if order.evaluate:
                found += add_score(state, lease.trial, {**merged(model.metrics), **report.scores})
                model.metrics.clear()
        elif differs:
            found.append(StateDiffers(order.result))
        return [*found, *self._advance(now)]

    def unit_failed(self, attempt: Attempt, reason: str, fault: Fault, now: Seconds) -> list[Order]:
        """Record a failed unit; `fault` is the cause and decides what follows."""
        ended = self.state.end_lease(attempt)
        if ended is None:
            return []
        lease, record, released = ended
        found = unit_fault(self.state, lease, record.node, reason, fault)
        return [*released, *found, *self._advance(now)]

    def state_stored(self, name: StateName, node: NodeId, now: Seconds) -> list[Order]:
        """Record a complete copy; ignore a copy that is no longer ordered."""
        if (name, node) not in self.state.copying:
            return []
        self.state.copying.discard((name, node))
        self.state.stored.add(name, node)
        return self._advance(now)

    def state_missing(self, name: StateName, node: NodeId, now: Seconds) -> list[Order]:
        """Record that a node does not have a recorded state, or that a copy failed."""
        state = self.state
        if (name, node) in state.copying:
            state.copying.discard((name, node))
            state.failed_copies[name] = state.failed_copies.get(name, 0) + 1
        else:
            state.stored.lose(node, name)
        return self._advance(now)

    def deadline_passed(self, now: Seconds) -> list[Order]:
        """Give up units that exceeded their time, and units of workers that had to leave by now."""
        found = [*release_late_leavers(self.state, now), *give_up_late_units(self.state, now)]
        return [*found, *self._advance(now)] if found else []

    def restart_timers(self, now: Seconds) -> None:
        """Restart all timers, because no report could arrive while the controller was down."""
        for lease in self.state.leases.values():
            lease.started_at = now
        for record in self.state.workers.values():
            record.revoked_at = now

    # --- requests of users

    def add(self, values: Values, now: Seconds, parent: int | None = None) -> list[Order]:
        """Add a trial with these values; it continues from the state of trial `parent` if given."""
        state = self.state
        begun = 0 if parent is None else state.models[parent].whole_epochs
        granted = epochs_of_new(state.spec, begun)
        said: list[Decision] = [Add(dict(values), granted, parent, begun)]
        if begun >= state.spec.epochs:
            reason = f"trial {parent} has already trained all {begun} epochs"
            said.append(Stop(len(state.trials), reason))
        return [*decide(state, said), *self._advance(now)]

    def stop(self, trial: int, reason: str, now: Seconds) -> list[Order]:
        """End a trial at a user's request; its running unit finishes, but the result is ignored."""
        if self.state.trials[trial].ended:
            return []
        return [*decide(self.state, [Stop(trial, reason)]), *self._advance(now)]

    def delete(self, trial: int, reason: str, now: Seconds) -> list[Order]:
        """End a trial at a user's request, and drop its states."""
        self.state.deleted.add(trial)
        return [*self.stop(trial, reason, now), *self._advance(now)]

    def pause(self, trial: int) -> list[Order]:
        """Pause a trial. The trial gets no further unit, but its running unit finishes."""
        self.state.paused.add(trial)
        return []

    def resume(self, trial: int, now: Seconds) -> list[Order]:
        """Resume a paused trial, which may get units again."""
        self.state.paused.discard(trial)
        return self._advance(now)

    def graduate_ended_epoch(self, trial: int, metrics: Mapping[str, float]) -> None:
        """Record an epoch of a graduated trial; an epoch without a finite metric adds no score."""
        one, value = self.state.trials[trial], score(self.state.spec, metrics)[0]
        if one.ended == "graduated" and math.isfinite(value):
            self.state.trials[trial] = replace(one, scores=(*one.scores, value))

    def close(self, reason: str) -> list[Order]:
        """Stop all trials that have not ended, and keep the best states."""
        state = self.state
        left = [Stop(trial.number, reason) for trial in state.trials if not trial.ended]
        found = decide(state, left)
        for worker in list(state.workers):
            self._lose(worker)
        state.staged.clear()
        return [*found, *keep_states(state)]

    # --- consequences

    def _advance(self, now: Seconds) -> list[Order]:
        """Apply the searcher's decisions until there are none, and return all resulting orders."""
        found = [*self._apply_searcher(), *keep_states(self.state)]
        if left := graduate_last_trials(self.state):  # needs stored states, see `keep_states`
            found += [*left, *self._apply_searcher(), *keep_states(self.state)]
        return [*found, *begin_units(self.state, now)]

    def _apply_searcher(self) -> list[Order]:
        found: list[Order] = []
        while decisions := next_decisions(self.state.spec, self.state.trials, self.state.paused):
            found += decide(self.state, decisions)
        return found

    def _lose(self, worker: WorkerId) -> Lease | None:
        record = self.state.workers.pop(worker, None)
        self.state.times.forget(worker)
        if record is None or record.attempt is None:
            return None
        return self.state.leases.pop(record.attempt)
