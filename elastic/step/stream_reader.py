"""Samples of an iterable dataset by their places in it, so that any worker can take any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from elastic.hooks.loader_worker_info import without_worker_info
from elastic.samples.sample_stream import SampleStream
from elastic.state.random_state import (
    host_random_state,
    restore_random_state,
    seed_host_generators,
)
from elastic.training_errors import UsageError


class StreamReader(Dataset[Any]):
    """A map-style dataset that reads an iterable one, once in each process, from its beginning.

    Samples that belong to others are read and passed over, and a place behind what was read means
    to begin anew. So every process sees the same stream, whatever became of the group. It reads
    as if it were alone: no worker info, and random numbers that follow from seed and epoch.
    """

    def __init__(self, source: IterableDataset[Any], stream: SampleStream) -> None:
        """Begin with nothing read.

        Args:
            source: the script's; its `set_epoch`, if it has one, hears the epoch, from 0, before
                each reading.
            stream: has the length of one reading, and the seeds.
        """
        self._source = source
        self._stream = stream
        self._samples: Iterator[Any] | None = None
        self._epoch = 0  # 1-based, of the reading
        self._place = 0  # of the sample that comes next
        self._random: dict[str, Any] | None = None  # as the reading left it

    def follow(self, stream: SampleStream) -> None:
        """Read as `stream` says from the next reading on.

        Args:
            stream: may have another seed than before; its length is the same.
        """
        self._stream = stream

    def __getitems__(self, ids: Sequence[tuple[int, int]]) -> list[Any]:
        """The samples of a batch.

        Args:
            ids: (epoch, place) of each, 1-based and 0-based; reading forward is the fast way.

        Raises:
            UsageError: if a reading has other than the stream's number of samples.
        """
        outside = host_random_state()
        try:
            with without_worker_info():
                if self._random is not None:
                    restore_random_state(self._random)
                return [self._at(epoch, place) for epoch, place in ids]
        finally:
            self._random = host_random_state()
            restore_random_state(outside)

    def _at(self, epoch: int, place: int) -> Any:
        samples = self._samples
        if samples is None or epoch != self._epoch or place < self._place:
            samples = self._begin(epoch)
        while self._place < place:
            self._next(samples)
        sample = self._next(samples)
        if self._place == self._stream.size:
            self._check_end(samples)
        return sample

    def _begin(self, epoch: int) -> Iterator[Any]:
        seed_host_generators(self._stream.epoch_seed(epoch))
        set_epoch = getattr(self._source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch - 1)
        self._epoch, self._place = epoch, 0
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
        what = f"train_set gave {given} samples in epoch {self._epoch - 1}"
        hint = (
            f"its len() is {self._stream.size}: every pass through its __iter__ has to give so many"
        )
        return UsageError(what, hint, "train_set")
