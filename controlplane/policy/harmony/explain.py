"""Why a job is where it is: what its neighbours cost it, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.policy.api import JobView
from controlplane.policy.harmony.migrations import Migration
from controlplane.policy.planning.arrival_line import Line
from controlplane.policy.planning.interference.occupancy import Occupancy
from controlplane.policy.planning.interference.speed_shares import SpeedShares
from controlplane.policy.planning.slot_partition import Partition, gang_size, slots_in_words
from schemas.ids import JobId

NAMED: Final = 3  # neighbours in a sentence
WORTH_NAMING: Final = 0.005  # share of its speed


@dataclass(frozen=True, slots=True)
class Explainer:
    """One plan, and what it was chosen by."""

    partition: Partition
    line: Line
    where: Occupancy  # by this plan
    present: Occupancy
    shares: SpeedShares
    migration: Migration | None
    dropped: Mapping[str, float]  # a speed of each family that nobody can have

    def why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        """The reason for a job's place, or for its wait."""
        words, numbers = self._placed(job, slots) if slots else self._waits(job)
        if job.family in self.dropped:
            speed = self.dropped[job.family]
            words += f"; its family reported {speed:g} samples/s, which is not counted"
        return words, numbers

    def _placed(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        words, numbers = self._beside(job.job, self.where)
        if job.job in self.line.before:
            words += f"; it delays {self.line.before[job.job]} by nothing"
        if len(job.running_on) > slots:
            words = f"it has moved, and {words}"
        moved = self.migration
        if moved is None or job.job not in moved.layouts:
            return words, numbers
        then = numbers["speed_share"]
        before, old = self._beside(job.job, self.present)
        others = [name for name in moved.layouts if name != job.job]
        trades = f"trades places with {others[0]}: " if others else ""
        gained = f"all together gain {moved.gain:.2f} of a job's speed"
        words = f"{trades}{words} (until now it {before}); {gained}"
        numbers |= {"speed_share_before": old["speed_share"], "gain": moved.gain,
                    "worth_s": moved.worth_s, "speed_share": then}  # fmt: skip
        return words, numbers

    def _waits(self, job: JobView) -> tuple[str, dict[str, float]]:
        needs, ahead = gang_size(job, self.partition), self.line.ahead.get(job.job, 0)
        numbers = {"needs": float(needs), "left": float(self.line.left), "ahead": float(ahead)}
        behind = f", behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
        return (
            f"needs {slots_in_words(needs)}, {slots_in_words(self.line.left)} free{behind}",
            numbers,
        )

    def _beside(self, job: JobId, where: Occupancy) -> tuple[str, dict[str, float]]:
        """What it keeps of its speed, and which neighbours cost it the rest."""
        share = self.shares.share(job, where)
        costs = self._costs(job, where, share)
        numbers = {
            "speed_share": share,
            **{f"cost_of_{name}": cost for name, cost in costs.items()},
        }
        if len(where.nodes[job]) == 1 and not where.neighbours(job):
            return "has its node to itself", numbers
        keeps = f"keeps {share:.0%} of its speed"
        named = [f"{name} costs it {cost:.0%}" for name, cost in costs.items()][:NAMED]
        return ": ".join([keeps, ", ".join(named)]) if named else keeps, numbers

    def _costs(self, job: JobId, where: Occupancy, share: float) -> Mapping[JobId, float]:
        """What it would gain if a neighbour were not there, the largest first."""
        costs: dict[JobId, float] = {}
        for other in where.neighbours(job):
            layout = where.nodes[other]
            where.take(other)
            cost = self.shares.share(job, where) - share
            where.put(other, layout)
            if cost >= WORTH_NAMING:
                costs[other] = cost
        return dict(sorted(costs.items(), key=lambda entry: -entry[1]))
