"""Decisions that are learnt from again and again, and how they are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from controlplane.policy.drl.inputs import CLUSTER_INPUTS, JOB_INPUTS
from controlplane.sim.learning.drl.episodes import Decision
from schemas.ids import Seconds


@dataclass(frozen=True, slots=True)
class Experience:
    """A decision, and how much better than usual it went from then on."""

    decision: Decision
    gain: float  # in deviations of the episodes on that trace


def pack(kept: Sequence[Experience]) -> dict[str, Any]:
    """All of it as few tensors; decisions about different numbers of jobs lie end to end.

    Args:
        kept: D of them, about J jobs in all.
    """
    decisions = [experience.decision for experience in kept]
    numbers = [
        (d.at, d.action, d.probability, d.taught, experience.gain, len(d.jobs))
        for d, experience in zip(decisions, kept, strict=True)
    ]
    jobs = [d.jobs for d in decisions] or [np.zeros((0, JOB_INPUTS))]
    clusters = [d.cluster for d in decisions]
    legal = [d.legal for d in decisions] or [np.zeros(0, dtype=np.bool_)]
    return {
        "numbers": torch.tensor(numbers, dtype=torch.float64).reshape(-1, 6),
        "jobs": torch.from_numpy(np.concatenate(jobs)),
        "clusters": torch.from_numpy(np.array(clusters).reshape(-1, CLUSTER_INPUTS)),
        "legal": torch.from_numpy(np.concatenate(legal)),
    }


def unpack(packed: dict[str, Any]) -> list[Experience]:
    """What `pack` made tensors of."""
    jobs, clusters = packed["jobs"].numpy(), packed["clusters"].numpy()
    legal, found, at, bit = packed["legal"].numpy(), [], 0, 0
    for row, numbers in enumerate(packed["numbers"].tolist()):
        many = int(numbers[5])
        decision = Decision(
            at=Seconds(numbers[0]),
            jobs=jobs[at : at + many],
            cluster=clusters[row],
            legal=legal[bit : bit + 3 * many + 1],
            action=int(numbers[1]),
            probability=numbers[2],
            taught=int(numbers[3]),
        )
        found.append(Experience(decision, numbers[4]))
        at, bit = at + many, bit + 3 * many + 1
    return found
