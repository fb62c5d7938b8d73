"""Training physics of the Table 2 model: step times, efficiency, lost epochs, reported curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from controlplane.sim.models.job_model import EpochMetrics, Placement, StepParts
from controlplane.sim.models.table2_constants import (
    ERRATIC_SPREAD,
    JUMP_EPOCHS,
    LOSS_LEFT,
    LOSS_SPREAD,
    NETWORK_BYTES_PER_S,
    NETWORK_HOP_S,
    NODE_BYTES_PER_S,
    NODE_HOP_S,
    NOISE_SPREAD,
    PLATEAU,
    SAFE_JUMP,
    SPIKE,
    SPIKES,
    Row,
)

FloatArray = NDArray[np.float64]
MARGIN = 1e-4  # distance of an accuracy from its target


def noise_scale(row: Row, share: float) -> float:
    """Return phi in samples at a share of the epochs to target; geometric growth, then constant."""
    first, last = row.noise
    return first * float((last / first) ** min(1.0, share))


def efficiency(row: Row, batch: int, phi: float) -> float:
    """Return the value of a sample relative to the first batch: (phi + m0) / (phi + m).

    McCandlish et al. 2018, and Pollux section 3.1.

    Args:
        batch: m, global, samples.
        phi: noise scale, samples.
    """
    return (phi + row.first) / (phi + batch)


def lost_epochs(before: int, batch: int) -> float:
    """Return the epochs lost by a jump of the global batch; 0 up to a doubling and for decreases.

    ONES section 3.3.2 and figure 13: after an abrupt increase the loss needs many epochs to
    recover, after a gradual one (figure 14) it does not. A decrease lowers the learning rate with
    it, and disturbs nothing. Paper: no formula; here each doubling beyond the first costs the same.

    Args:
        before: global batch, samples; 0: none.
        batch: new global batch, samples.
    """
    if before <= 0 or batch <= SAFE_JUMP * before:
        return 0.0
    return JUMP_EPOCHS * math.log2(batch / (SAFE_JUMP * before))


def reports(
    row: Row, to_target: int, phi: Sequence[float], rng: Generator, *, erratic: bool
) -> tuple[EpochMetrics, ...]:
    """Return the reports after 0, 1, ... epochs.

    The accuracy is above its target in exactly the epochs after `to_target`. The loss follows 1 /
    (b0 k + b1) + b2 (Optimus, section 3.1).

    Args:
        to_target: epochs, at least 1.
        phi: noise scale of each running epoch, samples; one more than there are epochs.
        erratic: with plateaus, spikes and more noise; ONES section 2.1: many curves are not
            smooth.
    """
    done = np.arange(len(phi), dtype=np.float64)
    measured = np.exp(NOISE_SPREAD * rng.standard_normal(done.size))
    scales = np.array([phi[0], *phi[:-1]]) * measured
    losses = _losses(row, done, to_target, rng, erratic=erratic)
    accuracies = _accuracies(row, done, to_target, rng)
    return tuple(
        EpochMetrics(loss, {"accuracy": accuracy}, scale)
        for loss, accuracy, scale in zip(
            losses.tolist(), accuracies.tolist(), scales.tolist(), strict=True
        )
    )


def _losses(
    row: Row, done: FloatArray, to_target: int, rng: Generator, *, erratic: bool
) -> FloatArray:
    noise = rng.standard_normal(done.size)
    spiking = rng.random(done.size) < SPIKES
    height = rng.uniform(*SPIKE, done.size)
    if erratic:
        done = done // PLATEAU * PLATEAU
    above = math.log(row.classes) - row.floor
    curve: FloatArray = row.floor + above / (1 + (1 / LOSS_LEFT - 1) * done / to_target)
    curve *= np.exp((ERRATIC_SPREAD if erratic else LOSS_SPREAD) * noise)
    if erratic:
        curve[spiking] *= height[spiking]
    return curve


def _accuracies(row: Row, done: FloatArray, to_target: int, rng: Generator) -> FloatArray:
    guess = 1 / row.classes
    rate = 3 / to_target  # e^-3: 5% of the way is left at the target
    way = -np.expm1(-rate * done) / -np.expm1(-3.0)
    curve = guess + (row.target - guess) * way + 0.01 * rng.standard_normal(done.size)
    limits = (row.target + MARGIN, 1.0), (0.0, row.target - MARGIN)
    return np.array(
        [
            min(max(value, low), high)
            for epoch, value in enumerate(curve.tolist())
            for low, high in [limits[epoch <= to_target]]
        ]
    )


def model_bytes(row: Row) -> float:
    """Return the bytes of the gradients in fp32, all of which go through a ring."""
    return row.parameters * 1e6 * 4


def sync_s(row: Row, placement: Placement) -> float:
    """Return the seconds of a ring all-reduce: 2 (c - 1) steps of 1/c of the gradients each.

    Args:
        placement: slots on each node; c in total.
    """
    workers = sum(placement)
    apart = sum(slots > 0 for slots in placement) > 1
    hop_s = NETWORK_HOP_S if apart else NODE_HOP_S
    bytes_per_s = NETWORK_BYTES_PER_S if apart else NODE_BYTES_PER_S
    return 2 * (workers - 1) * (model_bytes(row) / workers / bytes_per_s + hop_s)


def step_parts(row: Row, placement: Placement, batch: int) -> StepParts:
    """Return the passes of a step with `batch` samples, divided evenly.

    A local batch above memory takes several passes. Only the last one overlaps with the
    synchronisation: T = sqrt(T_grad^2 + T_sync^2), as in Pollux section 3.2 with gamma 2. The part
    of T beyond the gradients counts as synchronisation.

    Args:
        placement: slots on each node.
        batch: global, samples.
    """
    local = math.ceil(batch / sum(placement))
    passes = math.ceil(local / row.memory)
    compute_s = row.fixed_ms / 1000 + local / passes / row.peak
    pass_s = math.hypot(compute_s, sync_s(row, placement))
    return StepParts(pass_s, pass_s - compute_s, math.ceil(local / passes), passes)


def step_s(row: Row, placement: Placement, batch: int) -> float:
    """Return the seconds of a step with `batch` samples (global), divided evenly."""
    return step_parts(row, placement, batch).step_s
