"""What telemetry and epochs measure: how long passes take, where, and how noisy gradients are."""

from __future__ import annotations

import math

from controlplane.policy.api import EpochSeen, StepsSeen
from controlplane.policy.ones.job_history import OnesJobHistory
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.placement_index import PlacementIndex
from controlplane.policy.search.observed_families import Colocation, FamilyHistories, believable
from controlplane.prediction.core_sharing import stretch


class Measurements:
    """Teaches families what their jobs measured, and jobs how noisy their gradients are.

    Args:
        placement: where jobs are, and beside whom.
        options: whether GPU types, neighbours and passes count.
    """

    def __init__(
        self, families: FamilyHistories, placement: PlacementIndex, options: OnesOptions
    ) -> None:
        self._families = families
        self._placement = placement
        self._options = options

    def epoch(self, event: EpochSeen, history: OnesJobHistory) -> None:
        """An epoch: it measures a size if the group was the same all through it, and alone.

        Neighbours may have come and gone in it; telemetry tells of the moment.
        """
        self._observe_noise(history, event.family, max(0, event.epoch - 1), event.noise_scale)
        sane = math.isfinite(event.samples_per_s) and event.samples_per_s > 0
        alone = not self._options.interference or self._placement.is_alone(event.job)
        if event.whole and event.slots and sane and alone:
            self._timed(event)

    def steps(self, event: StepsSeen, history: OnesJobHistory, *, counts: bool) -> None:
        """Telemetry, by the worker's clock: reports that were held up arrive all at once.

        Args:
            counts: whether its speed is one of just its group: the first of a group may have been
                sent before all its members were there, if it does not say of what it is.
        """
        self._observe_noise(history, event.family, history.epoch, event.noise_scale)
        speed = event.samples_per_s
        if not counts or not math.isfinite(speed) or speed <= 0:
            return
        alone_s = self._alone_s(event, event.global_batch / speed)
        history.trial.add(event.group, event.slots, event.global_batch, alone_s, event.nodes)
        self._timed(event)

    def _timed(self, event: EpochSeen | StepsSeen) -> None:
        """A pass was measured; where nobody says how steps divide, a step counts as one."""
        family = self._families.of(event.family)
        if self._options.passes and event.passes and event.pass_s is not None:
            family.observe_passes(event.slots, event.local_batch, event.passes)
            share = _sync_share(event) if self._options.sync_times else None
            self._measured(event, event.local_batch, event.pass_s, share)
            return
        local = max(1, round(event.global_batch / max(1, event.slots)))
        if family.passes.limits.one_is_enough(event.slots, local):
            self._measured(event, local, event.global_batch / event.samples_per_s)

    def _measured(
        self,
        event: EpochSeen | StepsSeen,
        local: int,
        step_s: float,
        sync_share: float | None = None,
    ) -> None:
        options, family = self._options, self._families.of(event.family)
        if (options.gpu_types or options.interference) and self._placement.is_changing(event.job):
            return  # the view shows where it is going to be, not where this was measured
        gpu_type = self._placement.gpu_type(event.job) if options.gpu_types else ""
        colocation: Colocation | None = None
        if options.interference:
            others = self._placement.colocations(event.job)
            known = family.parts.colocations
            colocation = max(others, key=lambda one: (known.get(one, 0.0), one), default=None)
        step_s /= self._placement.stretch(event.job)
        family.add(
            event.nodes,
            event.slots,
            local,
            step_s,
            gpu_type=gpu_type,
            colocation=colocation,
            sync_share=sync_share,
        )

    def _alone_s(self, event: StepsSeen, step_s: float) -> float:
        """Seconds of a step if nobody else used the cores of its nodes."""
        cores = self._placement.cores
        alone = stretch(-(-event.slots // max(1, event.nodes)), cores)
        return step_s / self._placement.stretch(event.job) * alone

    def _observe_noise(
        self, history: OnesJobHistory, family: str, epoch: int, noise_scale: float | None
    ) -> None:
        if not believable(noise_scale):
            return
        history.observe_noise(noise_scale)
        self._families.of(family).observe_noise(epoch, noise_scale)


def _sync_share(event: EpochSeen | StepsSeen) -> float | None:
    """Share of a pass in which its worker waited for the reduction; None: nobody says."""
    if event.pass_s is None or event.sync_s is None:
        return None
    return event.sync_s / event.pass_s if 0.0 <= event.sync_s <= event.pass_s > 0.0 else None
