"""See every scheduler of torch that a script makes for its optimizer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_trackers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[LRScheduler], None]] = (
    weakref.WeakKeyDictionary()
)


def track_lr_schedulers(optimizer: torch.optim.Optimizer, track: Callable[..., None]) -> None:
    """Track every scheduler that is made for `optimizer` from now on.

    Args:
        optimizer: whose.
        track: gets each as a keyword argument, named `scheduler N`.
    """
    count = itertools.count(1)
    _trackers[optimizer] = lambda made: track(**{f"scheduler {next(count)}": made})
    if LRScheduler.__init__.__name__ == "made":
        return
    original: Any = LRScheduler.__init__

    def made(self: LRScheduler, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        tracker = _trackers.get(self.optimizer)
        if tracker is not None:
            tracker(self)

    LRScheduler.__init__ = made  # type: ignore[method-assign]
