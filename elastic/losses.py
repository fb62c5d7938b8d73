"""The training loss, as seen in `backward()`: the script need not hand it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LossMeter:
    """Mean of the scalars that the script called `backward` on since the last `take`.

    `torch.Tensor.backward` is wrapped while it listens, because no hook of autograd sees the loss.
    Nothing is synchronised: the sum stays a tensor on its device until somebody reads it.
    """

    def __init__(self) -> None:
        self.scale: Callable[[], float] = lambda: 1.0  # of a gradient scaler, if one is tracked
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._original: Callable[..., None] | None = None

    def listen(self) -> None:
        """Begin to see losses."""
        if self._original is not None:
            return
        original = self._original = torch.Tensor.backward

        def backward(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            self._saw(loss)
            original(loss, *args, **options)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

    def deafen(self) -> None:
        """Stop; `backward` is torch's own again."""
        if self._original is not None:
            torch.Tensor.backward = self._original  # type: ignore[method-assign]
            self._original = None

    def mean(self) -> float | None:
        """The mean so far; None when nothing was seen."""
        total, count = self._sum, self._count
        return float(total) / count if total is not None and count else None

    def take(self) -> float | None:
        """The mean so far, and begin anew."""
        mean, self._sum, self._count = self.mean(), None, 0
        return mean

    def _saw(self, loss: torch.Tensor) -> None:
        if loss.numel() != 1:
            return
        value = loss.detach().reshape(()) / self.scale()
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1
