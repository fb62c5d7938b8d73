"""Recordings of a live cluster that name only what matters."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from controlplane.sim.cluster import NodeGroup
from controlplane.sim.models.recording import (
    ChangeTimes,
    Epoch,
    EpochSpeed,
    Family,
    Recording,
    Submission,
)
from schemas.jobs import StopRule
from tests.support import builders

ONE_SLOT: Final = EpochSpeed(1, 1, 64, 640.0)


def a_job(**changes: Any) -> Submission:
    """Four epochs of 1000 samples on one slot, each as fast as `ONE_SLOT`."""
    job = Submission(
        name="a-1",
        at=0.0,
        user="user-1",
        family="m",
        spec=builders.job_spec(
            "a", max_batch_size=512, slots=(1, 4), stop=StopRule(epochs=4), retries=2
        ),
        ended="succeeded",
        ended_after_s=60.0,
        samples=4000,
        stated_samples=4000,
        epoch_samples=1000,
        epochs=tuple(Epoch(number, 64, None, None, ONE_SLOT) for number in (1, 2, 3, 4)),
    )
    return msgspec.structs.replace(job, **changes)


def recording(*jobs: Submission, **changes: Any) -> Recording:
    """These jobs of one family, measured on one slot, if `changes` of the family do not say more."""
    family = Family(name="m", speeds=(ONE_SLOT,) * 4, epoch_samples=1000)
    return Recording(
        name="week",
        nodes=(NodeGroup(count=1, slots=4),),
        took=ChangeTimes(),
        families=(msgspec.structs.replace(family, **changes),),
        jobs=jobs,
        left_out={},
    )
