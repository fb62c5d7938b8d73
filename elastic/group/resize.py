"""Switch from the current group to the pending one, for incumbents and newcomers.

Incumbents are members of the current group: they fix the boundary (the last step of the current
group) in advance and switch behind it. Newcomers join a running group at the boundary, or start
together with all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec

from elastic import fault_points
from elastic.batches import MicroBatch, Schedule, ScheduleRow
from elastic.collectives.backend_protocol import wait_for
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import Membership
from elastic.group.order_inbox import PendingGroup
from elastic.group.order_listener import OrderListener
from elastic.sample_stream import TrainingPosition
from elastic.state.broadcast import broadcast_training
from elastic.state.portions import transfer_steps
from elastic.state.training_state import TrainingState
from elastic.state.transfer import IncomingState, OutgoingState
from elastic.training_errors import BrokenGroupError
from schemas.wire.worker import GroupOrder

BOUNDARY_LEAD: Final = 2  # minimum steps from the agreement to the boundary
TRANSFER_BYTES_PER_S: Final = 400e6  # rate of a transfer beside training, over sockets
JOIN_PLAN_KEY: Final = "join plan"  # key in the new group's store


class JoinPlan(msgspec.Struct, frozen=True):
    """Facts about the boundary that newcomers need."""

    position: TrainingPosition  # at the boundary
    transfer_steps: int  # steps of the state's transfer
    old: tuple[int, ...]  # local batches of the former group, by rank
    new: tuple[int, ...]  # local batches of the new group, after the transfer
    seed: int  # of the order of samples


class Resize:
    """Incumbent's part in the switch to the pending group."""

    def __init__(
        self, membership: Membership, listener: OrderListener, training: TrainingState
    ) -> None:
        self._membership = membership
        self._listener = listener
        self._training = training

    def schedule_switch(
        self, pending: PendingGroup, boundary: int, micro_batch: MicroBatch, step_s: float
    ) -> None:
        """Deal out the samples after the boundary to the new group; all members are ready.

        `boundary` is far enough ahead that none of its samples are prefetched. `micro_batch`
        belongs to the step of the vote; `step_s` is the mean duration of a step.
        """
        membership, order = self._membership, pending.order
        fault_points.reach(
            "announce", rank=membership.rank, step=micro_batch.step, version=order.version
        )
        member = order.group.member(membership.own_id)
        rank = member.rank if member else None
        new = tuple(m.local_batch for m in order.group.members)
        old = micro_batch.row.local_batches
        rows = [ScheduleRow(boundary + 1, new, rank)]
        newcomers = len({m.worker for m in order.group.members} - set(membership.workers))
        if newcomers:
            pending.transfer_steps = self._transfer_steps(step_s)
            zeros = ScheduleRow(boundary + 1, (*old, *(0,) * newcomers), rank)
            rows = [zeros, ScheduleRow(boundary + 1 + pending.transfer_steps, new, rank)]
            if membership.rank == 0:
                self._post_join_plan(pending, boundary, micro_batch, new)
        self._training.schedule.forget(self._training.position.step)
        self._training.schedule.announce(rows)

    def _transfer_steps(self, step_s: float) -> int:
        state = self._training.tensors()
        sizes = [unit.size for unit in state.units(self._membership.device)]
        return transfer_steps(sum(sizes), step_s, TRANSFER_BYTES_PER_S, len(sizes))

    def _post_join_plan(
        self,
        pending: PendingGroup,
        boundary: int,
        micro_batch: MicroBatch,
        new: tuple[int, ...],
    ) -> None:
        group = self._listener.built(pending.version)
        if group is None:
            return
        training, old = self._training, micro_batch.row.local_batches
        position = TrainingPosition(
            micro_batch.epoch,
            micro_batch.cursor_before,
            micro_batch.step - 1,
            training.position.samples_done,
        )
        steps = boundary - position.step
        start = position.advanced(steps, sum(old), training.stream)
        plan = JoinPlan(start, pending.transfer_steps, old, new, training.stream.seed)
        group.store.post(JOIN_PLAN_KEY, lambda: msgspec.msgpack.encode(plan))

    def switch(self, pending: PendingGroup) -> OutgoingState | None:
        """Switch to the pending group; return the state's transfer to its newcomers, if any.

        The boundary step is done, and this worker stays a member.
        """
        membership, training, order = self._membership, self._training, pending.order
        built = self._listener.switch(pending)
        senders = len(membership.workers)
        newcomers = [m.rank for m in order.group.members if m.worker not in membership.workers]
        if built is None:  # same processes, another batch
            membership.group.version = order.version
        membership.enter(order, built or membership.group)
        if not newcomers:
            return None
        transfer = OutgoingState(
            membership.group,
            training.tensors(),
            newcomers,
            senders=senders,
            first=training.position.step + 1,
            steps=pending.transfer_steps,
        )
        if membership.rank == 0:
            transfer.post_metadata(training.metadata())
        return transfer


def start_together(
    group: ProcessGroup,
    membership: Membership,
    training: TrainingState,
    cancelled: threading.Event,
) -> None:
    """Start in a new group: every rank takes the state of rank 0.

    Raises:
        BrokenGroupError: if a peer is lost.
        CancelledError: if `cancelled` is set.
    """
    membership.group = group
    if group.size > 1:
        metadata = broadcast_training(training, group, 0, cancelled)
        if metadata is not None:
            training.load_metadata(metadata)


def await_join_plan(
    group: ProcessGroup, cancelled: threading.Event, report_failure: Callable[[str], None]
) -> JoinPlan:
    """Receive the join plan from the incumbents.

    `failed` gets the reason why no plan will come; the controller then cancels the wait.

    Raises:
        CancelledError: if `cancelled` is set.
    """
    plans: list[JoinPlan] = []
    received = threading.Event()

    def receive() -> None:
        try:
            plans.append(msgspec.msgpack.decode(group.store.fetch(JOIN_PLAN_KEY), type=JoinPlan))
        except (RuntimeError, BrokenGroupError) as error:
            report_failure(str(error).partition("\n")[0])
            return
        received.set()

    threading.Thread(target=receive, name=JOIN_PLAN_KEY, daemon=True).start()
    wait_for(received, cancelled)
    return plans[0]


def enter_at_boundary(
    order: GroupOrder,
    group: ProcessGroup,
    plan: JoinPlan,
    membership: Membership,
    training: TrainingState,
) -> IncomingState:
    """Join a running group, without samples until the state has arrived.

    Returns the incoming state, which waits for its first portion already.
    """
    training.position = plan.position
    training.set_seed(plan.seed)
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
