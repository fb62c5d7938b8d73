"""Every report of every worker after every step of a job's story: none is one too many.

Where the property of `test_hostile_reports` draws, this walks: each step of each story is followed
by each report, alone, and then by all that the workers would say if nothing had happened.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import get_type_hints

import pytest

from controlplane.core.model.worker import WorkerPhase
from controlplane.core.policy_view import ViewBuilder
from schemas.ids import NodeId, SlotId, node_of
from schemas.wire.agent import JobCleared
from tests.support import builders
from tests.support.builders import N2, S0, S1, T0, A
from tests.support.controller import Controller, WatchedSlotIndex
from tests.unit.controlplane.core.test_hostile_reports import KINDS, Hostile, expected

LONG_S = 5000.0  # every deadline has passed
STEPS = 60  # at most, until a job is where it was asked to be

Step = SlotId | NodeId | int | tuple[SlotId, ...]


def of_its_own(controller: Controller) -> Hostile:
    """A controller in the same state, of which nobody else knows."""
    machine = Hostile.__new__(Hostile)
    history, controller.history = controller.history, []
    machine.controller = copy.deepcopy(controller)
    controller.history = history
    state = machine.controller.state
    state.__dict__.pop("slot_index", None)
    state.slot_index.__class__ = WatchedSlotIndex
    machine.controller.reactor._views = ViewBuilder(state)
    return machine


def attack(controller: Controller) -> int:
    """Have each worker say anything, then all be well, then every deadline pass."""
    said = 0
    for whose in range(max(1, len(controller.job(A).workers))):
        for kind in KINDS:
            of_a_group = kind is JobCleared or "group" in get_type_hints(kind)
            for group in (0, 1, -1, 2) if of_a_group else (0,):
                machine = of_its_own(controller)
                machine.a_node_says_anything(
                    kind=kind, which=0, whose=whose, group=group, number=1,
                    fraction=1.0, text="x", strange="", flag=True,
                )  # fmt: skip
                machine.all_goes_well_for_a_moment(0, STEPS // 2)
                machine.time_passes(LONG_S)
                said += 1
    return said


def story(slots: tuple[SlotId, ...], then: tuple[Step, ...]) -> Iterator[Controller]:
    """A job on `slots` from its order on; `then` is moved, loses a member, or a node."""
    machine = Hostile()
    machine.a_job_is_placed(list(slots))
    yield machine.controller
    for step in (None, *then):
        if isinstance(step, tuple):
            machine.controller.now += 100.0
            machine.place(A, list(step))
        elif isinstance(step, int):
            members = machine.controller.job(A).workers.values()
            worker = [one for one in members if one.phase is WorkerPhase.MEMBER][step]
            ended = builders.exited(A, worker.version, rank=worker.rank, signal=9)
            machine.tell(node_of(worker.slot), ended)
        elif step is not None:
            machine.check(machine.controller.lose(NodeId(step)))
        yield machine.controller
        for _ in range(STEPS):
            said = next(expected(machine.controller.job(A)), None)
            if said is None:
                break
            machine.tell(*said)
            yield machine.controller


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "then"),
    [
        ((S0, S1), ((S0, S1, T0),)),
        ((S0, T0), ((S0,),)),
        ((S0, T0), ((),)),
        ((S0, T0), (0,)),
        ((S0, T0), (N2,)),
        ((S0,), ((T0,),)),
        ((S0,), ((S0, S1), 1)),
    ],
    ids=["grows", "shrinks", "pauses", "loses one", "loses a node", "moves", "loses one growing"],
)
def test_no_report_is_one_too_many(slots: tuple[SlotId, ...], then: tuple[Step, ...]) -> None:
    said = sum(attack(controller) for controller in story(slots, then))

    assert said > 500
