"""The learning rate follows the batch (ONES section 3.3.2), without a jump that spikes the loss.

The rate that script and schedulers see stays in terms of the job's first batch; a factor is applied
around each optimizer step only, so no scheduler can undo it or count it twice.

How far a job's learning rate has followed its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic.training_errors import UsageError

LrScaling = Literal["linear", "sqrt", "none"]
DOUBLING_STEPS: Final = 20


def lr_factor(rule: LrScaling, batch: int, base: int) -> float:
    """What the rate at `base` samples per step is multiplied with at `batch`.

    Linear is the paper's, for SGD; the square root is for optimizers that divide by the gradient's
    own size (Adam and its kin), which the paper does not treat.

    Args:
        rule: "linear" (ONES section 3.3.2), "sqrt" or "none".
        batch: global batch, samples per step.
        base: samples per step that the rate is meant for; 0 or less: nothing is scaled.
    """
    if rule == "none" or base <= 0:
        return 1.0
    ratio = batch / base
    return ratio if rule == "linear" else math.sqrt(ratio)


@dataclass(frozen=True, slots=True)
class LrRamp:
    """A factor on its way: down at once, up by at most 2x in `doubling` steps.

    Paper: the rate is scaled at once; its figures 13 and 14 show that a large jump spikes the loss.
    `doubling = 0` is the paper's way.
    """

    begin: float = 1.0
    to: float = 1.0
    since: int = 0  # step at which it began
    doubling: int = DOUBLING_STEPS

    def at(self, step: int) -> float:
        """The factor in force for `step`.

        Args:
            step: 1-based, of all epochs.
        """
        if self.to <= self.begin or self.doubling <= 0:
            return self.to
        doublings = max(0, step - self.since) / self.doubling
        if doublings >= math.log2(self.to / self.begin):
            return self.to
        return float(self.begin * 2.0**doublings)

    def towards(self, to: float, step: int) -> LrRamp:
        """From where the factor is at `step`, to another target.

        Args:
            step: behind which the new way begins, 1-based.
        """
        if to == self.to:
            return self
        return LrRamp(self.at(step), to, step, self.doubling)


DIVIDES_BY_GRADIENT: Final = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"}
)


class LrState:
    """The factors that rates are multiplied with around each step of an optimizer."""

    def __init__(self) -> None:
        self._ramps = [LrRamp()]  # one for each optimizer
        self._rules: list[LrScaling] = ["linear"]
        self.base_batch = 1  # samples per step that the script's rate is meant for

    def begin(
        self,
        rules: Sequence[LrScaling],
        base_batch: int,
        batch: int,
        doubling: int = DOUBLING_STEPS,
    ) -> None:
        """Say how the rates are to follow.

        Args:
            base_batch: samples per step that the script's rate is meant for.
            batch: samples per step at first.
            doubling: steps in which the factor grows by at most 2x; 0: all at once.
        """
        self._rules, self.base_batch = list(rules), base_batch
        targets = [lr_factor(rule, batch, base_batch) for rule in rules]
        self._ramps = [LrRamp(min(1.0, to), to, 0, doubling) for to in targets]

    def follow_batch(self, batch: int, step: int) -> None:
        """The global batch changes behind `step`: the rates follow (ONES section 3.3.2).

        Args:
            batch: global, samples per step.
            step: the last one with the old batch.
        """
        self._ramps = [
            ramp.towards(lr_factor(rule, batch, self.base_batch), step)
            for ramp, rule in zip(self._ramps, self._rules, strict=True)
        ]

    def at(self, step: int, place: int = 0) -> float:
        """The factor in force for `step`.

        Args:
            step: 1-based, of all epochs.
        """
        return self._ramps[place].at(step)

    def state_list(self) -> list[Any]:
        """What metadata and checkpoints keep of it."""
        return [
            value
            for ramp in self._ramps
            for value in (ramp.begin, ramp.to, ramp.since, ramp.doubling)
        ]

    def load_state_list(self, state: list[Any]) -> None:
        """The reverse.

        Args:
            state: what `state_list` gave, four for each optimizer: factor at first, factor in the
                end, step at which it began, steps for 2x. Rules and base batch stay.
        """
        self._ramps = [LrRamp(*state[start : start + 4]) for start in range(0, len(state), 4)]

    def encode(self) -> bytes:
        """The same as bytes, for a recovery."""
        return msgspec.msgpack.encode(self.state_list())

    def decode(self, data: bytes) -> None:
        """The reverse."""
        self.load_state_list(msgspec.msgpack.decode(data))


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Give `optimizers` this rate, with the ratios that all their parameter groups have.

    Args:
        optimizers: rates are taken against the default that the first was made with.
        lr: of a group whose rate is that default.
    """
    own = float(optimizers[0].defaults["lr"])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * (float(group["lr"]) / own if own else 1.0)


def scale_scheduler(scheduler: LRScheduler, factor: float) -> None:
    """Bring a scheduler that was made before the job's rate was known to that rate.

    Args:
        scheduler: of torch, one that goes by rates of its own.
        factor: the job's rate over the script's.

    Raises:
        UsageError: if it is made of others, or goes by rates of which nothing is known.
    """
    if factor == 1.0:
        return
    rates = getattr(scheduler, "base_lrs", None)
    if rates is None or hasattr(scheduler, "_schedulers"):
        what = f"the job file says a rate, and {type(scheduler).__name__} was made with another"
        raise UsageError(what, "leave lr out of the job file, or make one plain scheduler", "lr")
    scheduler.base_lrs = [rate * factor for rate in rates]
    for group in scheduler.optimizer.param_groups:
        group["initial_lr"] *= factor


def choose_lr_scaling(optimizer: torch.optim.Optimizer, asked: str) -> LrScaling:
    """How the learning rate follows the batch.

    Args:
        optimizer: whose kind decides if that is left open.
        asked: "linear", "sqrt", "none", or "auto": by the kind of optimizer.

    Raises:
        UsageError: if `asked` is no rule.
    """
    if asked == "auto":
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        return "sqrt" if kinds & DIVIDES_BY_GRADIENT else "linear"
    if asked not in {"linear", "sqrt", "none"}:
        what = f"lr_scaling {asked!r} is no rule"
        raise UsageError(what, 'choose "auto", "linear", "sqrt" or "none"', "lr_scaling")
    return asked  # type: ignore[return-value] # it is one of the rule's literals
