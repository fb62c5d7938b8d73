"""A sweep that runs: reports in, orders out.

The only way to change a sweep. The same reports in the same order lead to the same orders: what was
written down of them is the ledger, and to read it again is recovery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from controlplane.sweeps.dispatch import begin_units
from controlplane.sweeps.epoch_metrics import merged, score
from controlplane.sweeps.kept_states import keep_states
from controlplane.sweeps.model_states import ModelState
from controlplane.sweeps.orders import (
    Attempt,
    Order,
    ReleaseWorker,
    StateName,
    TrialEnded,
    TrialScored,
    UnitReport,
)
from controlplane.sweeps.searchers.search import next_decisions
from controlplane.sweeps.sweep_state import Place, SweepState
from controlplane.sweeps.trials import Add, Decision, Stop, apply, failed, with_score
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, Values, VisitOrder

Fault = Literal["trial", "state", "data"]
HANGS: Final = 2  # units of a trial that were given up, before it fails


class Sweep:
    """One sweep; its workers and nodes come, go and are lost while it runs."""

    def __init__(
        self, spec: SearchSpec, partitions: int, keep: int = 1, order: VisitOrder = "greedy"
    ) -> None:
        """Nothing has begun.

        Args:
            spec: checked.
            partitions: of the data.
            keep: best trials whose states are kept.
            order: who visits which partition next.
        """
        self.state = SweepState(spec, partitions, keep, order)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.state.trials) and all(trial.ended for trial in self.state.trials)

    @property
    def deadline(self) -> Seconds | None:
        """When `deadline_passed` has to be called."""
        leases = self.state.leases.values()
        return min((lease.order.deadline for lease in leases), default=None)

    # --- what is reported

    def begin(self, now: Seconds) -> list[Order]:
        """The search makes its first trials."""
        return self._go_on(now)

    def worker_came(self, worker: WorkerId, node: NodeId, now: Seconds) -> list[Order]:
        """A worker is ready to take units."""
        self.state.workers[worker] = Place(node)
        return self._go_on(now)

    def worker_gone(self, worker: WorkerId, now: Seconds) -> list[Order]:
        """Its process is no more; what its node has stays."""
        self._lose(worker)
        return self._go_on(now)

    def worker_revoked(self, worker: WorkerId, now: Seconds, *, urgent: bool) -> list[Order]:
        """Its slot is wanted: it ends its unit first, unless it is urgent."""
        place = self.state.workers.get(worker)
        if place is None:
            return []
        place.revoked = True
        if place.attempt is not None and not urgent:
            return []
        found: list[Order] = [*self.state.give_up(place.attempt)]
        del self.state.workers[worker]
        return [*found, ReleaseWorker(worker), *self._go_on(now)]

    def node_staged(self, node: NodeId, held: Sequence[int], now: Seconds) -> list[Order]:
        """The node has these partitions."""
        self.state.staged[node] = set(held)
        return self._go_on(now)

    def node_lost(self, node: NodeId, now: Seconds) -> list[Order]:
        """It is gone with its workers, its partitions and its states."""
        self.state.staged.pop(node, None)
        self.state.stored.lose(node)
        self.state.copying = {(name, at) for name, at in self.state.copying if at != node}
        for worker, place in list(self.state.workers.items()):
            if place.node == node:
                self._lose(worker)
        return self._go_on(now)

    def unit_done(self, attempt: Attempt, report: UnitReport, now: Seconds) -> list[Order]:
        """A unit is through and its state is on the worker's node; of an older attempt: nothing."""
        lease = self.state.leases.pop(attempt, None)
        if lease is None:
            return []
        order, model = lease.order, self.state.models[lease.trial]
        place = self.state.workers[order.worker]
        place.attempt = None
        self.state.times.measured(order.trial, order.worker, report.seconds)
        found: list[Order] = []
        first = model.visited(order.partition)
        self.state.stored.add(order.result, place.node)
        if first:
            model.metrics.append((report.metrics, report.samples))
            if order.evaluate:
                found += self._score(lease.trial, {**merged(model.metrics), **report.scores})
                model.metrics.clear()
        if place.revoked:
            del self.state.workers[order.worker]
            found.append(ReleaseWorker(order.worker))
        return [*found, *self._go_on(now)]

    def unit_failed(self, attempt: Attempt, why: str, fault: Fault, now: Seconds) -> list[Order]:
        """A unit came to nothing: its trial is at fault, or a state or the data of its node."""
        lease = self.state.leases.pop(attempt, None)
        if lease is None:
            return []
        place = self.state.workers[lease.order.worker]
        place.attempt = None
        found: list[Order] = []
        match fault:
            case "trial":
                found = self._fail(lease.trial, why)
            case "state":
                for node in lease.order.sources:
                    self.state.stored.lose(node, lease.order.state)
            case "data":
                self.state.staged[place.node].discard(lease.order.partition)
        if place.revoked:
            del self.state.workers[lease.order.worker]
            found.append(ReleaseWorker(lease.order.worker))
        return [*found, *self._go_on(now)]

    def state_stored(self, name: StateName, node: NodeId, now: Seconds) -> list[Order]:
        """A copy is complete; one that nobody ordered any more is dropped again."""
        self.state.copying.discard((name, node))
        if node in self.state.staged:
            self.state.stored.add(name, node)
        return self._go_on(now)

    def deadline_passed(self, now: Seconds) -> list[Order]:
        """Give up units that take far too long; their trial fails if that happens again."""
        found: list[Order] = []
        for attempt, lease in list(self.state.leases.items()):
            if lease.order.deadline > now:
                continue
            found += self.state.give_up(attempt)
            self.state.hangs[lease.trial] = self.state.hangs.get(lease.trial, 0) + 1
            if self.state.hangs[lease.trial] >= HANGS:
                took = lease.order.deadline - lease.began
                why = (
                    f"{HANGS} units took longer than {took:.0f} s; is there a deadlock in train_fn?"
                )
                found += self._fail(lease.trial, why)
        return [*found, *self._go_on(now)]

    # --- what users ask

    def add(self, values: Values, now: Seconds, parent: int | None = None) -> list[Order]:
        """A configuration joins; with a parent it goes on from the parent's state."""
        first = next_decisions(self.state.spec, [])
        epochs = first[0].epochs if first and isinstance(first[0], Add) else self.state.spec.epochs
        begun = 0 if parent is None else self.state.models[parent].whole_epochs
        granted = min(self.state.spec.epochs, max(epochs, begun + 1))
        return [*self._decide([Add(dict(values), granted, parent)]), *self._go_on(now)]

    def stop(self, trial: int, why: str, now: Seconds) -> list[Order]:
        """A user ends a trial."""
        if self.state.trials[trial].ended:
            return []
        return [*self._decide([Stop(trial, why)]), *self._go_on(now)]

    def pause(self, trial: int) -> list[Order]:
        """It takes no further unit; the one that runs ends."""
        self.state.paused.add(trial)
        return []

    def resume(self, trial: int, now: Seconds) -> list[Order]:
        """It goes on."""
        self.state.paused.discard(trial)
        return self._go_on(now)

    # --- what follows

    def _go_on(self, now: Seconds) -> list[Order]:
        """Ask the searcher until it has no more to say, then order what can be ordered."""
        found: list[Order] = []
        while decisions := next_decisions(self.state.spec, self.state.trials):
            found += self._decide(decisions)
        found += keep_states(self.state)
        return [*found, *begin_units(self.state, now)]

    def _decide(self, decisions: Sequence[Decision]) -> list[Order]:
        state = self.state
        everything = (1 << state.partitions) - 1
        found: list[Order] = []
        state.trials = apply(state.trials, decisions)
        for one in decisions:
            if isinstance(one, Add):
                model = ModelState(len(state.models), everything)
                if one.parent is not None:
                    whole = state.models[one.parent]
                    model.visits, model.at = list(whole.visits), len(whole.visits)
                    model.parent = StateName(one.parent, model.at)
                    model.metrics = list(whole.metrics)
                state.models.append(model)
            elif isinstance(one, Stop):
                for attempt, lease in list(state.leases.items()):
                    if lease.trial == one.trial:
                        found += state.give_up(attempt)
                found.append(TrialEnded(one.trial, "stopped", one.why))
        return found

    def _score(self, number: int, metrics: dict[str, float]) -> list[Order]:
        state = self.state
        value, wrong = score(state.spec, metrics)
        found: list[Order] = [TrialScored(number, state.models[number].whole_epochs, metrics)]
        if wrong:
            return [*found, *self._fail(number, wrong)]
        state.trials[number] = with_score(state.trials[number], value, state.spec.epochs)
        if state.trials[number].ended:
            found.append(TrialEnded(number, "done", f"trained {state.spec.epochs} epochs"))
        return found

    def _fail(self, number: int, why: str) -> list[Order]:
        self.state.trials[number] = failed(self.state.trials[number])
        return [TrialEnded(number, "failed", why)]

    def _lose(self, worker: WorkerId) -> None:
        place = self.state.workers.pop(worker, None)
        if place is not None and place.attempt is not None:
            del self.state.leases[place.attempt]
        self.state.times.forget(worker)
