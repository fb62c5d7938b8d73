"""What a step of several optimizers changes before it is sure to be done, as it was before."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from elastic.state.training_state import TrainingState


class StepUndo:
    """Takes a step back whose group broke when an optimizer had stepped already.

    An optimizer's parameters and state are copied before its first step; buffers, schedulers and
    scalers when the step begins.

    Args:
        training: of this worker, before the step.
    """

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._snapshot = training.snapshot()
        self._buffers = [buffer.clone() for buffer in training.tensors().buffers()]
        self._copies: list[_OptimizerCopy] = []  # in the order of their first steps
        self.is_complete = True  # no optimizer stepped without a copy

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step, and another reduction of the step may come behind it.

        Args:
            optimizer: copied unless it was in this step already.
        """
        if all(known.optimizer is not optimizer for known in self._copies):
            self._copies.append(_OptimizerCopy.of(optimizer))

    def take_back(self) -> None:
        """All is as it was before the step."""
        for known in reversed(self._copies):  # a parameter may have two optimizers
            known.put_back()
        self.restore_buffers()
        self._training.restore(self._snapshot)

    def restore_buffers(self) -> None:
        """Forward passes behind `take_back` may have changed them again."""
        for buffer, was in zip(self._training.tensors().buffers(), self._buffers, strict=True):
            buffer.copy_(was)


@dataclass(frozen=True, slots=True)
class _OptimizerCopy:
    """Parameters and state of one optimizer, each beside its copy."""

    optimizer: torch.optim.Optimizer
    parameters: list[tuple[torch.Tensor, torch.Tensor]]
    state: dict[Any, dict[str, tuple[Any, Any]]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _OptimizerCopy:
        held = [p.data for group in optimizer.param_groups for p in group["params"]]
        state = {
            key: {name: (value, _copied(value)) for name, value in entry.items()}
            for key, entry in optimizer.state.items()
            if isinstance(entry, dict)
        }
        return cls(optimizer, [(p, p.clone()) for p in held], state)

    def put_back(self) -> None:
        for parameter, was in self.parameters:
            parameter.copy_(was)
        state = self.optimizer.state
        for key in [k for k, e in state.items() if isinstance(e, dict) and k not in self.state]:
            del state[key]
        for key, entry in self.state.items():
            state[key] = {name: _put_back(value, was) for name, (value, was) in entry.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _put_back(value: Any, was: Any) -> Any:
    """The same tensor with the values that it had; what is none as it was."""
    if not isinstance(value, torch.Tensor):
        return was
    value.detach().copy_(was)
    return value
