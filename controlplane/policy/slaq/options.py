"""What can be chosen about SLAQ."""

from __future__ import annotations

from typing import Literal

import msgspec

from controlplane.policy.option_checks import refuse_above, refuse_below
from controlplane.policy.planning.placers import PlacerName


class SlaqOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `slaq`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 10.0  # T: the scheduling epoch that gains are predicted for; paper: 3 to 30
    target: Literal["loss", "quality"] = "loss"  # lower losses, or sooner at `quality`
    quality: float = 0.9  # share of the predicted fall of the loss that is worth something
    normalise: Literal["drop", "range"] = (
        "drop"  # by the largest fall between reports, as the paper
    )
    # does; or by all that a job is predicted to fall
    history: int = 40  # reports that a curve is fitted to, the latest
    decay: float = 0.85  # weight of a report against the one after it; paper: exponential
    worst_fit: float = 0.25  # residual, as a share of all that the loss fell, above which no curve
    # describes it, as it may be with losses that are not convex: then the job has its fair share
    efficiency_floor: float = 0.0  # no slots that make the speed-up per slot fall below; 0: off
    newcomers: float = 2.0  # times its fair share for a job with too few losses for a curve as yet
    margin: float = 0.25  # a slot moves to who gains so much more by it: every move costs steps
    quantum_s: float = 120.0  # turns, if not all can have their least; 0: the oldest run to the end
    most: int | None = None  # slots of one job
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        least = {
            "interval_s": 0.5,
            "quality": 0.01,
            "history": 3,
            "decay": 0.1,
            "worst_fit": 0.001,
            "efficiency_floor": 0.0,
            "newcomers": 1.0,
            "margin": 0.0,
            "quantum_s": 0.0,
        }
        refuse_below(self, least)
        most = {
            "interval_s": 3600.0,
            "quality": 0.999,
            "history": 1000,
            "decay": 1.0,
            "efficiency_floor": 1.0,
        }
        refuse_above(self, most)
        if self.most is not None:
            refuse_below(self, {"most": 1})
