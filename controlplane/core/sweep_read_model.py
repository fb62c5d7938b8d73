"""What happened in sweeps: their ledger and the epochs of their trials; no decision looks at it."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.ids import Seconds
from schemas.messages.client import LedgerUnit

KEPT_TIMES: Final = 64  # of late units


class TrialHistory(msgspec.Struct, kw_only=True):
    """One trial's past."""

    metrics: list[dict[str, float]] = []  # of its own epochs
    ended_at: list[Seconds] = []  # of these
    why: str = ""  # it ended
    state_bytes: int = 0  # of its newest state


class SweepHistory(msgspec.Struct, kw_only=True):
    """One sweep's past."""

    units: list[LedgerUnit] = []  # that count, in the order in which they ended
    trials: dict[int, TrialHistory] = {}
    late_s: list[float] = []  # of the latest units
    units_again: int = 0
    hopped_bytes: int = 0
    waited_s: float = 0.0
    trained_s: float = 0.0

    def trial(self, number: int) -> TrialHistory:
        """The past of a trial; empty if nothing happened to it yet.

        Args:
            number: what is returned for an unknown one is not kept.
        """
        return self.trials.get(number) or TrialHistory()

    def unit_begun(self, trial: int, waited_s: float, *, hops: bool) -> None:
        """A unit has its state.

        Args:
            hops: it came from another process or node.
        """
        self.waited_s += waited_s
        if hops:
            self.hopped_bytes += self.trial(trial).state_bytes

    def unit_ended(self, unit: LedgerUnit, size: int, *, again: bool) -> None:
        """A unit came to its end.

        Args:
            size: of the state that it left, bytes.
        """
        self.late_s.append(unit.seconds)
        del self.late_s[:-KEPT_TIMES]
        self.trained_s += unit.seconds
        self._open(unit.trial).state_bytes = size
        if again:
            self.units_again += 1
        else:
            self.units.append(unit)

    def epoch_ended(self, trial: int, metrics: dict[str, float], now: Seconds) -> None:
        """An epoch of a trial is over."""
        history = self._open(trial)
        history.metrics.append(metrics)
        history.ended_at.append(now)

    def trial_ended(self, trial: int, why: str) -> None:
        """A trial trains no further.

        Args:
            why: in words; the first word counts.
        """
        history = self._open(trial)
        history.why = history.why or why

    def _open(self, trial: int) -> TrialHistory:
        return self.trials.setdefault(trial, TrialHistory())
