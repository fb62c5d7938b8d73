"""How a worker meets the other members of a group that was ordered."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic import fault_points
from elastic.collectives.background_group_build import BackgroundBuild
from elastic.collectives.cancellable_waits import wait_for
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.group.membership import Membership
from elastic.training_errors import BrokenGroupError, CancelledError
from schemas.messages.worker import GroupOrder


def form_group(
    order: GroupOrder, membership: Membership, publish: Callable[[ProcessGroup], None]
) -> ProcessGroup:
    """The process group of `order`; blocks until all its members have come.

    Args:
        order: names the members and their store.
        membership: of this worker; is not changed.
        publish: gets the group before it meets anybody, so that it can be aborted.

    Raises:
        BrokenGroupError: if they did not all come in time.
    """
    member = order.group.member(membership.me)
    rank = member.rank if member else 0
    fault_points.reach("build", rank=rank, version=order.version)
    group = build_process_group(
        version=order.version,
        store=order.store,
        rank=rank,
        size=len(order.group.members),
        address=membership.address,
        device=membership.device,
        drawn_ahead=membership.drawn_ahead,
        publish=publish,
    )
    fault_points.reach("built", rank=rank, version=order.version)
    return group


def await_group(
    order: GroupOrder, membership: Membership, called_off: threading.Event
) -> ProcessGroup:
    """The process group of `order`, which the training thread has to wait for.

    Args:
        order: names the members and their store.
        membership: of this worker; is not changed.
        called_off: set when the wait is to end; the group is dropped then.

    Raises:
        BrokenGroupError: if it could not be built.
        CancelledError: if the wait was called off.
    """
    failures: list[str] = []
    building = BackgroundBuild(
        lambda publish: form_group(order, membership, publish), failures.append
    )
    try:
        wait_for(building.over, called_off)
    except CancelledError:
        building.drop()
        raise
    if building.group is None:
        raise BrokenGroupError(*failures)
    return building.group
