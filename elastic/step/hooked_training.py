"""Hooks that connect a script's model, optimizers and loader to the step executor."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from elastic.group.transitions import GroupTransitions
from elastic.hooks import patch_optimizer_step
from elastic.state.state_tensors import TensorState
from elastic.state.training_state import TrainingState
from elastic.step.batch_loader import ElasticLoader
from elastic.step.gradient_reduction import Reducer
from elastic.step.optimizer_turns import GradientOrigins, OptimizerTurns
from elastic.step.step_executor import StepExecutor


def hook_training(
    training: TrainingState,
    transitions: GroupTransitions,
    executor: StepExecutor,
    tensors: TensorState,
    train_set: Dataset[Any],
    *,
    bound: int,
    managed: bool,
    device: torch.device,
    options: dict[str, Any],
) -> tuple[Reducer, ElasticLoader]:
    """Patch the optimizers, hook the gradients, and create the loader.

    `bound` is the most samples of a pass; `managed` means that the worker may get a group.
    """
    turns = None
    for optimizer in tensors.optimizers:
        patch_optimizer_step(optimizer, executor)
    if len(tensors.optimizers) > 1:
        if managed:  # a remainder must not cause several passes
            bound += training.stream.min_samples - 1
        turns = OptimizerTurns(training, GradientOrigins(tensors.trained()))
    reducer = Reducer(tensors.trained(), executor.backward_finished)
    loader = ElasticLoader(
        train_set,
        training=training,
        transitions=transitions,
        executor=executor,
        bound=bound,
        device=device,
        options=options,
    )
    executor.set_reducer(reducer, loader.depth, turns)
    return reducer, loader
