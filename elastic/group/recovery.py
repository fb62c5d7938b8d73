"""Recovery of a group that lost a member: quiesce, report the position, continue in a new group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic import fault_points
from elastic.batches import Schedule, ScheduleRow
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import Membership, await_group, report_formed
from elastic.group.order_listener import MAX_ERROR_CHARACTERS, OrderListener
from elastic.reporting import Report
from elastic.state.broadcast import broadcast_training
from elastic.state.training_state import TrainingState
from elastic.training_errors import BrokenGroupError, CancelledError
from schemas.wire.agent import PREPARE, GroupBroken, Quiesced
from schemas.wire.worker import GroupOrder


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
            has_full_state=membership.has_full_state,
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
