"""Collectives that a script calls: gathered rows, sums, barriers and a shared evaluation.

In the body of the loop over the loader, they belong to a step, which is repeated if a worker is
lost, so they need no result then. If the gradients of the step are reduced already, nobody else
would drop the step, so this worker does. Between epochs, a lost worker is recovered from at once.
Workers that are ahead may have finished a collective that others have not, so the workers of the
recovered group share the results since their last step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.data import DataLoader, Dataset, Subset

from elastic import fault_points
from elastic.collectives.process_group import ProcessGroup
from elastic.group.membership import Membership
from elastic.group.transitions import GroupTransitions
from elastic.sample_stream import MicroBatch, StepOutcome, share_sizes
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.training_state import TrainingState
from elastic.step.batch_loader import to_device
from elastic.step.step_executor import StepExecutor
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError

T = TypeVar("T")
LOST: Final = (BrokenGroupError, CancelledError, fault_points.InjectedError)


class ScriptCollectives:
    """Collectives of one worker; all workers of the group must call the same ones in turn."""

    def __init__(
        self,
        membership: Membership,
        training: TrainingState,
        transitions: GroupTransitions,
        executor: StepExecutor,
    ) -> None:
        self._membership = membership
        self._training = training
        self._transitions = transitions
        self._executor = executor
        self._results: list[Any] = []  # of collectives between steps, since the last finished step
        self._step = 0  # the last finished step
        self._next = 0  # index of the next collective in `_results`
        transitions.after_recovery = self._share_results

    # --- calls of the script

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, by rank; see `ScalingAgent.all_gather`."""
        batch = self._executor.micro_batch
        if batch is None:
            return self._between_steps(partial(self._gathered, rows.detach()))
        self._refuse_passes("all_gather")
        samples = len(batch.ids)
        if not rows.dim() or rows.shape[0] % samples:
            problem = f"all_gather got shape {tuple(rows.shape)} in a batch of {samples} samples"
            raise UsageError(problem, "give one row, or equally many, for each sample of the batch")
        sizes = [share * (rows.shape[0] // samples) for share in self._shares(batch)]
        gathered: torch.Tensor = _Gather.apply(rows, self, sizes)  # type: ignore[no-untyped-call]
        return gathered

    def all_reduce(self, value: torch.Tensor | float) -> torch.Tensor:
        """Return the sum over all workers; see `ScalingAgent.all_reduce`."""
        tensor = torch.as_tensor(value, device=self._membership.device)
        if self._executor.micro_batch is None:
            return self._between_steps(partial(self._summed, tensor.detach()))
        self._refuse_passes("all_reduce")
        summed: torch.Tensor = _Sum.apply(tensor, self)  # type: ignore[no-untyped-call]
        return summed

    @property
    def batch_offset(self) -> int:
        """Position of this worker's first sample in the global batch; see `ScalingAgent`."""
        batch = self._executor.micro_batch
        if batch is None or not batch.count:
            return 0
        return sum(self._shares(batch)[: self.rank])

    def _shares(self, batch: MicroBatch) -> tuple[int, ...]:
        minimum = self._training.stream.min_samples
        return share_sizes(batch.total, batch.row.local_batches, minimum)

    def barrier(self) -> None:
        """Wait until all workers of the group have called it."""
        self._meet()

    def evaluate_loader(
        self, dataset: Dataset[Any], batch_size: int, **options: Any
    ) -> Iterator[Any]:
        """Yield this worker's batches of `dataset`; see `ScalingAgent.evaluate_loader`."""
        workers = self._meet()  # some may have lost a worker since the step that others have not
        left = list(range(len(dataset)))  # type: ignore[arg-type] # a map-style dataset
        while True:
            parts = {name: left[rank :: len(workers)] for rank, name in enumerate(workers)}
            if mine := parts[self._own_name]:
                loader = DataLoader(Subset(dataset, mine), batch_size=batch_size, **options)
                yield from (to_device(batch, self._membership.device) for batch in loader)
            met = self._meet()
            left = [place for name in workers if name not in met for place in parts[name]]
            if not left:
                return
            workers = met

    # --- in a step

    def _refuse_passes(self, name: str) -> None:
        batch = self._executor.micro_batch
        if batch is not None and not (batch.first and batch.last):
            problem = f"agent.{name} was called in a batch that is taken in several passes"
            hint = "raise max_local_batch, so that a worker's share fits its device at once"
            raise UsageError(problem, hint)

    def in_step(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place; if a worker is lost, the step is repeated.

        After a recovery in the current batch, nothing is summed: peers may be in another batch.
        """
        if self._executor.outcome is not StepOutcome.COMMITTED:
            return
        try:
            self._reach("collect")
            self._membership.group.all_reduce(tensor, self._executor.cancelled)
            self._reach("collected")
        except LOST as error:
            self._executor.collective_failed(error)

    @property
    def has_samples(self) -> bool:
        """False if the current batch only keeps the script's loop running."""
        batch = self._executor.micro_batch
        return batch is None or batch.count > 0

    @property
    def rank(self) -> int:
        """Rank in the current group."""
        return self._membership.rank

    @property
    def weight(self) -> float:
        """Weight of this worker's loss in the running step; all weights have the same scale."""
        return self._executor.loss_weight

    # --- between steps

    @property
    def _own_name(self) -> str:
        return self._membership.workers[self._membership.rank]

    @property
    def _takes_part(self) -> bool:
        """False in a newcomer before its first step, which its peers have not called with it."""
        return self._executor.in_loop

    def _meet(self) -> list[str]:
        """Wait for all workers; return the names of those that came."""

        def meet(group: ProcessGroup) -> list[str]:
            group.all_reduce(torch.zeros(1, device=group.device), self._executor.cancelled)
            return list(self._membership.workers) if self._takes_part else [self._own_name]

        if self._executor.micro_batch is None:
            return self._between_steps(meet)
        self.in_step(torch.zeros(1, device=self._membership.device))
        return list(self._membership.workers)

    def _between_steps(self, run: Callable[[ProcessGroup], T]) -> T:
        """Return the result of `run`, which is called again in each recovered group."""
        self._forget_old()
        if not self._takes_part:
            return run(ProcessGroup(0, 0, 1, self._membership.device))
        while self._next == len(self._results):
            try:
                self._reach("collect")
                made = run(self._membership.group)
                self._reach("collected")
                self._results.append(made)
            except LOST as error:
                self._transitions.recover(error)
        found: Any = self._results[self._next]
        self._next += 1
        if isinstance(found, torch.Tensor):
            found = found.clone()  # the script may change it, and peers may still need it
        result: T = found
        return result

    def _reach(self, point: str) -> None:
        step, version = self._training.position.step + 1, self._membership.version
        fault_points.reach(point, rank=self.rank, step=step, version=version)

    def _forget_old(self) -> None:
        """Forget the results of collectives before the last finished step."""
        step = self._training.position.step
        if step != self._step:
            self._results, self._step, self._next = [], step, 0

    def _share_results(self, group: ProcessGroup, cancelled: threading.Event) -> None:
        """Give all workers of a recovered group the longest list of results since the last step.

        A worker that is one step behind adopts that step, so its own results are of an earlier one.
        """
        self._forget_old()
        places = torch.zeros(group.size, 2, dtype=torch.int64, device=group.device)
        places[group.rank] = torch.tensor([self._step, len(self._results)])
        group.all_reduce(places, cancelled)
        known: list[list[int]] = places.tolist()
        if min(known) == max(known):
            return
        own = encode_metadata({"results": self._results})
        data = group.broadcast_bytes(own, cancelled, known.index(max(known)))
        if known[group.rank] < max(known):
            self._results = to_device(decode_metadata(data)["results"], self._membership.device)
            if self._step < max(known)[0]:
                self._step, self._next = max(known)[0], 0

    def _gathered(self, rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        sizes = torch.zeros(group.size, dtype=torch.int64, device=group.device)
        sizes[group.rank] = rows.shape[0]
        group.all_reduce(sizes, self._executor.cancelled)
        padded = _padded(rows, sizes.tolist(), group.rank)
        group.all_reduce(padded, self._executor.cancelled)
        return padded

    def _summed(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, self._executor.cancelled)
        return total


def _padded(rows: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    """Return zeros with the rows of all ranks, and `rows` at the place of `rank`."""
    padded = rows.new_zeros(sum(sizes), *rows.shape[1:])
    start = sum(sizes[:rank])
    padded[start : start + sizes[rank]] = rows[: sizes[rank]]
    return padded


class _Gather(torch.autograd.Function):
    """Rows of all workers. The losses of all workers depend on the rows of each.

    The gradients of the group are the sum of the workers' gradients times their weights. So each
    worker needs the sum of all losses' gradients times their weights, divided by its own.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, group: ScriptCollectives, sizes: list[int]
    ) -> torch.Tensor:
        own: Any = ctx
        own.group, own.sizes, own.shape = group, sizes, rows.shape
        padded = _padded(rows.detach(), sizes, group.rank)
        group.in_step(padded)
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own: Any = ctx
        rank, sizes = own.group.rank, own.sizes
        total = _of_all_losses(own.group, gradients[0])
        start = sum(sizes[:rank])
        found = total.new_zeros(own.shape)
        found[: sizes[rank]] = total[start : start + sizes[rank]]
        return found, None, None


class _Sum(torch.autograd.Function):
    """Sum over the workers that have samples in the step, with the gradients of `_Gather`."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: ScriptCollectives) -> torch.Tensor:
        own: Any = ctx
        own.group = group
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not group.has_samples:
            total.zero_()
        group.in_step(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own: Any = ctx
        total = _of_all_losses(own.group, gradients[0])
        return total if own.group.has_samples else torch.zeros_like(total), None


def _of_all_losses(group: ScriptCollectives, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of all workers' gradients times their weights, divided by the own weight."""
    weight = group.weight  # with weight 0, the loss may be NaN: a mean over nothing
    total = gradient.contiguous() * weight if weight else torch.zeros_like(gradient).contiguous()
    group.in_step(total)
    return total / weight if weight else torch.zeros_like(total)
