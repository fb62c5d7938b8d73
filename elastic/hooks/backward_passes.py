"""See the losses of outermost backward passes, and where these passes end.

The engine's own callback ends with the innermost pass, which is too early when a checkpointed
block runs a pass of its own inside. So `torch.autograd.backward` itself is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class BackwardListener(Protocol):
    """Who is notified of outermost backward passes."""

    losses: list[torch.Tensor]  # scalars that `backward` was called on, detached
    judge: Callable[[torch.Tensor], None] | None  # looks at each such scalar before its pass

    def backward_over(self) -> None:
        """An outermost backward pass is over."""
        ...


_listeners: list[BackwardListener] = []
_depth = 0
_original: Any = None


def listen(listener: BackwardListener) -> None:
    """From now on, notify `listener` of every outermost backward pass.

    Args:
        listener: is called in the order in which listeners came; one that comes twice is called
            twice.
    """
    global _original  # noqa: PLW0603 - one engine in a process
    _listeners.append(listener)
    if _original is None:
        _original = torch.autograd.backward
        torch.autograd.backward = _backward


def unlisten(listener: BackwardListener) -> None:
    """Tell it no more.

    Args:
        listener: one that does not listen is passed over.
    """
    if listener in _listeners:
        _listeners.remove(listener)


def warm_up(device: torch.device) -> None:
    """A first backward pass starts threads and libraries: let that be before the others wait."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    torch.autograd.grad((weight @ weight).sum(), weight)


def _backward(tensors: Any, *args: Any, **options: Any) -> None:
    global _depth  # noqa: PLW0603
    if _depth == 0:
        gradient = args[0] if args else options.get("grad_tensors")
        _note_loss(tensors, by_itself=gradient is None)
    _depth += 1
    try:
        _original(tensors, *args, **options)
    finally:
        _depth -= 1
    if _depth == 0:
        for listener in _listeners:
            listener.backward_over()


def _note_loss(tensors: Any, *, by_itself: bool) -> None:
    """Tell of a loss; it is judged unless `backward` multiplies it with a gradient."""
    loss = tensors if isinstance(tensors, torch.Tensor) else None
    if loss is None and isinstance(tensors, Sequence) and len(tensors) == 1:
        loss = tensors[0]
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        for listener in _listeners:
            listener.losses.append(loss.detach().reshape(()))
            if listener.judge is not None and by_itself:
                listener.judge(loss)
