"""Let an optimizer's step wait, scale its rates, or pass over what is no step.

`optimizer.step` is replaced on the one object, so schedulers and scalers find what they expect.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepGate(Protocol):
    """Who decides about each call of `optimizer.step`."""

    def passes_over(self) -> bool:
        """An optimizer is to step; whether it must pass over the present batch."""
        ...

    def refuse(self, what: str, remedy: str) -> None:
        """The script does what a group cannot do exactly: an error, unless it is alone for ever."""
        ...

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Wait until its parameters may change; what rates are multiplied with in this step."""
        ...


_stepping: list[torch.optim.Optimizer] = []  # the agent's, while it steps
_gates: list[StepGate] = []  # of the last agent in this process
_hooked: list[Any] = []


def patch_optimizer_step(optimizer: torch.optim.Optimizer, gate: StepGate) -> None:
    """Ask `gate` before each step of `optimizer`.

    Args:
        optimizer: this object only; others of its class keep their step.
        gate: asked in the thread that calls `step`; its factor holds for that call.
    """
    original = type(optimizer).step
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # by a scheduler made before

    def step(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        if scheduled:
            self._opt_called = True  # type: ignore[attr-defined] # or its scheduler complains
        closure, args, options = _closure_of(args, options)
        loss = None
        if closure is not None:  # its backward pass is where the group sums
            with torch.enable_grad():
                loss = closure()
        if gate.passes_over():
            return loss
        if closure is not None:
            options["closure"] = _evaluated(closure, loss, gate)
        factor = gate.before_optimizer_step(self)
        _stepping.append(self)
        try:
            return scaled(self, factor, *args, **options)
        finally:
            _stepping.pop()

    def scaled(self: torch.optim.Optimizer, factor: float, *args: Any, **options: Any) -> Any:
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

    if scheduled:
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # noqa: SLF001
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    _refuse_others(gate)


def _closure_of(
    args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The closure that `step` was called with, and the other arguments."""
    if args:
        return args[0], args[1:], options
    others = {name: value for name, value in options.items() if name != "closure"}
    return options.get("closure"), (), others


def _evaluated(closure: Callable[[], Any], loss: Any, gate: StepGate) -> Callable[[], Any]:
    """`closure`, whose first evaluation is over already."""
    losses = [loss]

    def evaluate() -> Any:
        if losses:
            return losses.pop()
        gate.refuse(
            "the optimizer evaluates its closure several times in a step, each worker for itself",
            "use an optimizer that evaluates it once; LBFGS is none",
        )
        return closure()

    return evaluate


def _refuse_others(gate: StepGate) -> None:
    """From now on, refuse steps of other optimizers while a batch is trained on."""
    _gates[:] = [gate]
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_any))


def _before_any(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    if _stepping:  # the agent's, or one inside of it
        return
    for gate in _gates:
        gate.refuse(
            f"a second optimizer ({type(optimizer).__name__}) steps in the loop, which "
            "build_optimizer() did not give",
            "return all optimizers from build_optimizer, as a tuple, list or dict: what others "
            "keep does not reach workers that join",
        )
