"""How a worker becomes a member: with others that start too, or at a running group's boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from elastic.collectives.cancellable_waits import wait_for
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import Membership
from elastic.group.switch_boundary import JOIN_PLAN, JoinPlan
from elastic.samples.batch_schedule import Schedule, ScheduleRow
from elastic.state.state_broadcast import broadcast_training
from elastic.state.state_transfer import IncomingState
from elastic.state.training_state import TrainingState
from elastic.training_errors import BrokenGroupError
from schemas.messages.worker import GroupOrder


def start_together(
    group: ProcessGroup,
    membership: Membership,
    training: TrainingState,
    called_off: threading.Event,
) -> None:
    """Begin in a group that starts: every rank takes the state of rank 0.

    Args:
        membership: takes `group`; its workers are known already.
        training: of this worker; rank 0's replaces it.

    Raises:
        BrokenGroupError: if a peer is gone.
        CancelledError: if `called_off` is set.
    """
    membership.group = group
    if group.size > 1:
        metadata = broadcast_training(training, group, 0, called_off)
        if metadata is not None:
            training.load_metadata(metadata)


def await_join_plan(
    group: ProcessGroup, called_off: threading.Event, failed: Callable[[str], None]
) -> JoinPlan:
    """Learn from the incumbents where the newcomers' first step is.

    Args:
        failed: told why nothing will come; the controller calls the wait off then.

    Raises:
        CancelledError: if `called_off` is set.
    """
    plans: list[JoinPlan] = []
    there = threading.Event()

    def ask() -> None:
        try:
            plans.append(msgspec.msgpack.decode(group.store.ask(JOIN_PLAN), type=JoinPlan))
        except (RuntimeError, BrokenGroupError) as error:
            failed(str(error).partition("\n")[0])
            return
        there.set()

    threading.Thread(target=ask, name=JOIN_PLAN, daemon=True).start()
    wait_for(there, called_off)
    return plans[0]


def enter_at_boundary(
    order: GroupOrder,
    group: ProcessGroup,
    plan: JoinPlan,
    membership: Membership,
    training: TrainingState,
) -> IncomingState:
    """Be a newcomer in a running group: no samples until the state is there.

    Args:
        group: of incumbents and newcomers, which was built meanwhile.
        plan: what the incumbents say of the boundary.
        membership: enters `group`, without the whole state.
        training: begins at the plan's position, with samples from the end of the transfer on.

    Returns:
        The state's transfer, which waits for its first portion already.
    """
    training.position = plan.position
    training.take_seed(plan.seed)
    first = plan.position.step + 1
    zeros = (*plan.old, *(0,) * (group.size - len(plan.old)))
    training.schedule = Schedule(ScheduleRow(first, zeros, group.rank))
    training.schedule.announce([ScheduleRow(first + plan.transfer_steps, plan.new, group.rank)])
    membership.enter(order, group)
    membership.has_full_state = False
    return IncomingState(
        group,
        training.tensors(),
        senders=len(plan.old),
        first=first,
        steps=plan.transfer_steps,
    )
