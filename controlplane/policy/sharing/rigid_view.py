"""View of a rigid job for the division of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from schemas.ids import JobId, NodeId, Seconds, SlotId


class RigidView(msgspec.Struct, frozen=True, kw_only=True):
    """Active rigid job: a waiting claim, or a holder of slots that no plan moves."""

    job: JobId
    account: str = ""  # PROJECT/USER
    submitted_at: Seconds
    slots: int
    family: str = ""  # jobs of the same program
    one_node: bool = False  # all its slots must be on one node
    fits: frozenset[SlotId] | None = None  # slots that it may use; None: all
    # Shares of a node's slots that one slot takes, where it takes more than one. For a job without
    # slots: the part of what is set aside that it takes, on each node that fits.
    shares: Mapping[NodeId, float] = {}
    exclusive: bool = False  # no other job on its nodes
    missing: str = ""  # why no node fits
    ready_at: Seconds = Seconds(0.0)  # earliest time of a start
    run_limit_s: float | None = None  # time limit of a run; None: unknown
    waits: bool = True  # it has no slots, and may start
    holds: tuple[SlotId, ...] = ()
    closes: Mapping[NodeId, tuple[Seconds, str]] = {}  # when nodes are not for it, and for what
    began_at: Seconds = Seconds(0.0)  # when it got these slots
    ends_at: Seconds | None = None  # latest end of the run; None: it has no time limit
    preemptible: bool = False  # it runs, and may begin again later
