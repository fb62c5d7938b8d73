"""The loader that a script iterates: the sample stream through torch's own DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elastic.group.group_changes import GroupTransitions
from elastic.samples.epoch_plan import rest_of_epoch
from elastic.samples.local_batches import passes
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import share_sizes
from elastic.state.training_state import TrainingState
from elastic.step.device_batch import to_device
from elastic.step.step_executor import StepExecutor
from elastic.step.stream_reader import StreamReader
from elastic.training_errors import UsageError

OPTIONS: Final = frozenset({
    "collate_fn", "in_order", "multiprocessing_context", "num_workers", "persistent_workers",
    "pin_memory", "prefetch_factor", "timeout", "worker_init_fn",
})  # fmt: skip
_ORDER: Final = "the agent shuffles, each epoch in an order of its own: leave set_epoch out"
REMEDIES: Final = {
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "batch_size": "agent.batch_size is the global batch, len(targets) a worker's part of it",
    "drop_last": "say agent.load(..., drop_last=True); len(loader) counts the batches",
    "generator": "the job's seed decides: `seed` in the job file, or from_env(seed=...)",
}


class _MicroBatchSampler:
    """The batch sampler: the rest of the running epoch, and who was given what of it."""

    def __init__(self, training: TrainingState, bound: int, *, reads: bool) -> None:
        self._training = training
        self._bound = bound
        self._reads = reads  # an iterable dataset, whose places are counted anew in each epoch
        self.handed_out: deque[MicroBatch] = deque()  # prefetched ones included

    def __iter__(self) -> Iterator[list[Any]]:
        self.handed_out = deque()
        training = self._training
        plan = rest_of_epoch(training.position, training.stream, training.schedule, self._bound)
        for micro_batch in plan:
            self.handed_out.append(micro_batch)
            ids, epoch = micro_batch.ids, micro_batch.epoch
            yield [(epoch, place) for place in ids] if self._reads else ids

    def __len__(self) -> int:
        """Micro-batches of the epoch, as planned now."""
        training = self._training
        stream, position = training.stream, training.position
        if not training.epoch_open:
            return stream.steps(stream.size, training.schedule_batch)
        row = training.schedule.at(position.step + 1)
        left, cursor = 0, position.cursor
        while taken := stream.taken(cursor, max(1, row.batch)):
            cursor, left = cursor + taken, left + 1
        mine = 0
        if row.rank is not None and row.local_batches:
            mine = share_sizes(row.batch, row.local_batches, stream.least)[row.rank]
        return position.epoch_step + left * len(passes(max(1, mine), self._bound, stream.least))


class ElasticLoader:
    """Iterates the rest of the running epoch; tensors come on the worker's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        training: TrainingState,
        transitions: GroupTransitions,
        executor: StepExecutor,
        bound: int,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: map-style, or iterable; the training state's stream says in which order.
            training: the ids of every epoch, whose they are, and where an iteration begins.
            transitions: change the group between two steps.
            executor: hears of each micro-batch, before and after the script has it.
            bound: samples that fit the device at once; larger shares are taken in passes.
            options: of torch's DataLoader, but for those that choose samples.
        """
        workers = int(options.get("num_workers", 0))
        if workers:
            options = {"persistent_workers": True, **options}
        self.dataset = dataset
        self.depth = workers * int(options.get("prefetch_factor") or 2)  # batches drawn ahead
        self._training = training
        reads = isinstance(dataset, IterableDataset)
        self._sampler = _MicroBatchSampler(training, bound, reads=reads)
        self._transitions = transitions
        self._executor = executor
        self._device = device
        self._reader: StreamReader | None = None
        if isinstance(dataset, IterableDataset):
            dataset = self._reader = StreamReader(dataset, training.stream)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._sampler, **options)

    def __getattr__(self, name: str) -> Any:
        """An option of torch's DataLoader; those that choose samples are the agent's."""
        if name in OPTIONS:
            return getattr(self._loader, name)
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
        raise AttributeError(f"{what}{remedy}", name=name, obj=self)

    def __iter__(self) -> Iterator[Any]:
        """Batches to the end of the epoch, or until the job is done.

        A second loop in the same epoch goes on where the first one was left.

        Raises:
            UsageError: outside of an epoch.
        """
        if not self._training.epoch_open:
            what = "the loader outside of an epoch: before agent.epochs(...) or after report()"
            hint = "loop over it in `for epoch in agent.epochs(...)`, before report(); elsewhere "
            raise UsageError(what, f"{hint}use train_set, or a DataLoader of your own")
        source: Iterator[Any] | None = None
        whole = True  # no step is under way
        while True:
            if whole:
                if self._training.epoch_is_over:
                    return  # the epoch's report comes first, in the group that trained it
                stale = self._transitions.before_step()
                source = self._begin() if source is None or stale else source
            if source is None:
                return
            try:
                batch = to_device(next(source), self._device)
            except StopIteration:
                return
            micro_batch = self._sampler.handed_out.popleft()
            self._executor.begin(micro_batch)
            go_on = False
            try:
                yield batch
            finally:
                go_on = self._executor.finish(micro_batch)
            if not go_on:
                return
            whole = micro_batch.last

    def _begin(self) -> Iterator[Any]:
        """The rest of the epoch; the job's seed may be known only since this worker joined."""
        if self._reader is not None:
            self._reader.follow(self._training.stream)
        return iter(self._loader)

    def __len__(self) -> int:
        """Batches of the running epoch, done and to come, as planned now.

        Before the first epoch: those of an epoch with the batch that the script's rate is meant
        for, which is what schedules count in.
        """
        return len(self._sampler)
