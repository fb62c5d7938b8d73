"""State that forward passes change: buffers, and rows of embeddings with `max_norm`.

Each worker's forward passes see its own samples only, so this state would drift apart. Before the
gradients of a step are reduced, the group agrees on it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from elastic.collectives.process_group import ProcessGroup
from elastic.state.state_tensors import TensorState


class ForwardState:
    """State of a model that its forward passes change."""

    def __init__(self, tensors: TensorState) -> None:
        self._tensors = tensors
        self._kept = _FlatCopy([])  # buffers at the start of the step
        self._sent = _FlatCopy([])  # room for the next exchange
        self._recovered = False  # in the running step
        self._limited = [_LimitedRows(module) for module in tensors.limited_embeddings()]

    def exchange(self, group: ProcessGroup, source: int, cancelled: threading.Event) -> None:
        """Give all ranks the buffers of rank `source`, and limit the rows that any rank used.

        DistributedDataParallel also broadcasts the buffers in each step. The result for the rows is
        that of one process on the global batch.
        """
        used = torch.cat([rows.used for rows in self._limited]) if self._limited else None
        if group.size > 1:
            if used is not None:
                group.all_reduce(used, cancelled)
            self._broadcast(self._tensors.buffers(), group, source, cancelled)
        if used is not None:
            parts = used.split_with_sizes([rows.used.numel() for rows in self._limited])
            for rows, part in zip(self._limited, parts, strict=True):
                rows.limit(part)

    def limit_arrived(self) -> None:
        """Limit the rows of the last exchange in a state that arrived from another worker."""
        for rows in self._limited:
            rows.limit_again()

    def begin(self) -> None:
        """Keep the buffers as they are before a step of a group."""
        buffers = self._tensors.buffers()
        if not self._kept.fits(buffers):
            self._kept = _FlatCopy(buffers)
        if buffers:
            torch._foreach_copy_(self._kept.views, buffers)

    def roll_back(self) -> None:
        """Restore the buffers of the last finished step, and forget the rows of the broken one."""
        for rows in self._limited:
            rows.used.zero_()
        buffers = self._tensors.buffers()
        if buffers and self._kept.fits(buffers):
            torch._foreach_copy_(buffers, self._kept.views)

    def recovered(self) -> None:
        """Keep the buffers of a recovered group."""
        self.begin()
        self._recovered = True

    def conclude(self) -> None:
        """Restore the buffers of a recovery, after which the script runs further passes."""
        if self._recovered:
            self.roll_back()
            self._recovered = False

    def _broadcast(
        self,
        buffers: list[torch.Tensor],
        group: ProcessGroup,
        source: int,
        cancelled: threading.Event,
    ) -> None:
        if not buffers:
            return
        sent, self._sent = self._sent, _FlatCopy([])  # a cancelled broadcast may still write
        if not sent.fits(buffers):
            sent = _FlatCopy(buffers)
        if group.rank == source:
            torch._foreach_copy_(sent.views, buffers)
        group.broadcast(sent.flat, source, cancelled)
        if group.rank != source:
            torch._foreach_copy_(buffers, sent.views)
        self._sent = sent


class _FlatCopy:
    """Room for tensors of any types in one row of bytes, with a view for each tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        device = tensors[0].device if tensors else None
        size = sum(tensor.nbytes for tensor in tensors)
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        found: dict[int, torch.Tensor] = {}
        start = 0
        # Large elements come first, so that each view is aligned.
        for place in sorted(range(len(tensors)), key=lambda at: -tensors[at].itemsize):
            tensor = tensors[place]
            part = self.flat[start : start + tensor.nbytes]
            found[place] = part.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        self.views = [found[place] for place in range(len(tensors))]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        return [(tensor.shape, tensor.dtype) for tensor in tensors] == self._kinds


class _LimitedRows:
    """Rows of an embedding with `max_norm` that this worker's forward passes used.

    A forward pass scales the rows of its samples down to the norm, in place.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        device = module.weight.device
        self.used = torch.zeros(module.num_embeddings, dtype=torch.int32, device=device)
        self._last = torch.empty(0, dtype=torch.int64, device=device)
        module.register_forward_pre_hook(self._note)

    def _note(self, _: Any, inputs: tuple[Any, ...]) -> None:
        if inputs:
            self.used[inputs[0].detach().reshape(-1)] = 1

    def limit(self, used: torch.Tensor) -> None:
        """Scale the rows that only other workers used, and forget this worker's rows.

        Because of rounding, it matters that no worker scales a row twice.
        """
        self._last = used.nonzero().view(-1)
        self._scale((used > self.used).nonzero().view(-1))
        self.used.zero_()

    def limit_again(self) -> None:
        """Scale all rows of the last call of `limit`."""
        self._scale(self._last)

    def _scale(self, rows: torch.Tensor) -> None:
        if rows.numel():
            weight = self._module.weight.data
            torch.embedding_renorm_(weight, rows, self._module.max_norm, self._module.norm_type)
