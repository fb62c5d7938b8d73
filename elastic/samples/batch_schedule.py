"""Which worker takes how many samples of which step, over the changes of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Who takes how much from one step on."""

    first: int  # step, 1-based
    local_batches: tuple[int, ...]  # by rank; 0 for a newcomer that has not the whole state yet
    rank: int | None  # this worker's; None when it has left

    @property
    def batch(self) -> int:
        """Global, samples per step."""
        return sum(self.local_batches)


class Schedule:
    """The rows that are in force or announced, oldest first.

    Args:
        row: in force from the first step on, whatever its own `first` says.
    """

    def __init__(self, row: ScheduleRow) -> None:
        self._rows = [row]

    def at(self, step: int) -> ScheduleRow:
        """The row in force at `step`.

        Args:
            step: 1-based, of all epochs.
        """
        found = self._rows[0]
        for row in self._rows:
            if row.first <= step:
                found = row
        return found

    def announce(self, rows: Sequence[ScheduleRow]) -> None:
        """These follow; they replace rows that begin as late."""
        first = min(row.first for row in rows)
        self._rows = [row for row in self._rows if row.first < first] + list(rows)

    def forget(self, step: int) -> None:
        """Drop what was over before `step`: a long job changes often.

        Args:
            step: 1-based, of all epochs; rows in force at it or later stay.
        """
        self._rows = [
            row
            for row, after in zip(self._rows, [*self._rows[1:], None], strict=True)
            if after is None or after.first > step
        ]
