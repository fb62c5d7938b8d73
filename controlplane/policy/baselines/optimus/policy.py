"""Optimus: one more slot to the job that it saves most time (Peng et al., EuroSys '18)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from controlplane.policy.api import ClusterView, JobView, Oracle, Plan, PolicyEvent
from controlplane.policy.baselines.optimus.options import OptimusOptions
from controlplane.policy.baselines.optimus.remaining_steps import Estimates
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.planning.placers import placer_of
from controlplane.policy.planning.scheduling_rounds import (
    Rounds,
    fill_idle_slots,
    fit_targets,
    reschedulable,
)
from controlplane.policy.planning.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    useful_slots,
)
from controlplane.policy.planning.slot_placer import with_user_batches
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds

STARTS_IN_A_ROUND: Final = 5.0  # times a start: restarts cost a fifth of a round at most


class Lengths(Protocol):
    """How long jobs will last; an oracle knows, a cluster has to guess."""

    def remaining_steps(self, job: JobView) -> float:
        """Steps that it has left at its user's batch."""
        ...

    def step_s(self, job: JobView, slots: int) -> float:
        """Seconds of one of these on so many slots."""
        ...


class Optimus(ImmediatePolicy):
    """Marginal gains (section 4.1): every job its least, then slot by slot where it saves most.

    What another slot saves is (step(n) - step(n + 1)) times the steps left. Sizes are decided in
    rounds and hold in between. Paper: a job that arrives waits for the next round, ten minutes at
    most. Here it starts at once where slots are idle, and rounds are shorter where jobs are young.

    The paper has parameter servers, and measures a new job at several sizes before it begins.
    Here workers exchange gradients among themselves, and a job is measured while it trains; until
    then its relatives' speed counts, or a speed-up of r^0.9.
    """

    def __init__(self, options: OptimusOptions | None = None, oracle: Oracle | None = None) -> None:
        """Begin with nothing learnt; the first plan begins a round.

        Args:
            options: of its settings; None for the defaults.
            oracle: knows how long jobs last; needed, and asked, only with `remaining` "oracle".

        Raises:
            SettingsError: if `remaining` is "oracle" and there is none.
        """
        self.options = options or OptimusOptions()
        self._estimates = Estimates(self.options.convergence)
        self._lengths: Lengths = self._estimates
        if self.options.remaining == "oracle":
            if oracle is None:
                field = "policy.options.remaining"
                what = f"{field}: no cluster has an oracle that knows how long jobs will last"
                raise SettingsError(what, "choose fit, or use `ones sim`", field)
            self._lengths = oracle
        self._placer = placer_of(self.options.placer, self.options.moves)
        starts = STARTS_IN_A_ROUND if self.options.moves == "restart" else 0.0
        self._rounds = Rounds(self.options.interval_s, self.options.age_share, starts)
        self._targets: dict[JobId, int] = {}  # slots of each job of the last round

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and loss curves."""
        self._placer.observe(event, now)
        self._estimates.observe(event)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """The sizes of the last round, as far as there is room for them by now."""
        partition = partition_of(view, now)
        if self._rounds.is_due(partition, self._targets):
            self._targets = share(
                reschedulable(partition), partition, self._lengths, self.options.most
            )
            self._rounds.begin(now)
        elif self.options.starts == "at-once":
            self._targets |= fill_idle_slots(partition, self._targets)
        sizes = fit_targets(partition, self._targets, fixed_batches=True)
        ascending = sorted(sizes.items(), key=lambda entry: entry[1])
        placed = self._placer.place(partition, dict(ascending))
        return compose_plan(
            partition,
            with_user_batches(partition, placed),
            self._why,
            restart=self._placer.restarts(partition, placed),
            wake_at=self._rounds.next_at(partition),
        )

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target = self._targets.get(job.job)
        if target is None:
            return "sizes are chosen again in the next round", {}
        steps = self._lengths.remaining_steps(job)
        numbers = {"remaining_steps": steps, "target": float(target)}
        if not slots:
            if target:
                return f"its {target} slots are not free yet", numbers
            return "every slot saves others more time", numbers
        numbers["step_s"] = self._lengths.step_s(job, slots)
        return f"about {steps * numbers['step_s']:.0f} s left on them", numbers


def share(
    jobs: Sequence[JobView], partition: Partition, lengths: Lengths, most: int | None
) -> dict[JobId, int]:
    """One round: slots of each job, 0 for those that have to wait.

    Args:
        jobs: in order of arrival, which decides between equal gains.
        most: slots of one job; None: no more than it allows.
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
