"""A sweep that runs: reports in, orders out.

The only way to change a sweep. The same reports in the same order lead to the same orders: what was
written down of them is the ledger, and to read it again is recovery.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from controlplane.sweeps.dispatch import (
    begin_units,
    training_limit,
    training_trials,
    waits_for_unit,
)
from controlplane.sweeps.epoch_metrics import merged, score
from controlplane.sweeps.graduation import graduate_last_trials, score_graduate
from controlplane.sweeps.kept_states import keep_states
from controlplane.sweeps.orders import (
    Attempt,
    Order,
    StateDiffers,
    StateName,
    UnitReport,
)
from controlplane.sweeps.partition_holders import partition_holders
from controlplane.sweeps.searchers.search import epochs_of_new, next_decisions
from controlplane.sweeps.sweep_state import Lease, Place, SweepState
from controlplane.sweeps.trial_changes import add_score, decide
from controlplane.sweeps.trials import Add, Decision, Stop
from controlplane.sweeps.unit_faults import (
    Fault,
    can_hold,
    crash,
    give_up_late_units,
    refuse_data,
    release_late_leavers,
    unit_fault,
)
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, Values, VisitOrder


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
