"""A controller and nodes in a few lines: links hold, and nothing happens until the test says so."""

from __future__ import annotations

from collections.abc import Mapping
from signal import SIGKILL
from typing import Any

from controlplane.core.commands import Command, SendDelta
from controlplane.core.inputs import Input, NodeLost
from schemas.ids import JobId, NodeId, Seconds, SlotId, WorkerId, slot_id
from schemas.wire.agent import GroupDelta
from tests.support.builders import proposal
from tests.support.controller import Controller
from tests.support.simulated_node import Node
from tests.support.simulated_processes import World

MANY = 500  # rounds: enough for everything to come about
Places = dict[JobId, dict[SlotId, int]]


class Site:
    """Goes on in rounds: orders arrive, agents and workers do the next thing, reports arrive."""

    def __init__(self, **slots: int) -> None:
        self.controller = Controller()
        self.controller.start()
        self.world = World()
        self.nodes = {
            NodeId(name): Node(NodeId(name), many, self.world) for name, many in slots.items()
        }
        self.orders: dict[NodeId, list[GroupDelta]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            self._greet(node)

    def take(self, event: Input) -> list[Command]:
        commands = self.controller.take(event)
        for command in commands:
            if isinstance(command, SendDelta) and command.node in self.orders:
                self.orders[command.node].append(command.delta)
        return commands

    def train(self, placed: Mapping[JobId, Mapping[SlotId, int]], **spec: Any) -> None:
        """Submit a job for each entry, and let all of them come to train there."""
        for job in placed:
            self.controller.submit(job.rpartition("-")[0], **spec)
        self.plan(placed)
        self.settle()
        assert self.where() == {job: dict(slots) for job, slots in placed.items()}

    def plan(self, placed: Mapping[JobId, Mapping[SlotId, int]]) -> None:
        """Propose a plan that is based on the present state."""
        batches = {job: dict(slots) for job, slots in placed.items()}
        self.take(proposal(batches, based_on=self.controller.state.version))

    def settle(self) -> None:
        """Go on until nothing happens any more; nobody trains an epoch meanwhile."""
        for _ in range(MANY):
            if not self.round():
                return
        raise AssertionError("it never comes to rest")

    def round(self) -> bool:
        """Everybody does one thing; False if there was nothing to do."""
        went_on = False
        for name, node in self.nodes.items():
            arrived, self.orders[name] = self.orders[name], []
            for delta in arrived:
                node.receive(delta)
            for work in list(node.work):
                node.finish(work)
                went_on = True
            for worker, process in list(node.processes.items()):
                before = process.progress, len(node.session.spool)
                if process.alive:
                    process.act(None)
                node.look(worker)
                went_on |= before != (process.progress, len(node.session.spool))
            known = self.controller.state.nodes[name]
            reports = node.said_after(known.committed if known.boot == node.boot else 0)
            for report in reports:
                self.take(report)
            went_on |= bool(arrived or reports)
            self.one_process_for_each_device()
        return went_on

    def one_process_for_each_device(self) -> None:
        for node in self.nodes.values():
            for slot in range(node.slots):
                assert len(node.granted(slot)) <= 1, node.granted(slot)

    def workers(self) -> list[tuple[NodeId, WorkerId]]:
        """All that live, node by node."""
        return [(name, worker) for name, node in self.nodes.items() for worker in node.living()]

    def kill(self, node: NodeId, worker: WorkerId) -> None:
        self.nodes[node].processes[worker].die(signal=SIGKILL)
        self.nodes[node].look(worker)

    def reboot(self, node: NodeId) -> None:
        """A host goes down for long enough to be given up, and comes back without anything."""
        self.take(NodeLost(node=node, silent_s=30.0))
        self.nodes[node].reboot()
        self.orders[node].clear()
        self._greet(self.nodes[node])

    def _greet(self, node: Node) -> None:
        self.take(node.hello())
        node.welcome(self.controller.state.term, self.controller.state.nodes[node.node].committed)

    def where(self) -> Places:
        """Slots and local batches of every group."""
        jobs = self.controller.state.jobs.values()
        return {
            job.job: {member.slot: member.local_batch for member in job.group.members}
            for job in jobs
            if job.group is not None
        }

    def slots(self) -> list[SlotId]:
        return [slot_id(name, at) for name, node in self.nodes.items() for at in range(node.slots)]

    def later(self, seconds: float) -> None:
        self.controller.now += seconds
        for event in self.controller.reactor.due(Seconds(self.controller.now)):
            self.take(event)
