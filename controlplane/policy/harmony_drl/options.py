"""What can be chosen about Harmony's learned placement."""

from __future__ import annotations

import msgspec

from controlplane.policy.harmony_drl.model import load


class HarmonyDrlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `harmony-drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model's file; none: the one that ships
    backfill: bool = True  # start a job before one that waits for more slots, if that delays nobody
    learn: bool = True  # the reward model goes on learning from the speeds that jobs report
    explore: bool = False  # nodes by chance, as probable as the policy says; else the best
    seed: int = 0  # of that chance

    def __post_init__(self) -> None:
        """Refuse a model that cannot be used."""
        if self.model is not None:
            load(self.model)
