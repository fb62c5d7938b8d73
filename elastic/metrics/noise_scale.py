"""The gradient noise scale: how large a batch can be before its samples say the same.

McCandlish et al. 2018, appendix A.1: the squared norms of the gradients of a small and of a large
batch differ by the noise. One worker's share is the small one, the group's batch the large one.
Where a worker takes its share in several passes, each pass but the last is a small one: so a worker
that is alone measures, too.
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
        # Of the step under way: squared norms of mean gradients of small batches, and the inverse
        # sizes of these batches; sums.
        self._squares = 0.0
        self._inverse_sizes, self._parts = 0.0, 0
        self._means = (0.0, 0.0)  # |G|^2 and tr(Sigma); one pair, because another thread reads it
        self._count = 0

    def begin(self) -> None:
        """A step begins that is measured."""
        self._squares, self._inverse_sizes, self._parts = 0.0, 0.0, 0

    def before(self, share: torch.Tensor, own: int, whole: int) -> None:
        """Look at one pass's part of the step's sum.

        Args:
            share: shape (scalars,), its mean gradient times own / whole.
        """
        # A number at once: the device is through with `share`, which is summed and given away next.
        self._squares += float(torch.dot(share, share)) * (whole / own) ** 2
        self._inverse_sizes += 1.0 / own
        self._parts += 1

    def after(self, total: torch.Tensor, whole: int) -> None:
        """Look at the sum after the reduction, and take in what both say of the noise.

        Args:
            total: shape (scalars,), the mean gradient of the batch.
            whole: samples of the step; where one pass took all of it, nothing is measured.
        """
        squares, inverse, parts = self._squares, self._inverse_sizes, self._parts
        self.begin()
        if not parts or not parts < whole * inverse:
            return
        own, small = parts / inverse, squares / parts
        large = float(torch.dot(total, total))
        signal = (whole * large - own * small) / (whole - own)
        noise = (small - large) / (1.0 / own - 1.0 / whole)
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
