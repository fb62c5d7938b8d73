"""What can be chosen about `drl`."""

from __future__ import annotations

import msgspec

from controlplane.policy.drl.actor import read_actor_model
from controlplane.policy.option_checks import LEAST_ROUND_S, refuse_above, refuse_below
from controlplane.policy.planning.placers import PlacerName
from controlplane.policy.planning.slot_placer import Moves


class DrlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model's file; none: the one that ships
    interval_s: float = 5.0  # a round: sizes are chosen at most so often
    one_job: bool = True  # re-scheduled in each round, as the paper says of DRL; else any number
    preempt: bool = False  # whether a running job may be stopped; the paper: no
    most: int | None = None  # slots of one job
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Refuse what makes no sense, and a model that cannot be used."""
        refuse_below(self, {"interval_s": LEAST_ROUND_S})
        refuse_above(self, {"interval_s": 3600.0})
        if self.most is not None:
            refuse_below(self, {"most": 1})
        if self.model is not None:
            read_actor_model(self.model)
