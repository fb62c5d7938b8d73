"""Initial batch and learning rate of a job; the job file overrides the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.sample_stream import ScheduleRow, split
from elastic.state.learning_rates import choose_lr_scaling, set_learning_rate
from elastic.state.training_state import TrainingState
from elastic.training_errors import UsageError
from schemas.wire.worker import Assignment


def set_initial_batch_and_rate(
    training: TrainingState,
    optimizers: Sequence[torch.optim.Optimizer],
    assignment: Assignment | None,
    *,
    batch_size: int,
    lr: float | None,
    scaling: str,
    doubling: int,
) -> list[tuple[str, Any, Any]]:
    """Set the optimizers' rates, and how they follow the batch.

    `batch_size` and `lr` are the script's; `lr` None keeps the optimizers' own rates. `doubling` is
    the number of steps in which a rate grows by at most 2x; 0: at once.

    Returns:
        (name, the script's value, the job's value) of the values that the job file may override.

    Raises:
        UsageError: if the batch is below 1, or the rule is unknown.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size {batch_size} is below 1", "raise it", "batch_size")
    rules = [choose_lr_scaling(optimizer, scaling) for optimizer in optimizers]
    base_batch = batch_size
    overrides: list[tuple[str, Any, Any]] = []
    if assignment is None:
        training.schedule.announce([ScheduleRow(1, split(batch_size, 1), 0)])
    else:
        group = assignment.group
        base_batch = group.base_batch or group.global_batch
        overrides.append(("batch_size", batch_size, assignment.spec.batch_size))
        if group.lr is not None:
            overrides.append(("lr", lr, group.lr))
            lr = group.lr
    if lr is not None:
        set_learning_rate(optimizers, lr)
    training.lr_state.begin(rules, base_batch, training.global_batch, doubling)
    return overrides
