"""Searches and sweeps played without training: a state is its history, scores are up to the test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from random import Random

from controlplane.sweeps.orders import (
    CopyState,
    DropState,
    Order,
    ReleaseWorker,
    RunUnit,
    StateName,
    StopUnit,
    TrialEnded,
    TrialScored,
    UnitReport,
)
from controlplane.sweeps.search import next_decisions
from controlplane.sweeps.sweep import Sweep
from controlplane.sweeps.trials import Decision, Trial, apply, with_score
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import Parameter, Searcher, SearchSpec, Values, log_uniform

Scores = Callable[[Trial, int], float]  # of a trial after an epoch, counted from the first

LR = {"lr": log_uniform(1e-4, 1e-1)}


def search(
    searcher: Searcher, epochs: int = 9, space: dict[str, Parameter] | None = None, seed: int = 0
) -> SearchSpec:
    return SearchSpec(
        space=LR if space is None else space,
        searcher=searcher,
        epochs=epochs,
        metric="accuracy",
        seed=seed,
    )


def settled(spec: SearchSpec, trials: Sequence[Trial]) -> tuple[list[Trial], list[Decision]]:
    """The trials once the searcher has nothing more to say, and what it said."""
    now = list(trials)
    said: list[Decision] = []
    for _ in range(1000):
        decisions = next_decisions(spec, now)
        if not decisions:
            return now, said
        now = apply(now, decisions)
        said += decisions
    raise AssertionError("the searcher never comes to rest")


def played(spec: SearchSpec, scores: Scores, order: Random) -> list[Trial]:
    """The trials when all is over; who finishes an epoch next is up to `order`."""
    trials, _ = settled(spec, [])
    while training := [trial for trial in trials if not trial.ended and not trial.waits]:
        one = training[order.randrange(len(training))]
        trials[one.number] = with_score(one, scores(one, one.epochs + 1), spec.epochs)
        trials, _ = settled(spec, trials)
    return trials


History = tuple[tuple[str, int, int], ...]  # values, epoch, partition of each unit
NOW = Seconds(0.0)


def goodness(history: History) -> float:
    digest = hashlib.blake2b(repr(history).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def step(history: History, values: Values, epoch: int, partition: int) -> History:
    return (*history, (repr(sorted(values.items())), epoch, partition))


def loss_and_samples(partition: int) -> tuple[float, int]:
    return 1.0 + partition, 10 * (1 + partition)


class SweepSite:
    def __init__(
        self,
        sweep: Sweep,
        held: dict[NodeId, set[int]],
        workers: int,
        *,
        lost_disks: bool = True,  # of a node that comes back
    ) -> None:
        self.sweep = sweep
        self.lost_disks = lost_disks
        self.held = held
        self.states: dict[NodeId, dict[StateName, History]] = {node: {} for node in held}
        self.running: dict[WorkerId, RunUnit] = {}
        self.copies: list[CopyState] = []
        self.idle: set[WorkerId] = set()
        self.node_of: dict[WorkerId, NodeId] = {}
        self.scored: list[TrialScored] = []
        self.ended: list[TrialEnded] = []
        self.units = 0  # that ended
        self._made = 0
        self.do(sweep.begin(NOW))
        self.do(sweep.nodes_hold(held, NOW))
        for at in range(workers):
            self.new_worker(list(held)[at % len(held)])

    def new_worker(self, node: NodeId) -> None:
        self._made += 1
        worker = WorkerId(f"w{self._made}")
        self.idle.add(worker)
        self.node_of[worker] = node
        self.do(self.sweep.worker_came(worker, node, NOW))

    def do(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case RunUnit():
                    assert order.worker in self.idle, "a slot has one unit at a time"
                    assert order.partition in self.held[self.node_of[order.worker]]
                    self.idle.remove(order.worker)
                    self.running[order.worker] = order
                case StopUnit(worker=worker):
                    del self.running[worker]
                case CopyState():
                    self.copies.append(order)
                case DropState(state=name, node=node):
                    self.states[node].pop(name, None)
                case ReleaseWorker(worker=worker):
                    self.idle.discard(worker)
                case TrialScored():
                    self.scored.append(order)
                case TrialEnded():
                    self.ended.append(order)
        leases = self.sweep.state.leases
        running = [order for order in self.running.values() if not leases[order.attempt].ignored]
        trials = [order.result.trial for order in running]
        assert len(trials) == len(set(trials)), "a trial is in one place at a time"

    def end_unit(self, worker: WorkerId) -> None:
        order = self.running.pop(worker)
        self.idle.add(worker)
        having = [self.states[node] for node in order.sources if node in self.states]
        if order.state is not None and not any(order.state in one for one in having):
            failed = self.sweep.unit_failed(order.attempt, "nobody has it", "state", NOW)
            self.do(failed)
            return
        before: History = ()
        if order.state is not None:
            before = next(one[order.state] for one in having if order.state in one)
        after = step(before, order.values, order.epoch, order.partition)
        self.states[self.node_of[worker]][order.result] = after
        self.units += 1
        good = {"accuracy": goodness(after)} if order.evaluate else {}
        loss, samples = loss_and_samples(order.partition)
        digest = hashlib.sha256(repr(after).encode()).hexdigest()
        report = UnitReport({"loss": loss}, samples, 1.0, good, digest)
        self.do(self.sweep.unit_done(order.attempt, report, NOW))

    def end_copy(self, at: int) -> None:
        copy = self.copies.pop(at)
        source = self.states.get(copy.source, {})
        if copy.state in source and copy.target in self.states:
            self.states[copy.target][copy.state] = source[copy.state]
            self.do(self.sweep.state_stored(copy.state, copy.target, NOW))

    def kill(self, worker: WorkerId) -> None:
        self.running.pop(worker, None)
        self.idle.discard(worker)
        self.do(self.sweep.worker_gone(worker, NOW))
        self.new_worker(self.node_of[worker])

    def revoke(self, worker: WorkerId, *, urgent: bool) -> None:
        self.do(self.sweep.worker_revoked(worker, NOW, 0.0 if urgent else 120.0))
        self.new_worker(self.node_of[worker])

    def lose(self, node: NodeId) -> None:
        gone = [one for one in (*self.running, *self.idle) if self.node_of[one] == node]
        self.running = {w: order for w, order in self.running.items() if w not in gone}
        self.idle -= set(gone)
        kept = self.states[node]
        self.states[node] = {}
        self.copies = [copy for copy in self.copies if node not in (copy.source, copy.target)]
        self.do(self.sweep.node_lost(node, NOW))
        if self.lost_disks:
            self.do(self.sweep.node_back(node, NOW))
            for name in self.sweep.state.stored.on(node):
                self.do(self.sweep.state_missing(name, node, NOW))
        else:
            self.states[node] = kept
            self.do(self.sweep.node_back(node, NOW))
            known = set(self.sweep.state.stored.on(node))
            self.states[node] = {name: each for name, each in kept.items() if name in known}
        self.do(self.sweep.nodes_hold(self.held, NOW))
        for _ in gone:
            self.new_worker(node)

    def run(self, rng: Random, faults: int = 0) -> None:
        """To the end of the sweep, with so many faults at moments by chance."""
        for _ in range(100_000):
            if self.sweep.over:
                return
            everybody = sorted((*self.running, *self.idle))
            if faults and rng.random() < 0.1:
                faults -= 1
                worker = everybody[rng.randrange(len(everybody))]
                kind = rng.randrange(4)
                if kind == 0:
                    self.lose(self.node_of[worker])
                elif kind == 1:
                    self.kill(worker)
                else:
                    self.revoke(worker, urgent=kind == 2)
            elif self.copies and (not self.running or rng.random() < 0.5):
                self.end_copy(rng.randrange(len(self.copies)))
            else:
                busy = sorted(self.running)
                assert busy, "nobody works, and the sweep is not over"
                self.end_unit(busy[rng.randrange(len(busy))])
        raise AssertionError("the sweep does not end")
