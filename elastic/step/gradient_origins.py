"""Which gradients an optimizer would take that were made in an earlier batch.

With one optimizer, a batch without its step tells. Of several one may step while another's
gradients go on adding up, so each parameter's gradient is followed from where it was empty. Those
that are left over and emptied before they are used are no harm: a generator's backward pass leaves
some in its critic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


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
