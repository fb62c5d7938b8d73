"""What can be chosen about the goodput policy."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.policy.option_checks import LEAST_ROUND_S, refuse, refuse_above, refuse_below
from controlplane.policy.planning.placers import PlacerName
from controlplane.policy.planning.scheduling_rounds import Starts
from controlplane.policy.planning.slot_placer import Moves

RESTART_S: Final = 30.0  # delta of the paper, where a job of another size starts from a checkpoint
ELASTIC_S: Final = 1.0  # what a change stalls a job that trains on meanwhile


class GoodputOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `goodput`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 60.0  # between rounds, as in the paper; 0: whenever it is asked
    age_share: float = 0.5  # of the jobs' mean age, that a round lasts at most; 0: `interval_s`
    starts: Starts = "at-once"  # of who comes between rounds: on idle slots, or in the next round
    share_family: bool = False  # learn speeds from jobs of the same family too; Pollux does not
    power: float = -1.0  # p of the mean of speed-ups: the lower, the fairer
    growth: float = 2.0  # times the most slots that a job has had, at most
    reallocation_s: float | None = None  # delta: cost of a re-allocation; None: as it is made
    batch_margin: float = 0.05  # of its goodput, that a new batch on the same slots must bring
    batches_per_doubling: int = 2  # that are tried between a job's first batch and its limit
    noise_scale_prior: float = 4.0  # times the job's first batch, until it reports one
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if 0.0 < self.interval_s < LEAST_ROUND_S:
            refuse("interval_s", f"{self.interval_s} is too short", f"give 0, or {LEAST_ROUND_S}")
        refuse_below(
            self,
            {
                "interval_s": 0.0,
                "power": -10.0,
                "age_share": 0.0,
                "growth": 1.0,
                "batch_margin": 0.0,
                "batches_per_doubling": 1,
                "noise_scale_prior": 0.01,
            },
        )
        refuse_above(self, {"power": 1.0, "age_share": 10.0})
        if self.reallocation_s is not None:
            refuse_below(self, {"reallocation_s": 0.0})

    @property
    def change_s(self) -> float:
        """Seconds that a re-allocation is taken to cost: as given, else by how jobs change."""
        if self.reallocation_s is not None:
            return self.reallocation_s
        return ELASTIC_S if self.moves == "elastic" else RESTART_S
