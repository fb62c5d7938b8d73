"""The training loss, as seen in `backward()`: the script need not hand it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class LossMeter:
    """Mean over the steps since the last `take`.

    Nothing is synchronised: the sum stays a tensor on its device until somebody reads it.
    """

    def __init__(self) -> None:
        self.scale: Callable[[], float] = lambda: 1.0  # of a gradient scaler, if one is tracked
        self._sum: torch.Tensor | float | None = None
        self._count = 0
        self.last: torch.Tensor | float | None = None  # of the step under way, once it is known

    def of_pass(self, losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The loss of one backward pass, unscaled; None when no scalar was seen.

        Args:
            losses: scalars that `backward` was called on in this pass.
        """
        if not losses:
            return None
        total = losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
        return total / self.scale()

    def add(self, loss: torch.Tensor | float) -> None:
        """Count one step's loss.

        Args:
            loss: mean over the step's samples, or over what they weigh; a tensor has one element.
        """
        self._sum = loss if self._sum is None else self._sum + loss
        self.last = loss
        self._count += 1

    def mean(self) -> float | None:
        """The mean so far; None when nothing was seen."""
        total, count = self._sum, self._count
        return float(total) / count if total is not None and count else None

    def take(self) -> float | None:
        """The mean so far, and begin anew."""
        mean, self._sum, self._count = self.mean(), None, 0
        return mean
