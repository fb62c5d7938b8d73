"""Jobs as a list of them has them."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.ids import JobId
from schemas.wire.client import JobSummary


def summary(job: JobId, **changes: Any) -> JobSummary:
    """A queued job of ann's, but for `changes`."""
    fields = {
        "type": "client.job_summary.1", "job": job, "name": job[:1], "user": "ann",
        "state": "queued", "reason": "", "slots": 0, "global_batch": 0, "lr": None, "epoch": 0,
        "samples_per_s": 0.0, "progress": 0.0, "train_loss": None, "metrics": {},
        "submitted_at": 0.0, "queued_s": 0.0, "running_s": 0.0, "rescales": 0, "batch_changes": 0,
    }  # fmt: skip
    return msgspec.convert({**fields, **changes}, JobSummary)
