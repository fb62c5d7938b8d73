"""Let the optimizer's step wait, scale its rates, or pass over what is no step.

`optimizer.step` is replaced on the one object, so schedulers and scalers find what they expect.
"""

from __future__ import annotations

import types
from typing import Any, Protocol

import torch


class StepGate(Protocol):
    """Who decides about each call of `optimizer.step`."""

    @property
    def skips(self) -> bool:
        """Whether the optimizer must pass over the present batch."""
        ...

    def before_optimizer_step(self) -> float:
        """Wait until parameters may change; what rates are multiplied with in this step."""
        ...


def patch_optimizer_step(optimizer: torch.optim.Optimizer, gate: StepGate) -> None:
    """Ask `gate` before each step of `optimizer`.

    Args:
        optimizer: this object only; others of its class keep their step.
        gate: asked in the thread that calls `step`; its factor holds for that call.
    """
    original = type(optimizer).step

    def step(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        if gate.skips:
            return None
        factor = gate.before_optimizer_step()
        if factor == 1.0:
            return original(self, *args, **options)
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            return original(self, *args, **options)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
