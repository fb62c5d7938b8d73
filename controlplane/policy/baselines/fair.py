"""Equal shares: as many slots for everybody, as far as each can use them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.option_checks import refuse_below
from controlplane.policy.planning.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.planning.slot_placer import Mode, Moves, Placer, with_user_batches
from schemas.ids import JobId, Seconds


class FairOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `fair`, table `[policy.options]` of the controller's settings."""

    quantum_s: float = 0.0  # run in turns of so long if not all fit; 0: the oldest run to the end
    placement: Mode = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        refuse_below(self, {"quantum_s": 0.0})


class Fair(ImmediatePolicy):
    """Max-min fair shares of slots, all of them used; the batch stays that of the user.

    Every job gets its least, then the smallest shares are raised together. Slots that are left
    over go to jobs that have them already, then to the oldest.

    If not all can have their least, the oldest have it: each waits only for older ones to end.
    With `quantum_s` they take turns: one that ran so long goes behind those that wait, so that
    nobody starves even if others never end.
    """

    def __init__(self, options: FairOptions | None = None) -> None:
        """Begin with no job known.

        Args:
            options: of its settings; None for the defaults.
        """
        self.options = options or FairOptions()
        self._placer = Placer(self.options.placement, self.options.moves)
        self._stays: dict[JobId, tuple[bool, Seconds]] = {}  # whether it runs, and since when

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Share out what there is."""
        partition = partition_of(view, now)
        self._follow(view, now)
        sizes = shares(self._line(partition), partition)
        placed = self._placer.place(partition, sizes)

        def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
            numbers = {"jobs": float(len(sizes)), "room": float(partition.room)}
            if slots:
                return f"its share of {slots_in_words(partition.room)} among {len(sizes)}", numbers
            turn = "whose turn it is" if self.options.quantum_s else "that came before it"
            words = f"needs {slots_in_words(job.least)}, jobs {turn} leave no room for it"
            return words, {**numbers, "needs": float(job.least)}

        return compose_plan(
            partition,
            with_user_batches(partition, placed),
            why,
            restart=self._placer.restarts(partition, placed),
            wake_at=self._next_turn(partition, sizes),
        )

    # --- turns

    def _follow(self, view: ClusterView, now: Seconds) -> None:
        """Since when jobs run or wait; other than `moved_at`, a new size does not count."""
        stays: dict[JobId, tuple[bool, Seconds]] = {}
        for name, job in view.jobs.items():
            runs = bool(job.running_on)
            was, since = self._stays.get(name, (runs, job.moved_at))
            stays[name] = (runs, since if was == runs else now)
        self._stays = stays

    def _line(self, partition: Partition) -> list[JobView]:
        """Jobs in the order in which they are given their least."""
        by_arrival = sorted(
            (*partition.running, *partition.waiting), key=lambda job: job.submitted_at
        )
        if not self.options.quantum_s:
            return by_arrival
        fresh, tired, waiting = [], [], []
        for job in by_arrival:
            runs, since = self._stays[job.job]
            if not runs:
                waiting.append(job)
            elif partition.now < since + self.options.quantum_s:
                fresh.append(job)
            else:
                tired.append(job)
        waiting.sort(key=lambda job: self._stays[job.job][1])
        return [*fresh, *waiting, *tired]

    def _next_turn(self, partition: Partition, sizes: dict[JobId, int]) -> Seconds | None:
        """When the turn of somebody is over for whom others wait."""
        waits = any(job.job not in sizes for job in (*partition.running, *partition.waiting))
        if not self.options.quantum_s or not waits:
            return None
        ends = [
            (self._stays[name][1] if self._stays[name][0] else partition.now)
            + self.options.quantum_s
            for name in sizes
        ]
        later = [end for end in ends if end > partition.now]
        return Seconds(min(later)) if later else None


def shares(line: Sequence[JobView], partition: Partition) -> dict[JobId, int]:
    """Slots of each job that has some, in the order of the line.

    Args:
        line: jobs in the order in which they are given their least.
        partition: how many slots there are.
    """
    left = partition.room
    jobs: list[JobView] = []
    for job in line:
        if job.least <= left:
            jobs.append(job)
            left -= job.least
    if not jobs:
        return {}
    bounds = [(job.least, max(job.least, useful_slots(job, partition))) for job in jobs]
    level = _level(bounds, partition.room)
    sizes = [min(max(level, low), high) for low, high in bounds]
    left = partition.room - sum(sizes)
    could = [place for place, (low, high) in enumerate(bounds) if low <= level < high]
    could.sort(key=lambda place: (len(jobs[place].running_on) <= level, jobs[place].submitted_at))
    for place in could[:left]:
        sizes[place] += 1
    return {job.job: size for job, size in zip(jobs, sizes, strict=True)}


def _level(bounds: Sequence[tuple[int, int]], room: int) -> int:
    """The greatest share that all can be raised to within their bounds and the room."""
    low, high = 0, max(high for _, high in bounds)
    while low < high:
        middle = math.ceil((low + high) / 2)
        if sum(min(max(middle, least), most) for least, most in bounds) <= room:
            low = middle
        else:
            high = middle - 1
    return low
