"""A lower bound of the average completion time, whatever the policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def fluid_srpt(release: FloatArray, work: FloatArray, most: FloatArray, capacity: float) -> float:
    """No schedule has a smaller average completion time (end minus release).

    The largest of three bounds, each of which relaxes something else. A job is fluid: at any
    moment it progresses at any rate up to `most`, and all rates together stay within `capacity`.

    - Shortest remaining processing time first on one machine as fast as the cluster, which is
      optimal there (Schrage 1968). It ignores `most`.
    - Every job alone: work / most.
    - Mean busy times. A job that progresses at most at rate m ends at least work / (2 m) after
      the mean moment of its work, and the sum of these mean moments is smallest if the least
      work goes first, pre-emptively (Goemans 1997, LP in mean busy times).

    Shortest-first under the limits `most` itself is no lower bound: on 4 slots, jobs of
    (work 4, most 4) and (work 4.4, most 1) take 6.4 s in all with the shorter one first, but 5.7 s
    if the longer one keeps its one slot from the start.

    Args:
        release: shape (J,), seconds.
        work: shape (J,), slot seconds at the best efficiency the job can have; 0 or more.
        most: shape (J,), slots whose worth of speed the job can use at most; above 0, may be
            infinite.
        capacity: slots of the cluster; above 0.

    Returns:
        Seconds; 0 without jobs.

    Raises:
        ValueError: if shapes differ or a value is out of its range.
    """
    _check(release, work, most, capacity)
    if not len(work):
        return 0.0
    flow = least_flow(
        release.tolist(), work.tolist(), np.minimum(most, capacity).tolist(), float(capacity)
    )
    return flow / len(work)


def least_flow(
    release: Sequence[float], work: Sequence[float], fastest: Sequence[float], capacity: float
) -> float:
    """The bound of `fluid_srpt` on the sum of completion times, unchecked and for few jobs fast.

    Args:
        release: seconds.
        work: slot seconds.
        fastest: slots, at most `capacity`.
    """
    size = [area / capacity for area in work]
    ends, _ = _one_machine(release, size, shortest=True)
    _, busy = _one_machine(release, size, shortest=False)
    alone = [area / fast for area, fast in zip(work, fastest, strict=True)]
    released = sum(release)
    return max(sum(ends) - released, sum(alone), sum(busy) + sum(alone) / 2.0 - released)


def _check(release: FloatArray, work: FloatArray, most: FloatArray, capacity: float) -> None:
    if not release.shape == work.shape == most.shape == (len(release),):
        raise ValueError(f"shapes differ: {release.shape}, {work.shape}, {most.shape}")
    if not (np.isfinite(release).all() and np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError("release and work must be finite, and work not negative")
    if not ((most > 0.0).all() and 0.0 < capacity < np.inf):
        raise ValueError("most and capacity must be above 0")


def _one_machine(
    release: Sequence[float], size: Sequence[float], *, shortest: bool
) -> tuple[list[float], list[float]]:
    """Run jobs one at a time on a machine of speed 1, pre-emptively.

    Args:
        release: seconds.
        size: seconds.
        shortest: first the job with the least remaining work; else with the least work of all.

    Returns:
        When each job ends, and the mean moment of its work.
    """
    order = sorted(range(len(release)), key=release.__getitem__)
    left, ends, busy = list(size), list(release), [0.0] * len(size)
    waiting: list[tuple[float, int]] = []
    now, arrived = -math.inf, 0
    while waiting or arrived < len(order):
        if not waiting:
            now = max(now, release[order[arrived]])
        while arrived < len(order) and release[order[arrived]] <= now:
            job = order[arrived]
            heapq.heappush(waiting, (size[job], job))
            arrived += 1
        _, job = heapq.heappop(waiting)
        end = now + left[job]
        until = min(end, release[order[arrived]]) if arrived < len(order) else end
        share = (until - now) / size[job] if size[job] else 1.0
        busy[job] += share * (now + until) / 2.0
        if until < end:
            left[job] -= until - now
            heapq.heappush(waiting, (left[job] if shortest else size[job], job))
        else:
            ends[job] = end
        now = until
    return ends, busy
