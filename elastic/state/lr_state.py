"""How far a job's learning rate has followed its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic.state.lr_scaling import DOUBLING_STEPS, LrRamp, LrScaling, lr_factor
from elastic.training_errors import UsageError

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
