"""Speeds, lengths and noise scales of families, i.e. jobs with the same script and model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeGuard

import numpy as np

from controlplane.policy.api import EpochSeen, StepsSeen
from controlplane.prediction.slowdowns import Observation, Parts, separate
from controlplane.prediction.step_times import MAX_WEIGHT, MeanStepTime, Size, StepTimes
from controlplane.prediction.throughput import (
    PRIOR_SCALING,
    Sample,
    Scaling,
    SeenPasses,
    SpeedModel,
    fit,
)

PAIR: Final = 2  # number of slots
TINY_S: Final = 1e-12  # lower bound that keeps a logarithm finite
MAX_STEP_S: Final = 1e7  # longer steps are implausible
MAX_RELATIVES: Final = 200  # kept totals of finished jobs; bounds memory
NOISE_SMOOTHING: Final = 0.3  # weight of the newest noise scale
MIN_NOISE, MAX_NOISE = 1e-9, 1e15  # samples; plausible range
FINE_EPOCHS: Final = 16  # each of the first 16 epochs is a separate stage
NEAR_STAGES: Final = (0, -1, 1, -2, 2)  # stages to try, as offsets; up to a quarter of a doubling
MAX_SIZES: Final = 400  # latest sizes of each family; bounds the time of a fit
Place = tuple[int, int, int, str]  # nodes, slots, local batch, GPU type

NO_PARTS: Final = Parts({}, {}, {})


@dataclass(slots=True)
class Priors:
    """Slow-downs by GPU type, as mean logarithms over all families, and the prior speed-up."""

    gpu_types: dict[str, float] = field(default_factory=dict)
    types: tuple[str, ...] = ()  # GPU types of the cluster
    scaling: Scaling = PRIOR_SCALING  # used for families never measured on several slots


@dataclass(slots=True)
class SmoothedNoise:
    """Gradient noise scale, smoothed in its logarithm because it spans orders of magnitude."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a measured noise scale phi, in samples, above 0."""
        self.count += 1
        share = max(NOISE_SMOOTHING, 1.0 / self.count)
        self.value = value if self.count == 1 else self.value * (value / self.value) ** share


def is_plausible_noise(noise_scale: float | None) -> TypeGuard[float]:
    """True if `noise_scale` (phi, samples) can be a measurement; None means not measured."""
    return noise_scale is not None and MIN_NOISE <= noise_scale <= MAX_NOISE


def stage(epoch: int) -> int:
    """Return the training stage of an epoch.

    Each early epoch is a stage. Later, eight stages follow each time the epoch number doubles.
    """
    return epoch if epoch < FINE_EPOCHS else FINE_EPOCHS + int(8 * math.log2(epoch / FINE_EPOCHS))


@dataclass(slots=True)
class FamilyRecord:
    """Measurements of one family, i.e. of jobs with the same script and model."""

    step_times: StepTimes[Place] = field(default_factory=lambda: StepTimes(MAX_SIZES))
    priors: Priors = field(default_factory=Priors)
    parts: Parts = NO_PARTS
    finished: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    reached: int = 0  # samples done by the job furthest ahead
    largest: int = 1  # most slots that a job ran on
    edition: int = 0  # number of fits of the model
    model: SpeedModel | None = None
    before: SpeedModel | None = None  # start values of the next fit
    passes: SeenPasses = field(default_factory=SeenPasses)
    noise: dict[int, SmoothedNoise] = field(default_factory=dict)  # by stage of training
    noise_count: int = 0  # number of noise scales measured

    @property
    def means(self) -> dict[Place, MeanStepTime]:
        """Mean step times by place."""
        return self.step_times.means

    def observe_speed(self, event: EpochSeen | StepsSeen, stretch: float = 1.0) -> None:
        """Record the step time of a plausible report, divided by the slow-down `stretch`."""
        rate, slots = event.samples_per_s, event.slots
        if math.isfinite(rate) and rate > 0 and slots and event.global_batch:
            local = max(1, round(event.global_batch / slots))
            self.add(event.nodes, slots, local, event.global_batch / rate / stretch)

    def observe_noise(self, epoch: int, noise_scale: float | None) -> None:
        """Record the noise scale phi (samples) after `epoch` epochs; ignore implausible values."""
        if is_plausible_noise(noise_scale):
            self.noise.setdefault(stage(epoch), SmoothedNoise()).add(noise_scale)
            self.noise_count += 1

    def noise_at(self, epoch: int) -> float | None:
        """Return the relatives' noise scale near this stage of training; None if not measured."""
        stages = (stage(epoch) + offset for offset in NEAR_STAGES)
        return next((self.noise[at].value for at in stages if at in self.noise), None)

    def observe_passes(self, slots: int, local_batch: int, passes: int) -> None:
        """Record the passes of a worker's step; discard the model if their limits change."""
        before = self.passes.limits
        self.passes.add(slots, local_batch, passes)
        if self.passes.limits != before:
            self.model = None

    def add(
        self,
        nodes: int,
        slots: int,
        local_batch: int,
        step_s: float,
        *,
        gpu_type: str = "",
    ) -> None:
        """Record a measured step time; discard the model if the measurement adds information.

        Args:
            local_batch: number of samples of one slot in a step.
            step_s: mean duration of a step, in seconds.
            gpu_type: type of the job's GPUs; empty if all types are alike.
        """
        if not 0.0 < step_s < MAX_STEP_S:
            return
        self.largest = max(self.largest, slots)
        key = (nodes, slots, local_batch, gpu_type)
        if self.step_times.add(key, step_s):
            self.model = None

    def speed_model(self, first_batch: int) -> SpeedModel:
        """Return the model of steps on the family's fastest GPU type."""
        if self.model is None:
            found = fit(self._samples(), first_batch, self.before, self.priors.scaling)
            self.model = self.before = replace(found, limits=self.passes.limits)
            self.edition += 1
            self.step_times.mark_fitted()
        return self.model

    def scaling(self) -> tuple[float | None, float | None]:
        """Return the exponents, 0 to 1, of the speed-up from one to two slots, and beyond.

        They hold within a node, and are None if not measured.
        """
        near = [(slots, local) for nodes, slots, local, *_ in self.means if nodes == 1]
        sizes = {slots for slots, _ in near}
        if self.model is None or max(sizes, default=1) == 1:
            return None, None
        local = float(np.median([local for _, local in near]))
        to_two = self._exponent(1, PAIR, local) if {1, PAIR} <= sizes else None
        most = max(sizes)
        return to_two, self._exponent(PAIR, most, local) if most > PAIR else None

    def _exponent(self, few: int, many: int, local: float) -> float:
        model = self.model or SpeedModel()
        steps = model.step_s(np.ones(2, dtype=np.int64), np.array([few, many]), np.full(2, local))
        before, after = np.maximum(steps, TINY_S)
        return min(max(1.0 - math.log2(after / before) / math.log2(many / few), 0.0), 1.0)

    def costs(self, types: Sequence[str]) -> list[float]:
        """Return log relative step times on `types`; unknown types get the mean of all families."""
        common, own = self.priors.gpu_types, self.parts.gpu_types
        both = [own[gpu_type] - common.get(gpu_type, 0.0) for gpu_type in types if gpu_type in own]
        level = sum(both) / len(both) if both else 0.0  # only differences are known
        return [own.get(gpu_type, common.get(gpu_type, 0.0) + level) for gpu_type in types]

    def _samples(self) -> list[Sample]:
        """Return step times on the family's fastest GPU type."""
        gpu_types = {gpu_type for *_, gpu_type in self.means}
        if len(gpu_types) <= 1 and not gpu_types & self.priors.gpu_types.keys():
            self.parts = NO_PARTS
            return [
                Sample(nodes, slots, local, mean.step_s, mean.weight)
                for (nodes, slots, local, _), mean in self.means.items()
            ]
        seen = [
            Observation(tuple(size), gpu_type, (), math.log(mean.step_s), mean.weight)
            for (*size, gpu_type), mean in self.means.items()
        ]
        self.parts = separate(seen, self.priors.gpu_types, {})
        base, fastest = self.parts.base, min(self.costs(self.priors.types), default=0.0)
        weights: dict[Size, float] = {}
        for (nodes, slots, local, _), mean in self.means.items():
            size = (nodes, slots, local)
            weights[size] = weights.get(size, 0.0) + mean.weight
        return [
            Sample(*size, float(np.exp(base[size] + fastest)), min(MAX_WEIGHT, weight))
            for size, weight in weights.items()
        ]


class FamilyHistories(dict[str, FamilyRecord]):
    """The records of families by name, with the priors that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.priors = Priors()

    def __missing__(self, name: str) -> FamilyRecord:
        """Add the empty record of a new family."""
        found = self[name] = FamilyRecord(priors=self.priors)
        return found
