"""Loader that a script iterates: the sample stream through torch's own DataLoader.

An iterable dataset is read by position, so that any worker can process any sample. Batches are
moved to the worker's device.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from elastic.group.transitions import GroupTransitions
from elastic.hooks import without_worker_info
from elastic.sample_stream import MicroBatch, SampleStream, passes, rest_of_epoch, share_sizes
from elastic.state.random_state import (
    host_random_state,
    restore_random_state,
    seed_host_generators,
)
from elastic.state.training_state import TrainingState
from elastic.step.step_executor import StepExecutor
from elastic.training_errors import UsageError
from elastic.usage_checks import dataset_size


class StreamReader(Dataset[Any]):
    """Map-style dataset that reads an iterable dataset from its start, once in each process.

    It skips the samples of other workers, and restarts for an earlier position. So every process
    sees the same stream, even if the group changes. Its random numbers follow from seed and epoch.
    The samples of unfinished steps are kept, for all workers, because a step that is dropped after
    the loss of a worker is divided anew.
    """

    def __init__(self, source: IterableDataset[Any], stream: SampleStream) -> None:
        """Prepare to read `source`. Its method `set_epoch`, if any, gets epochs counted from 0."""
        self._source = source
        self._stream = stream
        self._samples: Iterator[Any] | None = None
        self._epoch = 0  # epoch of the reading, 1-based
        self._place = 0  # position of the next sample
        self._kept: deque[Any] = deque()  # the latest samples; the last one is before `_place`
        self._random: dict[str, Any] | None = None  # state of the generators after the last read

    def follow(self, stream: SampleStream) -> None:
        """Use another stream of the same length from the next reading on; its seed may differ."""
        self._stream = stream

    def __getitems__(self, ids: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Return the samples at `ids`: epoch (from 1), position (from 0), first position to keep.

        Increasing and kept positions are fast. A dataset with more or fewer samples than the stream
        is refused.
        """
        outside = host_random_state()
        try:
            with without_worker_info():
                if self._random is not None:
                    restore_random_state(self._random)
                return [self._at(epoch, place, keep) for epoch, place, keep in ids]
        finally:
            self._random = host_random_state()
            restore_random_state(outside)

    def _at(self, epoch: int, place: int, keep: int) -> Any:
        while self._kept and self._place - len(self._kept) < keep:
            self._kept.popleft()
        if epoch == self._epoch and 0 < (back := self._place - place) <= len(self._kept):
            return self._kept[-back]
        samples = self._samples
        if samples is None or epoch != self._epoch or place < self._place:
            samples = self._begin(epoch)
        while True:
            sample = self._next(samples)
            if self._place > keep:
                self._kept.append(sample)
            if self._place > place:
                break
        if self._place == self._stream.size:
            self._check_end(samples)
        return sample

    def _begin(self, epoch: int) -> Iterator[Any]:
        seed_host_generators(self._stream.epoch_seed(epoch))
        set_epoch = getattr(self._source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch - 1)
        self._epoch, self._place = epoch, 0
        self._kept.clear()
        self._samples = samples = iter(self._source)
        return samples

    def _next(self, samples: Iterator[Any]) -> Any:
        try:
            sample = next(samples)
        except StopIteration:
            raise self._miscounted(str(self._place)) from None
        self._place += 1
        return sample

    def _check_end(self, samples: Iterator[Any]) -> None:
        self._samples = None
        for _ in samples:
            raise self._miscounted(f"more than {self._stream.size}")

    def _miscounted(self, given: str) -> UsageError:
        problem = f"train_set returned {given} samples in epoch {self._epoch - 1}"
        hint = f"its len() is {self._stream.size}: every pass through __iter__ must return as many"
        return UsageError(problem, hint, "train_set")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; on the CPU it is unchanged.

    Mappings, lists, (named) tuples and dataclasses keep their type. Unknown objects are unchanged.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _mapping_to(batch, device)
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        make: Any = getattr(batch, "_make", type(batch))  # a named tuple cannot take a list
        return make(moved)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _dataclass_to(batch, device)
    return batch


def _mapping_to(batch: Mapping[Any, Any], device: torch.device) -> Mapping[Any, Any]:
    moved = {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        kept = copy.copy(batch)  # keeps other attributes of the script's class
        kept.update(moved)
        return kept
    make: Any = type(batch)
    try:
        made: Mapping[Any, Any] = make(moved)
    except TypeError:  # the constructor needs other arguments
        return moved
    return made


def _dataclass_to(batch: Any, device: torch.device) -> Any:
    moved = copy.copy(batch)
    for entry in dataclasses.fields(batch):
        object.__setattr__(moved, entry.name, to_device(getattr(batch, entry.name), device))
    return moved


def held_samples(batch: Any, expected: int) -> int:
    """Return the number of samples in a batch from which a `collate_fn` may have left some out.

    It is the length of all tensors of the batch, if that is smaller than `expected`, and if these
    are not sequences of batches, shape (time, expected, ...).
    """
    sizes: list[tuple[int, ...]] = []
    parts = [batch]
    for part in parts:
        if isinstance(part, torch.Tensor):
            sizes += [tuple(part.shape)] if part.dim() else []
        elif isinstance(part, Mapping):
            parts.extend(part.values())
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            parts.extend(vars(part).values())
        elif isinstance(part, list | tuple):
            parts.extend(part)
    lengths = {size[0] for size in sizes}
    if len(lengths) != 1 or all(size[1:2] == (expected,) for size in sizes):
        return expected
    return min(lengths.pop(), expected)


READABLE_OPTIONS: Final = frozenset({
    "collate_fn", "in_order", "multiprocessing_context", "num_workers", "persistent_workers",
    "pin_memory", "prefetch_factor", "timeout", "worker_init_fn",
})  # fmt: skip
_ORDER: Final = "the agent shuffles each epoch differently: leave set_epoch out"
REMEDIES: Final = {
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "batch_size": "agent.batch_size is the global batch, len(targets) a worker's part of it",
    "drop_last": "call agent.load(..., drop_last=True); len(loader) counts the batches",
    "generator": "the job's seed decides: `seed` in the job file, or from_env(seed=...)",
}


class _MicroBatchSampler:
    """Batch sampler over the rest of the epoch, which records the micro-batches that it yields."""

    def __init__(self, training: TrainingState, bound: int, *, reads: bool) -> None:
        self._training = training
        self._bound = bound
        self._reads = reads  # True for an iterable dataset, where positions restart in each epoch
        self.handed_out: deque[MicroBatch] = deque()  # includes prefetched micro-batches

    def __iter__(self) -> Iterator[list[Any]]:
        self.handed_out = deque()
        training = self._training
        plan = rest_of_epoch(training.position, training.stream, training.schedule, self._bound)
        for micro_batch in plan:
            self.handed_out.append(micro_batch)
            yield self._readings(micro_batch) if self._reads else micro_batch.ids

    def _readings(self, micro_batch: MicroBatch) -> list[tuple[int, int, int]]:
        """Return the ids for a `StreamReader`, which keeps the samples of two steps in a group.

        A group drops at most the steps since its last finished one. A worker alone drops none.
        """
        start, row = micro_batch.cursor_before, micro_batch.row
        keep = max(self._training.position.cursor, start - row.batch)
        if len(row.local_batches) == 1:
            keep = micro_batch.cursor_after
        return [(micro_batch.epoch, place, keep) for place in micro_batch.ids]

    def __len__(self) -> int:
        """Return the number of micro-batches of the epoch, as currently planned."""
        training = self._training
        stream, position = training.stream, training.position
        if not training.epoch_open:
            return stream.steps(stream.size, training.schedule_batch)
        row = training.schedule.at(position.step + 1)
        left, mine = stream.steps_left(position.cursor, max(1, row.batch)), 0
        if row.rank is not None and row.local_batches:
            mine = share_sizes(row.batch, row.local_batches, stream.min_samples)[row.rank]
        return position.epoch_step + left * len(
            passes(max(1, mine), self._bound, stream.min_samples)
        )


class ElasticLoader:
    """Loader for the rest of the running epoch, with tensors on the worker's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        training: TrainingState,
        transitions: GroupTransitions,
        executor: StepExecutor,
        bound: int,
        device: torch.device,
        worker: str,
        options: Mapping[str, Any],
    ) -> None:
        """Wrap `dataset`; `options` are options of torch's DataLoader that do not select samples.

        A share of more than `bound` samples is processed in several passes. The processes that load
        data draw other random numbers for each `worker`, which is the name of this one.
        """
        workers = int(options.get("num_workers", 0))
        if workers:
            options = {"persistent_workers": True, **options}
        self.dataset = dataset
        self.depth = workers * int(options.get("prefetch_factor") or 2)  # prefetched batches
        self._training = training
        reads = isinstance(dataset, IterableDataset)
        self._sampler = _MicroBatchSampler(training, bound, reads=reads)
        self._transitions = transitions
        self._executor = executor
        self._device = device
        self._reader: StreamReader | None = None
        if isinstance(dataset, IterableDataset):
            dataset = self._reader = StreamReader(dataset, training.stream)
        self._collates = options.get("collate_fn") is not None  # it may leave samples out
        self._worker = worker
        self._seeds = torch.Generator()  # of the processes that load data
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._sampler, generator=self._seeds, **options
        )

    def __getattr__(self, name: str) -> Any:
        """Return an option of torch's DataLoader, unless the option selects samples."""
        if name in READABLE_OPTIONS:
            return getattr(self._loader, name)
        problem = f"{type(self).__name__!r} object has no attribute {name!r}"
        remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
        raise AttributeError(f"{problem}{remedy}", name=name, obj=self)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the epoch ends or the job is done.

        A second loop in the same epoch continues where the first loop stopped.
        """
        if not self._training.epoch_open:
            problem = "loader used outside of an epoch: before agent.epochs(...) or after report()"
            hint = "loop over it in `for epoch in agent.epochs(...)`, before report(); elsewhere "
            raise UsageError(problem, f"{hint}use train_set, or a DataLoader of your own")
        self._executor.check_trained()
        source: Iterator[Any] | None = None
        between_steps = True  # True between two steps
        while True:
            if between_steps:
                if self._training.epoch_is_over:
                    return  # the group reports the epoch before it changes
                discard_prefetched = self._transitions.before_step()
                source = self._begin() if source is None or discard_prefetched else source
            if source is None:
                return
            try:
                batch = to_device(next(source), self._device)
            except StopIteration:
                return
            micro_batch = self._sampler.handed_out.popleft()
            held = held_samples(batch, len(micro_batch.ids)) if self._collates else None
            self._executor.begin(micro_batch, held)
            proceed = False
            try:
                yield batch
            finally:
                proceed = self._executor.finish(micro_batch)
            if not proceed:
                return
            between_steps = micro_batch.last

    def _begin(self) -> Iterator[Any]:
        """Return a new iterator over the rest of the epoch; a join may have changed the seed.

        Before the state has arrived, torch's generator is in the same state in all newcomers.
        """
        stream, position = self._training.stream, self._training.position
        named = f"{stream.epoch_seed(position.epoch)}/{position.step}/{self._worker}".encode()
        digest = hashlib.blake2b(named, digest_size=8).digest()
        self._seeds.manual_seed(int.from_bytes(digest, "big") >> 1)
        if self._reader is not None:
            self._reader.follow(self._training.stream)
        return iter(self._loader)

    def __len__(self) -> int:
        """Return the planned number of batches of the running epoch, done and remaining.

        Outside of an epoch, return the number of batches in an epoch at the batch size for which
        the script's rate is meant, which is also the unit of schedules.
        """
        return len(self._sampler)


def loader_options(loader: DataLoader[Any], device: torch.device) -> dict[str, Any]:
    """Return options with which `ScalingAgent.load` produces the batches of `loader`."""
    if loader.batch_size is None:
        problem = "the training loader has its own batch sampler, or none"
        hint = "use DataLoader(data, batch_size=..., shuffle=True)"
        raise UsageError(problem, hint, "batch_size")
    streams, sampler = isinstance(loader.dataset, IterableDataset), loader.sampler
    partial = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != dataset_size(loader.dataset)
    )
    if not streams and (type(sampler) is not RandomSampler or partial):
        draws = " that draws with replacement, or not all samples" if partial else ""
        problem = f"the training loader has a {type(sampler).__name__}{draws}"
        remedy = "use shuffle=True: an epoch has every sample once, shuffled by the job's seed"
        raise UsageError(problem, remedy, "shuffle")
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory and device.type != "cpu",
        "drop_last": loader.drop_last,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    return options
