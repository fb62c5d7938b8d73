"""Usage of slots by account, with exponential decay."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import HOLDING
from schemas.ids import Seconds


class Usage(msgspec.Struct, kw_only=True):
    """Slot seconds of an account that ended intervals of constant slots have used."""

    value: float = 0.0  # decayed to `at`
    at: Seconds = Seconds(0.0)

    def add(self, slots: int, begin: Seconds, end: Seconds, half_life_s: float) -> None:
        """Add `slots` held from `begin` to `end`. Intervals may overlap, and end in order."""
        self.value = decayed(self.value, end - self.at, half_life_s)
        self.value += slot_seconds(slots, end - begin, half_life_s)
        self.at = end


def decayed(value: float, elapsed_s: float, half_life_s: float) -> float:
    """Return a usage after `elapsed_s` seconds."""
    return value * math.exp2(-max(0.0, elapsed_s) / half_life_s)


def slot_seconds(slots: int, held_s: float, half_life_s: float) -> float:
    """Return the decayed usage of slots held for the last `held_s` seconds.

    It is the integral of slots 2^(-t / H): slots H / ln 2 (1 - 2^(-held_s / H)).
    """
    share = -math.expm1(-math.log(2.0) * max(0.0, held_s) / half_life_s)
    return slots * half_life_s / math.log(2.0) * share


def charge(usage: dict[str, Usage], job: Job, now: Seconds, half_life_s: float) -> None:
    """Charge the job's account for the slots that the job has held since its last change."""
    if job.phase in HOLDING and now > job.accounting.since:
        account = usage.setdefault(job.account, Usage())
        account.add(len(job.held_slots()), job.accounting.since, now, half_life_s)


def usage_now(
    usage: Mapping[str, Usage], jobs: list[Job], now: Seconds, half_life_s: float
) -> dict[str, float]:
    """Return the usage of each account at `now`, with the slots that `jobs` hold."""
    found = {
        account: decayed(one.value, now - one.at, half_life_s) for account, one in usage.items()
    }
    for job in jobs:
        if job.phase in HOLDING:
            held = slot_seconds(len(job.held_slots()), now - job.accounting.since, half_life_s)
            found[job.account] = found.get(job.account, 0.0) + held
    return found
