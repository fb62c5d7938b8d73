"""A lower bound of the average completion time, whatever the policy."""

from __future__ import annotations

import heapq

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
    fastest = np.minimum(most, capacity)
    ends, _ = _one_machine(release, work / capacity, shortest=True)
    _, busy = _one_machine(release, work / capacity, shortest=False)
    return max(
        float(np.mean(ends - release)),
        float(np.mean(work / fastest)),
        float(np.mean(busy + work / (2.0 * fastest) - release)),
    )


def _check(release: FloatArray, work: FloatArray, most: FloatArray, capacity: float) -> None:
    if not release.shape == work.shape == most.shape == (len(release),):
        raise ValueError(f"shapes differ: {release.shape}, {work.shape}, {most.shape}")
    if not (np.isfinite(release).all() and np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError("release and work must be finite, and work not negative")
    if not ((most > 0.0).all() and 0.0 < capacity < np.inf):
        raise ValueError("most and capacity must be above 0")


def _one_machine(
    release: FloatArray, size: FloatArray, *, shortest: bool
) -> tuple[FloatArray, FloatArray]:
    """Run jobs one at a time on a machine of speed 1, pre-emptively.

    Args:
        release: shape (J,), seconds.
        size: shape (J,), seconds.
        shortest: first the job with the least remaining work; else with the least work of all.

    Returns:
        When each job ends, and the mean moment of its work; both of shape (J,).
    """
    order = np.argsort(release, kind="stable").tolist()
    due, left, whole = release.tolist(), size.tolist(), size.tolist()
    ends, busy = release.astype(float), np.zeros(len(due))
    waiting: list[tuple[float, int]] = []
    now, arrived = 0.0, 0
    while waiting or arrived < len(order):
        if not waiting:
            now = max(now, due[order[arrived]])
        while arrived < len(order) and due[order[arrived]] <= now:
            job = order[arrived]
            heapq.heappush(waiting, (whole[job], job))
            arrived += 1
        _, job = heapq.heappop(waiting)
        end = now + left[job]
        until = min(end, due[order[arrived]]) if arrived < len(order) else end
        share = (until - now) / whole[job] if whole[job] else 1.0
        busy[job] += share * (now + until) / 2.0
        if until < end:
            left[job] -= until - now
            heapq.heappush(waiting, (left[job] if shortest else whole[job], job))
        else:
            ends[job] = end
        now = until
    return ends, busy
