"""What can be chosen about Optimus."""

from __future__ import annotations

from typing import Literal

import msgspec

from controlplane.policy.option_checks import LEAST_ROUND_S, refuse, refuse_above, refuse_below
from controlplane.policy.planning.placers import PlacerName
from controlplane.policy.planning.scheduling_rounds import Starts
from controlplane.policy.planning.slot_placer import Moves


class OptimusOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `optimus`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 600.0  # between rounds, as in the paper; 0: whenever it is asked
    age_share: float = 1.0  # of the jobs' mean age, that a round lasts at most; 0: `interval_s`
    starts: Starts = "at-once"  # of who comes between rounds: on idle slots, or in the next round
    remaining: Literal["fit", "oracle"] = "fit"  # steps that a job has left, and their time
    moves: Moves = "restart"  # a job of another size starts from its checkpoint, as in the paper
    placer: PlacerName = "emptiest"
    most: int | None = None  # slots of one job
    convergence: float = 0.01  # share of the loss; an epoch that takes less away is the last

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if 0.0 < self.interval_s < LEAST_ROUND_S:
            refuse("interval_s", f"{self.interval_s} is too short", f"give 0, or {LEAST_ROUND_S}")
        refuse_below(self, {"interval_s": 0.0, "age_share": 0.0, "convergence": 1e-6})
        refuse_above(self, {"age_share": 10.0, "convergence": 0.5})
        if self.most is not None:
            refuse_below(self, {"most": 1})
