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
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, Seconds
from schemas.sharing import Sharing

MAX_HALF_LIVES: Final = 64.0  # since `_base`; 2^((t - base) / H) must not overflow
ROUNDING: Final = 1e-9  # of the slots of an account


class Ledgers:
    """Reader of a state that returns ledgers. It only visits jobs that have changed."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rules = Sharing()  # when the latest ledger was made
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
        for name in jobs:
            if name in self._state.active:
                self._stale[name] = None
            else:
                self._stale.pop(name, None)
                self._forget(name)

    def refresh(self) -> Turns[None]:
        """Visit changed jobs, so that the next ledger has less to do."""
        for name in list(self._stale):
            yield
            if name in self._stale:
                del self._stale[name]
                self._update(name, self._rules)

    def ledger(self, now: Seconds) -> Ledger:
        """Return the usage of accounts, and their slots that views of elastic jobs do not show."""
        state, rules = self._state, self._state.sharing or Sharing()
        if rules != self._rules or abs(now - self._base) > MAX_HALF_LIVES * rules.half_life_s:
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
            began_at=dict(state.began_at),
            holders=dict(self._holders),
            classes=dict(self._classes),
            ranks={name: rank for name, rank in ranks.items() if rank},
        )

    def _update(self, name: JobId, rules: Sharing) -> None:
        state = self._state
        self._forget(name)
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

    def _forget(self, name: JobId) -> None:
        if (account := self._accounts.pop(name, None)) is None:
            return
        self._holding[account].pop(name, None)
        if not self._holding[account]:
            del self._holding[account]
        self._sums.pop(account, None)
        self._holders.pop(name, None)
        self._classes.pop(name, None)

    def _usage(self, now: Seconds, half_life_s: float) -> dict[str, float]:
        """Return the usage of each account.

        The usage of jobs that hold s_j slots since t_j is, by `slot_seconds`,
        H / ln 2 (sum s_j - 2^(-now / H) sum s_j 2^(t_j / H)). The sums change only with the jobs.
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
            # Without the bound, rounding would decide between accounts that have just begun.
            held = slots - shrink * weight
            held = held * half_life_s / math.log(2.0) if held > ROUNDING * slots else 0.0
            found[account] = found.get(account, 0.0) + held
        return {account: found[account] for account in sorted(found)}  # sums must not vary
