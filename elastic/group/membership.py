"""Membership of this worker in a group, and the building of ordered groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from setproctitle import getproctitle, setproctitle

from elastic import fault_points
from elastic.collectives.backend_protocol import wait_for
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import BackgroundBuild, build_process_group
from elastic.group.launched_group import LaunchedGroup
from elastic.training_errors import BrokenGroupError, CancelledError
from schemas.ids import WorkerId, worker_id
from schemas.wire.worker import Assignment, GroupOrder


class LeftGroup(SystemExit):
    """Raised in the script when this worker leaves its group. The process exits with code 0."""


@dataclass(slots=True)
class Membership:
    """The group after the last join, resize or recovery, and this worker's place in that group."""

    own_id: WorkerId
    start_version: int  # version of the group that the worker was started for
    address: str  # address of this host, to which the other members connect
    device: torch.device
    workers: tuple[WorkerId, ...]  # by rank
    group: ProcessGroup
    prefetched_steps: int = 0  # maximum number of steps that the loader prefetches
    has_full_state: bool = True  # False for a newcomer until the state has arrived

    @classmethod
    def begin(
        cls,
        assignment: Assignment | None,
        device: torch.device,
        launched: LaunchedGroup | None = None,
    ) -> Membership:
        """Return the initial membership.

        Without an assignment the worker trains alone, or in the group of its launcher.
        """
        if assignment is None:
            rank, workers = (launched.rank, launched.workers) if launched else (0, (WorkerId(""),))
            group = ProcessGroup(0, rank, 1, device)
            return cls(WorkerId(""), 0, "127.0.0.1", device, workers, group)
        rank = assignment.rank
        members = assignment.group.members
        return cls(
            own_id=worker_id(assignment.job, assignment.version, rank),
            start_version=assignment.version,
            address=assignment.address,
            device=device,
            workers=tuple(member.worker for member in members),
            group=ProcessGroup(0, rank, 1, device),  # placeholder until the worker joins
        )

    @property
    def may_have_peers(self) -> bool:
        """True if this worker is in a group, or a cluster can enlarge its group."""
        return bool(self.own_id) or len(self.workers) > 1

    @property
    def rank(self) -> int:
        """Rank in the current group."""
        return self.group.rank

    @property
    def version(self) -> int:
        """Version of the current group."""
        return self.group.version

    def enter(self, order: GroupOrder, group: ProcessGroup) -> None:
        """Become a member of the group of `order`; `group` stays if only the batch changes."""
        if group.rank != self.group.rank:
            owner, rank, _ = getproctitle().rpartition(" rank ")
            if rank and owner.startswith("ones: "):  # unless the script set its own title
                setproctitle(f"{owner}{rank}{group.rank}")
        self.group = group
        self.workers = tuple(member.worker for member in order.group.members)


def form_group(
    order: GroupOrder, membership: Membership, publish: Callable[[ProcessGroup], None]
) -> ProcessGroup:
    """Build the process group of `order`; pass it to `publish` before the first connection."""
    member = order.group.member(membership.own_id)
    rank = member.rank if member else 0
    fault_points.reach("build", rank=rank, version=order.version)
    group = build_process_group(
        version=order.version,
        store=order.store,
        rank=rank,
        size=len(order.group.members),
        address=membership.address,
        device=membership.device,
        prefetched_steps=membership.prefetched_steps,
        publish=publish,
    )
    fault_points.reach("built", rank=rank, version=order.version)
    return group


def await_group(
    order: GroupOrder, membership: Membership, cancelled: threading.Event
) -> ProcessGroup:
    """Build the process group of `order` in the background, wait for it and return it."""
    failures: list[str] = []
    building = BackgroundBuild(
        lambda publish: form_group(order, membership, publish), failures.append
    )
    try:
        wait_for(building.over, cancelled)
    except CancelledError:
        building.drop()
        raise
    if building.group is None:
        raise BrokenGroupError(*failures)
    return building.group
