"""The one migration that gains most: to free slots, or a job in the place of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.policy.api import JobView
from controlplane.policy.harmony.options import HarmonyOptions
from controlplane.policy.planning.interference.best_layout import LayoutSearch
from controlplane.policy.planning.interference.occupancy import Layout, Occupancy
from controlplane.policy.planning.interference.speed_shares import SpeedShares, all_shares, gain_of
from schemas.ids import JobId, NodeId, Seconds

LOOKED_AT: Final = 6  # jobs that lose most together with what they cost others
PARTNERS: Final = 30  # that each of them may trade with
START_S: Final = 20.0  # of a job whose start nobody measured
CLOSE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Migration:
    """Where jobs go, and what that is worth."""

    layouts: Mapping[JobId, Layout]
    gain: float  # in the sum of normalised speeds
    worth_s: float  # seconds of training at full speed that it saves, less what it costs


class Migrations:
    """Looks for a migration in one schedule.

    Args:
        jobs: that may be moved, by their ids.
        where: everybody is, or will be by this plan.
        free: slots on each node that nobody has by this plan.
        now: seconds on the controller's clock.
    """

    def __init__(
        self,
        jobs: Mapping[JobId, JobView],
        where: Occupancy,
        free: Mapping[NodeId, int],
        *,
        shares: SpeedShares,
        options: HarmonyOptions,
        now: Seconds,
    ) -> None:
        self._jobs, self._where, self._free = jobs, where, free
        self._shares, self._options, self._now = shares, options, now
        self._speeds = all_shares(where, shares)

    def best(self) -> Migration | None:
        """The one that is worth most; None if none pays."""
        if self._options.migrations == "none":
            return None
        settled = [
            name for name, job in self._jobs.items()
            if self._now - job.moved_at >= self._options.settle_s - CLOSE
        ]  # fmt: skip
        worst = sorted(settled, key=self._lost, reverse=True)[:LOOKED_AT]
        found = [one for name in worst if self._lost(name) > self._options.margin
                 for one in self._of(name, settled)]  # fmt: skip
        return max(found, key=lambda one: one.worth_s, default=None)

    def _lost(self, name: JobId) -> float:
        """What would be gained if the job were nowhere, and had its own speed alone."""
        return 1.0 + gain_of({name: {}}, self._where, self._shares, self._speeds)

    def _of(self, name: JobId, partners: list[JobId]) -> Iterator[Migration]:
        options = self._options
        if any(self._free.values()):
            elsewhere = {name: self._elsewhere(name)}
            found = self._judged(elsewhere, aside=None)
            if found is not None:
                yield found
        if options.migrations == "swap":
            mine = self._where.nodes[name]
            apart = [one for one in partners if self._where.nodes[one] != mine and one != name]
            for other in apart[:PARTNERS]:
                for trade in _trades(name, other, self._where):
                    found = self._judged(trade, aside=other)
                    if found is not None:
                        yield found

    def _elsewhere(self, name: JobId) -> Layout:
        """The best place among free slots and its own."""
        before = self._where.nodes[name]
        free = Counter(self._free) + Counter(before)
        self._where.take(name)
        size = sum(before.values())
        layout = LayoutSearch(free, self._where, self._shares).best(name, size)
        self._where.put(name, before)
        return layout

    def _judged(self, layouts: dict[JobId, Layout], aside: JobId | None) -> Migration | None:
        """The migration, if it pays."""
        if all(self._where.nodes[name] == layout for name, layout in layouts.items()):
            return None
        gain = gain_of(layouts, self._where, self._shares, self._speeds)
        if gain <= self._options.margin:
            return None
        lasts_s = min(self._remaining_s(self._jobs[name]) for name in layouts)
        worth_s = gain * lasts_s - self._cost_s(layouts, aside)
        return Migration(layouts, gain, worth_s) if worth_s > 0.0 else None

    def _cost_s(self, layouts: Mapping[JobId, Layout], aside: JobId | None) -> float:
        """Seconds of training that moving costs; where no slot is free, one of two has to pause."""
        costs = [self._options.stall_s for _ in layouts]
        if aside is not None:
            starts = [self._jobs[name].start_s for name in layouts]
            costs.append(min(START_S if one is None else one for one in starts))
        return sum(costs)

    def _remaining_s(self, job: JobView) -> float:
        """How long it still trains: as stated, else as long as it did already."""
        if job.stop_samples is not None and job.samples_per_s > 0.0:
            return max(0.0, job.stop_samples - job.samples_done) / job.samples_per_s
        return job.ran_s + max(0.0, self._now - job.moved_at)


def _trades(one: JobId, other: JobId, where: Occupancy) -> Iterator[dict[JobId, Layout]]:
    """Each way in which two jobs can trade as many workers of one node as both have there."""
    mine, its = where.nodes[one], where.nodes[other]
    for here, many in mine.items():
        for there, as_many in its.items():
            if here != there:
                both = min(many, as_many)
                yield {one: _moved(mine, here, there, both), other: _moved(its, there, here, both)}


def _moved(layout: Layout, start: NodeId, end: NodeId, many: int) -> dict[NodeId, int]:
    then = Counter(layout)
    then[start] -= many
    then[end] += many
    return {node: workers for node, workers in then.items() if workers > 0}
