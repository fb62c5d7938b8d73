"""The sizes of jobs that share slots: max-min fair shares, gangs by rank, backfill, and rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, Literal

from controlplane.policy.api import ClusterView, JobView, Plan
from controlplane.policy.placement.free_slots import Placer
from controlplane.policy.placement.slot_partition import (
    Partition,
    gang_size,
    reserve,
    slots_in_words,
    useful_slots,
)
from schemas.ids import JobId, Seconds


def shares(
    queue: Sequence[JobView], partition: Partition, room: int | None = None
) -> dict[JobId, int]:
    """Return the max-min fair number of slots of each job that gets any, in the order of `queue`.

    Jobs get their minimum in this order. Without `room`, the partition's room is distributed.
    """
    room = partition.room if room is None else room
    left = room
    jobs: list[JobView] = []
    for job in queue:
        if job.least <= left:
            jobs.append(job)
            left -= job.least
    if not jobs:
        return {}
    bounds = [(job.least, max(job.least, useful_slots(job, partition))) for job in jobs]
    level = _level(bounds, room)
    sizes = [min(max(level, low), high) for low, high in bounds]
    left = room - sum(sizes)
    could = [place for place, (low, high) in enumerate(bounds) if low <= level < high]
    could.sort(key=lambda place: (len(jobs[place].running_on) <= level, jobs[place].submitted_at))
    for place in could[:left]:
        sizes[place] += 1
    return {job.job: size for job, size in zip(jobs, sizes, strict=True)}


def _level(bounds: Sequence[tuple[int, int]], room: int) -> int:
    """Return the greatest share to which all jobs can be raised within their bounds and `room`."""
    low, high = 0, max(high for _, high in bounds)
    while low < high:
        middle = math.ceil((low + high) / 2)
        if sum(min(max(middle, least), most) for least, most in bounds) <= room:
            low = middle
        else:
            high = middle - 1
    return low


Rank = Callable[[JobView], tuple[str, dict[str, float]]]  # reason for a rank: words, numbers


def fit_gangs(partition: Partition, ranked: Iterable[JobView]) -> dict[JobId, int]:
    """Return the sizes of the gangs that run. A gang gets slots that earlier gangs leave."""
    left = partition.room
    sizes: dict[JobId, int] = {}
    for job in ranked:
        size = gang_size(job, partition)
        if size <= left:
            sizes[job.job] = size
            left -= size
    return sizes


def gang_plan(
    partition: Partition,
    sizes: Mapping[JobId, int],
    placer: Placer,
    rank: Rank,
    wake_at: Seconds | None = None,
) -> Plan:
    """Return the plan that runs gangs with these sizes; `rank` explains the rank of a job."""
    room = partition.room
    left = room - sum(sizes.values())

    def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        words, numbers = rank(job)
        if slots:
            return words, numbers
        needs = gang_size(job, partition)
        text = f"{words}; needs {slots_in_words(needs)}, those before it leave {left} of {room}"
        return text, {**numbers, "needs": float(needs), "left": float(left)}

    return placer.plan(partition, sizes, why, wake_at)


class RoundRobin:
    """Turns between jobs. After a quantum, a running job queues behind the waiting jobs.

    Thus no job starves. With a quantum of 0 there are no turns: the oldest jobs run to their end.
    """

    def __init__(self, quantum_s: float) -> None:
        self._quantum_s = quantum_s
        self._stays: dict[JobId, tuple[bool, Seconds]] = {}  # job -> (runs, since when)

    def follow(self, view: ClusterView, now: Seconds) -> None:
        """Record the time since which each job runs or waits; a change of size is no new start."""
        stays: dict[JobId, tuple[bool, Seconds]] = {}
        for name, job in view.jobs.items():
            runs = bool(job.running_on)
            ran, since = self._stays.get(name, (runs, job.moved_at))
            stays[name] = (runs, since if ran == runs else now)
        self._stays = stays

    def queue(self, partition: Partition) -> list[JobView]:
        """Return the jobs in the order in which they get their minimum."""
        by_arrival = sorted(
            (*partition.running, *partition.waiting), key=lambda job: job.submitted_at
        )
        if not self._quantum_s:
            return by_arrival

        def turn(job: JobView) -> tuple[int, float]:
            """Return a sort key: jobs within their quantum, then waiting jobs, then other jobs."""
            runs, since = self._stays[job.job]
            if not runs:
                return 1, since
            return (0 if partition.now < since + self._quantum_s else 2), 0.0

        return sorted(by_arrival, key=turn)

    def next_at(self, partition: Partition, served: Container[JobId]) -> Seconds | None:
        """Return when the first turn of a job in `served` ends, or None if no job waits."""
        jobs: Iterable[JobView] = (*partition.running, *partition.waiting)
        names = [job.job for job in jobs]
        if not self._quantum_s or all(name in served for name in names):
            return None
        ends = [
            (self._stays[name][1] if self._stays[name][0] else partition.now) + self._quantum_s
            for name in names
            if name in served
        ]
        later = [end for end in ends if end > partition.now]
        return Seconds(min(later)) if later else None


@dataclass(slots=True)
class BackfillQueue:
    """The sizes of the jobs that get slots, and the queue of the jobs that do not."""

    sizes: dict[JobId, int] = field(default_factory=dict)
    left: int = 0  # number of slots that stay free
    ahead: dict[JobId, int] = field(default_factory=dict)  # waiting job -> jobs before it
    before: dict[JobId, JobId] = field(default_factory=dict)  # started job -> job that it overtakes


def backfill_queue(
    partition: Partition, remaining_s: Callable[[JobView, int], float], *, backfill: bool
) -> BackfillQueue:
    """Return the queue in which running jobs stay and waiting gangs start in order of arrival.

    Backfill is EASY's (Lifka 1995): the first job that does not fit is promised slots for the
    moment at which running jobs will have left enough. A later job may overtake it if that job ends
    before this moment, or uses slots that are not needed at that moment. `remaining_s` may be
    infinite.
    """
    queue = BackfillQueue(
        {job.job: len(job.running_on) for job in partition.running}, partition.room
    )
    queue.left -= sum(queue.sizes.values())
    first: JobView | None = None  # first job that does not fit
    until, spare = 0.0, 0.0
    for job in sorted(partition.waiting, key=lambda job: job.submitted_at):
        size = gang_size(job, partition)
        if first is None and size > queue.left:
            first = job
            started = [one for one in partition.waiting if one.job in queue.sizes]
            jobs = [*partition.running, *partition.pinned, *started]
            held = [(one, queue.sizes.get(one.job, len(one.running_on))) for one in jobs]
            ends = sorted((remaining_s(one, slots), slots) for one, slots in held)
            found = reserve(ends, size - queue.left)
            until, spare = (found.at, found.spare) if math.isfinite(found.at) else (0.0, 0.0)
        fits = size <= queue.left and (first is None or backfill)
        is_short = fits and (first is None or remaining_s(job, size) <= until)
        if fits and (is_short or size <= spare) and job is not first:
            queue.sizes[job.job] = size
            queue.left -= size
            if first is not None:
                queue.before[job.job] = first.job
                spare -= 0 if is_short else size
        else:
            queue.ahead[job.job] = len(queue.ahead)
    return queue


Starts = Literal["at-once", "rounds"]  # when jobs that arrive between rounds start
GROUP_CHANGE_S: Final = 1.0  # duration of a group change; least round for young jobs


class Rounds:
    """Rule for when a round starts; repeated requests at one moment belong to one round.

    Sizes are fixed until the next round, unless no job of the last round is left. A fixed interval
    suits jobs of one length: where jobs last seconds, a minute is too long. Therefore a round may
    also be limited to a share of the jobs' mean age.

    Args:
        interval_s: longest round, seconds; 0: decide at every new moment, and for every new job.
        age_share: longest round as a share of the mean age of the jobs at its start; jobs that
            arrived later have age 0. With 0, `interval_s` always applies.
        starts: shortest round, in multiples of the mean duration of the jobs' last starts.
    """

    def __init__(self, interval_s: float, age_share: float = 0.0, starts: float = 0.0) -> None:
        self._interval_s = interval_s
        self._age_share = age_share
        self._starts = starts
        self._begun_at = Seconds(0.0)

    def is_due(self, partition: Partition, decided: Mapping[JobId, object]) -> bool:
        """True if sizes have to be decided again."""
        jobs: Container[JobId] = partition.view.jobs
        if not any(name in jobs for name in decided):
            return True
        if self._interval_s:
            return partition.now >= self._ends_at(partition)
        new = any(job.job not in decided for job in partition.waiting)
        return new or partition.now != self._begun_at

    def begin(self, now: Seconds) -> None:
        """Record that sizes are decided now."""
        self._begun_at = now

    def next_at(self, partition: Partition) -> Seconds | None:
        """Return when the next round is due, or None if there are no jobs or a round is due now."""
        at = self._ends_at(partition)
        return at if partition.view.jobs and at > partition.now else None

    def _ends_at(self, partition: Partition) -> Seconds:
        jobs = partition.view.jobs.values()
        length_s = self._interval_s
        if self._age_share and jobs:
            ages = [max(0.0, self._begun_at - job.submitted_at) for job in jobs]
            started = [job.start_s for job in jobs if job.start_s is not None]
            least_s = max(GROUP_CHANGE_S, self._starts * fmean(started or [0.0]))
            length_s = min(length_s, max(least_s, self._age_share * fmean(ages)))
        return Seconds(self._begun_at + length_s)


def fill_idle_slots(
    partition: Partition,
    targets: Mapping[JobId, int],
    fewest: Callable[[JobView], int] = lambda job: job.least,
) -> dict[JobId, int]:
    """Return sizes for jobs that wait between rounds and fit on idle, unassigned slots.

    Jobs start in order of arrival, each on the `fewest` slots on which it can train (0 if it cannot
    train). The next round can give them more slots.
    """
    left = partition.room
    for job in (*partition.running, *partition.waiting, *partition.leaving):
        left -= max(targets.get(job.job, 0), len(job.running_on))
    found: dict[JobId, int] = {}
    for job in sorted(partition.waiting, key=lambda job: (job.submitted_at, job.job)):
        size = fewest(job)
        if not targets.get(job.job) and 0 < size <= left:
            found[job.job] = size
            left -= size
    return found


def reschedulable(partition: Partition) -> list[JobView]:
    """Return the jobs that a round decides about, in the order of the view.

    A job that is leaving its slots restarts on the slots that the round gives it.
    """
    names = {job.job for job in (*partition.running, *partition.waiting, *partition.leaving)}
    return [job for name, job in partition.view.jobs.items() if name in names]


def fit_targets(
    partition: Partition, targets: Mapping[JobId, int], *, fixed_batches: bool = False
) -> dict[JobId, int]:
    """Return the sizes of the jobs that run now: their targets, as far as there is room.

    Jobs come in the view's order. A job shrinks at once; it grows or starts if all of its target
    fits. A running job without a target keeps its size. With `fixed_batches`, a changed size has at
    most one slot for each sample of the user's batch.
    """
    if fixed_batches:
        jobs = partition.view.jobs
        targets = {
            name: _within_batch(jobs[name], target, partition)
            for name, target in targets.items()
            if name in jobs
        }
    sizes: dict[JobId, int] = {}
    left = partition.room - sum(targets.get(job.job, 0) for job in partition.leaving)
    for job in partition.running:
        have = len(job.running_on)
        sizes[job.job] = min(have, targets.get(job.job, have))
        left -= sizes[job.job]
    for job in (*partition.running, *partition.waiting):
        target = targets.get(job.job, 0)
        further = target - sizes.get(job.job, 0)
        if 0 < further <= left:
            sizes[job.job] = target
            left -= further
    return {name: sizes[name] for name in partition.view.jobs if sizes.get(name)}


def _within_batch(job: JobView, target: int, partition: Partition) -> int:
    """Return the target, lowered so that each slot has a sample; a kept size is not lowered."""
    if target in {0, len(job.running_on)}:
        return target
    return min(target, max(job.least, useful_slots(job, partition)))
