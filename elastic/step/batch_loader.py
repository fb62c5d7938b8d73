"""The loader that a script iterates: the sample stream through torch's own DataLoader."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from elastic.samples.local_batches import ScheduleRow, passes
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import share
from elastic.state.training_state import TrainingState
from elastic.step.step_executor import StepExecutor
from elastic.training_errors import UsageError

RESERVED_OPTIONS = frozenset(
    {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
)
PLACEHOLDER_SAMPLES: Final = 2  # samples of a batch that only keeps the script's loop going


class _MicroBatchSampler:
    """The batch sampler: the rest of the running epoch, as the schedule deals it out."""

    def __init__(self, training: TrainingState, bound: int) -> None:
        self._training = training
        self._bound = bound
        self.handed_out: deque[MicroBatch] = deque()  # prefetched ones included

    def __iter__(self) -> Iterator[list[int]]:
        self.handed_out = deque()
        for micro_batch in self._plan():
            self.handed_out.append(micro_batch)
            yield micro_batch.ids

    def __len__(self) -> int:
        position = self._training.position
        left = self._training.stream.size - position.cursor
        return math.ceil(max(0, left) / max(1, self._training.global_batch))

    def _plan(self) -> Iterator[MicroBatch]:
        position = self._training.position
        epoch, cursor, step = position.epoch, position.cursor, position.step
        order = self._training.stream.order(epoch)
        while cursor < len(order):
            step += 1
            row = self._training.schedule.at(step)
            if row.rank is None:
                return  # this worker has left by then
            ids = order[cursor : cursor + row.batch]
            yield from self._micro_batches(ids, row, epoch, cursor, step)
            cursor += len(ids)

    def _micro_batches(
        self, ids: list[int], row: ScheduleRow, epoch: int, cursor: int, step: int
    ) -> Iterator[MicroBatch]:
        mine = share(ids, row.local_batches, row.rank or 0)
        counts = passes(len(mine), self._bound) if mine else (0,)
        start = 0
        for place, count in enumerate(counts):
            yield MicroBatch(
                step=step,
                epoch=epoch,
                cursor_before=cursor,
                cursor_after=cursor + len(ids),
                ids=mine[start : start + count] or ids[:PLACEHOLDER_SAMPLES],
                count=count,
                total=len(ids),
                first=place == 0,
                last=place + 1 == len(counts),
                row=row,
            )
            start += count


class ElasticLoader:
    """Iterates the rest of the running epoch; tensors come on the worker's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        training: TrainingState,
        executor: StepExecutor,
        bound: int,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: map-style.
            training: the ids of every epoch, whose they are, and where an iteration begins.
            executor: told of each micro-batch, before and after the script has it.
            bound: samples that fit the device at once; larger shares are taken in passes.
            device: where batches are moved to.
            options: of torch's DataLoader, but for those that choose samples.

        Raises:
            UsageError: if an option chooses samples.
        """
        chosen = RESERVED_OPTIONS & set(options)
        if chosen:
            what = f"load() got {', '.join(sorted(chosen))}: which samples come when is the agent's"
            raise UsageError(what, "leave these out; batch_size is load's own argument")
        workers = int(options.get("num_workers", 0))
        if workers:
            options = {"persistent_workers": True, **options}
        self.dataset = dataset
        self.depth = workers * int(options.get("prefetch_factor") or 2)  # batches drawn ahead
        self._sampler = _MicroBatchSampler(training, bound)
        self._executor = executor
        self._device = device
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        """Batches to the end of the epoch, or until the job is done.

        A second loop in the same epoch goes on where the first one was left.
        """
        source: Iterator[Any] | None = None
        whole = True  # no step is under way
        while True:
            if whole:
                if not len(self._sampler):
                    return  # the epoch's report comes first, in the group that trained it
                stale = self._executor.before_batch()
                source = iter(self._loader) if source is None or stale else source
            if source is None:
                return
            try:
                batch = next(source)
            except StopIteration:
                return
            micro_batch = self._sampler.handed_out.popleft()
            self._executor.begin(micro_batch)
            go_on = False
            try:
                yield _moved(batch, self._device)
            finally:
                go_on = self._executor.finish(micro_batch)
            if not go_on:
                return
            whole = micro_batch.last

    def __len__(self) -> int:
        """Steps to the end of the epoch."""
        return len(self._sampler)


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
