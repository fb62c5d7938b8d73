"""How fast losses fell in live runs of the same jobs: areas under them, and times to most of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.bench.live_cluster import Run

LEAST: Final = 3  # epochs; a loss that was seen once or twice is no curve
MOST: Final = 0.9  # of a job's fall of loss
Losses = Sequence[tuple[float, float]]  # seconds after the job's submission, loss


class Fall(NamedTuple):
    """How the loss of one job fell."""

    area_s: float  # normalised loss times seconds, from its submission to its end
    most_s: float  # from its submission until `MOST` of the fall was seen


def falls(live: Sequence[Run]) -> list[list[Fall]]:
    """Of each run's jobs with a curve, in order of arrival.

    A loss is normalised: 1 until the job's first epoch has ended, 0 at the lowest loss that the
    job came to in any of the runs.

    Args:
        live: runs of the same jobs, one for each policy.
    """
    found: list[list[Fall]] = [[] for _ in live]
    for each in zip(*(run.jobs for run in live), strict=True):
        if min(len(ended.losses) for ended in each) >= LEAST:
            lowest = min(loss for ended in each for _, loss in ended.losses)
            for column, ended in zip(found, each, strict=True):
                column.append(fall(ended.losses, lowest, ended.jct_s))
    return found


def fall(losses: Losses, lowest: float, end_s: float) -> Fall:
    """Of one job.

    Args:
        losses: of its epochs, one at least.
        lowest: the loss that counts as 0.
        end_s: of the job, after its submission.
    """
    top = losses[0][1] - lowest

    def share(loss: float) -> float:
        return min(max((loss - lowest) / top, 0.0), 1.0) if top > 0.0 else 0.0

    steps = [(0.0, 1.0), *((at, share(loss)) for at, loss in losses), (end_s, 0.0)]
    area_s = sum(height * (until - at) for (at, height), (until, _) in itertools.pairwise(steps))
    # Where a job of one of the runs stayed above that, its end stands for it.
    most_s = next((at for at, height in steps[1:] if height <= 1.0 - MOST), end_s)
    return Fall(area_s, most_s)
