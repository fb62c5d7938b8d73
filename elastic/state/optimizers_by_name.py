"""What `build_optimizer` gave: one optimizer, or several in a container of the script's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from elastic.training_errors import CheckpointError, UsageError

Optimizers = TypeVar(  # one, or several in the script's own container
    "Optimizers",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)


def optimizers_by_name(built: Any, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """All optimizers, in the script's order.

    Args:
        built: one optimizer, or a tuple, list or mapping of them.
        model: what they train; several may train nothing beside it, which no checkpoint has.

    Returns:
        By key of a mapping, else by place from "0".

    Raises:
        UsageError: if a container holds nothing, something else or an optimizer twice, or several
            train what is no part of `model`.
    """
    if _is_optimizer(built):
        return {"0": built}
    if isinstance(built, Mapping):
        named = {str(key): value for key, value in built.items()}
    elif isinstance(built, list | tuple):
        named = {str(place): value for place, value in enumerate(built)}
    else:
        named = {"0": built}
    others = sorted({type(v).__name__ for v in named.values() if not _is_optimizer(v)})
    if others or len({id(each) for each in named.values()}) != max(1, len(named)):
        what = f"build_optimizer() gave {', '.join(others) or 'none, or one twice'}"
        raise UsageError(what, "return one optimizer, or a tuple, list or dict of them")
    known = {id(parameter) for parameter in model.parameters()}
    for name, each in named.items():
        held = [p for group in each.param_groups for p in group["params"]]
        if len(named) > 1 and any(id(parameter) not in known for parameter in held):
            what = (
                f"optimizer {name} ({type(each).__name__}) trains what build_model's does not hold"
            )
            raise UsageError(
                what, "build_model returns one module with all that is trained, as nn.ModuleDict"
            )
    return named


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def optimizer_states(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """What a checkpoint has of them.

    Returns:
        `optimizer`: the state of one; `optimizers`: those of several, by name.
    """
    states = {name: each.state_dict() for name, each in optimizers.items()}
    return {"optimizers": states} if len(states) > 1 else {"optimizer": next(iter(states.values()))}


def load_optimizer_states(
    optimizers: Mapping[str, torch.optim.Optimizer], content: Mapping[str, Any]
) -> None:
    """The reverse.

    Raises:
        CheckpointError: if it is of other optimizers.
    """
    states = content.get("optimizers")
    if states is None:
        states = {next(iter(optimizers)): content["optimizer"]}
    if set(states) != set(optimizers):
        has = "one optimizer" if "optimizer" in content else f"optimizers {', '.join(states)}"
        what = f"the checkpoint has {has}, build_optimizer() gave {', '.join(optimizers)}"
        raise CheckpointError(what, "return those that the job began with, by the same names")
    for name, each in optimizers.items():
        each.load_state_dict(states[name])
