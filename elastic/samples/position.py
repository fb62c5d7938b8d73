"""Where training stands in its stream of samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrainingPosition:
    """Where training stands."""

    epoch: int = 1  # the running one
    cursor: int = 0  # samples of it that are done
    step: int = 0  # steps since the job began
    samples_done: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """What comes next in a job's stream of samples."""

    epoch: int  # 1-based
    cursor: int  # samples of it that are done
    step: int  # steps that are done, of all epochs
    samples_done: int  # of all epochs


def advanced(position: Position, steps: int, batch: int, size: int) -> Position:
    """Where the stream stands `steps` steps of `batch` samples further on.

    Args:
        position: where to begin.
        steps: how many.
        batch: global, samples per step; the last step of an epoch is short.
        size: ||D||, samples of an epoch.
    """
    epoch, cursor, done = position.epoch, position.cursor, position.samples_done
    for _ in range(steps):
        if cursor >= size:
            epoch, cursor = epoch + 1, 0
        taken = min(batch, size - cursor)
        cursor, done = cursor + taken, done + taken
    if cursor >= size:
        epoch, cursor = epoch + 1, 0
    return Position(epoch, cursor, position.step + steps, done)
