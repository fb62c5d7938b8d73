"""What can be chosen about Tiresias."""

from __future__ import annotations

import math

import msgspec

from controlplane.policy.option_checks import refuse, refuse_below
from controlplane.policy.planning.placer import Mode


class TiresiasOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `tiresias`, table `[policy.options]` of the controller's settings."""

    limits: tuple[float, ...] = (3250.0, 7200.0)  # slot seconds at which a job leaves each queue
    promote_after: float = 0.0  # times as long waited as run: back to the first queue; 0: never
    placement: Mode = "consolidate"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        refuse_below(self, {"promote_after": 0.0})
        if not self.limits:
            refuse("limits", "there is none", "give at least one, in slot seconds")
        if not all(math.isfinite(limit) and limit > 0 for limit in self.limits):
            refuse("limits", f"{list(self.limits)} are not all above 0", "give slot seconds")
        if any(high <= low for low, high in zip(self.limits, self.limits[1:], strict=False)):
            refuse("limits", f"{list(self.limits)} do not rise", "give them in rising order")
