"""Gradients of a step, summed over the group in one flat bucket, inside `backward()`.

The script stays as it was: after `loss.backward()` every parameter's gradient is that of the global
batch. DistributedDataParallel is not used, because it cannot change its group (see the README).
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
    "the script makes sparse gradients", "use sparse=False: groups reduce dense ones"
)  # fmt: skip


class Reducer:
    """Sees every backward pass of some parameters, and hands its gradients over as one bucket."""

    def __init__(self, parameters: Iterable[nn.Parameter], finished: Callable[[], None]) -> None:
        """Begin to watch.

        Args:
            finished: called when an outermost backward pass has reached any of them.
        """
        self.parameters = [p for p in parameters if p.requires_grad]
        self._finished = finished
        self._fired = [False] * len(self.parameters)
        self._any = False
        self._prior: dict[int, torch.Tensor] = {}  # gradients that the script had kept
        self._kept: dict[int, torch.Tensor] = {}  # sums over the passes of one step, by place
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._used_before: dict[int, list[bool]] = {}  # in earlier passes, by place
        self.active = False  # a group of one needs nothing of all this
        self.watches = False  # for gradients that the script had kept, other than zeros
        self.found_kept = False
        self._looks = True  # for sparse gradients
        self.losses: list[torch.Tensor] = []  # of this step, as `backward` saw them
        self.judge: Callable[[torch.Tensor], None] | None = None  # of losses, before their pass
        for index, parameter in enumerate(self.parameters):
            parameter.register_hook(self._before(index))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._after(index)
            )
        listen(self)

    def close(self) -> None:
        """Stop watching."""
        self.active = False
        unlisten(self)

    def _before(self, index: int) -> Callable[[torch.Tensor], None]:
        def before(_: torch.Tensor) -> None:
            kept = self.parameters[index].grad
            if self.watches and not self.found_kept and kept is not None:
                self.found_kept = bool(kept.any())
            if self.active and not self._fired[index]:
                self._set_aside(index)

        return before

    def _set_aside(self, index: int) -> None:
        """What the script had kept of this parameter's gradient is no part of this step's."""
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

    def backward_over(self) -> None:
        """An outermost backward pass is over."""
        if self._any:
            self._any = False
            self._finished()

    def stop_watching(self) -> bool:
        """Whether gradients were found that the script had kept, since `watches` was set."""
        found, self.found_kept, self.watches = self.found_kept, False, False
        return found

    def is_sparse(self) -> bool:
        """Return whether a gradient is sparse; looks at them once."""
        looks, self._looks = self._looks, False
        grads = [parameter.grad for parameter in self.parameters] if looks else []
        return any(grad is not None and grad.layout is not torch.strided for grad in grads)

    # --- what a step's reduction does with it

    def accumulate(self, weight: float, place: int = 0) -> torch.Tensor:
        """Add this pass's gradients to the step's, and leave nothing for the optimizer to see.

        Args:
            weight: of this pass: its samples over the global batch.
            place: what is packed with the same place adds up.

        Returns:
            Shape (scalars,): this pass's gradients times `weight`, until the next pass.
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
        """Whether something was accumulated that was not packed since."""
        return bool(self._kept)

    def pack(
        self, weight: float, extra: int, place: int = 0, *, counts: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All gradients of the step times `weight`, and room for `extra` numbers, in one tensor.

        Args:
            weight: of this pass: its samples over the global batch; 0 takes nothing of it.
            extra: numbers behind the gradients, before one number for each parameter.
            place: takes what was accumulated with the same place.
            counts: whether this pass is one of the step, even if it weighs nothing: its zeros are
                gradients then. None: if it weighs anything.

        Returns:
            The bucket, shape (scalars + extra + parameters,), and a view of its last
            `extra + parameters` numbers.
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
        """What `pack` gives, empty, and apart from the gradients.

        Args:
            extra: numbers behind the gradients, before one number for each parameter.

        Returns:
            Zeros, shape (scalars + extra + parameters,), and a view of the last `extra +
            parameters`.
        """
        flat = torch.zeros_like(self._allocated(extra))
        return flat, flat[sum(p.numel() for p in self.parameters) :]

    def unpack(self, used: Sequence[bool], scale: float = 1.0) -> None:
        """Give every used parameter its part of the reduced bucket.

        Args:
            used: shape (parameters,): some rank has a gradient for it.
            scale: what the sums are multiplied with.
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
        """Forget this step's gradients; an operation that was given up keeps its bucket."""
        self._kept, self._flat, self._views = {}, None, []
        self._used_before = {}
        self._empty_grads()

    def _clear(self) -> None:
        self._prior = {}
        self._fired = [False] * len(self.parameters)

    def _empty_grads(self) -> None:
        """Zeros, not None: a gradient scaler looks for some, and the step is passed over anyway."""
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
                self._set_aside(index)  # before its old place in the bucket is written again
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
