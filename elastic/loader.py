"""The loader that a script iterates: the sample stream through torch's own DataLoader."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from elastic.errors import UsageError
from elastic.sampler import SampleStream

OWN = frozenset({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})


class Position(Protocol):
    """Where training stands, as the loader needs to know it."""

    epoch: int  # the running one, 1-based
    cursor: int  # samples of it that are done
    local_batches: tuple[int, ...]
    rank: int


class _Batches:
    """The batch sampler of one epoch at a time."""

    def __init__(self, stream: SampleStream, position: Position) -> None:
        self._stream = stream
        self._position = position
        self.handed_out: deque[tuple[int, list[int]]] = deque()  # prefetched ones included

    def __iter__(self) -> Iterator[list[int]]:
        where = self._position
        self.handed_out = deque()
        for cursor, ids in self._stream.batches(
            where.epoch, where.cursor, where.local_batches, where.rank
        ):
            self.handed_out.append((cursor, ids))
            yield ids

    def __len__(self) -> int:
        where = self._position
        return math.ceil(max(0, self._stream.size - where.cursor) / sum(where.local_batches))


class ElasticLoader:
    """Iterates the rest of the running epoch; tensors come on the worker's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        stream: SampleStream,
        position: Position,
        device: torch.device,
        done: Callable[[int, list[int]], bool],
        options: Mapping[str, Any],
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: map-style, of the stream's size.
            stream: which samples, in which order.
            position: read at the start of every iteration.
            device: where batches go.
            done: called with cursor and ids of a batch when the script is through with it, which
                is when it asks for more or leaves the loop; its answer is whether to go on.
            options: of torch's DataLoader, but for those that choose samples.
        """
        clash = sorted(OWN & options.keys())
        if clash:
            what = f"load() got {', '.join(clash)}: which samples come when is the agent's"
            raise UsageError(what, "leave these out; batch_size is load's own argument")
        self.dataset = dataset
        self._batches = _Batches(stream, position)
        self._device = device
        self._done = done
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        """Batches to the end of the epoch, or until the job is done.

        A second loop in the same epoch goes on where the first one was left.
        """
        for batch in self._loader:
            cursor, ids = self._batches.handed_out.popleft()
            go_on = False
            try:
                yield _moved(batch, self._device)
            finally:
                go_on = self._done(cursor, ids)
            if not go_on:
                return

    def __len__(self) -> int:
        """Steps to the end of the epoch."""
        return len(self._batches)


def _moved(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
