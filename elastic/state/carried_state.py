"""State that a script carries from batch to batch, such as a recurrent model's hidden state.

The data is divided into columns: sample i continues sample i - columns. The state has one row per
column. After each step the workers exchange their rows, so every worker has the rows of all columns
and can continue any column next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from elastic import fault_points
from elastic.collectives.process_group import ProcessGroup, as_byte_row
from elastic.sample_stream import MicroBatch, StepOutcome
from elastic.training_errors import UsageError

ROW_SHAPE_KEY: Final = "row"  # key for the shape of a sample's row, in a tensor's description


class CarriedState:
    """Rows of bytes, one per column, and the layout of the tensors that the script carries.

    `dim` is the dimension of the script's tensors along which the samples lie.
    """

    def __init__(self, columns: int, dim: int, device: torch.device) -> None:
        self.columns = columns
        self.device = device
        self._dim = dim
        self._layout: Any = None  # layout of a sample's row; None: nothing carried yet
        self._rows: torch.Tensor | None = None  # (columns, bytes)

    def state_before(self, samples: Sequence[int]) -> Any:
        """Return the detached state before each of `samples` (positions in the data), in order.

        Samples at the start of their column get zeros. Returns None if all samples start their
        columns, or nothing was carried yet.
        """
        places = torch.tensor(samples, device=self.device)
        begun = places >= self.columns
        if self._rows is None or not any(place >= self.columns for place in samples):
            return None
        rows = self._rows[places % self.columns] * begun[:, None]
        start = 0

        def next_part(width: int) -> torch.Tensor:
            """Return the next bytes of each row, as a copy that is aligned for any type."""
            nonlocal start
            start += width
            return rows[:, start - width : start].clone(memory_format=torch.contiguous_format)

        return self._unpack(self._layout, len(rows), next_part)

    def pack(self, state: Any, samples: int) -> torch.Tensor:
        """Return the script's state as rows of bytes, shape (samples, bytes).

        The state consists of tensors with one row per sample, in the same shape for every batch.
        """
        parts: list[torch.Tensor] = []
        layout = self._describe(state, samples, parts.append)
        if not parts:
            raise UsageError("agent.carried got no tensor", "assign the state after the batch")
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            problem = f"agent.carried got {layout}, before it was {self._layout}"
            raise UsageError(problem, "give tensors of the same shape and type for every sample")
        return torch.cat(parts, dim=1)

    def store(self, first: int, rows: torch.Tensor) -> None:
        """Store the rows of a finished step, shape (samples, bytes), from position `first` on."""
        if self._rows is None:
            self._rows = rows.new_zeros(self.columns, rows.shape[1])
        places = torch.arange(first, first + len(rows), device=self.device)
        self._rows[places % self.columns] = rows

    def state(self) -> dict[str, Any]:
        """Return a copy of the state on the host, or {} if nothing was carried yet."""
        if self._rows is None:
            return {}
        return {"layout": self._layout, "rows": self._rows.to("cpu", copy=True)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`, from this worker or another."""
        if state:
            self._layout, self._rows = state["layout"], state["rows"].to(self.device)

    def _describe(self, state: Any, samples: int, add: Callable[[torch.Tensor], None]) -> Any:
        if isinstance(state, torch.Tensor):
            if state.dim() <= self._dim or state.shape[self._dim] != samples:
                problem = f"agent.carried got shape {tuple(state.shape)} for {samples} samples"
                hint = (
                    f"samples are in dimension {self._dim}; set another with load(carried_dim=...)"
                )
                raise UsageError(problem, hint)
            rows = state.detach().to(self.device).movedim(self._dim, 0).contiguous()
            add(as_byte_row(rows).view(samples, -1))
            return {ROW_SHAPE_KEY: list(rows.shape[1:]), "dtype": str(rows.dtype).partition(".")[2]}
        if isinstance(state, Mapping):
            return {"dict": [[k, self._describe(v, samples, add)] for k, v in state.items()]}
        if isinstance(state, list | tuple):
            kind = "list" if isinstance(state, list) else "tuple"
            return {kind: [self._describe(part, samples, add) for part in state]}
        problem = f"agent.carried got {type(state).__name__}"
        raise UsageError(problem, "give a tensor, or tuples, lists and dicts of tensors")

    def _unpack(self, layout: Any, rows: int, next_part: Callable[[int], torch.Tensor]) -> Any:
        if ROW_SHAPE_KEY in layout:
            dtype = getattr(torch, layout["dtype"])
            shape = torch.Size(layout[ROW_SHAPE_KEY])
            part = next_part(shape.numel() * dtype.itemsize).view(dtype).view(rows, *shape)
            return part.movedim(0, self._dim).contiguous()
        if "dict" in layout:
            return {k: self._unpack(v, rows, next_part) for k, v in layout["dict"]}
        kind = list if "list" in layout else tuple
        parts = layout.get("list", layout.get("tuple"))
        return kind(self._unpack(part, rows, next_part) for part in parts)


LINE: Final = "scores, agent.carried = model(inputs, agent.carried)"


class CarriedRows:
    """Rows of the current step: at first this worker's own, after a reduction all workers'.

    The rows take effect when the step is committed.
    """

    def __init__(self, state: CarriedState) -> None:
        self._state = state
        self._micro_batch: MicroBatch | None = None
        self._own_rows: list[tuple[list[int], torch.Tensor]] = []  # positions of samples, rows
        self._width: int | None = None  # bytes of a row; None: nothing was carried in this step
        self._summed: torch.Tensor | None = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for `micro_batch`."""
        self._micro_batch = micro_batch
        if micro_batch.first:
            self._own_rows, self._width, self._summed = [], None, None

    def current(self) -> Any:
        """Return the carried state before the current batch."""
        micro_batch = self._current_batch()
        if micro_batch.total > self._state.columns:
            problem = f"a step of {micro_batch.total} samples exceeds {self._state.columns} columns"
            raise UsageError(problem, "lower the batch, or cut the data into more columns")
        return self._state.state_before(micro_batch.ids)

    def set_next(self, carried: Any) -> None:
        """Store the state after the current batch, as tensors with one row per sample."""
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
        """Exchange the rows of all workers by a reduction, after the reduction of gradients.

        It is an error if the script set no state in this batch, or a worker skipped the batch.
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
        group.all_reduce(rows, cancelled)  # exact: a row is zero on all ranks but its owner
        fault_points.reach("carried", **place)
        self._summed = rows

    def conclude(self, micro_batch: MicroBatch, outcome: StepOutcome) -> None:
        """Store a committed step's rows; an adopted step's rows arrived with the peers' state."""
        self._micro_batch = None
        if self._summed is not None and outcome is StepOutcome.COMMITTED:
            self._state.store(micro_batch.cursor_before, self._summed)
        self._summed = None
