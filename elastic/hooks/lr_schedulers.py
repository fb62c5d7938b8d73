"""See every scheduler of torch that a script makes for its optimizers, and scale its steps.

Some call their base class's constructor, some do not, some are made of others: so the constructor
of every class is wrapped, and the outermost one tells.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_trackers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[LRScheduler], None]] = (
    weakref.WeakKeyDictionary()
)
_watched: weakref.WeakSet[type] = weakref.WeakSet()
_being_made: list[int] = []  # schedulers whose constructor is running
_stepping: list[LRScheduler] = []  # those whose step is running
_counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], int]] = (
    weakref.WeakKeyDictionary()
)


def track_lr_schedulers(
    optimizers: Sequence[torch.optim.Optimizer],
    track: Callable[..., None],
    steps: Callable[[], int],
) -> None:
    """Track every scheduler that is made for one of `optimizers` from now on.

    Args:
        track: gets each as a keyword argument, named `scheduler N`: in the order in which the
            script makes them, for whichever optimizer.
        steps: how many a call of `step()` without arguments is to be, asked at each.
    """
    count = itertools.count(1)
    for optimizer in optimizers:
        _counts[optimizer] = steps
        _trackers[optimizer] = lambda made: track(**{f"scheduler {next(count)}": made})
    if LRScheduler in _watched:
        return
    for kind in [*_below(LRScheduler)]:
        _watch(kind)

    def derive(cls: type) -> None:
        _watch(cls)

    later: Any = classmethod(derive)
    LRScheduler.__init_subclass__ = later  # type: ignore[method-assign]


def _below(kind: type) -> Iterator[type]:
    yield kind
    derived: list[type] = kind.__subclasses__()
    for each in derived:
        yield from _below(each)


def _watch(kind: type) -> None:
    if kind in _watched:
        return
    _watched.add(kind)
    _watch_steps(kind)
    original: Any = vars(kind).get("__init__")
    if original is None:
        return

    @functools.wraps(original)
    def made(self: LRScheduler, *args: Any, **options: Any) -> None:
        outermost = id(self) not in _being_made
        _being_made.append(id(self))
        try:
            original(self, *args, **options)
        finally:
            _being_made.remove(id(self))
        optimizer = _optimizer_of(self) if outermost else None
        tracker = _trackers.get(optimizer) if optimizer is not None else None
        if tracker is not None:
            tracker(self)

    kind.__init__ = made  # type: ignore[misc]


def _watch_steps(kind: type) -> None:
    original: Any = vars(kind).get("step")
    if original is None:
        return

    @functools.wraps(original)
    def step(self: LRScheduler, *args: Any, **options: Any) -> None:
        if args or options or _stepping or _being_made:
            original(self, *args, **options)
            return
        optimizer = _optimizer_of(self)
        count = _counts.get(optimizer) if optimizer is not None else None
        _stepping.append(self)
        try:
            for _ in range(1 if count is None else count()):
                original(self)
        finally:
            _stepping.pop()

    kind.step = step  # type: ignore[attr-defined]


def _optimizer_of(made: LRScheduler) -> torch.optim.Optimizer | None:
    """Its own, or that of the schedulers that it is made of."""
    parts = list(vars(made).values())
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            return part
        if isinstance(part, LRScheduler) and (found := _optimizer_of(part)) is not None:
            return found
        if isinstance(part, list | tuple):
            parts.extend(part)
    return None
