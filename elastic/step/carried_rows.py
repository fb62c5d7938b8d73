"""Exchange of the state that a script carries from batch to batch."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from elastic import fault_points
from elastic.batches import MicroBatch, StepOutcome
from elastic.collectives.process_group import ProcessGroup
from elastic.state.carried_state import CarriedState
from elastic.training_errors import UsageError

LINE: Final = "scores, agent.carried = model(inputs, agent.carried)"


class CarriedRows:
    """Rows of the current step: this worker's from its passes, the others' from a reduction.

    They take effect when the step is committed. Every worker then has all rows, so any worker can
    continue any column after a change of the group or a loss.
    """

    def __init__(self, state: CarriedState) -> None:
        self._state = state
        self._micro_batch: MicroBatch | None = None
        self._own_rows: list[
            tuple[list[int], torch.Tensor]
        ] = []  # positions of samples, and their rows
        self._width: int | None = None  # bytes of a row; None: nothing was carried in this step
        self._summed: torch.Tensor | None = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for `micro_batch`."""
        self._micro_batch = micro_batch
        if micro_batch.first:
            self._own_rows, self._width, self._summed = [], None, None

    def current(self) -> Any:
        """Return the state that the current batch continues.

        Raises:
            UsageError: outside of the loop, or if the step has two samples of one column.
        """
        micro_batch = self._current_batch()
        if micro_batch.total > self._state.columns:
            problem = f"a step of {micro_batch.total} samples exceeds {self._state.columns} columns"
            raise UsageError(problem, "lower the batch, or cut the data into more columns")
        return self._state.state_before(micro_batch.ids)

    def set_next(self, carried: Any) -> None:
        """Store the state after the current batch: tensors with one row per sample.

        Raises:
            UsageError: outside of the loop, or if the shape changed.
        """
        micro_batch = self._current_batch()
        rows = self._state.pack(carried, len(micro_batch.ids))
        self._width = rows.shape[1]
        if micro_batch.count:
            self._own_rows.append((micro_batch.ids, rows))

    def _current_batch(self) -> MicroBatch:
        if self._micro_batch is None:
            problem = "agent.carried was used outside of the loop over the loader"
            raise UsageError(problem, "evaluate with a separate state that starts as None")
        return self._micro_batch

    def exchange(self, group: ProcessGroup, cancelled: threading.Event, *, skipped: bool) -> None:
        """Reduce the rows of all workers, after their gradients.

        `skipped` means that a worker skipped its batch.

        Raises:
            BrokenGroupError: if a peer is lost.
            CancelledError: if the wait was cancelled.
            UsageError: if the script carried nothing in this batch, or skipped it in a group.
        """
        micro_batch = self._current_batch()
        if skipped or self._width is None:
            problem = (
                "a batch did not set agent.carried, which load(columns=...) requires in every batch"
            )
            raise UsageError(problem, f"assign it before backward(), in every batch: {LINE}")
        place = {"rank": group.rank, "step": micro_batch.step, "version": group.version}
        rows = torch.zeros(
            micro_batch.total, self._width, dtype=torch.uint8, device=self._state.device
        )
        for samples, mine in self._own_rows:
            first = samples[0] - micro_batch.cursor_before
            rows[first : first + len(mine)] = mine
        fault_points.reach("carry", **place)
        group.all_reduce(rows, cancelled)  # peers have zeros there; sums of bytes are exact
        fault_points.reach("carried", **place)
        self._summed = rows

    def conclude(self, micro_batch: MicroBatch, outcome: StepOutcome) -> None:
        """Take over the rows of a committed step; rows of an adopted step came with its state."""
        self._micro_batch = None
        if self._summed is not None and outcome is StepOutcome.COMMITTED:
            self._state.store(micro_batch.cursor_before, self._summed)
        self._summed = None
