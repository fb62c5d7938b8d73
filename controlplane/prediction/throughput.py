"""Step time on r slots of n nodes: a closed form per job family, fitted to measurements.

The form is that of Pollux (Qiao et al., OSDI '21, eq. 8 to 11): computation is linear in the local
batch, communication is linear in the slots, differently within a node and across nodes, and both
overlap by a power mean. Pollux assumes that unmeasured parts cost nothing, so that jobs explore.
Here they have priors, weak enough that a few measurements outweigh them: computation has a part
that does not depend on the batch, each further slot adds a little, and communication across nodes
costs twice that within one. The remaining error at a measured size is corrected there.

There are two fits. `fit_by_search` finds all coefficients together, with the priors.
`fit_separately` is in closed form and requires that workers report their waits for reductions:
computation and network are each fitted to their own times. A wait is not the time of the network
but the part of it that computation does not hide, which depends on the overlap g. So the network is
solved for at each g of a grid, and the g that explains whole passes best is taken.

Closed form of step times, with corrections; passes per step; statistical efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from controlplane.prediction import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Maximum samples of a worker's pass; infinite if one pass was always enough.

    A worker alone may take more passes than one of several, to measure gradient noise.
    """

    alone: float = math.inf
    several: float = math.inf

    def passes(self, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the passes of a step, whose gradients are accumulated before the reduction.

        As few as the limit allows, of nearly equal size, as in the training library. Shapes (...).
        """
        most = np.where(np.asarray(slots) > 1, self.several, self.alone)
        return np.asarray(np.maximum(np.ceil(local_batch / most), 1.0))

    def one_is_enough(self, slots: int, local_batch: float) -> bool:
        """True if a share of `local_batch` samples is expected to take one pass."""
        return local_batch <= (self.several if slots > 1 else self.alone)


NO_LIMITS = PassLimits()


@dataclass(slots=True)
class SeenPasses:
    """Largest measured pass, and whether steps had several passes; alone and in groups."""

    alone: int = 0  # samples
    several: int = 0
    alone_splits: bool = False
    several_splits: bool = False

    def add(self, slots: int, local_batch: int, passes: int) -> None:
        """Record a step; `local_batch` is that of one pass of one worker."""
        if slots > 1:
            self.several = max(self.several, local_batch)
            self.several_splits |= passes > 1
        else:
            self.alone = max(self.alone, local_batch)
            self.alone_splits |= passes > 1

    @property
    def limits(self) -> PassLimits:
        """Assumed limits: larger shares than those measured are split into such passes."""
        return PassLimits(
            alone=float(self.alone) if self.alone_splits else math.inf,
            several=float(self.several) if self.several_splits else math.inf,
        )


FIXED_SHARE: Final = 0.3  # prior share of a step that does not depend on the batch
FAR: Final = 1.1  # prior factor of a step across nodes
# Corrections above this extend to other sizes; 1.25 cost 1.5% on two measured workloads.
MIN_MISFIT: Final = 2.0
MIN_COST_S: Final = 1e-300  # avoids a division by 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Exponents of the assumed speed-up of a family until several slots were measured."""

    to_two: float = 0.9  # prior: 2^0.9 times as fast on two slots
    beyond: float = 0.5  # and (r / 2)^0.5 times that on more: cautious until measured


PRIOR_SCALING: Final = Scaling()  # of a cluster without measurements


@dataclass(frozen=True, slots=True)
class Sample:
    """Mean step time measured at one size."""

    nodes: int
    slots: int
    local_batch: float  # samples per slot and step
    step_s: float
    weight: float = 1.0  # number of measurements
    sync_s: float | None = None  # part of `step_s` in the reduction; None: not reported


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """step = (compute^g + network^g)^(1/g), times a measured correction at the same size.

    compute = a + b l for a local batch of l; network = c + d (r - 2) on r >= 2 slots, with separate
    coefficients within a node and across nodes. Without a measured network, the whole step is
    compute r^(1 - exponent), with one exponent up to two slots and another beyond them. An
    unmeasured size is assumed to be no better than the nearest measured one, if that was much
    slower than the form predicts.
    """

    compute: tuple[float, float] = (FIXED_SHARE, 1.0 - FIXED_SHARE)
    near: tuple[float, float] | None = None  # network within a node, seconds
    far: tuple[float, float] | None = None
    overlap: float = 1.0  # g
    correction: dict[tuple[int, int], float] = field(default_factory=dict)  # (nodes, slots)
    known: bool = False  # False: times are relative, not seconds
    scaling: Scaling = PRIOR_SCALING  # used without a measured network
    limits: PassLimits = NO_LIMITS  # of a pass; a larger share takes several passes

    def step_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a step: all its passes, of which the last one has the reduction.

        Args:
            nodes: shape (...), nodes that the group spans.
            slots: shape (...), workers.
            local_batch: shape (...), samples of one slot in a step.

        Returns:
            Shape (...), seconds; relative to a step at the first batch if `known` is False.
        """
        if self.limits == NO_LIMITS:
            return self.pass_s(nodes, slots, local_batch)
        passes = self.limits.passes(slots, local_batch)
        each = np.where(passes > 1, np.ceil(local_batch / passes), local_batch)
        before = (passes - 1) * (self.compute[0] + self.compute[1] * each)
        return np.asarray(self.pass_s(nodes, slots, each) + before)

    def pass_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a pass with its reduction; shapes as for `step_s`."""
        compute = self.compute[0] + self.compute[1] * local_batch
        several = slots > 1
        to_two = np.power(np.clip(slots, 1, 2), 1.0 - self.scaling.to_two)
        further = np.power(np.maximum(slots / 2, 1.0), 1.0 - self.scaling.beyond)
        plain = compute * to_two * further
        near = self._with(self.near, compute, slots, plain)
        far = FAR * near if self.far is None else self._with(self.far, compute, slots, plain)
        step = np.where(several, np.where(nodes > 1, far, near), compute)
        if self.correction:
            step = step * self._corrections(np.asarray(nodes), np.asarray(slots))
        return np.asarray(step, dtype=np.float64)

    def _with(
        self,
        network: tuple[float, float] | None,
        compute: FloatArray,
        slots: IntArray,
        plain: FloatArray,
    ) -> FloatArray:
        if network is None:
            return plain
        cost = network[0] + network[1] * np.maximum(slots - 2, 0)
        longer = np.maximum(np.maximum(compute, cost), MIN_COST_S)
        ratio = np.minimum(compute, cost) / longer  # its powers neither overflow nor underflow
        return np.asarray(longer * np.power(1.0 + np.power(ratio, self.overlap), 1 / self.overlap))

    def _corrections(self, nodes: IntArray, slots: IntArray) -> FloatArray:
        sizes = zip(nodes.ravel().tolist(), slots.ravel().tolist(), strict=True)
        return np.array([self._correction(*size) for size in sizes]).reshape(slots.shape)

    def _correction(self, nodes: int, slots: int) -> float:
        known = self.correction.get((nodes, slots))
        if known is not None:
            return known
        alike = [(n, s) for n, s in self.correction if s > 1 and (n > 1) == (nodes > 1)]
        if not alike or slots == 1:
            return 1.0
        nearest = min(alike, key=lambda size: (abs(math.log(size[1] / slots)), size))
        off = self.correction[nearest]
        return off if off > MIN_MISFIT else 1.0


def statistical_efficiency(batch: FloatArray, first_batch: float, noise_scale: float) -> FloatArray:
    """Return the progress per sample, relative to the job's first batch.

    (phi + m0) / (phi + m), with the gradient noise scale phi (McCandlish et al. 2018; Pollux
    eq. 7).

    Args:
        batch: m, shape (...), global, samples per step.
        first_batch: m0, samples per step.
        noise_scale: phi, samples.

    Returns:
        Shape (...), 1 at the first batch, falling towards 0.
    """
    return np.asarray((noise_scale + first_batch) / (noise_scale + batch))


HOP_SHARE: Final = 0.05  # prior cost of each further slot, relative to that of two slots
TINY: Final = 1e-3  # smallest start of a coefficient, share of a step
FAR_TALK: Final = 2.0  # prior cost of communication across nodes, relative to within a node
TALK_SHARE: Final = 0.1  # prior share of communication in a step
USUAL_OVERLAP: Final = 1.5  # prior of g
MIN_OVERLAP: Final = 1.0  # g without overlap (Pollux eq. 11)
WIDTH: Final = 9.0  # width of the range of g, which ends at 10 as in Pollux
MIN_START_SHARE: Final = 0.01  # minimum distance of a start from the ends of that range, relative
MAX_LOGARITHM: Final = 60.0  # limit of a coefficient: exp(60) is beyond any measurement
MAX_EVALUATIONS: Final = 100  # evaluations of a fit; usually about 15

# Priors, a row each: factors of the x of (a, b, c, d, far c, far d, g).
PRIORS: Final = np.array([
    [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # a over b: a is 0.3 of a step at the middle batch
    [0.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0],  # d over c: a further slot adds a small share
    [0.0, 0.0, 0.0, 0.0, -1.0, 1.0, 0.0],  # the same across nodes
    [0.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0],  # communication across nodes costs twice that within one
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],  # computation and communication overlap by half
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # the part that depends on the batch takes most of a step
    [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],  # communication takes a tenth
])  # fmt: skip
TRUST: Final = np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05])  # roots of weights, in samples


def fit_by_search(samples: Sequence[Sample], before: SpeedModel | None = None) -> SpeedModel:
    """Return the model of least squares of logarithms (Levenberg-Marquardt), without corrections.

    Pollux minimises the same error (section 4.1), without priors. All coefficients are fitted
    together: one after the other, a few per cent of computation at large batches would count as
    network. Some samples are on several slots; the search starts at `before` or the priors.
    """
    fitted = _Fitted(samples)
    begin = fitted.prior_mean if before is None else fitted.x_of(before)
    found = least_squares(
        fitted.residuals, begin, jac=fitted.jacobian, method="lm", max_nfev=MAX_EVALUATIONS
    )
    return fitted.model(found.x)


class _Fitted:
    """A fit in seven numbers x: logarithms of a, b, of c, d within a node, and of c, d across.

    The last one is the logit of g's position between 1 and 10. So g stays in this range without a
    boundary that would stop the search, also for the other numbers.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        slots = np.array([s.slots for s in samples])
        nodes = np.array([s.nodes for s in samples])
        self._local = np.array([s.local_batch for s in samples])
        self._further = np.maximum(slots - 2, 0).astype(np.float64)
        self._several = slots > 1
        self._near = self._several & (nodes == 1)
        self._far = self._several & (nodes > 1)
        self._has_near, self._has_far = bool(self._near.any()), bool(self._far.any())
        self._seen = np.log([s.step_s for s in samples])
        self._weight = np.sqrt([s.weight for s in samples])
        middle = self._middle = float(np.exp(np.mean(self._seen)))
        batch = self._batch = float(np.exp(np.mean(np.log(self._local))))
        self._prior_targets = np.log([
            FIXED_SHARE / (1.0 - FIXED_SHARE) * batch, HOP_SHARE, HOP_SHARE, FAR_TALK,
            1.0, (1.0 - FIXED_SHARE) * middle / batch, TALK_SHARE * middle,
        ])  # fmt: skip
        self._prior_targets[4] = x_of(USUAL_OVERLAP)
        self.prior_mean: FloatArray = np.linalg.solve(PRIORS, self._prior_targets)

    def x_of(self, model: SpeedModel) -> FloatArray:
        """Return the x of a model, with coefficients large enough to grow again."""
        middle, batch = self._middle, self._batch
        a, b = (max(each, TINY * middle) for each in (model.compute[0], model.compute[1] * batch))
        near = model.near or model.far or (TALK_SHARE * middle, 0.0)
        far = model.far or (near[0] * FAR_TALK, 0.0)
        c, e = max(near[0], 0.01 * middle), max(far[0], 0.01 * middle)
        d, f = max(near[1], HOP_SHARE * c), max(far[1], HOP_SHARE * e)
        return np.append(np.log([a, b / batch, c, d, e, f]), x_of(model.overlap))

    def residuals(self, x: FloatArray) -> FloatArray:
        """Return logarithms of predicted over measured times, then deviations from the priors."""
        predicted = self._predicted(x)[0]
        off = TRUST * (PRIORS @ x - self._prior_targets)
        return np.append(self._weight * (predicted - self._seen), off)

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Derivatives of `residuals`, shape (samples + priors, 7)."""
        a, b, c, d, e, f, _ = _values(x)
        predicted, log_compute, log_talk, g = self._predicted(x)
        talks = np.exp(g * (log_talk - predicted))  # its share of the power mean; 0 on one slot
        of_compute = (1.0 - talks) * np.exp(-log_compute)
        log_talk = np.where(self._several, log_talk, 0.0)
        of_talk = talks * np.exp(-log_talk)
        of_g = (1.0 - talks) * log_compute + talks * log_talk - predicted
        columns = np.column_stack([
            of_compute * a,
            of_compute * b * self._local,
            of_talk * self._near * c,
            of_talk * self._near * d * self._further,
            of_talk * self._far * e,
            of_talk * self._far * f * self._further,
            of_g * _overlap_slope(g),
        ])  # fmt: skip
        return np.vstack([self._weight[:, None] * columns, TRUST[:, None] * PRIORS])

    def _predicted(self, x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, float]:
        """Return logarithms of step, computation and communication, shape (S,); and g."""
        a, b, c, d, e, f, g = _values(x)
        talk = self._near * (c + d * self._further) + self._far * (e + f * self._further)
        log_compute = np.log(a + b * self._local)
        log_talk = np.full(len(talk), -np.inf)
        np.log(talk, out=log_talk, where=self._several)
        return np.logaddexp(g * log_compute, g * log_talk) / g, log_compute, log_talk, g

    def model(self, x: FloatArray) -> SpeedModel:
        """Return the model of `x`.

        If only one kind of network was measured, several nodes are assumed to be no faster.
        """
        a, b, c, d, e, f, g = _values(x)
        near, far = (c, d), (e, f)
        if not self._has_far:
            far = (max(c, e), max(d, f))
        elif not self._has_near:
            near = (min(c, e), min(d, f))
        return SpeedModel(compute=(a, b), near=near, far=far, overlap=g, known=True)


def _values(x: FloatArray) -> list[float]:
    """Return a, b, c, d, far c, far d in seconds; g."""
    found: list[float] = np.exp(np.clip(x, -MAX_LOGARITHM, MAX_LOGARITHM)).tolist()
    found[6] = MIN_OVERLAP + WIDTH * found[6] / (1.0 + found[6])
    return found


def x_of(overlap: float) -> float:
    """Return the x of a g (1 to 10), moved a little inside at its limits, where it can change."""
    share = (overlap - MIN_OVERLAP) / WIDTH
    share = min(max(share, MIN_START_SHARE), 1.0 - MIN_START_SHARE)
    return float(np.log(share / (1.0 - share)))


def _overlap_slope(g: float) -> float:
    return (g - MIN_OVERLAP) * (MIN_OVERLAP + WIDTH - g) / WIDTH / g


FAR_TIMES: Final = 1.1  # prior cost across nodes, relative to within a node; low, so that jobs try
FURTHER_SHARE: Final = 0.01  # prior cost of each further slot, relative to that of two slots
FIXED_TRUST: Final = 0.1  # weight of the prior `FIXED_SHARE`, in samples
HOP_TRUST: Final = 0.04  # weight of `FURTHER_SHARE`; matters until two sizes are measured
MIN_COMPUTE_SHARE: Final = 0.01  # smallest share of a pass: no worker only waits
MIN_WAIT_SHARE: Final = 1e-3  # smallest share of a pass: a hidden reduction is not free
OVERLAPS: Final = np.array([1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.2, 4.5, 7.0, 10.0])
OVERLAP_COST: Final = (
    TRUST[4] * (np.array([x_of(g) for g in OVERLAPS]) - x_of(USUAL_OVERLAP))
) ** 2


def can_separate(samples: Sequence[Sample]) -> bool:
    """True if every measurement on several slots includes its time in the reduction."""
    return all(sample.sync_s is not None for sample in samples if sample.slots > 1)


def fit_separately(samples: Sequence[Sample]) -> SpeedModel:
    """Fit computation and network each by non-negative least squares of relative errors.

    Some samples are on several slots, and these have `sync_s`. The model has no corrections.
    """
    steps = _Steps.of(samples)
    compute = computing(steps.compute_s, steps.local, steps.weight)
    reduced = _Reduced(steps, compute[0] + compute[1] * steps.local)
    several = steps.slots > 1
    near = reduced.network(several & (steps.nodes == 1))
    far = reduced.network(several & (steps.nodes > 1))
    if far is None and near is not None:
        far = FAR_TIMES * near
    elif near is None and far is not None:
        near = far / FAR_TIMES
    elif near is None or far is None:
        raise ValueError("no sample is on several slots")
    best = reduced.best(near, far)
    return SpeedModel(
        compute=compute,
        near=(float(near[0, best]), float(near[1, best])),
        far=(float(far[0, best]), float(far[1, best])),
        overlap=float(OVERLAPS[best]),
        known=True,
    )


def computing(time: FloatArray, batch: FloatArray, weight: FloatArray) -> tuple[float, float]:
    """Return a and b of computation, by relative least squares with both at least 0.

    `time` are seconds of a pass without its reduction, above 0; all shapes are (S,).
    """
    root = np.sqrt(weight)
    middle = float(np.exp(np.mean(np.log(time))))
    matrix = np.column_stack([root / time, root * batch / time])
    prior = np.array([[np.sqrt(FIXED_TRUST) / middle, 0.0]])
    target = np.append(root, np.sqrt(FIXED_TRUST) * FIXED_SHARE)
    found = _non_negative(np.vstack([matrix, prior]), target[:, None])
    return float(found[0, 0]), float(found[1, 0])


class _Steps(NamedTuple):
    """Columns of measurements, shape (S,) each."""

    nodes: FloatArray
    slots: FloatArray
    local: FloatArray
    pass_s: FloatArray
    compute_s: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Steps:
        nodes, slots, local, pass_s, sync_s, weight = np.array([
            (s.nodes, s.slots, s.local_batch, s.step_s, s.sync_s or 0.0, s.weight) for s in samples
        ], dtype=np.float64).T  # fmt: skip
        sync_s = np.where(slots > 1, np.maximum(sync_s, MIN_WAIT_SHARE * pass_s), 0.0)
        compute_s = np.maximum(pass_s - sync_s, MIN_COMPUTE_SHARE * pass_s)
        return cls(nodes, slots, local, pass_s, compute_s, weight)


class _Reduced:
    """Networks that explain the times of reductions, one for each of `OVERLAPS` (G)."""

    def __init__(self, steps: _Steps, compute_s: FloatArray) -> None:
        self._steps, self._compute_s = steps, compute_s
        left = (steps.compute_s / steps.pass_s)[:, None]
        shares = np.power(np.maximum(1.0 - np.power(left, OVERLAPS), 0.0), 1.0 / OVERLAPS)
        self._shares: FloatArray = shares  # share of the network in a pass, (S, G)

    def network(self, chosen: BoolArray) -> FloatArray | None:
        """Return c and d of the chosen measurements, shape (2, G); None if there are none."""
        if not chosen.any():
            return None
        steps = self._steps
        root, pass_s = np.sqrt(steps.weight[chosen]), steps.pass_s[chosen]
        further = steps.slots[chosen] - 2.0
        matrix = np.column_stack([root / pass_s, root * further / pass_s])
        middle = float(np.exp(np.mean(np.log(pass_s))))
        prior = np.sqrt(HOP_TRUST) / middle * np.array([[-FURTHER_SHARE, 1.0]])
        targets = np.vstack([root[:, None] * self._shares[chosen], np.zeros((1, len(OVERLAPS)))])
        return _non_negative(np.vstack([matrix, prior]), targets)

    def best(self, near: FloatArray, far: FloatArray) -> int:
        """Return the index in `OVERLAPS` of the least squares of logarithms of whole passes."""
        steps = self._steps
        several, further = steps.slots > 1, np.maximum(steps.slots - 2.0, 0.0)[:, None]
        talk = np.where(
            (steps.nodes > 1)[:, None], far[0] + far[1] * further, near[0] + near[1] * further
        )
        longer = np.maximum(self._compute_s[:, None], talk)
        ratio = np.minimum(self._compute_s[:, None], talk) / longer
        predicted = longer * np.power(1.0 + np.power(ratio, OVERLAPS), 1.0 / OVERLAPS)
        off = np.log(predicted[several] / steps.pass_s[several, None])
        return int((steps.weight[several] @ off**2 + OVERLAP_COST).argmin())


def _non_negative(matrix: FloatArray, targets: FloatArray) -> FloatArray:
    """Least squares in two unknowns, both at least 0; shapes (S, 2) and (S, G), to (2, G)."""
    free, *_ = np.linalg.lstsq(matrix, targets, rcond=None)
    wrong = (free < 0.0).any(axis=0)
    if not wrong.any():
        return np.asarray(free)
    options = np.zeros((3, 2, targets.shape[1]))  # neither unknown, the first, the second
    for column in range(2):
        only = matrix[:, column]
        size = float(only @ only)
        if size > 0.0:
            options[column + 1, column] = np.maximum(only @ targets / size, 0.0)
    errors = np.square(np.matmul(matrix, options) - targets).sum(axis=1)
    best = options[errors.argmin(axis=0), :, np.arange(targets.shape[1])].T
    return np.asarray(np.where(wrong, best, free))


__all__ = ["Sample", "SpeedModel", "fit"]

MIN_MEASURED, MAX_MEASURED = (
    1e-12,
    1e12,
)  # of seconds and of samples; values outside are not measurements
MIN_STEP_S: Final = 1e-300  # keeps a logarithm finite


def fit(
    samples: Sequence[Sample],
    first_batch: int,
    before: SpeedModel | None = None,
    scaling: Scaling = PRIOR_SCALING,
) -> SpeedModel:
    """Return the model closest to `samples`; without any, a prior in relative time.

    Args:
        samples: of one family; implausible ones (nan, 0 seconds) are ignored. If all those on
            several slots have `sync_s`, the model is `fit_separately`, else `fit_by_search`.
        first_batch: a usual batch of one slot, for the prior.
        before: model of fewer samples of this family; starting there is faster and has the same
            result.
        scaling: prior of the speed-up until several slots were measured.
    """
    samples = [_without_implausible_wait(sample) for sample in samples if _is_plausible(sample)]
    if not samples:
        each = (1.0 - FIXED_SHARE) / max(first_batch, 1)
        return SpeedModel(compute=(FIXED_SHARE, each), scaling=scaling)
    if all(sample.slots == 1 for sample in samples):
        best = SpeedModel(compute=_computing(samples), known=True, scaling=scaling)
    elif can_separate(samples):
        best = fit_separately(samples)
    else:
        best = fit_by_search(samples, before if before is not None and before.known else None)
    return _corrected(best, samples)


def _is_plausible(sample: Sample) -> bool:
    return (
        MIN_MEASURED <= sample.step_s <= MAX_MEASURED
        and MIN_MEASURED <= sample.local_batch <= MAX_MEASURED
        and 0.0 <= sample.weight < math.inf
    )


def _without_implausible_wait(sample: Sample) -> Sample:
    if sample.sync_s is None or 0.0 <= sample.sync_s <= sample.step_s:
        return sample
    return replace(sample, sync_s=None)


def _computing(samples: Sequence[Sample]) -> tuple[float, float]:
    steps = ((sample.step_s, sample.local_batch, sample.weight) for sample in samples)
    return computing(*np.array(list(steps)).T)


def _residuals(model: SpeedModel, samples: Sequence[Sample]) -> FloatArray:
    """Return logarithms of measured over predicted times, shape (S,)."""
    seen = np.array([sample.step_s for sample in samples])
    predicted = model.step_s(
        np.array([sample.nodes for sample in samples]),
        np.array([sample.slots for sample in samples]),
        np.array([sample.local_batch for sample in samples]),
    )
    return np.asarray(np.log(seen) - np.log(np.maximum(predicted, MIN_STEP_S)))


def _corrected(model: SpeedModel, samples: Sequence[Sample]) -> SpeedModel:
    """Return the model with the mean error at each measured size as its correction."""
    residuals = _residuals(model, samples)
    at: dict[tuple[int, int], list[float]] = {}
    for sample, residual in zip(samples, residuals, strict=True):
        at.setdefault((sample.nodes, sample.slots), []).append(float(residual))
    correction = {size: float(np.exp(np.mean(values))) for size, values in at.items()}
    return replace(model, correction=correction, known=True)
