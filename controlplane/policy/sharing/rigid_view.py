"""View of a rigid job for the division of a cluster."""

from __future__ import annotations

import msgspec

from schemas.ids import JobId, Seconds, SlotId


class RigidView(msgspec.Struct, frozen=True, kw_only=True):
    """Active rigid job: a waiting claim, or a holder of slots that no plan moves."""

    job: JobId
    account: str = ""  # PROJECT/USER
    submitted_at: Seconds
    slots: int
    family: str = ""  # jobs of the same program
    one_node: bool = False  # all its slots must be on one node
    ready_at: Seconds = Seconds(0.0)  # earliest time of a start
    run_limit_s: float | None = None  # time limit of a run; None: unknown
    waits: bool = True  # it has no slots, and may start
    holds: tuple[SlotId, ...] = ()
    began_at: Seconds = Seconds(0.0)  # when it got these slots
    ends_at: Seconds | None = None  # latest end of the run; None: it has no time limit
    preemptible: bool = False  # it runs, and may begin again later
