"""Thread-safe shell around `OrderInbox`, between the connection's thread and the training thread.

It locks the inbox, opens stores and builds groups in the background. The connection's thread never
waits for training. The training thread acts on orders only at the start of a step or when gradients
are reduced, so nothing changes while the script runs.
"""

from __future__ import annotations

import threading

from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import BackgroundBuild
from elastic.collectives.rendezvous_store import StoreServers
from elastic.group.membership import Membership, form_group
from elastic.group.order_inbox import (
    BuildGroup,
    CancelWaits,
    DropBuild,
    Effect,
    OpenStore,
    OrderInbox,
    PendingGroup,
)
from elastic.reporting import Report
from schemas.wire.agent import RECOVER, JoinFailed, SlotAwaited, StoreOpened
from schemas.wire.worker import GroupOrder, SlotGranted, ToWorker

MAX_ERROR_CHARACTERS = 500  # limit of the error text in a report


class OrderListener:
    """Handover of orders from the connection's thread to the training thread."""

    def __init__(self, membership: Membership, report: Report, *, granted: bool) -> None:
        self.cancelled = threading.Event()  # set to cancel waits of the training thread
        self.stores = StoreServers(membership.address)
        self._membership = membership
        self._report = report
        self._inbox = OrderInbox(membership.own_id, membership.start_version)
        self._changed = threading.Condition()
        self._builds: dict[int, BackgroundBuild] = {}  # keyed by version
        self._granted = threading.Event()
        if granted:
            self._granted.set()

    # --- the connection's thread

    def receive(self, message: ToWorker) -> None:
        """Process a message from the agent without waiting for training.

        Orders to train a unit of a sweep are ignored.
        """
        if isinstance(message, SlotGranted):
            self._granted.set()
        if not isinstance(message, GroupOrder):
            return
        membership = self._membership
        with self._changed:
            effects = self._inbox.receive(
                message, version=membership.version, workers=membership.workers
            )
            for effect in effects:
                if not isinstance(effect, OpenStore):
                    self._apply(effect)
            self._changed.notify_all()
        for effect in effects:
            if isinstance(effect, OpenStore):
                self._open_store(effect.version)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case CancelWaits():
                self.cancelled.set()
            case BuildGroup(order):
                self._builds[order.version] = self._build(order)
            case DropBuild(version):
                if (build := self._builds.pop(version, None)) is not None:
                    build.drop()

    def _build(self, order: GroupOrder) -> BackgroundBuild:
        return BackgroundBuild(
            lambda publish: form_group(order, self._membership, publish),
            lambda error: self.report_join_failed(order.version, error),
        )

    def report_join_failed(self, version: int, error: str) -> None:
        """Report that the group of `version` cannot be built. The error text is truncated."""
        self._report(JoinFailed, group=version, error=error[:MAX_ERROR_CHARACTERS])

    def _open_store(self, version: int) -> None:
        if version in self.stores:
            return
        try:
            port = self.stores.serve(version, oldest=self._membership.version)
        except (OSError, RuntimeError) as error:
            self.report_join_failed(version, f"cannot open the group's store: {error}")
            return
        self._report(StoreOpened, group=version, port=port)

    # --- the training thread waits

    def await_slot(self) -> None:
        """Wait until the slot's previous process has exited; report the wait to the controller."""
        if not self._granted.is_set():
            self._report(SlotAwaited)
        self._granted.wait()

    def await_order(self) -> GroupOrder:
        """Wait for an order and return it; an order to recover stays for `await_recovery`."""
        with self._changed:
            order = self._changed.wait_for(self._inbox.peek)
            assert order is not None  # noqa: S101 - `wait_for` waits until it is not
            return order if order.kind == RECOVER else self._inbox.pop()

    def await_recovery(self) -> GroupOrder:
        """Wait for an order to quiesce or recover and return it; drop all other orders."""
        with self._changed:
            while True:
                self._changed.wait_for(self._inbox.peek)
                order = self._inbox.pop()
                if order.kind == RECOVER:
                    if self._inbox.peek() is None:
                        self.cancelled.clear()
                    return order

    # --- the training thread reads without waiting

    @property
    def pending(self) -> PendingGroup | None:
        """The pending group, or None."""
        return self._inbox.pending

    def built(self, version: int) -> ProcessGroup | None:
        """Return the process group of a pending version, or None if it is not complete."""
        build = self._builds.get(version)
        return build.group if build is not None else None

    def vote_ready(self) -> bool:
        """Return whether this worker votes "ready" for the pending group in this reduction."""
        with self._changed:
            return self._inbox.vote_ready(lambda version: self.built(version) is not None)

    def close_vote(self, *, unanimous: bool, boundary: int) -> PendingGroup | None:
        """Process the last reduction's vote; return the group that it fixed a boundary for."""
        with self._changed:
            agreed, effects = self._inbox.close_vote(unanimous=unanimous, boundary=boundary)
            for effect in effects:
                self._apply(effect)
        return agreed

    def switch(self, pending: PendingGroup) -> BackgroundBuild | None:
        """Forget `pending`, which becomes the current group, and return its construction.

        It is None if the same processes continue with another batch, or if this worker leaves.
        """
        with self._changed:
            self._inbox.switch(pending)
            return self._builds.pop(pending.version, None)

    def abandon_pending(self) -> None:
        """Drop the pending group, because recovery decides which group follows the current one."""
        with self._changed:
            for effect in self._inbox.abandon():
                self._apply(effect)
