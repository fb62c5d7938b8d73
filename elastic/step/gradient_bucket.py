"""Flat bucket of a step's gradients, reduced over the group inside `backward()`.

After `loss.backward()` every parameter's gradient is that of the global batch, so the script needs
no changes. DistributedDataParallel is not used, because it cannot change its group (see the
README).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from elastic.hooks import listen, unlisten
from elastic.state.state_tensors import dense_strides
from elastic.training_errors import UsageError

SPARSE: Final = (
    "the model has sparse gradients", "use sparse=False: groups reduce dense gradients"
)  # fmt: skip


class Reducer:
    """Collector of the gradients of some parameters in one bucket."""

    def __init__(self, parameters: Iterable[nn.Parameter], finished: Callable[[], None]) -> None:
        """Hook the parameters; `finished` is called after an outermost pass that reached any."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self._finished = finished
        self._fired = [False] * len(self.parameters)
        self._any = False
        self._prior: dict[int, torch.Tensor] = {}  # gradients that the script had kept
        self._kept: dict[int, torch.Tensor] = {}  # sums over the passes of one step, by place
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._used_before: dict[int, list[bool]] = {}  # in earlier passes, by place
        self.active = False  # False in a group of one with a single pass
        self.watch_kept = False  # look for nonzero gradients that the script kept
        self.found_kept = False
        self._check_sparse = True  # look for sparse gradients
        self.losses: list[torch.Tensor] = []  # of this step, as `backward` saw them
        self.check_loss: Callable[[torch.Tensor], None] | None = None  # called before their pass
        for index, parameter in enumerate(self.parameters):
            parameter.register_hook(self._before(index))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._after(index)
            )
        listen(self)

    def close(self) -> None:
        """Stop collecting."""
        self.active = False
        unlisten(self)

    def _before(self, index: int) -> Callable[[torch.Tensor], None]:
        def before(_: torch.Tensor) -> None:
            kept = self.parameters[index].grad
            if self.watch_kept and not self.found_kept and kept is not None:
                self.found_kept = bool(kept.any())
            if self.active and not self._fired[index]:
                self._set_aside(index)

        return before

    def _set_aside(self, index: int) -> None:
        """Set aside the gradient that the script had kept: it is not part of this step's."""
        parameter = self.parameters[index]
        kept = parameter.grad
        if kept is not None:
            self._prior[index] = kept.clone() if self._owns(kept) else kept
            parameter.grad = None

    def _after(self, index: int) -> Callable[[torch.Tensor], None]:
        def after(_: torch.Tensor) -> None:
            self._any = True
            self._fired[index] = self.active

        return after

    def _owns(self, tensor: torch.Tensor) -> bool:
        flat = self._flat
        return (
            flat is not None
            and tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        )

    def backward_finished(self) -> None:
        """Call `finished` if the outermost backward pass reached a parameter."""
        if self._any:
            self._any = False
            self._finished()

    def stop_watching(self) -> bool:
        """Return whether kept gradients were found since `watch_kept` was set."""
        found, self.found_kept, self.watch_kept = self.found_kept, False, False
        return found

    def is_sparse(self) -> bool:
        """Return whether a gradient is sparse; checks once."""
        check, self._check_sparse = self._check_sparse, False
        grads = [parameter.grad for parameter in self.parameters] if check else []
        return any(grad is not None and grad.layout is not torch.strided for grad in grads)

    # --- what a step's reduction does with it

    def accumulate(self, weight: float, place: int = 0) -> torch.Tensor:
        """Add this pass's gradients to the step's, and leave zeros for the optimizer.

        `weight` is the pass's samples over the global batch. Gradients of the same `place` are
        added up. Returns shape (scalars,), valid until the next pass: this pass's gradients times
        `weight`.
        """
        flat = self._filled(weight)
        self._kept[place] = self._kept[place].add_(flat) if place in self._kept else flat.clone()
        self._used_before[place] = self._used(place)
        self._empty_grads()
        return flat[: sum(p.numel() for p in self.parameters)]

    def _used(self, place: int) -> list[bool]:
        before = self._used_before.get(place)
        if before is None:
            return [*self._fired]
        return [a or b for a, b in zip(before, self._fired, strict=True)]

    @property
    def has_kept(self) -> bool:
        """True if accumulated gradients were not packed yet."""
        return bool(self._kept)

    def pack(
        self, weight: float, extra: int, place: int = 0, *, counts: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bucket with the step's gradients times `weight`, and a view of its tail.

        The bucket has shape (scalars + extra + parameters,); the tail is the last `extra +
        parameters` numbers. `weight` is the pass's samples over the global batch; 0 excludes its
        gradients. Gradients accumulated at the same `place` are added. `counts` says whether the
        pass belongs to the step even with weight 0: its zeros are gradients then. None: if the
        weight is not 0.
        """
        flat = self._filled(weight, extra)
        kept = self._kept.pop(place, None)
        if kept is not None:
            flat[: kept.numel()].add_(kept)
        used = self._used(place)
        before = self._used_before.pop(place, [])
        if not (weight != 0 if counts is None else counts) and not any(before):
            used = [False] * len(used)
        end = sum(p.numel() for p in self.parameters)
        flat[end + extra :].copy_(torch.tensor([float(u) for u in used], dtype=flat.dtype))
        return flat, flat[end:]

    def pack_nothing(self, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a bucket and tail of zeros, separate from the gradients, shaped as by `pack`."""
        flat = torch.zeros_like(self._allocated(extra))
        return flat, flat[sum(p.numel() for p in self.parameters) :]

    def unpack(self, used: Sequence[bool], scale: float = 1.0) -> None:
        """Give each used parameter its part of the reduced bucket, times `scale`.

        `used`, shape (parameters,), is True if some rank has a gradient for the parameter.
        """
        if scale != 1.0 and self._flat is not None:
            self._flat[: sum(p.numel() for p in self.parameters)].mul_(scale)
        for index, parameter in enumerate(self.parameters):
            if not used[index]:
                parameter.grad = self._prior.get(index)
                continue
            view = self._views[index]
            grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            if index in self._prior:
                grad = grad + self._prior[index]
            parameter.grad = grad
        self._clear()

    def discard(self) -> None:
        """Discard this step's gradients; an abandoned operation keeps its bucket."""
        self._kept, self._flat, self._views = {}, None, []
        self._used_before = {}
        self._empty_grads()

    def _clear(self) -> None:
        self._prior = {}
        self._fired = [False] * len(self.parameters)

    def _empty_grads(self) -> None:
        """Set gradients to zeros, not None, which a gradient scaler needs; the step is skipped."""
        for index, parameter in enumerate(self.parameters):
            if index in self._prior:
                parameter.grad = self._prior[index]
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)
        self._clear()

    def _filled(self, weight: float, extra: int = 0) -> torch.Tensor:
        flat = self._allocated(extra)
        sources, targets = [], []
        for index, parameter in enumerate(self.parameters):
            if not self._fired[index]:
                self._set_aside(index)  # before its place in the bucket is overwritten
            grad = parameter.grad
            if weight and self._fired[index] and grad is not None:
                if grad.layout is not torch.strided:
                    raise UsageError(*SPARSE)
                sources.append(grad)
                targets.append(self._views[index])
            else:
                self._views[index].zero_()
        if sources:
            torch._foreach_copy_(targets, sources)
            if weight != 1.0:
                torch._foreach_mul_(targets, weight)
        return flat

    def _allocated(self, extra: int) -> torch.Tensor:
        size = sum(p.numel() for p in self.parameters) + extra + len(self.parameters)
        if self._flat is None or self._flat.numel() < size:
            first = self.parameters[0]
            wide = torch.float64 if any(p.dtype is torch.float64 for p in self.parameters) else None
            flat = torch.zeros(size, dtype=wide or torch.float32, device=first.device)
            self._flat, self._views, start = flat, [], 0
            for parameter in self.parameters:
                strides = dense_strides(parameter)
                self._views.append(flat.as_strided(parameter.shape, strides, start))
                start += parameter.numel()
        return self._flat
