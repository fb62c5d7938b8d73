"""The gradient noise scale: how large a batch can be before its samples say the same.

McCandlish et al. 2018, appendix A.1: the squared norms of the gradients of a small and of a large
batch differ by the noise. One worker's share is the small one, the group's batch the large one.
"""

from __future__ import annotations

import math
from typing import Final

import torch

EVERY: Final = 4  # steps between measurements
SMOOTHING: Final = 0.1  # weight of the newest
LEAST: Final = 16  # measurements before anything is said


class NoiseMeter:
    """Running estimates of |G|^2 and tr(Sigma), whose ratio is the noise scale in samples."""

    def __init__(self) -> None:
        self._own = 0.0  # squared norm of this worker's mean gradient
        self._means = (0.0, 0.0)  # |G|^2 and tr(Sigma); one pair, because another thread reads it
        self._count = 0

    def before(self, share: torch.Tensor, own: int, whole: int) -> None:
        """Look at this worker's part of the sum that is about to be reduced.

        Args:
            share: shape (scalars,), its mean gradient times own / whole.
            own: samples that it took.
            whole: samples of the step.
        """
        self._own = float(torch.dot(share, share)) * (whole / own) ** 2

    def after(self, total: torch.Tensor, own: int, whole: int) -> None:
        """Look at the sum after the reduction, and take in what both say of the noise.

        Args:
            total: shape (scalars,), the mean gradient of the batch.
            own: samples that this worker took.
            whole: samples of the step; where it is no more than `own`, nothing is measured.
        """
        if not own < whole:
            return
        large = float(torch.dot(total, total))
        signal = (whole * large - own * self._own) / (whole - own)
        noise = (self._own - large) / (1.0 / own - 1.0 / whole)
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return  # a step that overflowed
        self._count += 1
        weight = max(SMOOTHING, 1.0 / self._count)
        old_signal, old_noise = self._means
        self._means = (
            old_signal + weight * (signal - old_signal),
            old_noise + weight * (noise - old_noise),
        )

    def scale(self) -> float | None:
        """The ratio of noise and signal, in samples; None while it cannot be estimated.

        Any thread may ask.
        """
        signal, noise = self._means
        if self._count < LEAST or signal <= 0 or noise <= 0:
            return None
        return noise / signal
