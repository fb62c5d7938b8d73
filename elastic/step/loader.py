"""The loader that a script iterates: the sample stream through torch's own DataLoader."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from elastic.group.member import Member
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.position import TrainingPosition
from elastic.samples.sample_stream import SampleStream, share
from elastic.samples.schedule import passes
from elastic.training_errors import UsageError

OWN = frozenset({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"})
SHADOW: Final = 2  # samples of a batch that only keeps the script's loop going


class _Pieces:
    """The batch sampler: the rest of the running epoch, as the schedule deals it out."""

    def __init__(
        self, stream: SampleStream, standing: TrainingPosition, member: Member, bound: int
    ) -> None:
        self._stream = stream
        self._standing = standing
        self._member = member
        self._bound = bound
        self.handed_out: deque[MicroBatch] = deque()  # prefetched ones included

    def __iter__(self) -> Iterator[list[int]]:
        self.handed_out = deque()
        for piece in self._plan():
            self.handed_out.append(piece)
            yield piece.ids

    def __len__(self) -> int:
        where = self._standing
        batch = self._member.schedule.at(where.step + 1).batch
        return math.ceil(max(0, self._stream.size - where.cursor) / max(1, batch))

    def _plan(self) -> Iterator[MicroBatch]:
        where = self._standing
        epoch, cursor, step = where.epoch, where.cursor, where.step
        order = self._stream.order(epoch)
        while cursor < len(order):
            step += 1
            row = self._member.schedule.at(step)
            if row.rank is None:
                return  # this worker has left by then
            ids = order[cursor : cursor + row.batch]
            mine = share(ids, row.local_batches, row.rank)
            after = cursor + len(ids)
            counts = passes(len(mine), self._bound) if mine else (0,)
            start = 0
            for place, count in enumerate(counts):
                yield MicroBatch(
                    step=step,
                    epoch=epoch,
                    before=cursor,
                    cursor=after,
                    ids=mine[start : start + count] or ids[:SHADOW],
                    count=count,
                    total=len(ids),
                    first=place == 0,
                    last=place + 1 == len(counts),
                    row=row,
                )
                start += count
            cursor = after


class ElasticLoader:
    """Iterates the rest of the running epoch; tensors come on the worker's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        stream: SampleStream,
        standing: TrainingPosition,
        member: Member,
        bound: int,
        device: torch.device,
        done: Callable[[MicroBatch], bool],
        options: Mapping[str, Any],
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: map-style.
            stream: the ids of every epoch.
            standing: where training stands; read whenever an iteration begins.
            member: deals out the samples, and changes the group where a step begins.
            bound: samples that fit the device at once; larger shares are taken in passes.
            device: where batches are moved to.
            done: told of each piece that the script is through with; False ends the loop.
            options: of torch's DataLoader, but for those that choose samples.

        Raises:
            UsageError: if an option chooses samples.
        """
        chosen = OWN & set(options)
        if chosen:
            what = f"load() got {', '.join(sorted(chosen))}: which samples come when is the agent's"
            raise UsageError(what, "leave these out; batch_size is load's own argument")
        workers = int(options.get("num_workers", 0))
        if workers:
            options = {"persistent_workers": True, **options}
        self.dataset = dataset
        self.depth = workers * int(options.get("prefetch_factor") or 2)  # batches drawn ahead
        self._pieces = _Pieces(stream, standing, member, bound)
        self._member = member
        self._device = device
        self._done = done
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._pieces, **options)

    def __iter__(self) -> Iterator[Any]:
        """Batches to the end of the epoch, or until the job is done.

        A second loop in the same epoch goes on where the first one was left.
        """
        source: Iterator[Any] | None = None
        whole = True  # no step is under way
        while True:
            if whole:
                if not len(self._pieces):
                    return  # the epoch's report comes first, in the group that trained it
                stale = self._member.before_batch()
                source = iter(self._loader) if source is None or stale else source
            if source is None:
                return
            try:
                batch = next(source)
            except StopIteration:
                return
            piece = self._pieces.handed_out.popleft()
            self._member.begin(piece)
            go_on = False
            try:
                yield _moved(batch, self._device)
            finally:
                go_on = self._done(piece)
            if not go_on:
                return
            whole = piece.last

    def __len__(self) -> int:
        """Steps to the end of the epoch."""
        return len(self._pieces)


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
