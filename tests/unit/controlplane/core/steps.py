"""Stories of a controller as rows of a table: a beginning, what happens, and what is seen then.

What happens is an input, a report, a call with the controller, or seconds that pass. A report comes
from the node of its worker, or from the node that it is paired with. What is seen is a mapping: its
keys are names in `READ`, functions of the controller, or paths of attributes of job a or of the job
that they are paired with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, Final, get_args

import pytest

from controlplane.core.commands import Announce, Command, RequestPlan, SendDelta
from controlplane.core.model.job import Job
from schemas.ids import JobId, NodeId, SlotId, node_of, worker_id
from schemas.wire.agent import AgentEvent, GroupDelta
from tests.support.builders import (
    S0,
    S1,
    T0,
    A,
    Born,
    deltas,
    exited,
    ready,
    reasons,
    resized,
    send,
    started,
    store,
)
from tests.support.controller import ELASTIC, Controller, cluster_of, training

HALVES = {S0: 32, T0: 32}
ON_N1 = {S0: 32, S1: 32}
STORE = "127.0.0.1:29500"
OLD, NEW = (1, 0), (2, 1)  # rank 0 of version 1, and the newcomer of version 2
STORE_OPENS = store(A, index=3, group=2, port=29500)
NEWCOMER = started(A, 2, rank=1), ready(A, 2, rank=1)  # what it says first

Happens = Callable[[Controller], Any]
Story = list[Any]


# --- how stories begin


def alone() -> Controller:
    """Job a trains on one slot of the first node; each node has two."""
    return training(cluster_of(n1=2, n2=2), S0)


def both() -> Controller:
    """Job a trains on one slot of each node."""
    return training(cluster_of(n1=2, n2=2), S0, T0)


def growing() -> Controller:
    """Job a was on one slot and is told to take one on the other node."""
    controller = alone()
    controller.take(resized(A, on=(S0, T0)))
    return controller


def switching() -> Controller:
    """The same, when all were told to switch."""
    return told(growing(), STORE_OPENS, *NEWCOMER)


def quiescing() -> Controller:
    """A worker of three is lost; the other two are told to come to rest."""
    controller = training(cluster_of(n1=2, n2=2), S0, S1, T0)
    return told(controller, exited(A, rank=2, signal=9))


# --- what happens


def told(controller: Controller, *steps: Any) -> Controller:
    for step in steps:
        happens(controller, step)
    return controller


def happens(controller: Controller, step: Any) -> list[Command]:
    match step:
        case (node, report):
            return controller.tell(node, report)
        case int() | float():
            controller.now += step
            return []
        case _ if isinstance(step, get_args(AgentEvent)):
            worker = worker_id(step.job, step.version, step.rank)
            return controller.tell(node_of(controller.job(step.job).workers[worker].slot), step)
        case _ if callable(step):
            return step(controller) or []
    return controller.take(step)


def do(method: str, *arguments: Any, **fields: Any) -> Happens:
    return lambda controller: getattr(controller, method)(*arguments, **fields)


def submit(name: str = "a", **spec: Any) -> Happens:
    return do("submit", name, **spec)


def place(placed: Mapping[JobId, Mapping[SlotId, int] | SlotId]) -> Happens:
    return do("place", placed)


def lose(node: NodeId) -> Happens:
    return do("lose", node)


# --- what is seen


def order(make: Any, version: int, on: Any, born: Born, job: JobId = A, **more: Any) -> GroupDelta:
    """A delta of an elastic job."""
    delta: GroupDelta = make(job, version, on=on, born=born, **ELASTIC, **more)
    return delta


def to(delta: GroupDelta, *nodes: NodeId) -> list[SendDelta]:
    return [send(node, delta) for node in nodes]


def usable(controller: Controller) -> dict[SlotId, bool]:
    return {slot.slot: slot.usable for slot in controller.view().slots}


def placed(controller: Controller, job: JobId = A) -> dict[SlotId, int]:
    """What `job` trains on, and with which batches."""
    group = controller.job(job).group
    return {member.slot: member.local_batch for member in group.members} if group else {}


def phases(controller: Controller) -> dict[JobId, str]:
    return {name: job.phase.value for name, job in controller.state.jobs.items()}


def waiting_claims(controller: Controller) -> dict[SlotId, JobId]:
    """For whom newcomers wait for a slot that is still another job's."""
    claims = controller.state.slot_index.reservations()
    return {slot: job.job for slot, (job, _) in claims.items()}


def replays(controller: Controller) -> bool:
    return controller.replayed() == controller.state


def _of_a(read: Callable[[Job], object]) -> Callable[[Controller, list[Command]], object]:
    return lambda controller, _: read(controller.job(A))


READ: Final[dict[str, Callable[[Controller, list[Command]], object]]] = {
    "commands": lambda _, commands: commands,
    "orders": lambda _, commands: deltas(commands),
    "nodes": lambda _, commands: [command.node for command in deltas(commands)],
    "reasons": lambda _, commands: reasons(commands),
    "phase": _of_a(lambda job: job.phase.value),
    "change": _of_a(lambda job: job.change.phase.value if job.change else None),
    "workers": _of_a(
        lambda job: {(one.version, one.rank): one.phase.value for one in job.workers.values()}
    ),
    "batches": _of_a(lambda job: [one.local_batch for one in job.group_workers()]),
    "waits": _of_a(lambda job: job.override_wait_reason),
    "slots": lambda controller, _: [*placed(controller)],
    "placed": lambda controller, _: placed(controller),
    "phases": lambda controller, _: phases(controller),
    "usable": lambda controller, _: usable(controller),
    "due": lambda controller, _: controller.due(),
    "owners": lambda controller, _: controller.state.slot_index.owners(),
    "claims": lambda controller, _: waiting_claims(controller),
    "releasing": lambda controller, _: controller.state.slot_index.releasing(),
    "outcome": lambda controller, _: controller.history_of(A).versions[-1].outcome,
    "kinds": lambda controller, _: [one.kind for one in controller.history_of(A).versions],
    "outcomes": lambda controller, _: [
        (one.version, one.outcome) for one in controller.history_of(A).decisions
    ],
    "active": lambda controller, _: [*controller.state.active],
    "with processes": lambda controller, _: [*controller.state.jobs_with_processes],
    "processes": lambda controller, _: controller.history_of(A).processes,
    "versions": lambda controller, _: controller.history_of(A).versions,
    "resumed": lambda controller, _: [
        (one.version, one.resumed_epoch, one.resumed_step, one.outcome)
        for one in controller.history_of(A).versions
    ],
    "first": lambda _, commands: commands[0],
    "last": lambda _, commands: commands[-1],
    "news of nodes": lambda _, commands: [
        one for one in commands if isinstance(one, Announce) and one.event.node is not None
    ],
    "asks": lambda _, commands: RequestPlan() in commands,
    "starts": lambda controller, _: controller.state.deadlines.starts,
    "nodes' phases": lambda controller, _: {
        name: node.phase.value for name, node in controller.state.nodes.items()
    },
    "committed": lambda controller, _: {
        name: node.committed for name, node in controller.state.nodes.items()
    },
    "epoch infos": lambda controller, _: controller.history_of(A).epochs,
    "epochs": lambda controller, _: [one.epoch for one in controller.history_of(A).epochs],
    "seen": lambda controller, _: [*controller.view().jobs],
}  # fmt: skip


def seen(name: Any, controller: Controller, commands: list[Command]) -> object:
    if callable(name):
        return name(controller)
    if name in READ:
        return READ[name](controller, commands)
    job, path = (A, name) if isinstance(name, str) else name
    return reduce(getattr, path.split("."), controller.job(job))


def played(begin: Callable[[], Controller], *steps: Any) -> Iterator[tuple[object, object]]:
    """Go through a story; yield what is seen and what is expected, each with its step."""
    controller, commands = begin(), list[Command]()
    for number, step in enumerate(steps, start=1):
        if isinstance(step, dict):
            found = {name: seen(name, controller, commands) for name in step}
            yield {"step": number, **found}, {"step": number, **step}
        else:
            commands = happens(controller, step)


def stories(table: Mapping[str, Story]) -> pytest.MarkDecorator:
    """Parametrise a test by the stories of a table, each of which sees something."""
    assert all(any(isinstance(step, dict) for step in story) for story in table.values())
    return pytest.mark.parametrize("story", table.values(), ids=table)
