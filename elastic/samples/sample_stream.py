"""Every sample once per epoch, whatever the batch size and the number of workers.

The order of an epoch is a pure function of (seed, epoch, size); a step takes the next B ids of it
and deals them out by rank. So any cursor can be continued with any global batch and any split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SampleStream:
    """The sample ids of a job.

    Attributes:
        seed: of the job.
        size: ||D||, samples of one pass over the training set.
        least: samples that a step must have: a smaller remainder goes to the step before it.
        drop_last: a remainder that is no whole step is left out, unless it is the whole epoch.
    """

    seed: int
    size: int
    least: int = 1
    drop_last: bool = False

    def order(self, epoch: int) -> list[int]:
        """All ids of `epoch` (1-based), shape (size,), each exactly once.

        Args:
            epoch: 1-based; with seed and size it decides alone.
        """
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        ids: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return ids

    def taken(self, cursor: int, batch: int) -> int:
        """Samples of the step that begins at `cursor`; 0 where the epoch is over.

        Args:
            cursor: samples of the epoch that are done.
            batch: global, samples per step.
        """
        left = max(0, self.size - cursor)
        if self.drop_last:
            return batch if batch <= left else 0 if cursor else left
        return left if left - batch < self.least else batch

    def steps(self, cursor: int, batch: int) -> int:
        """Steps from the beginning of an epoch to `cursor`, if all had the same batch; rounded up.

        Args:
            cursor: samples of the epoch that are done; `size` or more: the whole epoch's steps.
            batch: global, samples per step.
        """
        if self.drop_last:
            total = max(1, self.size // batch)
        else:  # the last one begins where less than `least` would be left behind it
            total = 1 + max(0, (self.size - self.least) // batch)
        return total if cursor >= self.size else min(total, -(-cursor // batch))

    def batches(
        self, epoch: int, cursor: int, local_batches: Sequence[int], rank: int
    ) -> Iterator[tuple[int, list[int]]]:
        """What `rank` trains on from `cursor` to the end of `epoch`.

        Args:
            epoch: 1-based.
            cursor: samples of the epoch that are done, over all ranks.
            local_batches: b_j^i by rank, samples per step.
            rank: whose share to give.

        Yields:
            The cursor behind each step, and the rank's ids; the last step is never padded, and may
            leave a rank with none.
        """
        order = self.order(epoch)
        while taken := self.taken(cursor, sum(local_batches)):
            step = order[cursor : cursor + taken]
            cursor += len(step)
            yield cursor, share(step, local_batches, rank)


def share(step: Sequence[int], local_batches: Sequence[int], rank: int) -> list[int]:
    """The part of a step's ids that `rank` takes.

    A step of another size, the last one, is dealt out with differences of at most one sample, low
    ranks first, to as many ranks as can have two: layers that look at a batch as a whole refuse a
    single one. A newcomer without the whole state takes none.

    Args:
        step: ids of the step, in the order of the epoch.
        local_batches: by rank, samples per step; 0 for a newcomer without the whole state.
        rank: whose part to give.

    Returns:
        Ids of this rank; in a whole step, `local_batches[rank]` of them.
    """
    if len(step) == sum(local_batches):
        start = sum(local_batches[:rank])
        return list(step[start : start + local_batches[rank]])
    if local_batches[rank] == 0:
        return []
    place = sum(1 for batch in local_batches[:rank] if batch)
    takers = min(sum(1 for batch in local_batches if batch), max(1, len(step) // 2))
    if place >= takers:
        return []
    each, rest = divmod(len(step), takers)
    start = each * place + min(place, rest)
    return list(step[start : start + each + (place < rest)])
