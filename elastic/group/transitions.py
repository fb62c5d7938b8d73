"""Changes of this worker's group: join, resize, recovery, leaving, and checks of equal states.

All of it runs on the training thread, between two steps or during the reduction. Incumbents are
members of the current group. They agree on the boundary (the last step of the current group) in
advance and switch after it. Newcomers join a running group at the boundary, or start together with
all others. When a member is lost, the survivors stop, report their positions, and continue in a new
group.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from elastic import fault_points
from elastic.collectives.backend_protocol import wait_for
from elastic.collectives.control_words import AgreedWords
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import LeftGroup, Membership, await_group
from elastic.group.order_inbox import PendingGroup
from elastic.group.order_listener import MAX_ERROR_CHARACTERS, OrderListener
from elastic.reporting import Report, SampleRecords
from elastic.sample_stream import MicroBatch, Schedule, ScheduleRow, TrainingPosition
from elastic.state.epoch_reports import EpochReports
from elastic.state.portions import transfer_steps
from elastic.state.training_state import TrainingState
from elastic.state.transfer import IncomingState, OutgoingState
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    START,
    SUSPEND,
    GroupBroken,
    GroupFormed,
    JoinFailed,
    Quiesced,
)
from schemas.wire.worker import GroupOrder

BOUNDARY_LEAD: Final = 2  # minimum steps from the agreement to the boundary
TRANSFER_BYTES_PER_S: Final = 400e6  # rate of a transfer over sockets during training
JOIN_PLAN_KEY: Final = "join plan"  # key in the new group's store
CHECK_AFTER: Final = 2  # steps from a transfer or recovery to the comparison of states
CHECK_EVERY: Final = 256  # steps between comparisons, which detect workers that diverge
FORGIVEN_STEPS: Final = 1024  # steps after which a repaired difference is forgotten
MAX_NAMED: Final = 3  # differences that a message names
RATES_REMEDY: Final = (
    "set rates by a scheduler of torch, or from agent.step or agent.progress: a counter of the "
    "script starts at 0 in a worker that joins; decide whether to step by the gradients, which "
    "are equal on all ranks after backward()"
)
STATES_REMEDY: Final = (
    "forward passes and steps may change only what agent.load and agent.track keep, by numbers "
    "that are equal on all ranks: no random numbers, counters or objects of the script's own"
)
LINGER_S: Final = 0.1  # a leaver keeps its sockets open so long, for peers that still read


class JoinPlan(msgspec.Struct, frozen=True):
    """Facts about the boundary that newcomers need."""

    position: TrainingPosition  # position at the boundary
    transfer_steps: int  # number of steps in which newcomers receive the state
    old: tuple[int, ...]  # local batches of the former group, by rank
    new: tuple[int, ...]  # local batches of the new group, after the transfer
    seed: int  # seed of the order of samples


class Mismatch(Enum):
    """Reason to send rank 0's state to all workers."""

    NONE = auto()
    SKIPPED = auto()  # a script skipped a batch, with its clipping and its schedulers
    RATES = auto()  # other hyperparameters, or an optimizer that stepped on some ranks only
    STATES = auto()  # other parameters, buffers or optimizer state


@dataclass(frozen=True, slots=True)
class ReductionTerms:
    """Content that the transitions add to a reduction."""

    ready: bool = False  # vote for the pending group
    compare_checksums: bool = False  # compare all states; same value on every rank
    compare_rates: bool = False  # compare hyperparameters; same value on every rank


NO_TERMS: Final = ReductionTerms()


class Recovered(NamedTuple):
    """Point from which the new group continues."""

    step: int  # last finished step of the new group
    metadata: dict[str, Any] | None  # metadata of the received state; None: not received


class _SwitchCost(NamedTuple):
    """The costs in seconds of a switch that admits newcomers, kept until the next step ends."""

    took_s: float
    step_s: float  # average step before the boundary
    sync_s: float  # part of the step in reductions


class GroupTransitions:
    """Reactions to orders and to lost peers, at points that do not disturb the script."""

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
        self.cancelled = listener.cancelled  # event that cancels waits for peers
        self.after_recovery: Callable[[ProcessGroup, threading.Event], None] = lambda *_: None
        self._membership = membership
        self._listener = listener
        self._training = training
        self._epochs = epochs
        self._records = records
        self._report = report
        # Step numbers alone decide when checksums are compared, so all workers agree.
        self._check_at = 0  # step of the next scheduled comparison; 0: none is scheduled
        self._compare_from = 0  # first step in which hyperparameters are compared
        self._mismatch = Mismatch.NONE  # if the states differ, rank 0 has to broadcast its state
        self._repaired_at: int | None = None  # step before which this worker's state was replaced
        self._retired: ProcessGroup | None = None  # previous group, until states are compared
        self._new_batch: tuple[int, int] | None = None  # first step, global batch; sets the rates
        self._lost_members = False  # records for lost members have to be written
        self._became_rank_0 = False  # became rank 0 in a recovery; no step has followed yet
        self._discard_prefetched = False  # prefetched batches are invalid
        self._left = False
        self._switch_cost: _SwitchCost | None = None  # kept until the newcomers' first step

    # --- in

    def join(self) -> None:
        """Wait for the order to join a group, and join that group."""
        order = self._listener.await_order()
        self._membership.has_full_state = order.kind == START
        if order.kind == RECOVER:  # this worker has no state and reports so
            self.recover(None)
            return
        try:
            group = await_group(order, self._membership, self.cancelled)
            plan = self._await_join_plan(order, group) if order.kind == JOIN else None
        except BrokenGroupError as error:
            kind = JoinFailed if order.kind == JOIN else GroupBroken
            self._report(kind, group=order.version, error=error.message[:MAX_ERROR_CHARACTERS])
            self.recover(None)  # the controller stops this worker, or starts a recovery
        except CancelledError:
            self.recover(None)
        else:
            if plan is None:
                self._start(order, group)
            else:
                self._join_at_boundary(order, group, plan)

    def join_launched(self, group: ProcessGroup) -> None:
        """Join the fixed group of a launcher; every rank takes the state of rank 0."""
        self._membership.group = group
        self._take_rank_0_state()

    def _start(self, order: GroupOrder, group: ProcessGroup) -> None:
        """Start together with all other ranks; every rank takes the state of rank 0."""
        self._membership.group = group
        try:
            self._take_rank_0_state()
        except (BrokenGroupError, CancelledError) as error:
            self._report(GroupBroken, group=order.version, error=error.message)
            threading.Event().wait()  # the state may be mixed; the controller stops this worker
        self._report_formed()

    def _take_rank_0_state(self) -> None:
        group, full = self._membership.group, self._membership.has_full_state
        if group.size > 1:
            metadata = self._broadcast_state(group, 0)
            if metadata is not None:
                self._training.load_metadata(metadata, group.rank)
            self._membership.has_full_state = full

    def _broadcast_state(self, group: ProcessGroup, source: int) -> dict[str, Any] | None:
        """Broadcast the state of rank `source`; return its metadata, or None on rank `source`.

        The other ranks have no full state from here on: it is mixed if the source is lost. The
        caller sets `has_full_state` when this worker's position is that of the state.
        """
        if group.rank != source:
            self._membership.has_full_state = False
        return self._training.broadcast(group, source, self.cancelled)

    def _await_join_plan(self, order: GroupOrder, group: ProcessGroup) -> JoinPlan:
        """Receive the join plan. If the plan cannot arrive, the controller cancels the wait."""
        plans: list[JoinPlan] = []
        received = threading.Event()

        def receive() -> None:
            try:
                data = group.store.fetch(JOIN_PLAN_KEY)
                plans.append(msgspec.msgpack.decode(data, type=JoinPlan))
            except (RuntimeError, BrokenGroupError) as error:
                self._listener.report_join_failed(order.version, str(error).partition("\n")[0])
                return
            received.set()

        threading.Thread(target=receive, name=JOIN_PLAN_KEY, daemon=True).start()
        wait_for(received, self.cancelled)
        return plans[0]

    def _join_at_boundary(self, order: GroupOrder, group: ProcessGroup, plan: JoinPlan) -> None:
        """Join a running group; this worker gets no samples until the state has arrived."""
        membership, training = self._membership, self._training
        training.position = plan.position
        training.set_seed(plan.seed)
        first = plan.position.step + 1
        zeros = (*plan.old, *(0,) * (group.size - len(plan.old)))
        training.schedule = Schedule(ScheduleRow(first, zeros, group.rank))
        training.schedule.announce([ScheduleRow(first + plan.transfer_steps, plan.new, group.rank)])
        membership.enter(order, group)
        membership.has_full_state = False
        training.transfer = IncomingState(
            group=group,
            state=training.tensors(),
            senders=len(plan.old),
            first=first,
            steps=plan.transfer_steps,
        )
        last = plan.position.step + plan.transfer_steps
        self._check_at, self._compare_from = last + CHECK_AFTER, first + 1
        self._new_batch = (last + 1, sum(plan.new))

    # --- between two steps

    def before_step(self) -> bool:
        """Prepare the next step; return whether prefetched batches are invalid."""
        self.check_left()
        if self.cancelled.is_set():
            self.recover(None)
        if self._lost_members:
            self._write_for_lost()
        step = self._training.position.step
        try:
            if self._mismatch is not Mismatch.NONE:
                self._resynchronise()
            pending = self._listener.pending
            if pending is not None and pending.boundary == step:
                self._switch(pending)
        except (CancelledError, BrokenGroupError) as error:
            self.recover(error)
        if self._training.transfer is not None:
            self._advance_transfer(self._training.transfer)
        step = self._training.position.step  # of the recovery, if there was one
        if self._new_batch is not None and step + 1 >= self._new_batch[0]:
            self._training.lr_state.follow_batch(self._new_batch[1], step)
            self._new_batch = None
        discard_prefetched, self._discard_prefetched = self._discard_prefetched, False
        return discard_prefetched

    def _resynchronise(self) -> None:
        """Send rank 0's state to all, because the states differ; all workers wait.

        A worker whose state differed says so. If that happens again soon, its script cannot be
        trained in a group, and the worker refuses to go on.
        """
        found, self._mismatch = self._mismatch, Mismatch.NONE
        membership, training = self._membership, self._training
        own = training.tensors().sample().copy()
        self._take_rank_0_state()
        step = training.position.step
        self._check_at = max(self._check_at, step + CHECK_AFTER)
        if membership.rank == 0 or found is Mismatch.SKIPPED:
            return
        apart = own.differences(training.tensors().sample())
        if not apart:
            return
        named = "; ".join(apart[:MAX_NAMED] + ["..."] * (len(apart) > MAX_NAMED))
        problem = f"rank {membership.rank} had another state than rank 0: {named}"
        last, self._repaired_at = self._repaired_at, step
        if last is None or step - last > FORGIVEN_STEPS or training.rates_may_differ:
            sys.stderr.write(f"[ones] {problem}; it has rank 0's state now\n")
            return
        again = f"{problem}, {step - last} steps after it was given rank 0's state"
        raise UsageError(again, RATES_REMEDY if found is Mismatch.RATES else STATES_REMEDY)

    def _switch(self, pending: PendingGroup) -> None:
        """Switch to the pending group after its boundary; start to send newcomers the state."""
        began, (step_s, sync_s) = time.perf_counter(), self._training.recent_steps.average_step()
        membership, training, order = self._membership, self._training, pending.order
        step = training.position.step
        fault_points.reach("boundary", rank=membership.rank, step=step, version=order.version)
        build = self._listener.switch(pending)
        built = build.group if build is not None else None
        member = order.group.member(membership.own_id)
        if member is None:
            self._leave_on_order(order)
            return
        former, old = membership.workers, membership.group
        newcomers = [m.rank for m in order.group.members if m.worker not in former]
        if built is None:  # same processes, another batch
            old.version = order.version
        membership.enter(order, built or old)
        last = step + pending.transfer_steps
        self._new_batch = (last + 1, order.group.global_batch)
        training.transfer = None
        if newcomers:
            training.transfer = OutgoingState(
                group=membership.group,
                state=training.tensors(),
                newcomers=newcomers,
                senders=len(former),
                first=step + 1,
                steps=pending.transfer_steps,
                metadata=training.metadata() if membership.rank == 0 else None,
            )
            self._check_at, self._compare_from = last + CHECK_AFTER, step + 2
            self._retired = old
        elif membership.group is not old:
            old.retire()
        if member.rank == 0 and set(former) - set(membership.workers):
            self._records.write_for_lost(frozenset(membership.workers))
        fault_points.reach("swapped", rank=membership.rank, version=order.version)
        took_s = time.perf_counter() - began
        connect_s = build.seconds if build is not None else 0.0
        self._report_formed(pause_s=took_s, step_s=step_s, connect_s=connect_s)
        if newcomers:
            self._switch_cost = _SwitchCost(took_s, step_s, sync_s)

    def _report_full_pause(self) -> None:
        """Report again if members waited for a newcomer in the first step of the new group.

        The first report cannot wait for that step, which might never end if a newcomer is lost.
        """
        cost, self._switch_cost = self._switch_cost, None
        if cost is None:
            return
        waited_s = self._training.recent_steps.sync_s - cost.sync_s
        if waited_s > 0.0:
            self._report_formed(pause_s=cost.took_s + waited_s, step_s=cost.step_s)

    def _advance_transfer(self, transfer: OutgoingState | IncomingState) -> None:
        membership, position = self._membership, self._training.position
        if not transfer.is_over(position.step + 1):
            transfer.begin_portion(position.step + 1)
            return
        self._training.transfer = None
        if not membership.has_full_state:
            membership.has_full_state = True
            fault_points.reach("handed_over", rank=membership.rank, version=membership.version)
            self._report_formed()

    # --- where gradients are reduced

    def before_reduction(self, step: int) -> ReductionTerms:
        """Return the terms that the transitions add to the reduction of step `step`."""
        listener, training = self._listener, self._training
        regular = training.transfer is None and step % CHECK_EVERY == 0
        return ReductionTerms(
            ready=listener.pending is not None and listener.vote_ready(),
            compare_checksums=step == self._check_at or regular,
            compare_rates=step >= self._compare_from,
        )

    def after_reduction(
        self, micro_batch: MicroBatch, terms: ReductionTerms, agreed: AgreedWords
    ) -> None:
        """Act on the agreed words, in the same step on all ranks.

        A newcomer then waits for this step's portion of the state, because the optimizer needs it.
        """
        self._report_full_pause()
        if 0 < agreed.skipped < self._membership.group.size:
            self._mismatch = Mismatch.SKIPPED
            self._training.partial_skips += 1
        elif terms.compare_rates and not agreed.same_rates:
            self._mismatch = Mismatch.RATES
        elif terms.compare_checksums and not agreed.same:
            self._mismatch = Mismatch.STATES
        self._records.write()
        if terms.ready:
            self._agree(micro_batch, agreed)
        if micro_batch.step == self._check_at:
            self._check_at = 0
            self._retire_former()
        transfer = self._training.transfer
        if isinstance(transfer, IncomingState) and not self._membership.has_full_state:
            load = partial(self._training.load_metadata, rank=self._membership.rank)
            transfer.take_portion(micro_batch.step, self.cancelled, load)

    def _agree(self, micro_batch: MicroBatch, agreed: AgreedWords) -> None:
        """Close the vote. If all ranks are ready, schedule the shares after the boundary.

        The boundary is so far ahead that no rank has prefetched samples of the steps after it.
        """
        membership, training = self._membership, self._training
        boundary = micro_batch.step + max(BOUNDARY_LEAD, membership.group.prefetched_steps)
        unanimous = agreed.ready == membership.group.size
        pending = self._listener.close_vote(unanimous=unanimous, boundary=boundary)
        if pending is None:
            return
        order, step = pending.order, micro_batch.step
        fault_points.reach("announce", rank=membership.rank, step=step, version=order.version)
        member = order.group.member(membership.own_id)
        rank = member.rank if member else None
        new = tuple(m.local_batch for m in order.group.members)
        old = micro_batch.row.local_batches
        rows = [ScheduleRow(boundary + 1, new, rank)]
        newcomers = len({m.worker for m in order.group.members} - set(membership.workers))
        if newcomers:
            sizes = training.tensors().unit_sizes(membership.device)
            pending.transfer_steps = transfer_steps(
                sum(sizes),
                agreed.seconds,
                TRANSFER_BYTES_PER_S,
                # the script would update its averages from parameters that have not arrived
                1 if training.tracks_weights else len(sizes),
            )
            zeros = ScheduleRow(boundary + 1, (*old, *(0,) * newcomers), rank)
            rows = [zeros, ScheduleRow(boundary + 1 + pending.transfer_steps, new, rank)]
            if membership.rank == 0:
                self._post_join_plan(pending, boundary, micro_batch, new)
        training.schedule.forget(training.position.step)
        training.schedule.announce(rows)

    def _post_join_plan(
        self, pending: PendingGroup, boundary: int, micro_batch: MicroBatch, new: tuple[int, ...]
    ) -> None:
        group = self._listener.built(pending.version)
        if group is None:
            return
        training, old, done = self._training, micro_batch.row.local_batches, micro_batch.step - 1
        position = TrainingPosition(
            micro_batch.epoch, micro_batch.cursor_before, done, training.position.samples_done
        )
        start = position.advanced(boundary - done, sum(old), training.stream)
        plan = JoinPlan(start, pending.transfer_steps, old, new, training.stream.seed)
        group.store.post(JOIN_PLAN_KEY, lambda: msgspec.msgpack.encode(plan))

    def _retire_former(self) -> None:
        if self._retired is not None:
            self._retired.retire()
            self._retired = None

    # --- a member was lost

    def recover(
        self, error: Exception | None, roll_back: Callable[[], None] | None = None
    ) -> Recovered:
        """Continue in the group that the controller forms of the survivors, or leave.

        `error` revealed the loss; it is None if the controller cancelled the waits. `roll_back`
        restores the state of the last finished step, and is called first. Without a controller,
        `error` is raised.
        """
        if not self._membership.own_id:  # nobody can form another group
            raise error or CancelledError
        self._switch_cost = None
        for group in (self._membership.group, self._retired):
            if group is not None:
                group.abort()  # operations without a peer never end and block later device work
        if roll_back is not None:
            roll_back()
            self._mismatch = Mismatch.NONE  # found in the step that is rolled back
        recovered = self._join_survivors(error)
        self._training.transfer, self._new_batch = None, None
        self._mismatch = Mismatch.NONE
        self._check_at = self._compare_from = recovered.step + CHECK_AFTER
        self._retire_former()
        self._lost_members = self._discard_prefetched = True
        return recovered

    def _join_survivors(self, error: Exception | None) -> Recovered:
        membership, listener = self._membership, self._listener
        if isinstance(error, BrokenGroupError | fault_points.InjectedError):
            text = str(error)[:MAX_ERROR_CHARACTERS]
            self._report(GroupBroken, group=membership.version, error=text)
        listener.abandon_pending()
        while True:
            order = listener.await_recovery()
            if order.stage == PREPARE:
                self._quiesce(order)
                continue
            if order.group.member(membership.own_id) is None:
                self._leave()
            try:
                return self._enter_recovered(order)
            except CancelledError:
                continue
            except BrokenGroupError as broken:
                self._report(GroupBroken, group=order.version, error=broken.message)

    def _quiesce(self, order: GroupOrder) -> None:
        membership, position = self._membership, self._training.position
        fault_points.reach("quiesce", rank=membership.rank, version=order.version)
        self._report(
            Quiesced,
            group=order.version,
            step=position.step,
            epoch=position.epoch - 1,
            has_full_state=membership.has_full_state,
            port=self._listener.stores.serve(order.version, oldest=membership.version),
        )

    def _enter_recovered(self, order: GroupOrder) -> Recovered:
        """Connect to the survivors; if `order.source` is set, receive the state of that rank."""
        membership, training, cancelled = self._membership, self._training, self.cancelled
        fault_points.reach("recover", rank=membership.rank, version=order.version)
        group = await_group(order, membership, cancelled)
        metadata: dict[str, Any] | None = None
        try:
            if order.source is not None:
                metadata = self._broadcast_state(group, order.source)
                if metadata is not None and training.carried is not None:
                    training.carried.load(metadata["carried"])
            elif self._is_mismatched(group):
                metadata = self._broadcast_state(group, 0)
                if metadata is not None:
                    training.load_metadata(metadata, group.rank)
            own_lr_state = msgspec.msgpack.encode(training.lr_state.state_list())
            lr_state = group.broadcast_bytes(own_lr_state, cancelled, int(order.source or 0))
            self.after_recovery(group, cancelled)
        except (CancelledError, BrokenGroupError):
            group.abort()
            group.retire()  # in the background, because running operations block
            raise
        membership.has_full_state = True
        step = training.position.step if metadata is None else int(metadata["step"])
        training.lr_state.load_state_list(msgspec.msgpack.decode(lr_state))
        training.lr_state.follow_batch(order.group.global_batch, step)
        old = membership.group
        membership.enter(order, group)
        old.retire()
        shares = tuple(member.local_batch for member in order.group.members)
        training.schedule = Schedule(ScheduleRow(1, shares, group.rank))
        fault_points.reach("recovered", rank=group.rank, version=order.version)
        self._report_formed()
        self._became_rank_0 |= group.rank == 0 and old.rank != 0
        return Recovered(step, metadata)

    def _is_mismatched(self, group: ProcessGroup) -> bool:
        """Return whether the state of a survivor may differ, and is not repaired yet."""
        own = b"" if self._mismatch is Mismatch.NONE else b"1"
        return any(group.gather_bytes(own, self.cancelled))

    def _write_for_lost(self) -> None:
        became_rank_0 = self._became_rank_0
        self._lost_members = self._became_rank_0 = False
        self._records.write()
        if self._membership.rank == 0:
            self._records.write_for_lost(frozenset(self._membership.workers))
            if became_rank_0:
                self._epochs.report_again(self._membership.version)

    # --- out

    def _report_formed(
        self, *, pause_s: float = 0.0, step_s: float = 0.0, connect_s: float = 0.0
    ) -> None:
        """Report that this worker trains in its current group; a time of 0 was not measured."""
        position = self._training.position
        self._report(
            GroupFormed,
            group=self._membership.version,
            epoch=position.epoch - 1,
            step=position.step,
            pause_ms=pause_s * 1e3,
            step_ms=step_s * 1e3,
            connect_ms=connect_s * 1e3,
        )

    def _leave_on_order(self, order: GroupOrder) -> None:
        """Leave the group. If the job is suspended, rank 0 first writes a checkpoint."""
        membership = self._membership
        self._records.write()
        if order.kind == SUSPEND:
            if membership.rank == 0:
                self._records.write_for_lost(frozenset({membership.own_id}))
                fault_points.reach("suspend", rank=0, version=order.version)
                self._epochs.suspend(order.version)
                fault_points.reach("suspended", rank=0, version=order.version)
            membership.group.broadcast_bytes(b"", self.cancelled)
        self._leave()

    def _leave(self) -> NoReturn:
        self._records.write()
        if self._membership.group.size > 1 and not self._left:
            time.sleep(LINGER_S)
        self._left = True  # for `check_left`, if the script's loop swallows the exception
        raise LeftGroup(0)

    def check_left(self) -> None:
        """Raise `LeftGroup` again if the script's loop swallowed it."""
        if self._left:
            raise LeftGroup(0)
