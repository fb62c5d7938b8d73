"""See every gradient scaler that a script scales losses with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_seen: list[Callable[[GradScaler], None]] = []  # told of each; the last agent's in this process


def track_grad_scalers(track: Callable[[GradScaler], None]) -> None:
    """Tell `track` of each scaler before it scales a loss, also of those that it knows.

    Args:
        track: takes the place of what was told before.
    """
    _seen[:] = [track]
    if GradScaler.scale.__name__ == "scale_tracked":
        return
    original: Any = GradScaler.scale

    def scale_tracked(self: GradScaler, outputs: Any) -> torch.Tensor | Any:
        if self.is_enabled():
            for tell in _seen:
                tell(self)
        return original(self, outputs)

    GradScaler.scale = scale_tracked  # type: ignore[method-assign, assignment]
