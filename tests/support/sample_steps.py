"""Steps of a job that are computed without the loader, for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic.sample_stream import SampleStream, share


def steps_of(
    stream: SampleStream, epoch: int, cursor: int, local_batches: Sequence[int], rank: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the cursor after each step and the ids of `rank`, until `epoch` ends."""
    order = stream.order(epoch)
    while taken := stream.taken(cursor, sum(local_batches)):
        step = order[cursor : cursor + taken]
        cursor += taken
        yield cursor, share(step, local_batches, rank, stream.min_samples)
