"""Slots that accounts hold and have used, kept up to date from one input to the next."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

from controlplane.core.model.job_phases import HOLDING
from controlplane.core.model.usage import decayed
from controlplane.core.state import State
from controlplane.policy.sharing.caps import Ledger
from schemas.ids import JobId, Seconds
from schemas.sharing import Sharing

MAX_HALF_LIVES: Final = 64.0  # from `_base` until now, because 2^t / H must not overflow


class Ledgers:
    """Source of ledgers of a state. It only reads the state, and visits jobs that have changed."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rules: Sharing | None = None  # at the latest ledger
        self._restart(Seconds(0.0))

    def _restart(self, now: Seconds) -> None:
        """Forget everything, because any job may have changed."""
        self._rules = self._state.sharing or Sharing()
        self._stale = dict(self._state.active)
        self._base = now  # times in `_sums` are relative to it
        self._accounts: dict[JobId, str] = {}  # of the jobs below
        self._holding: dict[str, dict[JobId, tuple[int, Seconds]]] = defaultdict(dict)
        self._sums: dict[str, tuple[int, float]] = {}  # see `_usage`
        self._holders: dict[JobId, tuple[str, int]] = {}
        self._classes: dict[JobId, str] = {}
        self._overridden: set[JobId] = set()

    def touch(self, jobs: Mapping[JobId, None]) -> None:
        """Mark jobs as possibly changed."""
        self._stale |= jobs

    def ledger(self, now: Seconds) -> Ledger:
        """Return the usage of accounts, and what views of elastic jobs do not show of them."""
        state, rules = self._state, self._state.sharing or Sharing()
        if rules != self._rules or now - self._base > MAX_HALF_LIVES * rules.half_life_s:
            self._restart(now)
        if state.overrides.keys() != self._overridden:
            self._stale |= dict.fromkeys(state.overrides.keys() ^ self._overridden)
            self._overridden = set(state.overrides)
        for name in self._stale:
            self._update(name, rules)
        self._stale = {}
        outside = Counter[str]()
        for account, many in self._holders.values():
            outside[account] += many
        ranks = {name: rules.classes[one].rank for name, one in self._classes.items()}
        return Ledger(
            usage=self._usage(now, rules.half_life_s),
            outside=outside,
            began_at=state.began_at,
            holders=dict(self._holders),
            classes=dict(self._classes),
            ranks={name: rank for name, rank in ranks.items() if rank},
        )

    def _update(self, name: JobId, rules: Sharing) -> None:
        state = self._state
        if (account := self._accounts.pop(name, None)) is not None:
            self._holding[account].pop(name, None)
            self._sums.pop(account, None)
            self._holders.pop(name, None)
            self._classes.pop(name, None)
        if name not in state.active:
            return
        job = state.jobs[name]
        self._accounts[name] = account = job.account
        self._sums.pop(account, None)
        if job.phase in HOLDING:
            self._holding[account][name] = len(job.held_slots()), job.accounting.since
        if (name in state.rigid or name in state.overrides) and (many := len(job.members())):
            self._holders[name] = account, many
        if (known := job.spec.stated_class) in rules.classes:
            self._classes[name] = known

    def _usage(self, now: Seconds, half_life_s: float) -> dict[str, float]:
        """Return the usage of each account.

        Jobs that hold s_j slots since t_j add H / ln 2 (sum s_j - 2^(-now / H) sum s_j 2^(t_j / H))
        to it, as in `slot_seconds`. The sums change only with the jobs.
        """
        found = {
            account: decayed(one.value, now - one.at, half_life_s)
            for account, one in self._state.usage.items()
        }
        shrink = math.exp2((self._base - now) / half_life_s)
        for account, jobs in self._holding.items():
            if account not in self._sums:
                weights = [
                    slots * math.exp2((since - self._base) / half_life_s)
                    for slots, since in jobs.values()
                ]
                self._sums[account] = sum(slots for slots, _ in jobs.values()), math.fsum(weights)
            slots, weight = self._sums[account]
            held = max(0.0, slots - shrink * weight) * half_life_s / math.log(2.0)
            if jobs:
                found[account] = found.get(account, 0.0) + held
        return found
