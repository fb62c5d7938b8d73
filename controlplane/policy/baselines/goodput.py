"""Goodput: sizes and batches chosen together, as in Pollux (Qiao et al., OSDI '21)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

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
from controlplane.policy.options import GoodputOptions
from controlplane.policy.placement.placers import make_placer
from controlplane.policy.placement.sizes import Rounds, fill_idle_slots, fit_targets, reschedulable
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    with_batch,
)
from controlplane.policy.search.cluster_index import ClusterIndexCache
from controlplane.policy.search.observed_families import FamilyRecord
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.throughput import SpeedModel, statistical_efficiency
from schemas.ids import JobId, Seconds, SlotId, node_of

MIN_SPEEDUP: Final = 1e-3  # speed-up of a job without slots; keeps its term finite
PRICE_STEPS: Final = 60  # bisection steps in the search for the price of a slot


@dataclass(frozen=True, slots=True)
class JobBounds:
    """The limits of a job's slots and batches."""

    first_batch: int  # global, samples per step
    batch_limit: int
    local_limit: int
    most: int  # most slots
    widest: int  # number of slots of the largest node


@dataclass(frozen=True, slots=True)
class GoodputTable:
    """Best batch, and its goodput, on 1, 2, ... slots that are close together."""

    batches: IntArray  # shape (N,), samples per step; 0: no valid batch
    goodputs: FloatArray  # shape (N,), samples/s times efficiency relative to the first batch

    @property
    def fewest(self) -> int:
        """Smallest number of slots with a valid batch, or 1 if there is none."""
        return 1 + int(np.argmax(self.goodputs > 0))

    @property
    def speedups(self) -> FloatArray:
        """Goodput relative to that on the fewest slots, shape (N,), or 0 without a valid batch."""
        least = float(self.goodputs[self.fewest - 1])
        return self.goodputs / least if least else np.zeros_like(self.goodputs)


def goodput_table(
    model: SpeedModel, bounds: JobBounds, noise_scale: float, per_doubling: int
) -> GoodputTable:
    """Return, for each size, the batch of a grid with the greatest goodput (Pollux eq. 6-8)."""
    batches = _grid(bounds.first_batch, bounds.batch_limit, per_doubling)
    slots = np.arange(1, bounds.most + 1)[:, None]
    each = goodputs(model, bounds, slots, batches[None, :], noise_scale)
    best = each.argmax(axis=1)
    value = each[np.arange(bounds.most), best]
    return GoodputTable(batches=np.where(value > 0, batches[best], 0), goodputs=value)


def goodputs(
    model: SpeedModel,
    bounds: JobBounds,
    slots: IntArray,
    batches: IntArray,
    noise_scale: float,
    *,
    nodes: int | None = None,
) -> FloatArray:
    """Return effective samples/s (speed times efficiency), shape (..., B); 0 for invalid batches.

    `slots` has shape (..., 1), and `batches` (1, B). If `nodes` is None, the job has as few nodes
    as possible.
    """
    local = np.ceil(batches / slots)
    spans = -(-slots // bounds.widest) if nodes is None else np.full_like(slots, nodes)
    steps = model.step_s(
        np.broadcast_to(spans, local.shape), np.broadcast_to(slots, local.shape), local
    )
    efficiency = statistical_efficiency(batches.astype(np.float64), bounds.first_batch, noise_scale)
    fits = (local <= bounds.local_limit) & (batches >= slots)
    return np.where(fits, batches / steps * efficiency, 0.0)


def utilities(speedups: FloatArray, power: float) -> FloatArray:
    """Return one term per speed-up. Their sum is largest where the power mean is largest.

    Pollux eq. 17 is (1/J sum s^p)^(1/p), the geometric mean for p = 0. Speed-ups below
    `MIN_SPEEDUP` are raised to this value.
    """
    bounded = np.maximum(speedups, MIN_SPEEDUP)
    if power == 0:
        return np.log(bounded)
    return np.asarray(np.sign(power) * np.power(bounded, power))


def best_sizes(value: Sequence[FloatArray], room: int) -> list[int]:
    """Return the number of slots of each job that maximises the total value.

    At a common price per slot each job chooses its most valuable size. The price is the lowest at
    which there are enough slots. The remaining slots then go where they add most. Pollux searches
    whole placements with a genetic algorithm. This search is deterministic, and optimal except for
    the last few slots. `value` has the values of 0, 1, ... slots of each job, -inf for sizes not
    allowed.
    """
    if not value:
        return []
    widest = max(map(len, value))
    table = np.full((len(value), widest), -np.inf)
    for row, values in enumerate(value):
        table[row, : len(values)] = values
    counts = np.arange(widest)
    sizes = table.argmax(axis=1)
    if sizes.sum() > room:
        gains = (table[:, 1:] - table[:, :1]) / counts[1:]
        low, high = 0.0, 1.0 + max(0.0, float(gains.max(initial=0.0)))
        sizes = np.zeros_like(sizes)
        for _ in range(PRICE_STEPS):
            price = (low + high) / 2
            asked = (table - price * counts).argmax(axis=1)
            if asked.sum() > room:
                low = price
            else:
                high, sizes = price, asked
    return _fill_up(table, [int(size) for size in sizes], room)


def _fill_up(table: FloatArray, sizes: list[int], room: int) -> list[int]:
    """Return the sizes after giving the remaining slots to the jobs that gain most."""
    left = room - sum(sizes)

    def next_gain(row: int) -> tuple[float, int, int]:
        """Return minus the greatest gain per further slot, the row, and the number of slots."""
        size = sizes[row]
        further = table[row, size + 1 : size + 1 + left]
        if not len(further):
            return 0.0, row, 0
        gains = (further - table[row, size]) / np.arange(1, len(further) + 1)
        best = int(gains.argmax())
        return -float(gains[best]), row, best + 1

    heap = [next_gain(row) for row in range(len(sizes))]
    heapify(heap)
    while left and heap:
        loss, row, more = heappop(heap)
        if loss >= 0:
            break
        if more <= left:
            sizes[row] += more
            left -= more
        heappush(heap, next_gain(row))
    return sizes


def _grid(first: int, limit: int, per_doubling: int) -> IntArray:
    """Return the batches from `first` to `limit` in equal ratios, both included."""
    many = int(np.ceil(np.log2(max(limit, first) / first) * per_doubling))
    steps = np.exp2(np.arange(many) / per_doubling) * first
    return np.unique(np.append(np.floor(steps).astype(np.int64), max(limit, first)))


NOISE_SMOOTHING: Final = 0.3  # weight of the newest noise scale in telemetry


@dataclass(slots=True)
class _JobHistory:
    slots: frozenset[SlotId] = frozenset()  # latest slots
    most: int = 0  # most slots so far
    changes: int = 0  # number of changes of slots, starts included


@dataclass(frozen=True, slots=True)
class _Target:
    slots: int
    batch: int
    speedup: float  # speed-up relative to `fewest` slots
    fewest: int = 1  # smallest number of slots on which the job can train
    packed: bool = False  # True: move to fewer nodes at the same size


class Goodput(ImmediatePolicy):
    """Policy that maximises a mean of the jobs' speed-ups in goodput.

    Goodput is speed times statistical efficiency. The speed of a job is learnt from its own reports
    (with `share_family` also from its family's), and the efficiency from the noise of its
    gradients. The best batch is found for every size. Sizes are then chosen for all jobs together,
    in rounds.

    Departures from Pollux: marginal values decide sizes instead of a genetic algorithm. The shared
    placer decides placements. A new job may have its minimum. If a job keeps its slots, its batch
    changes only if this gains enough.
    """

    def __init__(self, options: GoodputOptions | None = None) -> None:
        self.options = options or GoodputOptions()
        self._placer = make_placer(self.options.placer, self.options.moves)
        self._rounds = Rounds(self.options.interval_s, self.options.age_share)
        self._clusters = ClusterIndexCache()
        self._speeds: dict[str, FamilyRecord] = {}
        self._noise_scales: dict[JobId, float] = {}  # smoothed values from telemetry
        self._histories: dict[JobId, _JobHistory] = {}
        self._tables: dict[JobId, tuple[object, GoodputTable]] = {}
        self._targets: dict[JobId, _Target] = {}

    # --- the policy's methods

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and, while epochs run, noise scales, as Pollux' agents do."""
        self._placer.observe(event, now)
        match event:
            case EpochSeen():
                if event.whole:
                    self._speed(event.job, event.family).observe_speed(event)
            case StepsSeen():
                self._speed(event.job, event.family).observe_speed(event)
                self._observe_noise(event.job, event.noise_scale)
            case JobEnded():
                self._histories.pop(event.job, None)
                self._tables.pop(event.job, None)
                self._speeds.pop(f"job {event.job}", None)
                self._noise_scales.pop(event.job, None)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the sizes of the last or a new round, as far as there is room for them now."""
        partition = partition_of(view, now)
        self._follow(view)
        if self._rounds.is_due(partition, self._targets):
            self._targets = self._round(partition)
            self._rounds.begin(now)
        elif self.options.starts == "at-once":
            self._fill(partition)
        sizes = fit_targets(partition, self._slots_of_targets())
        largest_first = dict(sorted(sizes.items(), key=lambda entry: -entry[1]))
        placed = self._placer.place(partition, largest_first, self._packed(partition, sizes))
        return compose_plan(
            partition,
            {name: self._local_batches(view.jobs[name], slots) for name, slots in placed.items()},
            self._why,
            restart=self._placer.restarts(partition, placed),
            wake_at=self._rounds.next_at(partition),
        )

    def _packed(self, partition: Partition, sizes: dict[JobId, int]) -> set[JobId]:
        """Return the running jobs that may move as a whole to fewer nodes.

        A job cannot move if its batch is too small for its old and new slots together.
        """
        held = [(job, len(job.running_on), sizes.get(job.job, 0)) for job in partition.running]
        packed = {name for name, target in self._targets.items() if target.packed}
        return {
            job.job
            for job, have, size in held
            if size > have or (size == have and job.job in packed)
            if size + have <= job.batch_limit
        }

    # --- measurements

    def _speed(self, job: JobId, family: str) -> FamilyRecord:
        key = f"family {family}" if family and self.options.share_family else f"job {job}"
        return self._speeds.setdefault(key, FamilyRecord())

    def _observe_noise(self, job: JobId, reported: float | None) -> None:
        """Update the smoothed noise scale, in logarithms because it spans orders of magnitude."""
        if reported is not None and math.isfinite(reported) and reported > 0.0:
            before = self._noise_scales.get(job, reported)
            self._noise_scales[job] = before * (reported / before) ** NOISE_SMOOTHING

    def _follow(self, view: ClusterView) -> None:
        """Record changes of the jobs' slots; a repeated view changes nothing."""
        for name in [name for name in self._histories if name not in view.jobs]:
            del self._histories[name]
            self._tables.pop(name, None)
        for name, job in view.jobs.items():
            history = self._histories.setdefault(name, _JobHistory())
            slots = frozenset(job.running_on)
            history.changes += bool(slots) and slots != history.slots
            history.slots = slots
            history.most = max(history.most, len(slots))

    def _noise_scale(self, job: JobView) -> float:
        """Return the noise scale by telemetry, else by epochs, else by the prior."""
        known = self._noise_scales.get(job.job, job.noise_scale)
        if known is None or not math.isfinite(known):
            return self.options.noise_scale_prior * job.batch_size
        return max(0.0, known)

    # --- a round

    def _round(self, partition: Partition) -> dict[JobId, _Target]:
        jobs = sorted(reschedulable(partition), key=lambda job: job.submitted_at)
        known = [(job, *self._known(job, partition)) for job in jobs]
        sizes = best_sizes([self._value(*each, partition.now) for each in known], partition.room)
        return {
            each[0].job: self._target(*each, size, partition.now)
            for each, size in zip(known, sizes, strict=True)
        }

    def _slots_of_targets(self) -> dict[JobId, int]:
        return {name: target.slots for name, target in self._targets.items()}

    def _fill(self, partition: Partition) -> None:
        """Start waiting jobs on idle slots between rounds, as Pollux' scheduler also does."""

        def fewest(job: JobView) -> int:
            table = self._known(job, partition)[1]
            return max(job.least, table.fewest) if table.batches.any() else 0

        filled = fill_idle_slots(partition, self._slots_of_targets(), fewest)
        for name, size in filled.items():
            job = partition.view.jobs[name]
            bounds, table = self._known(job, partition)
            self._targets[name] = self._target(job, bounds, table, size, partition.now)

    def _known(self, job: JobView, partition: Partition) -> tuple[JobBounds, GoodputTable]:
        """Return bounds and table: at most `growth` times the most slots so far (section 4.2.1)."""
        grown = int(self.options.growth * self._histories[job.job].most)
        needs = -(-job.batch_size // max(1, job.local_limit))
        first = max(job.least, needs, grown)
        most = min(job.most, len(partition.view.slots), job.batch_limit, first)
        bounds = JobBounds(
            first_batch=job.batch_size,
            batch_limit=job.batch_limit,
            local_limit=job.local_limit,
            most=max(1, most, len(job.running_on)),
            widest=self._clusters.of(partition.view).widest,
        )
        return bounds, self._table(job, bounds)

    def _table(self, job: JobView, bounds: JobBounds) -> GoodputTable:
        """Return the cached table of a job; compute it again if its inputs have changed."""
        speed = self._speed(job.job, job.family)
        model, noise_scale = speed.speed_model(job.batch_size), self._noise_scale(job)
        key = (speed.edition, bounds, noise_scale)
        known = self._tables.get(job.job)
        if known is None or known[0] != key:
            table = goodput_table(model, bounds, noise_scale, self.options.batches_per_doubling)
            known = self._tables[job.job] = (key, table)
        return known[1]

    def _value(
        self, job: JobView, bounds: JobBounds, table: GoodputTable, now: Seconds
    ) -> FloatArray:
        """Return the value of 0, 1, ... slots, minus the cost of the change (Pollux eq. 16)."""
        speedups = np.append(0.0, table.speedups)
        have = len(job.running_on)
        if have:
            stays = speedups[have] * self._spread(job, bounds, table)
            speedups = speedups * self._share_kept(job, now)
            speedups[have] = max(stays, speedups[have])
        value = utilities(speedups, self.options.power)
        value[1:][table.batches == 0] = -np.inf
        value[1 : job.least] = -np.inf
        return value

    def _spread(self, job: JobView, bounds: JobBounds, table: GoodputTable) -> float:
        """Return the goodput on the current nodes, divided by that on as few nodes as possible."""
        have, nodes = len(job.running_on), len({node_of(slot) for slot in job.running_on})
        batch = int(table.batches[have - 1])
        if not batch or nodes == -(-have // bounds.widest):
            return 1.0
        model = self._speed(job.job, job.family).speed_model(job.batch_size)
        slots, batches = np.array([[have]]), np.array([[batch]])
        current = goodputs(model, bounds, slots, batches, self._noise_scale(job), nodes=nodes)
        return float(current[0, 0] / table.goodputs[have - 1])

    def _share_kept(self, job: JobView, now: Seconds) -> float:
        """Return (T - R delta) / (T + delta): the part of age T that R + 1 re-allocations leave."""
        age = max(0.0, now - job.submitted_at)
        cost = self.options.change_s
        if not cost:
            return 1.0
        return max(0.0, (age - self._histories[job.job].changes * cost) / (age + cost))

    def _target(
        self, job: JobView, bounds: JobBounds, table: GoodputTable, size: int, now: Seconds
    ) -> _Target:
        """Return the target at this size; keep the batch if another batch gains too little."""
        if not size:
            return _Target(0, 0, 0.0)
        batch = int(table.batches[size - 1])
        present = sum(job.running_on.values())
        if size == len(job.running_on) and batch != present:
            model = self._speed(job.job, job.family).speed_model(job.batch_size)
            both = np.array([[present, batch]])
            current, then = goodputs(
                model, bounds, np.array([[size]]), both, self._noise_scale(job)
            )[0]
            if then <= current * (1 + self.options.batch_margin):
                batch = present
        packed = size == len(job.running_on) and self._share_kept(job, now) > (
            self._spread(job, bounds, table) * (1 + self.options.batch_margin)
        )
        speedup = float(table.speedups[size - 1])
        return _Target(size, batch, speedup, table.fewest, packed)

    # --- results

    def _local_batches(self, job: JobView, slots: list[SlotId]) -> dict[SlotId, int]:
        target = self._targets.get(job.job)
        if target is None or target.slots != len(slots):
            return dict(job.running_on)
        return with_batch(job, target.batch, slots)

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target = self._targets.get(job.job)
        if target is None:
            return "sizes are chosen again in the next round", {}
        noise_scale = self._noise_scale(job)
        numbers = {
            "target": float(target.slots),
            "batch_then": float(target.batch),
            "speedup": target.speedup,
            "noise_scale": noise_scale,
        }
        if slots:
            fewest = "one slot" if target.fewest == 1 else f"{target.fewest} slots"
            words = f"expected: {target.speedup:.2f} x the goodput of {fewest}"
            return f"{words}, with batch {target.batch}", numbers
        if target.slots:
            return f"its {target.slots} slots are not free yet", numbers
        return "every slot is worth more to other jobs", numbers
