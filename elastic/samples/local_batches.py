"""How a batch is dealt out: over workers, and over the passes of one worker."""

from __future__ import annotations


def split(batch: int, workers: int) -> tuple[int, ...]:
    """`batch` samples over `workers`, with differences of at most one, low ranks first.

    Args:
        batch: global, samples per step.
        workers: how many share it, 1 or more.

    Returns:
        Local batches by rank, shape (workers,), samples.
    """
    each, rest = divmod(batch, workers)
    return tuple(each + (rank < rest) for rank in range(workers))


def passes(count: int, bound: int, least: int = 1) -> tuple[int, ...]:
    """`count` samples in as few passes as `bound` per pass allows, of nearly equal size.

    More than one pass means that gradients are accumulated before they are reduced.

    Args:
        count: samples of a worker's share of a step.
        bound: samples that fit the device at once. Where it is just `least` and `count` no
            multiple of it, the first passes have a sample more.
        least: samples that a pass must have if `count` has so many; `bound` or less.

    Returns:
        Samples of each micro-batch.
    """
    if count <= bound:
        return (count,)
    return split(count, min(-(-count // bound), max(1, count // least)))
