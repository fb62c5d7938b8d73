"""The step time as Pollux models it: no priors, and unmeasured parts cost nothing.

The form is the same as in `throughput` (Qiao et al., OSDI '21, eq. 8 to 11). The fit is that of the
published simulator (petuum/adaptdl, branch osdi21-artifact): it minimises the errors of passes with
and without their reduction, from a fixed start. Sizes that a job has not tried therefore look at
least as fast as they can be, and the job explores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import Bounds, minimize

from controlplane.prediction import BoolArray, FloatArray, IntArray

FREE_S: Final = 1e-8  # network of a single slot, and least value of a coefficient
MAX_OVERLAP: Final = 10.0  # greatest g
FAR: Final = 1.1  # unmeasured network across nodes: at least 1.1 times that within a node
OVERLAP_PENALTY: Final = 1e-3  # times (g - 1)^2
HOP_PENALTY: Final = 1e-2  # times (d / c)^2: prefer networks that more slots do not slow down
PAIR: Final = 2  # slots of the smallest network
START: Final = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)  # first a, b, far c, far d, c, d, g


@dataclass(frozen=True, slots=True)
class PassSample:
    """Measured seconds of a pass on slots that process `local_batch` samples each."""

    nodes: int
    slots: int
    local_batch: float
    compute_s: float  # pass without its reduction
    pass_s: float  # pass with its reduction


@dataclass(frozen=True, slots=True)
class PassModel:
    """pass = (compute^g + network^g)^(1/g); compute = a + b l; network = c + d (r - 2).

    l is the local batch and r the number of slots. The network's coefficients depend on whether the
    slots are on one node or on several; a single slot has no network.
    """

    compute: tuple[float, float]
    near: tuple[float, float]
    far: tuple[float, float]
    overlap: float

    def compute_s(self, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a pass without reduction, shape (...)."""
        return self.compute[0] + self.compute[1] * local_batch

    def pass_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a pass with reduction; all shapes are (...)."""
        values = np.array([*self.compute, *self.far, *self.near, self.overlap])
        network = _network(values, np.asarray(nodes) > 1, np.asarray(slots))
        compute = self.compute_s(local_batch)
        return np.asarray(np.exp(_log_pass(compute, network, self.overlap)))


def fit_passes(samples: Sequence[PassSample]) -> PassModel:
    """Return the model closest to `samples`, of which there is at least one.

    What was not measured is fixed: the network at nearly 0, and, if all local batches were equal, a
    at half of the computation.
    """
    rows = [(s.nodes, s.slots, s.local_batch, s.compute_s, s.pass_s) for s in samples]
    nodes, slots, local, compute_s, pass_s = np.array(rows, dtype=np.float64).T
    begin = np.array(START)
    least = np.append(np.full(6, FREE_S), 1.0)
    most = np.append(np.full(6, np.inf), MAX_OVERLAP)
    far, several = nodes > 1, slots > 1

    def fix(place: int, value: float) -> None:
        begin[place] = least[place] = most[place] = value

    if len(np.unique(local)) == 1:
        fix(0, max(FREE_S, float(compute_s.mean()) / 2))
    unmeasured = {2: not far.any(), 4: not (several & ~far).any()}
    for constant, unknown in unmeasured.items():
        if unknown:
            fix(constant, FREE_S)
        if unknown or slots.max() <= PAIR:
            fix(constant + 1, FREE_S)
    loss = _Loss(far, slots, local, np.log(compute_s), np.log(pass_s))
    found = minimize(loss, begin, jac=True, bounds=Bounds(least, most), method="L-BFGS-B").x
    a, b, far_c, far_d, c, d, g = found.tolist()
    if not far.any():
        far_c, far_d = max(far_c, FAR * c), max(far_d, FAR * d)
    return PassModel((a, b), (c, d), (far_c, far_d), g)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Root mean squared errors of both logarithms plus penalties, and their gradient."""

    far: BoolArray
    slots: FloatArray
    local: FloatArray
    log_compute: FloatArray
    log_pass: FloatArray

    def __call__(self, x: FloatArray) -> tuple[float, FloatArray]:
        a, b, far_c, far_d, c, d, g = x
        compute = a + b * self.local
        network = _network(x, self.far, self.slots)
        log_c, log_n = np.log(compute), np.log(network)
        predicted = _log_pass(compute, network, g)
        share = np.exp(g * (log_n - predicted))  # of the network in the power mean
        err_c, slope_c = _rmse(log_c - self.log_compute)
        err_p, slope_p = _rmse(predicted - self.log_pass)
        by_compute = slope_c / compute + slope_p * (1.0 - share) / compute
        by_network = slope_p * share / network
        hops = np.maximum(self.slots - PAIR, FREE_S)
        far, near = self.far, ~self.far & (self.slots > 1)
        by_g = slope_p * ((1.0 - share) * log_c + share * log_n - predicted) / g
        ratios = HOP_PENALTY * ((far_d / far_c) ** 2 + (d / c) ** 2)
        gradient = np.array([
            by_compute.sum(),
            (by_compute * self.local).sum(),
            by_network[far].sum() - 2 * HOP_PENALTY * far_d**2 / far_c**3,
            (by_network * hops)[far].sum() + 2 * HOP_PENALTY * far_d / far_c**2,
            by_network[near].sum() - 2 * HOP_PENALTY * d**2 / c**3,
            (by_network * hops)[near].sum() + 2 * HOP_PENALTY * d / c**2,
            by_g.sum() + 2 * OVERLAP_PENALTY * (g - 1),
        ])  # fmt: skip
        return err_c + err_p + OVERLAP_PENALTY * (g - 1) ** 2 + ratios, gradient


def _rmse(errors: FloatArray) -> tuple[float, FloatArray]:
    """Return the root of the mean square, and its derivatives; these are 0 where it is 0."""
    root = float(np.sqrt(np.mean(errors**2)))
    return root, errors / (len(errors) * root) if root else np.zeros_like(errors)


def _network(x: FloatArray, far: BoolArray, slots: FloatArray | IntArray) -> FloatArray:
    hops = np.maximum(slots - PAIR, FREE_S)
    near = np.where(slots > 1, x[4] + x[5] * hops, FREE_S)
    return np.where(far, x[2] + x[3] * hops, near)


def _log_pass(compute: FloatArray, network: FloatArray, g: float) -> FloatArray:
    return np.asarray(np.logaddexp(g * np.log(compute), g * np.log(network)) / g)


PASSES_ALONE: Final = 2  # least passes of a single slot with more than the first batch
BATCHES: Final = 50  # total batches tried at each size, in equal ratios
ROUNDING: Final = 1e-8  # tolerance of divisions into whole samples


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Bounds of a job's batches, in samples."""

    first: int  # global batch at the start
    least: int  # smallest global batch to try
    most: int  # largest global batch to try
    most_local: int  # largest share of one slot, in all passes of a step
    most_pass: float  # largest pass of one slot; infinite if not known


def best_batches(
    model: PassModel, bounds: BatchBounds, noise_scale: float, nodes: IntArray, slots: IntArray
) -> tuple[FloatArray, IntArray]:
    """Return the greatest goodput (Pollux eq. 6 to 8), and its global batch, at several sizes.

    Goodput is samples/s times efficiency; it is 0 if no batch is valid. A single slot with more
    than the first batch takes at least two passes, because one pass does not measure the noise of
    gradients.

    Args:
        noise_scale: phi in samples; infinite if all batches are equally efficient.
        nodes: nodes of the job, shape (...).
        slots: slots of the job, at least one, shape (...).
    """
    slots = np.asarray(slots)
    low = np.maximum(bounds.least, slots)
    most = np.minimum(bounds.most, bounds.most_local * slots)
    batches = np.rint(np.geomspace(low, np.maximum(low, most), BATCHES))
    share = batches / slots
    passes = np.maximum(np.ceil(share / bounds.most_pass - ROUNDING), 1)
    alone = (slots == 1) & (share > bounds.first)
    passes = np.where(alone, np.maximum(passes, PASSES_ALONE), passes)
    local = np.ceil(share / passes - ROUNDING)
    step_s = model.pass_s(nodes, slots, local) + (passes - 1) * model.compute_s(local)
    goodput = np.where(low <= most, batches / step_s, 0.0)
    if np.isfinite(noise_scale):
        goodput *= (noise_scale + bounds.first) / (noise_scale + batches)
    best = goodput.argmax(axis=0)[None]
    goodputs, chosen = (np.take_along_axis(each, best, axis=0)[0] for each in (goodput, batches))
    return goodputs, chosen.astype(np.int64)
