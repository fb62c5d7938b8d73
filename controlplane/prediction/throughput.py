"""The step time on r slots of n nodes: a closed form per job family, fitted to measurements.

The form is that of Pollux (Qiao et al., OSDI '21, eq. 8 to 11). Computation is linear in the local
batch. Communication is linear in the slots, with different coefficients within a node and across
nodes. A power mean of both expresses their overlap. Pollux assumes that unmeasured parts cost
nothing, so that jobs explore. This module has weak priors instead, which a few measurements
outweigh. A correction at each measured size removes the error that remains there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from controlplane.prediction import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Largest number of samples in one pass of a worker, or infinity if one pass was always enough.

    A single worker can take more passes than a worker of a group, to measure gradient noise.
    """

    alone: float = math.inf
    several: float = math.inf

    def passes(self, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the passes of each step: as few as the limit allows; all shapes are (...)."""
        most = np.where(np.asarray(slots) > 1, self.several, self.alone)
        return np.asarray(np.maximum(np.ceil(local_batch / most), 1.0))

    def one_is_enough(self, slots: int, local_batch: float) -> bool:
        """True if one pass is expected to be enough for `local_batch` samples."""
        return local_batch <= (self.several if slots > 1 else self.alone)


NO_LIMITS = PassLimits()


@dataclass(slots=True)
class SeenPasses:
    """Largest measured pass, and whether steps were split, for single workers and for groups."""

    _largest: list[float] = field(default_factory=lambda: [0.0, 0.0])  # samples
    _splits: list[bool] = field(default_factory=lambda: [False, False])

    def add(self, slots: int, local_batch: int, passes: int) -> None:
        """Record a step; `local_batch` is the number of samples in one pass of one worker."""
        group = int(slots > 1)
        self._largest[group] = max(self._largest[group], float(local_batch))
        self._splits[group] |= passes > 1

    @property
    def limits(self) -> PassLimits:
        """The limits estimated from steps; if any step was split, the limit is the largest pass."""
        pairs = zip(self._largest, self._splits, strict=True)
        return PassLimits(*(most if split else math.inf for most, split in pairs))


FIXED_SHARE: Final = 0.3  # prior: share of a step that is independent of the batch
FAR: Final = 1.1  # prior: a step across nodes takes 1.1 times as long as within a node
# Corrections above this factor also apply to other sizes. A factor of 1.25 cost 1.5% on two
# measured workloads.
MIN_MISFIT: Final = 2.0
MIN_COST_S: Final = 1e-300  # avoids a division by 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Exponents of a family's assumed speed-up, used until several slots were measured."""

    to_two: float = 0.9  # prior: 2^0.9 times as fast on two slots
    beyond: float = 0.5  # r > 2 slots: (r / 2)^0.5 times as fast as two; cautious


PRIOR_SCALING: Final = Scaling()  # of a cluster without measurements


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean step time measured at one size."""

    nodes: int
    slots: int
    local_batch: float  # samples per slot and step
    step_s: float
    weight: float = 1.0  # number of measurements


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """step = (compute^g + network^g)^(1/g), times a measured correction at the same size.

    compute = a + b l for a local batch of l; network = c + d (r - 2) on r >= 2 slots, with separate
    coefficients within a node and across nodes. Without a measured network, the whole step is
    compute r^(1 - exponent), with one exponent up to two slots and another beyond two. If the
    nearest measured size was much slower than the form predicts, an unmeasured size is assumed to
    be slower by the same factor.
    """

    compute: tuple[float, float] = (FIXED_SHARE, 1.0 - FIXED_SHARE)
    near: tuple[float, float] | None = None  # network within a node, seconds
    far: tuple[float, float] | None = None
    overlap: float = 1.0  # g
    correction: dict[tuple[int, int], float] = field(default_factory=dict)  # (nodes, slots)
    known: bool = False  # False: times are relative, not seconds
    scaling: Scaling = PRIOR_SCALING  # used without a measured network
    limits: PassLimits = NO_LIMITS  # a share above the limit takes several passes

    def step_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a step with all passes; only the last pass includes the reduction.

        All shapes are (...). `local_batch` is the number of samples of one slot in a step. The
        result is relative to a step at the first batch if `known` is False.
        """
        if self.limits == NO_LIMITS:
            return self.pass_s(nodes, slots, local_batch)
        passes = self.limits.passes(slots, local_batch)
        each = np.where(passes > 1, np.ceil(local_batch / passes), local_batch)
        before = (passes - 1) * (self.compute[0] + self.compute[1] * each)
        return np.asarray(self.pass_s(nodes, slots, each) + before)

    def pass_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a pass that includes the reduction; shapes as for `step_s`."""
        compute = self.compute[0] + self.compute[1] * local_batch
        several = slots > 1
        to_two = np.power(np.clip(slots, 1, 2), 1.0 - self.scaling.to_two)
        further = np.power(np.maximum(slots / 2, 1.0), 1.0 - self.scaling.beyond)
        plain = compute * to_two * further
        near = self._with(self.near, compute, slots) if self.near else plain
        far = self._with(self.far, compute, slots) if self.far else FAR * near
        step = np.where(several, np.where(nodes > 1, far, near), compute)
        if self.correction:
            step = step * self._corrections(np.asarray(nodes), np.asarray(slots))
        return np.asarray(step, dtype=np.float64)

    def _with(
        self, network: tuple[float, float], compute: FloatArray, slots: IntArray
    ) -> FloatArray:
        cost = network[0] + network[1] * np.maximum(slots - 2, 0)
        longer = np.maximum(np.maximum(compute, cost), MIN_COST_S)
        ratio = np.minimum(compute, cost) / longer  # powers of a ratio cannot overflow
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
    """Return the progress per sample, relative to the progress per sample at the first batch.

    The value is (phi + m0) / (phi + m), with the gradient noise scale phi, the first batch m0 and
    the global batch m, shape (...), all in samples (McCandlish et al. 2018; Pollux eq. 7).
    """
    return np.asarray((noise_scale + first_batch) / (noise_scale + batch))


HOP_SHARE: Final = 0.05  # prior cost of each further slot, relative to the cost of two slots
TINY: Final = 1e-3  # smallest start value of a coefficient, as a share of a step
FAR_TALK: Final = 2.0  # prior: communication across nodes costs twice that within a node
TALK_SHARE: Final = 0.1  # prior share of communication in a step
USUAL_OVERLAP: Final = 1.5  # prior of g
MIN_OVERLAP: Final = 1.0  # g without overlap (Pollux eq. 11)
WIDTH: Final = 9.0  # g is between 1 and 10, as in Pollux
MIN_START_SHARE: Final = 0.01  # start values keep this share of `WIDTH` from its ends
MAX_LOGARITHM: Final = 60.0  # exp(60) is beyond any measured coefficient
MAX_EVALUATIONS: Final = 100  # limit per fit; most fits need about 15

# Each row is one prior: factors by which to multiply the x of (a, b, c, d, far c, far d, g).
PRIORS: Final = np.array([
    [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # a over b: a is 0.3 of a step at the middle batch
    [0.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0],  # d over c: a further slot adds a small share
    [0.0, 0.0, 0.0, 0.0, -1.0, 1.0, 0.0],  # far d over far c: as above, across nodes
    [0.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0],  # far c over c: communication across nodes costs twice
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],  # g: computation and communication overlap by half
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # b: the part that depends on the batch is most of a step
    [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],  # c: communication takes a tenth of a step
])  # fmt: skip
TRUST: Final = np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05])  # roots of prior weights, samples


def _fit_by_search(samples: Sequence[Sample], before: SpeedModel | None = None) -> SpeedModel:
    """Return the model with the least squared errors of logarithms, without corrections.

    The method is Levenberg-Marquardt. Pollux minimises the same error (section 4.1) without priors.
    All coefficients are fitted together; with separate fits, an error of the computation at large
    batches would be attributed to the network. Some samples must be on several slots.
    """
    fitted = _Fitted(samples)
    begin = fitted.prior_mean if before is None else fitted.x_of(before)
    limits = {"method": "lm", "max_nfev": MAX_EVALUATIONS}
    return fitted.model(least_squares(fitted.residuals, begin, fitted.jacobian, **limits).x)


class _Fitted:
    """Fit with seven unknowns x: logarithms of a, b, of c, d within a node, of c, d across nodes.

    The seventh unknown is the logit of g's position between 1 and 10. It keeps g in this range
    without a boundary, where the search would stop for all unknowns.
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
        self._prior_targets[4] = _x_of(USUAL_OVERLAP)
        self.prior_mean: FloatArray = np.linalg.solve(PRIORS, self._prior_targets)

    def x_of(self, model: SpeedModel) -> FloatArray:
        """Return the x of a model, with coefficients large enough for the search to change."""
        middle, batch = self._middle, self._batch
        a, b = (max(each, TINY * middle) for each in (model.compute[0], model.compute[1] * batch))
        near = model.near or model.far or (TALK_SHARE * middle, 0.0)
        far = model.far or (near[0] * FAR_TALK, 0.0)
        c, e = max(near[0], 0.01 * middle), max(far[0], 0.01 * middle)
        d, f = max(near[1], HOP_SHARE * c), max(far[1], HOP_SHARE * e)
        return np.append(np.log([a, b / batch, c, d, e, f]), _x_of(model.overlap))

    def residuals(self, x: FloatArray) -> FloatArray:
        """Return log(predicted / measured time) per sample, then deviations from the priors."""
        predicted = self._predicted(x)[0]
        off = TRUST * (PRIORS @ x - self._prior_targets)
        return np.append(self._weight * (predicted - self._seen), off)

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Return the derivatives of `residuals`, shape (samples + priors, 7)."""
        a, b, c, d, e, f, _ = _values(x)
        predicted, log_compute, log_talk, g = self._predicted(x)
        talks = np.exp(g * (log_talk - predicted))  # network's share of the mean; 0 on one slot
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
        """Return the logarithms of step, computation and communication, shape (S,); and g."""
        a, b, c, d, e, f, g = _values(x)
        talk = self._near * (c + d * self._further) + self._far * (e + f * self._further)
        log_compute = np.log(a + b * self._local)
        log_talk = np.full(len(talk), -np.inf)
        np.log(talk, out=log_talk, where=self._several)
        return np.logaddexp(g * log_compute, g * log_talk) / g, log_compute, log_talk, g

    def model(self, x: FloatArray) -> SpeedModel:
        """Return the model that `x` describes.

        If only one kind of network was measured, communication across nodes is assumed to be no
        faster than communication within a node.
        """
        a, b, c, d, e, f, g = _values(x)
        near, far = (c, d), (e, f)
        if not self._has_far:
            far = (max(c, e), max(d, f))
        elif not self._has_near:
            near = (min(c, e), min(d, f))
        return SpeedModel(compute=(a, b), near=near, far=far, overlap=g, known=True)


def _values(x: FloatArray) -> list[float]:
    """Return a, b, c, d, far c and far d in seconds, and g."""
    found: list[float] = np.exp(np.clip(x, -MAX_LOGARITHM, MAX_LOGARITHM)).tolist()
    found[6] = MIN_OVERLAP + WIDTH * found[6] / (1.0 + found[6])
    return found


def _x_of(overlap: float) -> float:
    """Return the x of an overlap g (1 to 10); a g at a limit is moved inside to be changeable."""
    share = (overlap - MIN_OVERLAP) / WIDTH
    share = min(max(share, MIN_START_SHARE), 1.0 - MIN_START_SHARE)
    return float(np.log(share / (1.0 - share)))


def _overlap_slope(g: float) -> float:
    return (g - MIN_OVERLAP) * (MIN_OVERLAP + WIDTH - g) / WIDTH / g


FIXED_TRUST: Final = 0.1  # weight of the prior `FIXED_SHARE`, in samples


def _fit_compute(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return a and b, at least 0, fitted to passes on one slot by relative least squares."""
    time, batch, weight = np.array([(s.step_s, s.local_batch, s.weight) for s in samples]).T
    root = np.sqrt(weight)
    middle = float(np.exp(np.mean(np.log(time))))
    prior = np.array([[np.sqrt(FIXED_TRUST) / middle, 0.0]])
    matrix = np.vstack([np.column_stack([root / time, root * batch / time]), prior])
    target = np.append(root, np.sqrt(FIXED_TRUST) * FIXED_SHARE)[:, None]
    found, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    if (found < 0.0).any():
        options = np.zeros((3, 2, 1))  # both 0; only a above 0; only b above 0
        for column in range(2):
            only = matrix[:, column]
            size = float(only @ only)
            if size > 0.0:
                options[column + 1, column] = np.maximum(only @ target / size, 0.0)
        errors = np.square(np.matmul(matrix, options) - target).sum(axis=1)
        found = options[int(errors.argmin())]
    return float(found[0, 0]), float(found[1, 0])


MIN_MEASURED, MAX_MEASURED = 1e-12, 1e12  # seconds, samples, weights; others are errors
MIN_STEP_S: Final = 1e-300  # keeps a logarithm finite


def fit(
    samples: Sequence[Sample],
    first_batch: int,
    before: SpeedModel | None = None,
    scaling: Scaling = PRIOR_SCALING,
) -> SpeedModel:
    """Return the model closest to `samples`; without samples, return a prior in relative time.

    Args:
        samples: measurements of one family; implausible ones (nan, 0 seconds) are ignored.
        first_batch: a usual batch of one slot, for the prior.
        before: earlier model of this family; makes the search faster.
        scaling: prior of the speed-up, used until several slots were measured.
    """
    samples = [sample for sample in samples if _is_plausible(sample)]
    if not samples:
        each = (1.0 - FIXED_SHARE) / max(first_batch, 1)
        return SpeedModel(compute=(FIXED_SHARE, each), scaling=scaling)
    if all(sample.slots == 1 for sample in samples):
        best = SpeedModel(compute=_fit_compute(samples), known=True, scaling=scaling)
    else:
        best = _fit_by_search(samples, before if before is not None and before.known else None)
    return _corrected(best, samples)


def _is_plausible(sample: Sample) -> bool:
    return (
        MIN_MEASURED <= sample.step_s <= MAX_MEASURED
        and MIN_MEASURED <= sample.local_batch <= MAX_MEASURED
        and 0.0 <= sample.weight <= MAX_MEASURED
    )


def _corrected(model: SpeedModel, samples: Sequence[Sample]) -> SpeedModel:
    """Return the model with the mean error at each measured size as the correction of that size."""
    rows = [(s.step_s, s.nodes, s.slots, s.local_batch) for s in samples]
    seen, nodes, slots, local = np.array(rows).T
    predicted = model.step_s(nodes.astype(np.int64), slots.astype(np.int64), local)
    residuals = np.log(seen) - np.log(np.maximum(predicted, MIN_STEP_S))
    at: dict[tuple[int, int], list[float]] = {}
    for sample, residual in zip(samples, residuals, strict=True):
        at.setdefault((sample.nodes, sample.slots), []).append(float(residual))
    correction = {size: float(np.exp(np.mean(values))) for size, values in at.items()}
    return replace(model, correction=correction, known=True)
