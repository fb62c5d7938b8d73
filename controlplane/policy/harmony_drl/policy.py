"""`harmony-drl`: a network places gangs where jobs disturb each other least (INFOCOM 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    JobView,
    Plan,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.harmony_drl.explain import Explained, explain, waits
from controlplane.policy.harmony_drl.gang_placement import Choose, best, place_gang, sampled
from controlplane.policy.harmony_drl.model import TrainedModel, load
from controlplane.policy.harmony_drl.options import HarmonyDrlOptions
from controlplane.policy.harmony_drl.reported_speeds import ReportedSpeeds
from controlplane.policy.harmony_drl.situation import Classes, Situation, situation
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.planning.arrival_line import line_of
from controlplane.policy.planning.slot_partition import (
    compose_plan,
    gang_size,
    partition_of,
)
from controlplane.policy.planning.slot_placer import with_user_batches
from schemas.ids import JobId, Seconds

if TYPE_CHECKING:
    from numpy.random import Generator


class HarmonyDrl(ImmediatePolicy):
    """Places gangs of the wanted size in order of arrival, worker by worker; moves nobody.

    See the README of this room.
    """

    def __init__(
        self, options: HarmonyDrlOptions | None = None, model: TrainedModel | None = None
    ) -> None:
        """Load the model.

        Args:
            options: of its settings; None for the defaults.
            model: to decide by; None: the one that the options name.

        Raises:
            SettingsError: if the model cannot be used.
        """
        self.options = options or HarmonyDrlOptions()
        trained = model or load(self.options.model)
        self._actor = trained.actor
        self._reports = ReportedSpeeds(trained.reward)
        self._classes = Classes(trained.families)
        self._seen: Situation | None = None  # the last view

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a speed, if the job is where the last view showed it."""
        match event:
            case StepsSeen() | EpochSeen() if self.options.learn and self._seen is not None:
                if isinstance(event, EpochSeen) and not event.whole:
                    return
                shared = self._seen.shared
                job = shared.jobs.get(event.job)
                if job is None or (job.size, len(job.workers)) != (event.slots, event.nodes):
                    return
                key = _key(event.family, event.slots, event.global_batch)
                self._reports.add(shared, event.job, key, event.samples_per_s)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Take note of who is where, and let the reward model learn."""
        self._reports.learn()
        self._seen = situation(view, self._reports.model, self._classes)
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Keep what runs; place who is next in line, as long as there is room."""
        partition = partition_of(view, now)
        here = situation(view, self._reports.model, self._classes)
        room = int(here.shared.free.sum())
        placed = {job.job: list(job.running_on) for job in partition.running}
        partition.room = room + sum(map(len, placed.values()))  # nobody waits for who leaves
        line = line_of(partition, self._remaining_s, backfill=self.options.backfill)
        explained: dict[JobId, Explained] = {}
        for name, size in line.sizes.items():
            if name not in placed:
                here.shared.add(name, self._classes.number(view.jobs[name].family), size)
                choose = self._choose(name, view.version)
                choices = place_gang(here.shared, self._actor, name, choose)
                placed[name] = here.take([choice.node for choice in choices])
                explained[name] = explain(choices, here.nodes)

        def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
            if slots:
                one = explained[job.job]
                passed = line.before.get(job.job)
                return one.words + (
                    f"; it delays {passed} by nothing" if passed else ""
                ), one.numbers
            return waits(gang_size(job, partition), room, line.ahead.get(job.job, 0))

        return compose_plan(partition, with_user_batches(partition, placed), why)

    def _remaining_s(self, job: JobView, slots: int) -> float:
        """As stated, at the speed that it or its relatives reported; else infinite."""
        if job.stop_samples is None:
            return math.inf
        speed = job.samples_per_s if job.running_on else 0.0
        speed = speed or self._reports.speed_alone(_key(job.family, slots, job.batch_size))
        return max(0.0, job.stop_samples - job.samples_done) / speed if speed else math.inf

    def _choose(self, job: JobId, version: int) -> Choose:
        if not self.options.explore:
            return best
        return sampled(default_rng((self.options.seed, version, *job.encode())))


def _key(family: str, slots: int, batch: int) -> tuple[str, int, int]:
    """Jobs of the same are as fast as each other alone."""
    return family, slots, batch
