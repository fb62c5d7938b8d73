"""What can be chosen about Harmony."""

from __future__ import annotations

from typing import Literal

import msgspec

from controlplane.policy.option_checks import refuse_above, refuse_below


class HarmonyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `harmony`, table `[policy.options]` of the controller's settings."""

    slowdowns: Literal["learnt", "oracle"] = "learnt"  # "oracle": in a simulation only
    prior: float = 0.3  # share of its speed that a job is believed to lose by a neighbour, at first
    ridge: float = 0.5  # measurements that this belief weighs
    spread: float = 0.1  # the same, for being on several nodes
    migrations: Literal["none", "free", "swap"] = "swap"  # to free slots; also in place of others
    backfill: bool = True  # start a job before one that waits for more slots, if that delays nobody
    settle_s: float = 60.0  # in its place, before a job is moved
    margin: float = 0.05  # sum of normalised speeds that a move has to gain at least
    stall_s: float = 5.0  # training time that a move is taken to cost; a pause costs the last start

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        least = {
            "prior": 0.0, "ridge": 1e-3, "spread": 0.0, "settle_s": 0.0, "margin": 0.0,
            "stall_s": 0.0,
        }  # fmt: skip
        refuse_below(self, least)
        refuse_above(self, {"prior": 0.95, "spread": 0.95, "ridge": 1e3, "settle_s": 1e6})
