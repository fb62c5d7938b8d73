"""Steps of several optimizers: their backward passes, stale gradients, and rollback.

Each backward pass of a batch is reduced separately, and an optimizer may step between two passes.
So the group can break after some optimizers have stepped. The whole step is then rolled back from
copies.

With one optimizer, a batch without an optimizer step shows that the script accumulates gradients.
With several, one optimizer may step while gradients of another accumulate, so each gradient is
tracked from the batch in which it started. Leftover gradients that are cleared before use are
harmless. For example, a generator's backward pass leaves gradients in its critic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic.sample_stream import MicroBatch
from elastic.state.training_state import TrainingState
from elastic.training_errors import UsageError


class GradientOrigins:
    """Record of the batch in which each gradient started. Create it before other hooks."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._batch = 0
        self._fired: set[int] = set()  # parameters reached by the current backward pass, by id
        self._origins: dict[int, int] = {}  # batch in which a gradient started, by parameter id
        self._stale: dict[int, torch.Tensor] = {}  # True if it includes earlier batches, by id
        for parameter in parameters:
            parameter.register_hook(partial(self._before, parameter))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start the next step."""
        self._batch += 1
        self._fired.clear()

    def backward_finished(self) -> None:
        """Record the end of an outermost backward pass."""
        self._fired.clear()

    def _before(self, parameter: nn.Parameter, _: torch.Tensor) -> None:
        key, kept = id(parameter), parameter.grad
        if key in self._fired:
            return
        self._fired.add(key)
        if kept is None:
            self._stale.pop(key, None)
        elif key in self._stale:
            self._stale[key] = self._stale[key] & kept.any()
        elif self._origins.get(key) != self._batch:
            self._stale[key] = kept.any()
        self._origins[key] = self._batch

    def include_earlier(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` will use gradients that contain parts of earlier batches."""
        doubtful = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            key, grad = id(parameter), parameter.grad
            if grad is None:
                continue
            if self._origins.get(key) != self._batch:
                doubtful.append(grad.any())
            elif key in self._stale:
                doubtful.append(self._stale[key])
        return bool(doubtful) and bool(torch.stack(doubtful).any())


class StepUndo:
    """Rollback of a step after the group broke and an optimizer had already stepped.

    Schedulers and scalers are copied when the step starts. The parameters and the state of an
    optimizer are copied before the optimizer's first step.
    """

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._snapshot = training.snapshot()
        self._copies: list[_OptimizerCopy] = []  # ordered by their first steps
        self.is_complete = True  # False if an optimizer stepped without a copy

    def save_copy(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy an optimizer before its first step, for a rollback if a later reduction fails."""
        if all(known.optimizer is not optimizer for known in self._copies):
            self._copies.append(_OptimizerCopy.of(optimizer))

    def roll_back(self) -> None:
        """Restore the state before the step."""
        for known in reversed(self._copies):  # two optimizers may have the same parameter
            known.restore()
        self._training.restore(self._snapshot)


@dataclass(frozen=True, slots=True)
class _OptimizerCopy:
    """Parameters and state of one optimizer, paired with their copies."""

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

    def restore(self) -> None:
        for parameter, saved in self.parameters:
            parameter.copy_(saved)
        state = self.optimizer.state
        for key in [k for k, e in state.items() if isinstance(e, dict) and k not in self.state]:
            del state[key]
        for key, entry in self.state.items():
            state[key] = {name: _restored(value, saved) for name, (value, saved) in entry.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _restored(value: Any, saved: Any) -> Any:
    """Copy `saved` into the tensor `value` and return it; for other values, return `saved`."""
    if not isinstance(value, torch.Tensor):
        return saved
    value.detach().copy_(saved)
    return value


class OptimizerTurns:
    """Order of backward passes and optimizer steps in a step, and the rollback of the step."""

    def __init__(self, training: TrainingState, origins: GradientOrigins) -> None:
        self._training = training
        self.origins = origins
        self._passes = 0  # backward passes of the current batch
        self._max_passes = 0  # maximum of backward passes in a batch; 0: not known yet
        self._undo: StepUndo | None = None
        self._broken = False  # the group broke during the current step
        self._before_rollback: dict[str, Any] | None = None  # snapshot before the rollback

    def begin(self, micro_batch: MicroBatch, *, may_break: bool) -> None:
        """Prepare for `micro_batch`; `may_break` is True in a group, with the full state here."""
        self._passes = 0
        if not micro_batch.first:
            return
        self._undo = StepUndo(self._training) if may_break else None
        self._broken, self._before_rollback = False, None
        self.origins.begin()

    def backward_finished(self) -> None:
        """Record an outermost backward pass."""
        self.origins.backward_finished()
        self._passes += 1

    def save_copy(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy an optimizer that is about to step, if another reduction can follow.

        No reduction is expected after as many backward passes as the longest batch had before.
        """
        undo = self._undo
        if undo is None:
            return
        if self._passes < self._max_passes or not self._max_passes:
            undo.save_copy(optimizer)
        else:
            undo.is_complete = False

    def roll_back(self) -> bool:
        """Roll the step back; return True if the state before the step is restored."""
        undo, self._broken = self._undo, True
        if undo is None or not undo.is_complete:
            return False
        if self._before_rollback is None:
            self._before_rollback = self._training.snapshot()
        undo.roll_back()
        return True

    def adopt(self) -> None:
        """Continue a step that the other workers finished, with their tensors.

        The script completes the step with its own schedulers and scalers, as they were before the
        rollback.
        """
        if self._before_rollback is not None:
            self._training.restore(self._before_rollback)
            self._before_rollback = None

    def check_skipped(self, skipped: int, ranks: int) -> None:
        """Check that either all workers or none skipped the batch."""
        if 0 < skipped < ranks:
            problem = f"{skipped} of {ranks} workers skipped a batch, with several optimizers"
            hint = "call backward() and step in every batch; multiply the loss by 0 to skip one"
            raise UsageError(problem, hint)

    def conclude(self, micro_batch: MicroBatch) -> None:
        """Conclude a batch."""
        if not self._broken:
            self._max_passes = max(self._max_passes, self._passes)
        if micro_batch.last:
            self._undo = None
