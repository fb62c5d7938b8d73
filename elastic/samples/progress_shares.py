"""How much of a job is done."""

from __future__ import annotations

from typing import NamedTuple

from elastic.samples.stream_position import TrainingPosition
from schemas.jobs import StopRule


class Progress(NamedTuple):
    """Shares, from 0 to 1; they follow the samples that are done, whatever the batch is."""

    epoch: float
    job: float  # of the stop rule's epochs or samples; 0 where only a metric ends the job


def progress_of(position: TrainingPosition, size: int, rule: StopRule | None) -> Progress:
    """Where `position` is in its epoch and in its job.

    Args:
        position: behind the last step that is done.
        rule: that ends the job; None: not known yet.
    """
    epoch = min(1.0, position.cursor / size) if size else 0.0
    shares = [0.0]
    if rule is not None and rule.epochs:
        shares.append((position.epoch - 1 + epoch) / rule.epochs)
    if rule is not None and rule.samples:
        shares.append(position.samples_done / rule.samples)
    return Progress(epoch, min(1.0, max(shares)))
