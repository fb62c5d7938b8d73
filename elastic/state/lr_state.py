"""How far a job's learning rate has followed its batch."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch

from elastic.state.lr_scaling import DOUBLING_STEPS, LrRamp, LrScaling, lr_factor
from elastic.training_errors import UsageError

DIVIDES_BY_GRADIENT: Final = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"}
)


class LrState:
    """The factor that rates are multiplied with around each step of the optimizer."""

    def __init__(self) -> None:
        self._ramp = LrRamp()
        self._scaling: LrScaling = "linear"
        self.base_batch = 1  # samples per step that the script's rate is meant for

    def begin(
        self, scaling: LrScaling, base_batch: int, batch: int, doubling: int = DOUBLING_STEPS
    ) -> None:
        """Say how the rate is to follow.

        Args:
            scaling: the rule.
            base_batch: samples per step that the script's rate is meant for.
            batch: samples per step at first.
            doubling: steps in which the factor grows by at most 2x; 0: all at once.
        """
        self._scaling, self.base_batch = scaling, base_batch
        to = lr_factor(scaling, batch, base_batch)
        self._ramp = LrRamp(min(1.0, to), to, 0, doubling)

    def follow_batch(self, batch: int, step: int) -> None:
        """The global batch changes behind `step`: the rate follows (ONES section 3.3.2).

        Args:
            batch: global, samples per step.
            step: the last one with the old batch.
        """
        self._ramp = self._ramp.towards(lr_factor(self._scaling, batch, self.base_batch), step)

    def at(self, step: int) -> float:
        """The factor in force for `step`.

        Args:
            step: 1-based, of all epochs.
        """
        return self._ramp.at(step)

    def state_list(self) -> list[Any]:
        """What metadata and checkpoints keep of it."""
        ramp = self._ramp
        return [ramp.begin, ramp.to, ramp.since, ramp.doubling]

    def load_state_list(self, state: list[Any]) -> None:
        """The reverse.

        Args:
            state: what `state_list` gave: factor at first, factor in the end, step at which it
                began, steps for 2x. Rule and base batch stay.
        """
        begin, to, since, doubling = state
        self._ramp = LrRamp(begin, to, since, doubling)

    def encode(self) -> bytes:
        """The same as bytes, for a recovery."""
        return msgspec.msgpack.encode(self.state_list())

    def decode(self, data: bytes) -> None:
        """The reverse.

        Args:
            data: what `encode` gave.
        """
        self.load_state_list(msgspec.msgpack.decode(data))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give `optimizer` this rate, with the ratios that its parameter groups have.

    Args:
        optimizer: its groups' rates are taken against the default that it was made with.
        lr: of a group whose rate is that default.
    """
    own = float(optimizer.defaults["lr"])
    for group in optimizer.param_groups:
        group["lr"] = lr * (float(group["lr"]) / own if own else 1.0)


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
