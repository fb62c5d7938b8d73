"""The gradient noise scale, as reports of workers name it."""

from __future__ import annotations

import math


def first_noise_scale(*scales: float | None) -> float | None:
    """The first of several that can be one.

    Args:
        scales: in samples, as scripts and workers report them; None where none was measured.

    Returns:
        A number of samples above 0; None if there is none.
    """
    return next((v for v in scales if v is not None and math.isfinite(v) and v > 0), None)
