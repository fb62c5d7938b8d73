"""How much longer steps take where workers share the cores of their host."""

from __future__ import annotations

import math

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray


def stretch(busy: int, cores: float) -> float:
    """Times that a step takes longer when `busy` workers of one thread share `cores`.

    Args:
        busy: workers on a node, of all jobs.
        cores: of that node; infinite: each worker has a device of its own.
    """
    return max(1.0, busy / cores) if math.isfinite(cores) else 1.0


def stretch_alone(slots: IntArray, nodes: IntArray, cores: float) -> FloatArray:
    """The same for a job that has its nodes to itself.

    Args:
        slots: shape (L,), of the job.
        nodes: shape (L,), that it is spread over evenly.

    Returns:
        Shape (L,), 1 or more.
    """
    if not math.isfinite(cores):
        return np.ones(len(slots))
    return np.maximum(1.0, np.ceil(slots / nodes) / cores)
