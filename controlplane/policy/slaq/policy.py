"""SLAQ: slots go where the loss is expected to fall most (Zhang et al., SoCC '17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest

import numpy as np
from msgspec.structs import replace

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    ImmediatePolicy,
    JobEnded,
    JobView,
    Plan,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.options import SlaqOptions
from controlplane.policy.placement.placers import make_placer
from controlplane.policy.placement.sizes import RoundRobin, shares
from controlplane.policy.placement.slot_partition import (
    Partition,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.slaq.observed_jobs import ObservedJobs, SizeGains
from schemas.ids import JobId, Seconds


def allocate(
    gains: SizeGains,
    bounds: Sequence[tuple[int, int]],
    have: Sequence[int],
    room: int,
    margin: float,
) -> list[int]:
    """Return the number of slots of each job, starting from the current sizes.

    Excess slots are removed where they are missed least, and free slots go where they gain most.
    Then slots move one by one to the job that gains more. Without a margin this is the paper's
    greedy choice (each job starts with its minimum), if no slot of a job gains more than the one
    before it. With a margin, jobs keep sizes that are nearly as good.

    Args:
        gains: gain of each slot; a slot without gain is not assigned.
        bounds: minimum and maximum slots of each job; all minimums fit.
        have: current slots of each job; 0 for a job that starts.
        margin: share by which the gain of a move must exceed the loss.
    """
    exchange = _Exchange(gains, bounds, have)
    left = room - sum(exchange.sizes)
    while left < 0:
        _, giver = exchange.giver()
        exchange.change(giver, -1)
        left += 1
    while left > 0:
        gained, taker = exchange.taker()
        if gained <= 0.0:
            break
        exchange.change(taker, 1)
        left -= 1
    while True:
        (gained, taker), (lost, giver) = exchange.taker(), exchange.giver()
        if gained <= 0.0 or gained <= (1.0 + margin) * lost or taker == giver:
            return exchange.sizes
        exchange.change(giver, -1)
        exchange.change(taker, 1)


class _Exchange:
    """The heaps of all jobs' gains from one more slot, and of their losses from one slot fewer."""

    def __init__(
        self, gains: SizeGains, bounds: Sequence[tuple[int, int]], have: Sequence[int]
    ) -> None:
        self._gains, self._bounds = gains, bounds
        self.sizes = [
            min(max(now, low), high) for now, (low, high) in zip(have, bounds, strict=True)
        ]
        self._takers: list[tuple[float, int, int]] = []  # (minus the gain, row, size)
        self._givers: list[tuple[float, int, int]] = []  # (loss, row, size)
        for row in range(len(bounds)):
            self._push(row)

    def taker(self) -> tuple[float, int]:
        """Return the largest gain from one more slot, and its row; (0, -1) if there is none."""
        loss, row = self._first(self._takers)
        return (-loss, row) if row >= 0 else (0.0, -1)

    def giver(self) -> tuple[float, int]:
        """Return the least loss from one slot fewer, and its row; (inf, -1) if there is none."""
        return self._first(self._givers)

    def change(self, row: int, by: int) -> None:
        """Add `by` slots (1 or -1) to the job in `row`."""
        self.sizes[row] += by
        self._push(row)

    def _push(self, row: int) -> None:
        size, (least, most) = self.sizes[row], self._bounds[row]
        if size < most:
            heappush(self._takers, (-self._gains.step(row, size), row, size))
        if size > least:
            heappush(self._givers, (self._gains.step(row, size - 1), row, size))

    def _first(self, heap: list[tuple[float, int, int]]) -> tuple[float, int]:
        """Return the value and row of the first entry that is not outdated."""
        while heap and self.sizes[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return heap[0][:2] if heap else (float("inf"), -1)


@dataclass(frozen=True, slots=True)
class SlaqDecision:
    """The sizes of jobs, and the facts that explain them."""

    sizes: dict[JobId, int]  # sizes of jobs that have slots, in the order of the queue
    room: int  # number of slots for all jobs
    shared: dict[JobId, str]  # jobs with a fair share -> why they have no curve
    forecast: Forecast  # for the jobs with curves

    def why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        """Return the reason for a job's size, in words and numbers."""
        if not slots:
            words = f"needs {slots_in_words(job.least)}, jobs whose turn it is leave no room for it"
            return words, {"room": float(self.room), "needs": float(job.least)}
        if job.job in self.shared:
            numbers = {"room": float(self.room), "jobs": float(len(self.sizes))}
            share = f"its share of {slots_in_words(self.room)} among {len(self.sizes)}"
            return f"{share}, since {self.shared[job.job]}", numbers
        return self.forecast.why(job.job)


class Forecast:
    """Expected effect of chosen sizes, and of one more slot for each job, on losses."""

    def __init__(self, jobs: Sequence[JobId], gains: SizeGains, sizes: Sequence[int]) -> None:
        self._jobs, self._gains, self._sizes = jobs, gains, sizes
        self._rows = {job: row for row, job in enumerate(jobs)}
        chosen = np.array(sizes, dtype=np.int64)
        self._then = gains.losses_then(chosen)
        self._shares = gains.shares(self._then)
        self._more = gains.shares(gains.losses_then(chosen + 1)) - self._shares
        self._next = [gains.step(row, size) for row, size in enumerate(sizes)]
        self._first_two = nlargest(2, range(len(jobs)), key=self._next.__getitem__)

    def losses(self) -> dict[JobId, float]:
        """Return the expected loss of each job at the end of the next scheduling epoch."""
        return dict(zip(self._jobs, self._then.tolist(), strict=True))

    def why(self, job: JobId) -> tuple[str, dict[str, float]]:
        """Return the reason for a job's size; it names the other job that would gain most."""
        gains, row = self._gains, self._rows[job]
        size = self._sizes[row]
        numbers = {
            "loss": float(gains.loss_now[row]),
            "predicted_loss": float(self._then[row]),
            "limit": float(gains.limit[row]),
            "share_of_rest": float(self._shares[row]),
            "gain": gains.step(row, size - 1) if size > 1 else gains.of(row, 1),
        }
        words = (
            f"the next {gains.options.interval_s:.0f} s are expected to lower its loss"
            f" by {_percent(numbers['share_of_rest'])} of what is left"
        )
        for rival in self._first_two:
            if rival != row:
                more = float(self._more[rival])
                numbers |= {"rival_share_of_rest": more, "rival_gain": self._next[rival]}
                other = f"by one more slot {self._jobs[rival]} would gain {_percent(more)}"
                return f"{words}; {other}", numbers
        return words, numbers


def decide(
    queue: Sequence[JobView], partition: Partition, observed: ObservedJobs, options: SlaqOptions
) -> SlaqDecision:
    """Return the sizes for one scheduling epoch.

    Jobs without a curve get fair shares; other jobs get slots by predicted gain. Jobs get their
    minimum in the order of `queue`.
    """
    equal = shares(queue, partition)
    served = [partition.view.jobs[name] for name in equal]
    without = observed.no_curve(served)
    shared = [job for job in served if job.job in without]
    curved = [job for job in served if job.job not in without]
    gains = observed.gains(curved, partition.now)
    room = partition.room - sum(equal[job.job] for job in shared)
    spare = room - sum(job.least for job in curved)
    ahead = _newcomer_slots(
        [job for job in shared if observed.is_new(job)], equal, spare, partition, options
    )
    room -= sum(ahead.values())
    bounds = [_bounds(job, row, partition, gains, options) for row, job in enumerate(curved)]
    bounds = _without_recent_shrinks(curved, bounds, partition.now - options.interval_s, room)
    have = [len(job.running_on) for job in curved]
    found = allocate(gains, bounds, have, room, options.margin)
    sizes = {job.job: size for job, size in zip(curved, found, strict=True)}
    sizes |= shares(shared, partition, partition.room - sum(found) - sum(ahead.values()))
    for name, more in ahead.items():
        sizes[name] += more
    return SlaqDecision(
        sizes={name: sizes[name] for name in equal},
        room=partition.room,
        shared=without,
        forecast=Forecast([job.job for job in curved], gains, found),
    )


def _newcomer_slots(
    jobs: Sequence[JobView],
    equal: Mapping[JobId, int],
    spare: int,
    partition: Partition,
    options: SlaqOptions,
) -> dict[JobId, int]:
    """Return the slots that new jobs get beyond their fair shares, by job."""
    ahead: dict[JobId, int] = {}
    for place, job in enumerate(jobs):
        share = equal[job.job]
        most = min(useful_slots(job, partition), round(options.newcomers * share))
        ahead[job.job] = max(0, min(most - share, spare // (len(jobs) - place)))
        spare -= ahead[job.job]
    return ahead


def _bounds(
    job: JobView, row: int, partition: Partition, gains: SizeGains, options: SlaqOptions
) -> tuple[int, int]:
    most = max(job.least, min(useful_slots(job, partition), options.most or job.most))
    if options.efficiency_floor > 0.0:
        most = max(job.least, gains.efficient(row, most))
    return job.least, most


def _without_recent_shrinks(
    jobs: Sequence[JobView], bounds: Sequence[tuple[int, int]], since: float, room: int
) -> list[tuple[int, int]]:
    """Return bounds that do not let jobs changed after `since` shrink.

    If the minimums of these bounds exceed `room`, return `bounds`.
    """
    held = [
        (len(job.running_on), most)
        if job.moved_at > since and least <= len(job.running_on) <= most
        else (least, most)
        for job, (least, most) in zip(jobs, bounds, strict=True)
    ]
    return held if sum(least for least, _ in held) <= room else list(bounds)


def _percent(share: float) -> str:
    """Return a share as a percentage with two digits, such as 0.35%, 3.5% and 35%."""
    return f"{100.0 * share:.2g}%"


class Slaq(ImmediatePolicy):
    """Policy that maximises the sum of normalised loss reductions in the next scheduling epoch.

    Every job gets its minimum. Then each slot goes to the job with the largest predicted reduction
    of the loss by this slot. If the losses of a job follow no curve, the job gets its fair share.
    See the README of this folder.
    """

    def __init__(self, options: SlaqOptions | None = None) -> None:
        self.options = options or SlaqOptions()
        self._observed = ObservedJobs(self.options)
        self._placer = make_placer(self.options.placer)
        self._round_robin = RoundRobin(self.options.quantum_s)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn losses and speeds from `event`."""
        self._placer.observe(event, now)
        match event:
            case EpochSeen() | StepsSeen():
                self._observed.observe(event, now)
            case JobEnded():
                self._observed.forget(event.job)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the plan for one scheduling epoch, starting from the current sizes."""
        partition = partition_of(view, now)
        self._round_robin.follow(view, now)
        decision = decide(
            self._round_robin.queue(partition), partition, self._observed, self.options
        )
        wake_at = self._round_robin.next_at(partition, decision.sizes)
        if view.jobs:
            next_epoch = Seconds(now + self.options.interval_s)
            wake_at = next_epoch if wake_at is None else min(wake_at, next_epoch)
        plan = self._placer.plan(partition, decision.sizes, decision.why, wake_at)
        return replace(plan, predicted_loss=decision.forecast.losses())
