"""Read-only properties of a worker, for scripts and for framework adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from elastic.batches import MicroBatch
from elastic.group.membership import Membership
from elastic.sample_stream import Progress, progress_of
from elastic.state.training_state import TrainingState
from elastic.step.step_executor import StepExecutor
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError
from schemas.jobs import StopRule
from schemas.wire.worker import Assignment


class StepView:
    """Read-only view of the step under way, for the training loop of a framework."""

    def __init__(
        self, training: TrainingState, membership: Membership, executor: StepExecutor
    ) -> None:
        self._training = training
        self._membership = membership
        self._executor = executor

    @property
    def batch(self) -> MicroBatch | None:
        """Latest batch of the loader, until the loop has finished it; None outside of the loop."""
        return self._executor.current_batch

    @property
    def is_dropped(self) -> bool:
        """True if the group broke during the step, which is rolled back and will be repeated."""
        return self._executor.is_dropped

    @property
    def has_state(self) -> bool:
        """True if this worker has the full state after this step; a newcomer needs some steps."""
        transfer = self._training.transfer
        if self._membership.has_full_state:
            return True
        return transfer is not None and transfer.is_over(self._training.position.step + 2)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all workers in the current batch, by rank; all ranks must call it.

        Workers whose batch counts no samples contribute nothing. Outside of the loop over the
        loader the list is empty. If a member is lost meanwhile, the list holds only this worker's
        `data`: the step is repeated, or ends without the member. `data` must not be empty.
        """
        batch, group = self.batch, self._membership.group
        if batch is None:
            return []
        own = data if batch.count else b""
        try:
            found = [
                group.broadcast_bytes(own, self._executor.cancelled, rank)
                for rank in range(group.size)
            ]
        except (BrokenGroupError, CancelledError):  # the next reduction raises it too, and recovers
            found = [data]
        return [part for part in found if part]

    @property
    def loss(self) -> torch.Tensor | float | None:
        """Loss of the step under way over all workers, once reduced; a tensor has one element.

        It is the mean over the samples of the global batch, or over the items stated with
        `agent.weight`.
        """
        return self._training.losses.last

    @property
    def rate_factor(self) -> float:
        """Factor of the first optimizer's learning rates in the step under way."""
        return self._training.lr_state.at(self._training.position.step + 1)

    @property
    def epochs_done(self) -> float:
        """Finished epochs of the job, fractional, including the step under way."""
        position, batch = self._training.position, self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        return position.epoch - 1 + cursor / max(1, self._training.stream.size)

    @property
    def stop_rule(self) -> StopRule | None:
        """Stop rule of the job; without a cluster None until `epochs` starts."""
        return self._training.stop_rule

    @property
    def schedule_batch(self) -> int:
        """Samples of one step as schedulers count steps."""
        return self._training.schedule_batch

    @property
    def epoch_steps(self) -> int:
        """Steps of the running epoch, done and remaining, if the batch size does not change."""
        position = self._training.position
        left = self._training.stream.steps_left(position.cursor, self._training.global_batch)
        return position.epoch_step + left

    @property
    def ends_epoch(self) -> bool:
        """True if the current batch is the last of the epoch or of the job."""
        batch, position = self.batch, self._training.position
        if batch is None or not batch.last:
            return False
        rule = self.stop_rule
        limit = rule.samples if rule is not None else None
        done = position.samples_done + batch.cursor_after - position.cursor
        if limit is not None and done >= limit:
            return True
        following = max(1, self._training.schedule.at(batch.step + 1).batch)
        return not self._training.stream.taken(batch.cursor_after, following)

    @contextlib.contextmanager
    def counting_steps(self, counts: bool) -> Iterator[None]:  # noqa: FBT001
        """Within the context, let a scheduler's step count as the samples of one training step.

        Args:
            counts: True: schedulers that step meanwhile count training steps; False: they count
                epochs.
        """
        self._executor.counts_steps = counts
        try:
            yield
        finally:
            self._executor.counts_steps = True

    @property
    def epoch_is_open(self) -> bool:
        """True if an epoch has started and was not reported yet."""
        return self._training.epoch_open

    def planned_steps(self, rule: StopRule) -> int | None:
        """Return the steps of the whole job with the batch that schedules count in.

        Returns:
            None if neither epochs nor samples end the job.
        """
        stream, base = self._training.stream, self._training.schedule_batch
        whole = stream.steps(stream.size, base)
        ends = []
        if rule.epochs is not None:
            ends.append(rule.epochs * whole)
        if rule.samples is not None:
            epochs, rest = divmod(rule.samples, stream.size)
            ends.append(epochs * whole + (stream.steps(rest, base) if rest else 0))
        return min(ends, default=None)

    def remaining_steps(self) -> int | None:
        """Return the steps after the one under way at the current batch size; None if unknown."""
        rule, stream, position = self.stop_rule, self._training.stream, self._training.position
        if rule is None or (rule.epochs is None and rule.samples is None):
            return None
        batch = self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        size = max(1, self._training.schedule.at(position.step + 2).batch)
        whole, in_epoch = stream.steps_left(0, size), stream.steps_left(cursor, size)
        ends = []
        if rule.epochs is not None:
            ends.append(in_epoch + max(0, rule.epochs - position.epoch) * whole)
        if rule.samples is not None:
            left = rule.samples - position.samples_done - (cursor - position.cursor)
            beyond = left - (stream.size - cursor)
            if beyond <= 0:
                ends.append(max(0, -(-left // size)))
            else:
                epochs, rest = divmod(beyond, stream.size)
                ends.append(in_epoch + epochs * whole + -(-rest // size))
        return min(ends)


class AgentProperties:
    """Read-only properties of one worker: rank, progress, batch size and device.

    Args:
        assignment: of this worker; None: the worker trains alone.
    """

    def __init__(
        self,
        assignment: Assignment | None,
        training: TrainingState,
        membership: Membership,
        executor: StepExecutor,
    ) -> None:
        self._assignment = assignment
        self._training = training
        self._membership = membership
        self._executor = executor
        self._joined = False

    @property
    def rank(self) -> int:
        """Rank of this worker in its group, which may change; rank 0 prints and saves.

        Before the first epoch, the rank that this worker is going to have.
        """
        if self._assignment is not None and not self._joined:
            return int(self._assignment.rank)
        return self._membership.rank

    @property
    def is_managed(self) -> bool:
        """True if a cluster started this worker; otherwise it always trains alone."""
        return self._assignment is not None

    @property
    def world_size(self) -> int:
        """Number of workers in the current group, or in the first group before it forms."""
        return len(self._membership.workers)

    @property
    def step(self) -> int:
        """Steps done since the start of the job; raises UsageError before `load`."""
        return self._require_loaded("step").position.step

    @property
    def device(self) -> torch.device:
        """Device of model and batches: the slot's GPU, or the CPU."""
        return self._membership.device

    @property
    def progress(self) -> Progress:
        """Finished shares of the epoch and of the job, 0 to 1; raises UsageError before `load`."""
        training = self._require_loaded("progress")
        if training.why_done:
            return Progress(1.0, 1.0)
        return progress_of(training.position, training.stream.size, training.stop_rule)

    @property
    def job_lr(self) -> float | None:
        """Learning rate of the job file, for the job's first batch; None if there is none."""
        return self._assignment.group.lr if self._assignment is not None else None

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch (||D||)."""
        return self._training.stream.size

    @property
    def batch_size(self) -> int:
        """Current global batch, samples per step; raises UsageError before `load`."""
        return self._require_loaded("batch_size").global_batch

    @property
    def view(self) -> StepView:
        """View of the step under way, for a framework's training loop."""
        return StepView(self._training, self._membership, self._executor)

    def _require_loaded(self, name: str) -> TrainingState:
        if not self._training.is_loaded:
            raise UsageError(f"agent.{name} was used before load()", "call agent.load(...) first")
        return self._training
