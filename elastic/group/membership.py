"""Which group this worker is a member of.

How a worker meets the other members of a group that was ordered.
"""

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
from elastic.reporting import Report
from elastic.sample_stream import TrainingPosition
from elastic.training_errors import BrokenGroupError, CancelledError
from schemas.ids import WorkerId, worker_id
from schemas.wire.agent import GroupFormed
from schemas.wire.worker import Assignment, GroupOrder


class LeftGroup(SystemExit):
    """This worker is not in the job's group any more; its script ends here, with exit code 0."""


@dataclass(slots=True)
class Membership:
    """The present group, as it was joined, resized or recovered last."""

    me: WorkerId
    born: int  # version of the group that this worker was started for
    address: str  # of this host, where the other members reach it
    device: torch.device
    workers: tuple[WorkerId, ...]  # by rank
    group: ProcessGroup
    drawn_ahead: int = 0  # steps whose samples this worker's loader may have drawn already
    has_full_state: bool = True  # False for a newcomer until the state has come

    @classmethod
    def begin(cls, assignment: Assignment | None, device: torch.device) -> Membership:
        """What a worker starts with: its part in the group that it is to join.

        Args:
            assignment: of this worker; None: it is alone for ever.
        """
        if assignment is None:
            me = WorkerId("")
            return cls(me, 0, "127.0.0.1", device, (me,), _alone(0, device))
        rank = assignment.rank
        members = assignment.group.members
        return cls(
            me=worker_id(assignment.job, assignment.version, rank),
            born=assignment.version,
            address=assignment.address,
            device=device,
            workers=tuple(member.worker for member in members),
            group=_alone(rank, device),  # until it joins
        )

    @property
    def rank(self) -> int:
        """In the present group."""
        return self.group.rank

    @property
    def version(self) -> int:
        """Of the present group."""
        return self.group.version

    def enter(self, order: GroupOrder, group: ProcessGroup) -> None:
        """Be a member of the group that `order` describes.

        Args:
            order: names the members, by rank.
            group: of these members; the present one if only the batch changes.
        """
        if group.rank != self.group.rank:
            owner, rank, _ = getproctitle().rpartition(" rank ")
            if rank and owner.startswith("ones: "):  # not a title of the script's own
                setproctitle(f"{owner}{rank}{group.rank}")
        self.group = group
        self.workers = tuple(member.worker for member in order.group.members)


def _alone(rank: int, device: torch.device) -> ProcessGroup:
    return ProcessGroup(0, rank, 1, device)


def report_formed(
    report: Report,
    membership: Membership,
    position: TrainingPosition,
    *,
    pause_s: float = 0.0,
    step_s: float = 0.0,
) -> None:
    """Say that this worker trains in its present group, with the whole state or without.

    Args:
        position: where it begins in the group.
        pause_s: how long its training stood still for it.
        step_s: of a usual step before that; 0: not measured.
    """
    report(
        GroupFormed,
        group=membership.version,
        epoch=position.epoch - 1,
        step=position.step,
        pause_ms=pause_s * 1e3,
        step_ms=step_s * 1e3,
    )


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
