"""Optimus: each slot goes to the job that saves the most time by it (Peng et al., EuroSys '18)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    ImmediatePolicy,
    JobEnded,
    JobView,
    Oracle,
    Plan,
    PolicyEvent,
)
from controlplane.policy.options import OptimusOptions
from controlplane.policy.placement.placers import make_placer
from controlplane.policy.placement.sizes import Rounds, fill_idle_slots, fit_targets, reschedulable
from controlplane.policy.placement.slot_partition import Partition, partition_of, useful_slots
from controlplane.policy.search.observed_jobs import ObservedJobs
from controlplane.prediction.lengths import LossCurve, fit_loss
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds

MAX_LOSSES: Final = 200


class LengthEstimates(ObservedJobs):
    """Remaining steps and step times; lengths may come from the convergence of losses.

    A job ends before the first epoch that reduces its loss by less than the share `convergence`.
    """

    def __init__(self, convergence: float) -> None:
        super().__init__()
        self._convergence = convergence
        self._losses: dict[JobId, dict[int, float]] = {}  # epoch -> loss
        self._curves: dict[JobId, LossCurve | None] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Learn speeds, losses, and the lengths of jobs that ended."""
        super().observe(event)
        if isinstance(event, EpochSeen) and event.train_loss is not None and event.epoch:
            losses = self._losses.setdefault(event.job, {})
            losses[event.epoch] = event.train_loss
            if len(losses) > MAX_LOSSES:
                del losses[min(losses)]
            self._curves.pop(event.job, None)
        elif isinstance(event, JobEnded):
            self._losses.pop(event.job, None)
            self._curves.pop(event.job, None)

    def remaining_steps(self, job: JobView) -> float:
        """Return the number of remaining steps with the user's batch.

        The stated work is used if there is any, else the steps until the loss converges (Optimus
        section 3.1), else the estimate of the base class.
        """
        curve = self._curve(job.job) if job.stop_samples is None else None
        if curve is not None and job.epoch_samples:
            epochs = max(1.0, curve.converged_at(self._convergence) - job.epoch)
            return epochs * job.epoch_samples / job.batch_size
        return super().remaining_steps(job)

    def _curve(self, job: JobId) -> LossCurve | None:
        if job not in self._curves:
            losses = self._losses.get(job, {})
            self._curves[job] = fit_loss(list(losses), list(losses.values()))
        return self._curves[job]


MIN_ROUND_STARTS: Final = 5.0  # shortest round, in starts, so that restarts cost a fifth at most


class Optimus(ImmediatePolicy):
    """Policy of marginal gains (section 4.1): each slot goes where it saves most time.

    Every job gets its minimum first. Another slot saves (step(n) - step(n + 1)) times the remaining
    steps. Sizes are decided in rounds and are fixed in between. In the paper, an arriving job waits
    for the next round, ten minutes at most. Here it starts at once if slots are idle, and rounds
    are shorter while jobs are young.

    The paper has parameter servers, and measures a new job at several sizes before it starts. Here
    workers exchange gradients in a ring, and a job is measured while it trains. Until then the
    speed of its family is used, or a speed-up of r^0.9.

    Raises:
        SettingsError: if `remaining` is "oracle" and there is no oracle.
    """

    def __init__(self, options: OptimusOptions | None = None, oracle: Oracle | None = None) -> None:
        self.options = options or OptimusOptions()
        self._estimates = LengthEstimates(self.options.convergence)
        self._lengths: LengthEstimates | Oracle = self._estimates
        if self.options.remaining == "oracle":
            if oracle is None:
                field = "policy.options.remaining"
                problem = f"{field}: no cluster has an oracle that knows how long jobs will last"
                raise SettingsError(problem, "choose fit, or use `ones sim`", field)
            self._lengths = oracle
        self._placer = make_placer(self.options.placer, self.options.moves)
        starts = MIN_ROUND_STARTS if self.options.moves == "restart" else 0.0
        self._rounds = Rounds(self.options.interval_s, self.options.age_share, starts)
        self._targets: dict[JobId, int] = {}  # slots of each job in the last round

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and loss curves from `event`."""
        self._placer.observe(event, now)
        self._estimates.observe(event)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the sizes of the last or a new round, as far as there is room for them now."""
        partition = partition_of(view, now)
        if self._rounds.is_due(partition, self._targets):
            self._targets = share(
                reschedulable(partition), partition, self._lengths, self.options.most
            )
            self._rounds.begin(now)
        elif self.options.starts == "at-once":
            self._targets |= fill_idle_slots(partition, self._targets)
        sizes = fit_targets(partition, self._targets, fixed_batches=True)
        ascending = dict(sorted(sizes.items(), key=lambda entry: entry[1]))
        return self._placer.plan(partition, ascending, self._why, self._rounds.next_at(partition))

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target = self._targets.get(job.job)
        if target is None:
            return "sizes are chosen again in the next round", {}
        steps = self._lengths.remaining_steps(job)
        numbers = {"remaining_steps": steps, "target": float(target)}
        if not slots:
            if target:
                return f"its {target} slots are not free yet", numbers
            return "every slot saves other jobs more time", numbers
        numbers["step_s"] = self._lengths.step_s(job, slots)
        return f"about {steps * numbers['step_s']:.0f} s left on them", numbers


def share(
    jobs: Sequence[JobView],
    partition: Partition,
    lengths: LengthEstimates | Oracle,
    most: int | None,
) -> dict[JobId, int]:
    """Return the number of slots of each job in one round, at most `most`; 0: it waits.

    `jobs` are in order of arrival, which decides ties.
    """
    left = partition.room
    sizes: dict[JobId, int] = {}
    heap: list[tuple[float, int]] = []  # (minus the gain, place)
    by_least = sorted(jobs, key=lambda job: job.least)
    steps = [lengths.remaining_steps(job) for job in by_least]
    caps = [min(useful_slots(job, partition), most or job.most) for job in by_least]

    def gain(place: int) -> float:
        job, size = by_least[place], sizes[by_least[place].job]
        if size >= caps[place]:
            return 0.0
        return (lengths.step_s(job, size) - lengths.step_s(job, size + 1)) * steps[place]

    for place, job in enumerate(by_least):
        fits = job.least <= left
        sizes[job.job] = job.least if fits else 0
        if fits:
            left -= job.least
            heap.append((-gain(place), place))
    heapify(heap)
    while left and heap:
        loss, place = heappop(heap)
        if loss >= 0:
            break
        sizes[by_least[place].job] += 1
        left -= 1
        heappush(heap, (-gain(place), place))
    return sizes
