"""Job-aware exploration: a whole job is placed by one idea, and not one worker at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.harmony_drl.gang_placement import Candidates, Choose

# Of the features of `gang_placement.features_of`.
ROOM, HERE, FITS, JOBS = 2, 3, 4, 11
PATTERNS: Final[Mapping[str, Mapping[int, float]]] = {
    "packed": {FITS: 4.0, HERE: 8.0, ROOM: -1.0},  # on few nodes, the tightest that fit
    "balanced": {HERE: -8.0, ROOM: 1.0},  # on the emptiest nodes, each worker on another
    "least loaded": {JOBS: -8.0, HERE: 1.0},  # where the fewest jobs are
}


def pattern(name: str) -> Choose:
    """Places every worker of a job by one rule."""
    weights = PATTERNS[name]

    def choose(among: Candidates) -> int:
        found = sum(among.features[:, column] * weight for column, weight in weights.items())
        return int(np.argmax(found))

    return choose


def at_random(rng: Generator) -> Choose:
    """Places every worker anywhere."""

    def choose(among: Candidates) -> int:
        return int(rng.integers(len(among.scores)))

    return choose
