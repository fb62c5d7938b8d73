"""How long a step takes on so many slots: a form per job family, fitted to what was seen.

The form is that of Pollux (Qiao et al., OSDI '21, eq. 8 to 11): computing is linear in the local
batch, talking is linear in the slots, differently within a node and across nodes, and both overlap
by a power mean. Pollux takes what was not measured yet to cost nothing, so that jobs explore. Here
priors stand in for it, weak enough that a few measurements outweigh them: computing has a part
that does not depend on the batch, each further slot adds a little, and talk across nodes costs
twice that within one. What remains wrong at a size that was measured is made good there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from controlplane.prediction.array_types import FloatArray
from controlplane.prediction.reduction_fit import can_separate, computing, separated
from controlplane.prediction.speed_model import (
    FIXED_SHARE,
    PRIOR_SCALING,
    Sample,
    Scaling,
    SpeedModel,
)
from controlplane.prediction.throughput_fit import refined

__all__ = ["Sample", "SpeedModel", "fit"]

LEAST, MOST = 1e-12, 1e12  # of seconds and of samples: whatever lies beyond was not measured
NO_STEP_S: Final = 1e-300  # keeps a logarithm finite


def fit(
    samples: Sequence[Sample],
    first_batch: int,
    before: SpeedModel | None = None,
    scaling: Scaling = PRIOR_SCALING,
) -> SpeedModel:
    """The model that explains `samples` best; without any, a prior in relative time.

    Args:
        samples: of one family; those that nobody can have measured (nan, 0 seconds) do not count.
            Where all that are of several slots tell their reductions, computing and network are
            fitted apart (`reduction_fit`), else together (`throughput_fit`).
        first_batch: a usual batch of one slot, for the prior.
        before: fitted to fewer samples of this family; the search begins there, which is faster,
            and comes to the same.
        scaling: what is believed of the speed-up until several slots were seen.
    """
    samples = [_told(sample) for sample in samples if _sane(sample)]
    if not samples:
        each = (1.0 - FIXED_SHARE) / max(first_batch, 1)
        return SpeedModel(compute=(FIXED_SHARE, each), scaling=scaling)
    if all(sample.slots == 1 for sample in samples):
        best = SpeedModel(compute=_computing(samples), known=True, scaling=scaling)
    elif can_separate(samples):
        best = separated(samples)
    else:
        best = refined(samples, before if before is not None and before.known else None)
    return _corrected(best, samples)


def _sane(sample: Sample) -> bool:
    return (
        LEAST <= sample.step_s <= MOST
        and LEAST <= sample.local_batch <= MOST
        and 0.0 <= sample.weight < math.inf
    )


def _told(sample: Sample) -> Sample:
    """As it is, but for a wait that nobody can have had."""
    if sample.sync_s is None or 0.0 <= sample.sync_s <= sample.step_s:
        return sample
    return replace(sample, sync_s=None)


def _computing(samples: Sequence[Sample]) -> tuple[float, float]:
    """A and b of steps on one slot, all of which is computing."""
    steps = ((sample.step_s, sample.local_batch, sample.weight) for sample in samples)
    return computing(*np.array(list(steps)).T)


def _residuals(model: SpeedModel, samples: Sequence[Sample]) -> FloatArray:
    """Logarithms of what was measured over what the model says, shape (S,)."""
    seen = np.array([sample.step_s for sample in samples])
    said = model.step_s(
        np.array([sample.nodes for sample in samples]),
        np.array([sample.slots for sample in samples]),
        np.array([sample.local_batch for sample in samples]),
    )
    return np.asarray(np.log(seen) - np.log(np.maximum(said, NO_STEP_S)))


def _corrected(model: SpeedModel, samples: Sequence[Sample]) -> SpeedModel:
    """The mean of what the model is wrong by at each size that was seen."""
    residuals = _residuals(model, samples)
    at: dict[tuple[int, int], list[float]] = {}
    for sample, residual in zip(samples, residuals, strict=True):
        at.setdefault((sample.nodes, sample.slots), []).append(float(residual))
    correction = {size: float(np.exp(np.mean(values))) for size, values in at.items()}
    return replace(model, correction=correction, known=True)
