"""A step in which several optimizers take turns.

Each backward pass of a batch is reduced for itself, and an optimizer may step between two of them.
So the group may break under a step that some optimizers have made already: it is taken back, whole.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic.samples.micro_batch import MicroBatch
from elastic.state.step_undo import StepUndo
from elastic.state.training_state import TrainingState
from elastic.step.gradient_origins import GradientOrigins
from elastic.training_errors import UsageError


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
