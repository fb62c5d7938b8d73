"""The core, when nodes and people say anything that a decoder lets through."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any, Final

import msgspec

from controlplane.core.commands import Announce, SendDelta, SendSweepDelta
from controlplane.core.inputs import NodeReported
from schemas.codec import PUBLISHED, encode, tag_of
from schemas.errors import OnesError
from schemas.sweeps import Asha, Grid, PopulationBased, RandomSearch, choice
from schemas.wire.agent import AgentEvent, Numbered
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import TAGS, Known, hostile_map
from tests.support.builders import N1, N2
from tests.support.sweep_world import SweepCluster, sweep_job
from tests.unit.controlplane.core.test_hostile_reports import KINDS, SLOTS, Hostile, written

EVENTS: Final = tuple(tag for tag in TAGS if tag in {tag_of(kind) for kind in KINDS})
OF_SWEEPS: Final = (
    *(tag for tag in EVENTS if tag.startswith("sweep.")),
    "worker.ready.2", "worker.exited.1", "worker.started.1", "worker.group_formed.2",
)  # fmt: skip
KNOWN: Final[Known] = {
    "job": ["a-1", "a-1", "a-2", "a-3"], "version": [1, 2, 3, 4], "group": [1, 2, 3, 4], "rank": [0, 1, 2],
    "index": [*range(1, 12)], "epoch": [1, 2, 3], "step": [1, 2], "trial": [0, 1, 2], "attempt": [*range(1, 8)],
    "port": [29500],
}  # fmt: skip
STEPS: Final = 40


def reports(data: bytes) -> None:
    """Jobs that train, and reports of anything in between."""
    choices = Choices(data)
    machine = Hostile()
    machine.one_is_ordered(_slots(choices) or [SLOTS[0]], choices.below(16))
    for _ in range(STEPS):
        if not choices.left:
            break
        which = choices.below(16)
        match choices.below(12):
            case 0 if len(machine.controller.state.jobs) < 3:
                machine.a_job_is_placed(_slots(choices) or [SLOTS[0]])
            case 1 if machine.controller.names:
                machine.a_job_is_moved(which, _slots(choices), late=choices.flag())
            case 2 if machine.controller.names:
                machine.a_user_intervenes(which, choices.pick(("pause", "resume", "cancel")))
            case 3 | 4 if machine.controller.names:
                machine.all_goes_well_for_a_moment(which, choices.pick((1, 2, 3, 5, 20)))
            case 5:
                how = choices.pick(("lost", "greets", "forgets"))
                machine.a_node_comes_or_goes(choices.pick((N1, N2)), how)
            case 6:
                within_s = choices.pick((None, 0.0, 100.0, -1.0))
                machine.a_node_is_drained_or_given_back(choices.pick((N1, N2)), within_s)
            case 7:
                machine.time_passes(choices.pick((1.0, 700.0, 2000.0)))
            case _:
                event = _event(choices, EVENTS)
                if event is not None:
                    machine.tell(choices.pick((N1, N2)), event)
    machine.teardown()


def sweeps(data: bytes) -> None:
    """A sweep whose workers do their work, and whose nodes say anything of it."""
    choices = Choices(data)
    searcher = choices.pick((RandomSearch(3), Asha(4, eta=2), PopulationBased(4), Grid()))
    more = {"space": {"lr": choice(0.1, 0.2, 0.3)}} if isinstance(searcher, Grid) else {}
    cluster = SweepCluster(n1=2, n2=2)
    name = cluster.submit(
        **sweep_job((1, 4), searcher=searcher, epochs=3, partitions=2, replicas=1, **more)
    )
    rng = Random(choices.below(256))
    cluster.place({name: cluster.slots()})
    for _ in range(STEPS):
        if not choices.left:
            break
        match choices.below(8):
            case 0 | 1 | 2:
                for _ in range(choices.below(24)):
                    cluster.step(rng)
            case 3:
                cluster.later(choices.pick((1.0, 60.0, 700.0)))
            case 4:
                if not cluster.job(name).ended:
                    cluster.place({name: [slot for slot in cluster.slots() if choices.flag()]})
            case _:
                event = _event(choices, OF_SWEEPS)
                if event is not None:
                    _told(cluster, event, choices)
    again = cluster.controller.replayed()
    assert written(again) == written(cluster.controller.state)


def _told(cluster: SweepCluster, event: AgentEvent, choices: Choices) -> None:
    """A node reports it next in its stream, as if it came from one of its workers."""
    node = choices.pick((N1, N2))
    known = cluster.controller.state.nodes[node]
    report = NodeReported(node=node, boot=known.boot, seq=known.committed + 1, event=event)
    for command in cluster.controller.take(report):
        if isinstance(command, Announce):
            encode(command.event)
        elif isinstance(command, SendDelta | SendSweepDelta):
            encode(command.delta)


def _slots(choices: Choices) -> list[Any]:
    return [slot for slot in SLOTS if choices.flag()]


def _event(choices: Choices, tags: tuple[str, ...]) -> AgentEvent | None:
    """An event as a decoder lets it through; None: it does not."""
    inner = hostile_map(choices, tags, KNOWN)
    whole = {"type": "agent.numbered.1", "node": "n1", "boot": "b", "seq": 1, "event": inner}
    with contextlib.suppress(OnesError, OverflowError, ValueError):
        numbered = PUBLISHED.decode(msgspec.msgpack.encode(whole))
        if isinstance(numbered, Numbered):
            return numbered.event
    return None
