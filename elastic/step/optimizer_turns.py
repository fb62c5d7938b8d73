"""A step in which several optimizers take turns.

Each backward pass of a batch is reduced for itself, and an optimizer may step between two of them.
So the group may break under a step that some optimizers have made already: it is taken back, whole.

Which gradients an optimizer would take that were made in an earlier batch.

With one optimizer, a batch without its step tells. Of several one may step while another's
gradients go on adding up, so each parameter's gradient is followed from where it was empty. Those
that are left over and emptied before they are used are no harm: a generator's backward pass leaves
some in its critic.

What a step of several optimizers changes before it is sure to be done, as it was before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.batches import MicroBatch
from elastic.state.training_state import TrainingState
from elastic.training_errors import UsageError


class GradientOrigins:
    """Follows the gradients of some parameters over the batches.

    Args:
        parameters: those that are trained; this is made before whoever else looks at their
            gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._batch = 0
        self._fired: set[int] = set()  # in the present backward pass
        self._origins: dict[int, int] = {}  # batch in which a gradient began, by id
        self._stale: dict[int, torch.Tensor] = {}  # whether one has earlier batches' in it
        for parameter in parameters:
            parameter.register_hook(self._before(parameter))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Another step begins."""
        self._batch += 1
        self._fired.clear()

    def backward_over(self) -> None:
        """An outermost backward pass is over."""
        self._fired.clear()

    def _before(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        key = id(parameter)

        def before(_: torch.Tensor) -> None:
            if key in self._fired:
                return
            self._fired.add(key)
            kept = parameter.grad
            if kept is None:
                self._stale.pop(key, None)
            elif key in self._stale:
                self._stale[key] = self._stale[key] & kept.any()
            elif self._origins.get(key) != self._batch:
                self._stale[key] = kept.any()
            self._origins[key] = self._batch

        return before

    def are_earlier(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient that `optimizer` is about to take is of an earlier batch, in part."""
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


class OptimizerTurns:
    """Follows backward passes and optimizers through a step, and takes it back."""

    def __init__(self, training: TrainingState, origins: GradientOrigins) -> None:
        self._training = training
        self._origins = origins
        self._passes = 0  # backward passes of the present batch
        self._most = 0  # of a batch so far; 0: there was none yet
        self._stepped = False  # an optimizer had its turn in the present batch
        self._undo: StepUndo | None = None
        self._broken = False  # the group broke under the present step
        self._reached: dict[str, Any] | None = None  # before the step was taken back

    def begin(self, micro_batch: MicroBatch, *, may_break: bool) -> None:
        """The script gets `micro_batch`.

        Args:
            micro_batch: of the step that is under way.
            may_break: this worker has peers, and the whole state to take back to.
        """
        self._passes, self._stepped = 0, False
        if not micro_batch.first:
            return
        self._undo = StepUndo(self._training) if may_break else None
        self._broken, self._reached = False, None
        self._origins.begin()

    def backward_over(self, micro_batch: MicroBatch) -> int:
        """An outermost backward pass is over; its place among those of the batch, from 0.

        Raises:
            UsageError: if an optimizer had its turn before it, and the step takes several passes.
        """
        self._origins.backward_over()
        if self._stepped and not (micro_batch.first and micro_batch.last):
            what = (
                "an optimizer steps between two backward passes of a batch, and this worker takes "
                "its share of the batch in several passes: the later gradients would be those of "
                "parameters that have not stepped yet"
            )
            raise UsageError(
                what,
                "lower batch_size or raise max_local_batch, so that shares fit the device at once; "
                "or step all optimizers behind the last backward pass",
            )
        self._passes += 1
        return self._passes - 1

    def has_turn(self) -> None:
        """An optimizer steps, or passes over its step."""
        self._stepped = True

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step: what it changes can be put back.

        Behind as many backward passes as no batch had more of, nothing is copied: nothing follows.

        Args:
            optimizer: whose parameters and state are copied.
        """
        undo = self._undo
        if undo is None:
            return
        if self._passes < self._most or not self._most:
            undo.keep(optimizer)
        else:
            undo.is_complete = False

    def takes_earlier(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` is about to take gradients of earlier batches."""
        return self._origins.are_earlier(optimizer)

    def take_back(self) -> bool:
        """Undo the step, as far as it got; whether the state of the step before is here again."""
        undo, self._broken = self._undo, True
        if undo is None or not undo.is_complete:
            return False
        if self._reached is None:
            self._reached = self._training.snapshot()
        undo.take_back()
        return True

    def adopt(self) -> None:
        """The others finished the step, and their tensors are here: the script goes on with it.

        Its schedulers and scalers had begun the step already, and will end it.
        """
        if self._reached is not None:
            self._training.restore(self._reached)
            self._reached = None

    def check_skipped(self, skipped: int, ranks: int) -> None:
        """See to it that all workers took the batch, or none.

        Args:
            skipped: workers whose scripts passed over it.

        Raises:
            UsageError: otherwise: which optimizers the others step is not known to those.
        """
        if 0 < skipped < ranks:
            what = f"{skipped} of {ranks} workers passed over a batch, with several optimizers"
            raise UsageError(
                what,
                "call backward() and step in every batch: a loss times 0 takes nothing of it",
            )

    def conclude(self, micro_batch: MicroBatch, *, unused: bool) -> None:
        """The script is through with the batch.

        Args:
            unused: gradients of earlier passes were not reduced.

        Raises:
            UsageError: if the last pass of the step had fewer backward passes than another.
        """
        if not self._broken:
            self._most = max(self._most, self._passes)
        if not micro_batch.last:
            return
        if self._reached is not None and self._undo is not None:
            self._undo.restore_buffers()
        self._undo = None
        if unused:
            what = "the passes of a batch make different numbers of backward passes"
            raise UsageError(what, "make as many in each batch that the loader gives")
