"""Running jobs that trade slots: what each is to have, and who steps aside so that it can begin."""

from __future__ import annotations

from enum import Enum

import msgspec

from controlplane.policy.api import Reason
from schemas.ids import JobId, Seconds, SlotId


class Way(Enum):
    """How a job steps aside; the value is what users see. The cheaper ones come first."""

    STAGING = "goes to free slots meanwhile"
    SHRINK = "goes on with fewer slots meanwhile"
    PAUSE = "pauses meanwhile"


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of them is while the others take their places."""

    way: Way
    local_batch: dict[SlotId, int] = {}  # samples per step; none while it pauses


class Swap(msgspec.Struct, kw_only=True):
    """Jobs that train, each of which is to have slots that another one of them has now.

    Without those in `aside`, the others can take their places one after the other.
    """

    targets: dict[JobId, dict[SlotId, int]]  # slot -> local batch, samples per step
    aside: dict[JobId, Aside]
    reasons: dict[JobId, Reason]
    by: str = "policy"  # or operator: whose wish it is
    stepped: dict[JobId, None] = {}  # of `aside`: those that were ordered to
    began: Seconds = Seconds(0.0)

    def slots(self) -> set[SlotId]:
        """All that are kept for its jobs until it is over."""
        return {slot for target in self.targets.values() for slot in target}
