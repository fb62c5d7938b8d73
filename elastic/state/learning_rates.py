"""Learning rate that follows the batch (ONES section 3.3.2), without jumps that spike the loss.

Script and schedulers see the rate for the job's first batch. A factor is applied only during each
optimizer step, so no scheduler can undo the factor or apply it twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic.training_errors import UsageError

LrScaling = Literal["linear", "sqrt", "none"]
DOUBLING_STEPS: Final = 20


def lr_factor(rule: LrScaling, batch: int, base: int) -> float:
    """Return the factor that adapts a rate for `base` samples per step to `batch` samples.

    "linear" is the paper's rule, for SGD. "sqrt" is for Adam-like optimizers, which divide by the
    gradient's own size; the paper does not treat them.
    """
    if rule == "none" or base <= 0:
        return 1.0
    ratio = batch / base
    return ratio if rule == "linear" else math.sqrt(ratio)


@dataclass(frozen=True, slots=True)
class LrRamp:
    """Course of a factor, which falls at once and rises by at most 2x in `doubling` steps.

    The paper scales the rate at once, and its figures 13 and 14 show that a large jump spikes the
    loss. With `doubling = 0` the factor also rises at once, as in the paper.
    """

    begin: float = 1.0
    to: float = 1.0
    since: int = 0  # step at which the ramp starts
    doubling: int = DOUBLING_STEPS

    def at(self, step: int) -> float:
        """Return the factor for `step` (1-based, counted over all epochs)."""
        if self.to <= self.begin or self.doubling <= 0:
            return self.to
        doublings = max(0, step - self.since) / self.doubling
        if doublings >= math.log2(self.to / self.begin):
            return self.to
        return float(self.begin * 2.0**doublings)

    def towards(self, to: float, step: int) -> LrRamp:
        """Return a ramp that starts after `step`, at the factor of `step`, and ends at `to`."""
        if to == self.to:
            return self
        return LrRamp(self.at(step), to, step, self.doubling)


ADAM_LIKE: Final = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"}
)


class LrState:
    """Factors for the learning rates during each optimizer step, one per optimizer."""

    def __init__(self) -> None:
        self._ramps = [LrRamp()]  # one ramp per optimizer
        self._rules: list[LrScaling] = ["linear"]
        self.base_batch = 1  # global batch for which the script's rate is meant

    def begin(
        self,
        rules: Sequence[LrScaling],
        base_batch: int,
        batch: int,
        doubling: int = DOUBLING_STEPS,
    ) -> None:
        """Set the rules that the rates follow, one per optimizer.

        The script's rate is meant for the global batch `base_batch`. The factor grows by at most 2x
        in `doubling` steps; 0 sets no limit.
        """
        self._rules, self.base_batch = list(rules), base_batch
        targets = [lr_factor(rule, batch, base_batch) for rule in rules]
        self._ramps = [LrRamp(min(1.0, to), to, 0, doubling) for to in targets]

    def follow_batch(self, batch: int, step: int) -> None:
        """Adapt the rates to a global batch that changes after `step` (ONES section 3.3.2)."""
        self._ramps = [
            ramp.towards(lr_factor(rule, batch, self.base_batch), step)
            for ramp, rule in zip(self._ramps, self._rules, strict=True)
        ]

    def at(self, step: int, place: int = 0) -> float:
        """Return the factor for `step` (1-based) and the optimizer at index `place`."""
        return self._ramps[place].at(step)

    def state_list(self) -> list[Any]:
        """Return the state for metadata and checkpoints; see `load_state_list`."""
        return [value for ramp in self._ramps for value in astuple(ramp)]

    def load_state_list(self, state: list[Any]) -> None:
        """Load the result of `state_list`; rules and base batch do not change.

        The list has four values per optimizer: first factor, final factor, start step, steps for
        2x.
        """
        self._ramps = [LrRamp(*state[start : start + 4]) for start in range(0, len(state), 4)]


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Set the rate of `optimizers`, keeping the ratios between all parameter groups.

    A group that has the default rate of the first optimizer gets the rate `lr`.
    """
    own = float(optimizers[0].defaults["lr"])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * (float(group["lr"]) / own if own else 1.0)


def scale_scheduler(scheduler: LRScheduler, factor: float) -> None:
    """Multiply the rates of a scheduler that was created before the job's rate was known.

    Schedulers that consist of other schedulers are refused.
    """
    if factor == 1.0:
        return
    rates = getattr(scheduler, "base_lrs", None)
    if rates is None or hasattr(scheduler, "_schedulers"):
        problem = f"the job file sets lr, but {type(scheduler).__name__} was created with another"
        hint = "leave lr out of the job file, or create one plain scheduler"
        raise UsageError(problem, hint, "lr")
    scheduler.base_lrs = [rate * factor for rate in rates]
    for group in scheduler.optimizer.param_groups:
        group["initial_lr"] *= factor


def choose_lr_scaling(optimizer: torch.optim.Optimizer, asked: str) -> LrScaling:
    """Return the rule `asked`; for "auto", return the rule for the class of `optimizer`."""
    if asked == "auto":
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        return "sqrt" if kinds & ADAM_LIKE else "linear"
    if asked not in {"linear", "sqrt", "none"}:
        problem = f"lr_scaling {asked!r} is unknown"
        raise UsageError(problem, 'choose "auto", "linear", "sqrt" or "none"', "lr_scaling")
    return asked  # type: ignore[return-value] # `asked` is one of the literals
