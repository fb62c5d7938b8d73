"""What a sample is worth at a batch size."""

from __future__ import annotations

import numpy as np

from controlplane.prediction.array_types import FloatArray


def statistical_efficiency(batch: FloatArray, first_batch: float, noise_scale: float) -> FloatArray:
    """Progress per sample, relative to the job's first batch.

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
