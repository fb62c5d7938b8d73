"""Changes of this worker's group: join, resize, recovery, leaving, and checks of equal states.

All of it runs on the training thread, between two steps or during the reduction.

Switch from the current group to the pending one, for incumbents and newcomers.

Incumbents are members of the current group: they fix the boundary (the last step of the current
group) in advance and switch behind it. Newcomers join a running group at the boundary, or start
together with all others.

Recovery of a group that lost a member: quiesce, report the position, continue in a new group.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import msgspec

from elastic import fault_points
from elastic.collectives.backend_protocol import wait_for
from elastic.collectives.control_words import AgreedWords
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import LeftGroup, Membership, await_group, report_formed
from elastic.group.order_inbox import PendingGroup
from elastic.group.order_listener import MAX_ERROR_CHARACTERS, OrderListener
from elastic.reporting import Report, SampleRecords
from elastic.sample_stream import MicroBatch, Schedule, ScheduleRow, TrainingPosition
from elastic.state.broadcast import broadcast_training
from elastic.state.epoch_reports import EpochReports
from elastic.state.portions import transfer_steps
from elastic.state.training_state import TrainingState
from elastic.state.transfer import IncomingState, OutgoingState
from elastic.training_errors import BrokenGroupError, CancelledError
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    START,
    SUSPEND,
    GroupBroken,
    JoinFailed,
    Quiesced,
)
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


@dataclass(frozen=True, slots=True)
class Recovered:
    """Continuation point of the new group."""

    step: int  # last finished step of the new group
    metadata: dict[str, Any] | None  # of the received state; None if the own state was kept
    became_rank_0: bool  # True if this worker has just become rank 0

    def merged_with(self, earlier: Recovered | None) -> Recovered:
        """Return this recovery with the open duties of `earlier`, which no step followed."""
        if earlier is None:
            return self
        return replace(self, became_rank_0=self.became_rank_0 or earlier.became_rank_0)


class Recovery:
    """Survivor's part in the recovery of its group.

    `training` takes over the state that is furthest ahead; `listener` also serves the store of the
    new group.
    """

    def __init__(
        self,
        membership: Membership,
        listener: OrderListener,
        training: TrainingState,
        report: Report,
    ) -> None:
        self._membership = membership
        self._listener = listener
        self._training = training
        self._report = report

    def run(self, error: Exception | None) -> Recovered | None:
        """Wait until the controller has formed a group of the survivors; None if this worker left.

        `error` is what revealed the loss; None if the controller cancelled the waits.
        """
        membership, listener = self._membership, self._listener
        if isinstance(error, BrokenGroupError | fault_points.InjectedError):
            self._report_broken(membership.version, str(error)[:MAX_ERROR_CHARACTERS])
        listener.abandon_pending()
        while True:
            order = listener.await_recovery()
            if order.stage == PREPARE:
                self._quiesce(order)
                continue
            if order.group.member(membership.own_id) is None:
                return None
            try:
                return self._recover(order)
            except CancelledError:
                continue
            except BrokenGroupError as broken:
                self._report_broken(order.version, broken.message)

    def _report_broken(self, version: int, error: str) -> None:
        self._report(GroupBroken, group=version, error=error)

    def _quiesce(self, order: GroupOrder) -> None:
        membership, position = self._membership, self._training.position
        fault_points.reach("quiesce", rank=membership.rank, version=order.version)
        self._report(
            Quiesced,
            group=order.version,
            step=position.step,
            epoch=position.epoch - 1,
            full=membership.has_full_state,
            port=self._listener.stores.serve(order.version, oldest=membership.version),
        )

    def _recover(self, order: GroupOrder) -> Recovered:
        """Connect to the survivors and synchronise the state.

        Raises:
            BrokenGroupError: if a peer is lost.
            CancelledError: if the wait was cancelled.
        """
        membership, training = self._membership, self._training
        fault_points.reach("recover", rank=membership.rank, version=order.version)
        cancelled = self._listener.cancelled
        group = await_group(order, membership, cancelled)
        try:
            metadata = self._synchronise(order, group)
            lr_state = group.broadcast_bytes(
                training.lr_state.encode(), cancelled, int(order.source or 0)
            )
        except (CancelledError, BrokenGroupError):
            group.abort()
            group.retire()  # in the background: operations under way would block this thread
            raise
        step = training.position.step if metadata is None else int(metadata["step"])
        training.lr_state.decode(lr_state)
        training.lr_state.follow_batch(order.group.global_batch, step)
        former_rank = membership.rank
        self._enter(order, group)
        fault_points.reach("recovered", rank=group.rank, version=order.version)
        report_formed(self._report, membership, training.position)
        return Recovered(step, metadata, became_rank_0=group.rank == 0 and former_rank != 0)

    def _synchronise(self, order: GroupOrder, group: ProcessGroup) -> dict[str, Any] | None:
        """Receive the state that is furthest ahead; return its metadata, or None without need."""
        if order.source is None:
            return None
        training, cancelled = self._training, self._listener.cancelled
        metadata = broadcast_training(training, group, order.source, cancelled)
        if metadata is not None and training.carried is not None:
            training.carried.load(metadata["carried"])
        return metadata

    def _enter(self, order: GroupOrder, group: ProcessGroup) -> None:
        membership = self._membership
        old = membership.group
        membership.enter(order, group)
        old.retire()
        row = ScheduleRow(1, tuple(m.local_batch for m in order.group.members), group.rank)
        self._training.schedule = Schedule(row)


CHECK_AFTER: Final = 2  # steps after a transfer or a recovery
CHECK_EVERY: Final = 256  # steps; detects scripts that let workers diverge


class StateCheck:
    """Schedule of checksum comparisons; depends on step numbers alone, so all workers agree."""

    def __init__(self) -> None:
        self.mismatch = False  # states differ: rank 0's has to be broadcast
        self._at = 0  # scheduled step; 0: none

    def schedule(self, step: int) -> None:
        """Schedule a comparison `CHECK_AFTER` steps after `step`, instead of an earlier one."""
        self._at = step + CHECK_AFTER

    def is_due(self, step: int, *, transferring: bool, rates_may_differ: bool) -> bool:
        """Return whether checksums are reduced together with the gradients of `step`.

        `transferring`: some members lack the full state. `rates_may_differ`: a scheduler just set
        rates by metrics, whose values may differ between workers.
        """
        return step == self._at or (
            not transferring and (rates_may_differ or step % CHECK_EVERY == 0)
        )

    def finish_scheduled(self, step: int) -> bool:
        """Return whether `step` was the scheduled one, and unschedule it."""
        if step != self._at:
            return False
        self._at = 0
        return True

    def reset(self) -> None:
        """Forget the schedule and the result, after the group broke."""
        self._at, self.mismatch = 0, False


LINGER_S: Final = 0.1  # keeps a leaver's sockets until its peers have read them


@dataclass(frozen=True, slots=True)
class ReductionTerms:
    """Parts of a reduction that the transitions request."""

    ready: bool  # vote for the pending group
    compare_checksums: bool  # reduce checksums of the states; equal on every rank


@dataclass(frozen=True, slots=True)
class _SwitchCost:
    """Costs in seconds of a boundary with newcomers, kept until the first step after it ends."""

    took_s: float
    step_s: float  # average step before the boundary
    sync_s: float  # part of the step in reductions


class GroupTransitions:
    """Reactions to orders, at points that do not disturb the script, and to lost peers."""

    def __init__(
        self,
        membership: Membership,
        listener: OrderListener,
        training: TrainingState,
        *,
        epochs: EpochReports,
        records: SampleRecords,
        report: Report,
    ) -> None:
        self._membership = membership
        self._listener = listener
        self._training = training
        self._epochs = epochs
        self._records = records
        self._report = report
        self._resize = Resize(membership, listener, training)
        self._recovery = Recovery(membership, listener, training, report)
        self._check = StateCheck()
        self._retired: ProcessGroup | None = None  # former group, until the states are compared
        self._new_batch: tuple[int, int] | None = None  # first step, global batch
        self._recovered: Recovered | None = None  # records of its lost members are due
        self._discard_prefetched = False  # prefetched batches are invalid
        self._left = False
        self._switch_cost: _SwitchCost | None = None  # until the newcomers' first step

    @property
    def cancelled(self) -> threading.Event:
        """Event that cancels waits for peers."""
        return self._listener.cancelled

    def set_prefetch_depth(self, depth: int) -> None:
        """Set how many steps the loader prefetches: a boundary is never nearer.

        The members agree on the largest value at the rendezvous.
        """
        self._membership.prefetched_steps = depth

    # --- in

    def join(self) -> None:
        """Wait for the order to become a member, and carry it out."""
        order = self._listener.await_order()
        self._membership.has_full_state = order.kind == START
        if order.kind == RECOVER:  # this worker has no state and reports so
            self.recover(None)
            return
        self._listener.pop()
        try:
            group = await_group(order, self._membership, self.cancelled)
        except BrokenGroupError as error:
            kind = JoinFailed if order.kind == JOIN else GroupBroken
            self._report(kind, group=order.version, error=error.message[:MAX_ERROR_CHARACTERS])
            self.recover(None)  # the controller stops this worker, or starts a recovery
        except CancelledError:
            self.recover(None)
        else:
            if order.kind == JOIN:
                self._join_at_boundary(order, group)
            else:
                self._start(order, group)

    def _start(self, order: GroupOrder, group: ProcessGroup) -> None:
        try:
            start_together(group, self._membership, self._training, self.cancelled)
        except (BrokenGroupError, CancelledError) as error:
            self._report(GroupBroken, group=order.version, error=error.message)
            threading.Event().wait()  # the state may be mixed; the controller stops this worker
        report_formed(self._report, self._membership, self._training.position)

    def _join_at_boundary(self, order: GroupOrder, group: ProcessGroup) -> None:
        try:
            plan = await_join_plan(
                group,
                self.cancelled,
                lambda error: self._listener.report_join_failed(order.version, error),
            )
        except CancelledError:
            self.recover(None)
            return
        training = self._training
        training.transfer = enter_at_boundary(order, group, plan, self._membership, training)
        last = plan.position.step + plan.transfer_steps
        self._check.schedule(last)
        self._new_batch = (last + 1, sum(plan.new))

    # --- between two steps

    def before_step(self) -> bool:
        """Prepare the next step; return whether prefetched batches are invalid.

        Raises:
            LeftGroup: if this worker is not in the group any more.
        """
        if self._left:
            raise LeftGroup(0)
        if self.cancelled.is_set():
            self.recover(None)
        if self._recovered is not None:
            self._write_for_lost(self._recovered)
        step = self._training.position.step
        try:
            if self._check.mismatch:
                self._resynchronise()
            pending = self._listener.pending
            if pending is not None and pending.boundary == step:
                self._switch(pending)
        except (CancelledError, BrokenGroupError) as error:
            self.recover(error)
        if self._training.transfer is not None:
            self._advance_transfer(self._training.transfer)
        if self._new_batch is not None:
            self._follow_batch(*self._new_batch)
        discard_prefetched, self._discard_prefetched = self._discard_prefetched, False
        return discard_prefetched

    def _resynchronise(self) -> None:
        """Broadcast the state of rank 0, because the checksums differ; all workers wait."""
        self._check.mismatch = False
        membership, training = self._membership, self._training
        if membership.rank == 0:
            sys.stderr.write(
                "[ones] workers have different states: sending rank 0's state to all\n"
            )
        metadata = broadcast_training(training, membership.group, 0, self.cancelled)
        if metadata is not None:
            training.load_metadata(metadata)

    def _switch(self, pending: PendingGroup) -> None:
        began, (step_s, sync_s) = time.perf_counter(), self._training.recent_steps.average_step()
        membership, order = self._membership, pending.order
        step = self._training.position.step
        fault_points.reach("boundary", rank=membership.rank, step=step, version=order.version)
        member = order.group.member(membership.own_id)
        if member is None:
            self._listener.switch(pending)
            self._leave_on_order(order)
            return
        former, old = membership.workers, membership.group
        transfer = self._training.transfer = self._resize.switch(pending)
        last = step + pending.transfer_steps
        self._new_batch = (last + 1, order.group.global_batch)
        if transfer is not None:
            self._check.schedule(last)
            self._retired = old
        elif membership.group is not old:
            old.retire()
        if member.rank == 0 and set(former) - set(membership.workers):
            self._records.write_for_lost(frozenset(membership.workers))
        fault_points.reach("swapped", rank=membership.rank, version=order.version)
        took_s = time.perf_counter() - began
        position = self._training.position
        report_formed(self._report, membership, position, pause_s=took_s, step_s=step_s)
        if set(membership.workers) - set(former):
            self._switch_cost = _SwitchCost(took_s, step_s, sync_s)

    def _report_full_pause(self) -> None:
        """Report again if members waited for a newcomer in the first step of the new group.

        The first report cannot wait for that step, which may not end if a newcomer is lost.
        """
        cost, self._switch_cost = self._switch_cost, None
        if cost is None:
            return
        waited_s = self._training.recent_steps.reduction_s() - cost.sync_s
        if waited_s > 0.0:
            report_formed(
                self._report,
                self._membership,
                self._training.position,
                pause_s=cost.took_s + waited_s,
                step_s=cost.step_s,
            )

    def _advance_transfer(self, transfer: OutgoingState | IncomingState) -> None:
        membership, position = self._membership, self._training.position
        if not transfer.is_over(position.step + 1):
            transfer.begin_portion(position.step + 1)
            return
        self._training.transfer = None
        if not membership.has_full_state:
            membership.has_full_state = True
            fault_points.reach("handed_over", rank=membership.rank, version=membership.version)
            report_formed(self._report, membership, position)

    def _follow_batch(self, first: int, batch: int) -> None:
        """Adapt the learning rate to the batch, from the step in which all have the state."""
        step = self._training.position.step
        if step + 1 >= first:
            self._training.lr_state.follow_batch(batch, step)
            self._new_batch = None

    # --- where gradients are summed

    def before_reduction(self, step: int) -> ReductionTerms:
        """Return what this worker reduces together with the gradients of `step`."""
        listener, transferring = self._listener, self._training.transfer is not None
        return ReductionTerms(
            ready=listener.pending is not None and listener.vote_ready(),
            compare_checksums=self._check.is_due(
                step,
                transferring=transferring,
                rates_may_differ=self._training.rates_may_differ,
            ),
        )

    def after_reduction(
        self, micro_batch: MicroBatch, terms: ReductionTerms, agreed: AgreedWords
    ) -> None:
        """Act on the agreed words, in the same step on all ranks.

        A newcomer then waits for the step's portion of the state, which the optimizer needs.

        Raises:
            CancelledError: if the wait was cancelled.
            BrokenGroupError: if the portion did not arrive.
        """
        self._report_full_pause()
        if agreed.skipped > 0 or (terms.compare_checksums and not agreed.same):
            self._check.mismatch = True
        self._records.write()
        if terms.ready:
            self._agree(micro_batch, agreed)
        if self._check.finish_scheduled(micro_batch.step):
            self._retire_former()
        transfer = self._training.transfer
        if isinstance(transfer, IncomingState) and not self._membership.has_full_state:
            load = self._training.load_metadata
            transfer.take_portion(micro_batch.step, self.cancelled, load)

    def _agree(self, micro_batch: MicroBatch, agreed: AgreedWords) -> None:
        """Close the vote, and schedule the switch if it was unanimous."""
        group = self._membership.group
        boundary = micro_batch.step + max(BOUNDARY_LEAD, group.prefetched_steps)
        unanimous = agreed.ready == group.size
        pending = self._listener.close_vote(unanimous=unanimous, boundary=boundary)
        if pending is not None:
            self._resize.schedule_switch(pending, boundary, micro_batch, agreed.seconds)

    def _retire_former(self) -> None:
        if self._retired is not None:
            self._retired.retire()
            self._retired = None

    # --- a member was lost

    def recover(
        self, error: Exception | None, roll_back: Callable[[], None] | None = None
    ) -> Recovered:
        """Continue in the group that the controller forms of the survivors.

        `error` is what revealed the loss; None if the controller cancelled the waits. `roll_back`
        runs first and restores the state of the last finished step.

        Raises:
            LeftGroup: if this worker is not in that group.
        """
        self._switch_cost = None
        self._abort_groups()
        if roll_back is not None:
            roll_back()
        recovered = self._recovery.run(error)
        if recovered is None:
            self._leave()
        self._training.transfer, self._new_batch = None, None
        self._check.reset()
        self._check.schedule(recovered.step)
        self._retire_former()
        self._recovered = recovered.merged_with(self._recovered)
        self._discard_prefetched = True
        return recovered

    def _abort_groups(self) -> None:
        """Abort the groups, whose operations never end and would block later device work."""
        for group in (self._membership.group, self._retired):
            if group is not None:
                group.abort()

    def _write_for_lost(self, recovered: Recovered) -> None:
        self._recovered = None
        self._records.write()
        if self._membership.rank == 0:
            workers = frozenset(self._membership.workers)
            self._records.write_for_lost(workers)
            if recovered.became_rank_0:
                self._epochs.report_again(self._membership.version)

    # --- out

    def _leave_on_order(self, order: GroupOrder) -> None:
        """Leave the group as `order` says, after writing a checkpoint if the job is suspended.

        Raises:
            CancelledError: if a suspended job's checkpoint was cancelled.
            BrokenGroupError: if a peer was lost before it was written.
            LeftGroup: otherwise.
        """
        self._records.write()
        if order.kind == SUSPEND:
            self._suspend(order.version)
        self._leave()

    def _suspend(self, version: int) -> None:
        membership = self._membership
        if membership.rank == 0:
            self._records.write_for_lost(frozenset({membership.own_id}))
            fault_points.reach("suspend", rank=0, version=version)
            self._epochs.suspend(version)
            fault_points.reach("suspended", rank=0, version=version)
        membership.group.broadcast_bytes(b"", self.cancelled)

    def _leave(self) -> NoReturn:
        self._records.write()
        if self._membership.group.size > 1 and not self._left:
            time.sleep(LINGER_S)
        self._left = True  # in case the script's loop swallows the exception
        raise LeftGroup(0)

    def check_left(self) -> None:
        """Raise `LeftGroup` again if the script's loop swallowed it.

        Raises:
            LeftGroup: if this worker is not in the group any more.
        """
        if self._left:
            raise LeftGroup(0)
