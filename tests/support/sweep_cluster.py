"""A controller and nodes with imaginary hoppers, whose events come in any order that can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from controlplane.core.commands import Announce, AskForPlan, Command, SendDelta, SendSweepDelta
from controlplane.core.handlers import sweeps
from controlplane.core.history import Record
from controlplane.core.inputs import ControllerStarted, Input, NodeLost
from controlplane.core.model.job import Job
from controlplane.core.model.sweep import JobSweep
from schemas.ids import JobId, NodeId, Seconds, SlotId, Term, slot_id
from schemas.sweeps import Parameter, RandomSearch, SearchSpec, SweepSpec
from schemas.wire.agent import GroupDelta
from schemas.wire.feed import FeedEvent
from schemas.wire.sweeps import SweepDelta
from tests.support.builders import proposal
from tests.support.controller import Controller
from tests.support.simulated_hoppers import Hopper, HopperNode, World

Delta = GroupDelta | SweepDelta
ENOUGH = 20_000


def sweep_spec(**changes: Any) -> SweepSpec:
    """A small sweep, with changes; those of its search by their names."""
    search: dict[str, Any] = {
        "space": {"lr": Parameter(log_uniform=(1e-4, 0.1))},
        "searcher": RandomSearch(3),
        "epochs": 2,
        "metric": "accuracy",
    }
    fields: dict[str, Any] = {
        "input_fn": "data:load",
        "model_fn": "models:build",
        "train_fn": "models:train",
        "eval_fn": "models:evaluate",
        "partitions": 2,
    }
    for name, value in changes.items():
        (search if name in SearchSpec.__struct_fields__ else fields)[name] = value
    return SweepSpec(search=SearchSpec(**search), **fields)


def sweep_job(slots: tuple[int, int] = (1, 4), **changes: Any) -> dict[str, Any]:
    """What a job has that is a sweep."""
    return {
        "script": "sweep",
        "slots": slots,
        "batch_size": slots[1],
        "max_batch_size": "keep",
        "sweep": sweep_spec(**changes),
    }


class SweepCluster:
    """Deltas arrive, hoppers go on, reports arrive: one at a time, whichever is chosen."""

    def __init__(self, **slots: int) -> None:
        self.controller = Controller()
        self.controller.start()
        self.world = World()
        self.orders: dict[NodeId, list[Delta]] = {}
        self.asked = False
        self.told: list[FeedEvent] = []  # announcements
        self.records: list[Record] = []  # of what happened
        for name, many in slots.items():
            node = HopperNode(NodeId(name), many, self.world)
            self.orders[node.node] = []
            self.greet(node)

    def nothing_was_passed_over(self) -> None:
        """To hold every sweep against its job changes nothing: those that matter were."""
        ctx = self.controller.reactor._ctx
        before = len(ctx.out), ctx.plan_needed
        sweeps.reconcile_sweeps(ctx, list(ctx.state.sweeps))
        assert (len(ctx.out), ctx.plan_needed) == before

    # --- what people and machines do

    def take(self, event: Input) -> list[Command]:
        commands = self.controller.take(event)
        self.records += self.controller.reactor.records
        self.nothing_was_passed_over()
        for command in commands:
            match command:
                case SendDelta(node=node, delta=delta) | SendSweepDelta(node=node, delta=delta):
                    if self.world.nodes[node].up:
                        self.orders[node].append(delta)
                case AskForPlan():
                    self.asked = True
                case Announce(event=told):
                    self.told.append(told)
        self.check()
        return commands

    def check(self) -> None:
        """A unit is in one place, a slot has one unit, a trial has one unit."""
        for job in self.controller.state.jobs.values():
            if job.sweep is not None:
                counted = [one for one in job.sweep.engine.state.leases.values() if not one.ignored]
                trials = [one.trial for one in counted]
                assert len(trials) == len(set(trials)), "a trial has one unit at a time"
                assert set(job.sweep.units) == {
                    one.order.worker for one in job.sweep.engine.state.leases.values()
                }

    def submit(self, name: str = "a", **spec: Any) -> JobId:
        self.take_submission(name, **spec)
        return JobId(f"{name}-{self.controller.state.jobs_accepted}")

    def take_submission(self, name: str, **spec: Any) -> None:
        for command in self.controller.submit(name, **spec):
            if isinstance(command, AskForPlan):
                self.asked = True

    def job(self, name: JobId) -> Job:
        return self.controller.job(name)

    def sweep(self, name: JobId) -> JobSweep:
        found = self.job(name).sweep
        assert found is not None
        return found

    def place(self, placed: Mapping[JobId, list[SlotId]]) -> None:
        """Propose a plan: these slots, the batch of each job in equal shares."""
        batches: dict[JobId, dict[SlotId, int]] = {}
        for job, slots in placed.items():
            share, more = divmod(self.job(job).spec.batch_size, max(1, len(slots)))
            batches[job] = {slot: share + (at < more) for at, slot in enumerate(slots)}
        self.take(proposal(batches, based_on=self.controller.state.version))

    def greet(self, node: HopperNode) -> None:
        self.orders[node.node].clear()
        self.take(node.hello())
        known = self.controller.state.nodes[node.node]
        node.welcome(self.controller.state.term, known.committed)

    def restart_controller(self) -> None:
        """The next incarnation; what was under way to nodes is lost."""
        for orders in self.orders.values():
            orders.clear()
        self.take(ControllerStarted(term=Term(self.controller.state.term + 1), release="0"))
        for node in self.world.nodes.values():
            if node.up:
                self.greet(node)

    def restart_agent(self, node: HopperNode) -> None:
        node.restart()
        self.greet(node)

    def lose(self, node: HopperNode) -> None:
        """A host is silent for long; its processes are gone."""
        node.up = False
        self.orders[node.node].clear()
        for process in node.living():
            process.alive = False
        self.take(NodeLost(node=node.node, silent_s=30.0))

    def bring_back(self, node: HopperNode, *, disk: bool = True) -> None:
        node.up = True
        node.reboot(disk=disk)
        self.greet(node)

    # --- what happens by itself

    def possible(self) -> list[Callable[[], None]]:
        """Everything that could happen next."""
        found: list[Callable[[], None]] = []
        for name, node in self.world.nodes.items():
            if not node.up:
                continue
            if self.orders[name]:
                found.append(partial(self._arrives, node))
            known = self.controller.state.nodes[name]
            committed = known.committed if known.boot == node.session.boot else 0
            if reports := node.said_after(committed):
                found.append(partial(self._reports, reports[0]))
            found += [partial(node.fetch, 0)] * bool(node.fetching)
            for process in node.living():
                found += _next_of(process)
        return found

    def _arrives(self, node: HopperNode) -> None:
        node.receive(self.orders[node.node].pop(0))

    def _reports(self, report: Input) -> None:
        self.take(report)

    def settle(self, *, training: bool = False) -> None:
        """Everything arrives, in order; units begin, and end only if `training`."""
        for _ in range(ENOUGH):
            ready = [one for one in self.possible() if training or not _is_end(one)]
            if not ready:
                return
            ready[0]()
        raise AssertionError("it never comes to rest")

    def end_unit(self, name: JobId, trial: int | None = None) -> None:
        """The first unit that is under way ends, or that of a trial."""
        self.settle()
        for node in self.world.nodes.values():
            for process in node.living():
                unit = process.unit
                if process.job != name or unit is None or not process.begun:
                    continue
                if trial is None or unit.result.trial == trial:
                    process.end()
                    self.settle()
                    return
        raise AssertionError("no unit is under way")

    def slots(self) -> list[SlotId]:
        return [slot_id(n.node, at) for n in self.world.nodes.values() for at in range(n.slots)]

    def step(self, rng: Random) -> bool:
        """One thing happens, by chance; False if nothing can."""
        found = self.possible()
        if found:
            found[rng.randrange(len(found))]()
        return bool(found)

    def later(self, seconds: float) -> None:
        self.controller.now += seconds
        for event in self.controller.reactor.due(Seconds(self.controller.now)):
            self.take(event)

    def hoppers(self, name: JobId) -> list[Hopper]:
        return [p for n in self.world.nodes.values() for p in n.living() if p.job == name]


def _next_of(process: Hopper) -> list[Callable[[], None]]:
    if process.unit is not None:
        return [process.end] if process.begun else [process.begin]
    return [partial(process.die, 0, None)] if process.leaving else []


def _is_end(one: Callable[[], None]) -> bool:
    return getattr(one, "__name__", "") == "end"
