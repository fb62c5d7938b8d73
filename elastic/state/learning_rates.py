"""Learning rate that follows the batch (ONES section 3.3.2), without jumps that spike the loss.

The rate that script and schedulers see is for the job's first batch. A factor is applied around
each optimizer step only, so no scheduler can undo it or count it twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic.training_errors import UsageError

LrScaling = Literal["linear", "sqrt", "none"]
DOUBLING_STEPS: Final = 20


def lr_factor(rule: LrScaling, batch: int, base: int) -> float:
    """Return the factor of a rate for `base` samples per step at a global batch of `batch`.

    "linear" is the paper's rule, for SGD; "sqrt" is for optimizers that divide by the gradient's
    own size (Adam-like), which the paper does not treat. No scaling if `base` <= 0.
    """
    if rule == "none" or base <= 0:
        return 1.0
    ratio = batch / base
    return ratio if rule == "linear" else math.sqrt(ratio)


@dataclass(frozen=True, slots=True)
class LrRamp:
    """Course of a factor: down at once, up by at most 2x in `doubling` steps.

    Paper: the rate is scaled at once; its figures 13 and 14 show that a large jump spikes the loss.
    `doubling = 0` is the paper's way.
    """

    begin: float = 1.0
    to: float = 1.0
    since: int = 0  # start step
    doubling: int = DOUBLING_STEPS

    def at(self, step: int) -> float:
        """Return the factor in force for `step` (1-based, of all epochs)."""
        if self.to <= self.begin or self.doubling <= 0:
            return self.to
        doublings = max(0, step - self.since) / self.doubling
        if doublings >= math.log2(self.to / self.begin):
            return self.to
        return float(self.begin * 2.0**doublings)

    def towards(self, to: float, step: int) -> LrRamp:
        """Return a ramp from the factor at `step` to another target; starts after `step`."""
        if to == self.to:
            return self
        return LrRamp(self.at(step), to, step, self.doubling)


ADAM_LIKE: Final = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"}
)


class LrState:
    """Factors of the learning rates around each optimizer step, one for each optimizer."""

    def __init__(self) -> None:
        self._ramps = [LrRamp()]  # one for each optimizer
        self._rules: list[LrScaling] = ["linear"]
        self.base_batch = 1  # samples per step that the script's rate is for

    def begin(
        self,
        rules: Sequence[LrScaling],
        base_batch: int,
        batch: int,
        doubling: int = DOUBLING_STEPS,
    ) -> None:
        """Set the rules that the rates follow.

        `base_batch` is the batch that the script's rate is meant for, `batch` the initial one. The
        factor grows by at most 2x in `doubling` steps; 0: at once.
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
        """Return the factor in force for `step` (1-based), of the optimizer at `place`."""
        return self._ramps[place].at(step)

    def state_list(self) -> list[Any]:
        """Return the state for metadata and checkpoints."""
        return [
            value
            for ramp in self._ramps
            for value in (ramp.begin, ramp.to, ramp.since, ramp.doubling)
        ]

    def load_state_list(self, state: list[Any]) -> None:
        """Load the result of `state_list`; rules and base batch stay.

        It has four values per optimizer: first factor, final factor, start step, steps for 2x.
        """
        self._ramps = [LrRamp(*state[start : start + 4]) for start in range(0, len(state), 4)]


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Set the rate of `optimizers`, keeping the ratios of all parameter groups.

    Ratios are relative to the default rate of the first optimizer; `lr` is the rate of a group that
    has this default.
    """
    own = float(optimizers[0].defaults["lr"])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * (float(group["lr"]) / own if own else 1.0)


def scale_scheduler(scheduler: LRScheduler, factor: float) -> None:
    """Scale a scheduler that was created before the job's rate was known.

    `factor` is the job's rate over the script's.

    Raises:
        UsageError: if the scheduler consists of others, or has rates of an unknown kind.
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
    """Return the rule `asked`, or for "auto" the rule for this class of optimizer."""
    if asked == "auto":
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        return "sqrt" if kinds & ADAM_LIKE else "linear"
    if asked not in {"linear", "sqrt", "none"}:
        problem = f"lr_scaling {asked!r} is unknown"
        raise UsageError(problem, 'choose "auto", "linear", "sqrt" or "none"', "lr_scaling")
    return asked  # type: ignore[return-value] # it is one of the rule's literals
