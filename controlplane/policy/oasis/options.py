"""What can be chosen about the policy that admits jobs."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.policy.option_checks import LEAST_ROUND_S, refuse, refuse_above, refuse_below
from controlplane.policy.planning.placers import PlacerName

LEAST_PRICE: Final = 1e-12  # value per slot second


class OasisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `oasis`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 30.0  # one time slot of the paper: sizes are planned for each
    horizon: int = 240  # intervals that are planned ahead
    u: float | None = None  # U, value per slot second; None: estimated from the jobs seen
    l: float | None = None  # noqa: E741 - L, the same
    window: int = 200  # jobs that U and L are estimated from, the latest
    margin: float = 0.1  # of the time to go: a promise is so much later, or else an interval
    start_s: float = 20.0  # that a start, or a start after a pause, is planned to take
    measured_at_once: int = 16  # slots of the cluster for each job that may run to be measured
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        refuse_below(
            self,
            {
                "interval_s": LEAST_ROUND_S,
                "horizon": 2,
                "window": 2,
                "margin": 0.0,
                "start_s": 0.0,
                "measured_at_once": 1,
            },
        )
        refuse_above(self, {"horizon": 5000, "window": 100_000, "margin": 10.0})
        for name in ("u", "l"):
            value = getattr(self, name)
            if value is not None and not LEAST_PRICE <= value < float("inf"):
                refuse(name, f"{value} is no price", "give a value per slot second above 0")
        if self.u is not None and self.l is not None and self.u < self.l:
            refuse("u", f"{self.u} is below l, {self.l}", "raise the first or lower the second")
