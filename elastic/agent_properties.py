"""What a script may ask of its worker at any time; what a checkpoint may say otherwise, later.

What a framework's own loop asks of the step under way: its batch, its loss, what is to come.
"""

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
    """Looks, and changes nothing.

    Args:
        executor: knows the batch that the loop has at present.
    """

    def __init__(
        self, training: TrainingState, membership: Membership, executor: StepExecutor
    ) -> None:
        self._training = training
        self._membership = membership
        self._executor = executor

    @property
    def batch(self) -> MicroBatch | None:
        """What the loop has got of the loader and is not through with."""
        return self._executor.present

    @property
    def is_dropped(self) -> bool:
        """Whether the group broke under the step, and it is taken anew: what it did is undone."""
        return self._executor.is_dropped

    @property
    def has_state(self) -> bool:
        """Whether the state is whole behind this step: a newcomer's takes some steps to come."""
        transfer = self._training.transfer
        if self._membership.has_full_state:
            return True
        return transfer is not None and transfer.is_over(self._training.position.step + 2)

    def gather(self, data: bytes) -> list[bytes]:
        """What all workers give in the present batch, by rank; every one of them has to ask.

        Args:
            data: of this worker; nobody gets it where its batch counts nothing. Not empty.

        Returns:
            Nothing outside of the loop over the loader. If a member is lost meanwhile, and the step
            is taken anew or ends without it, only what this worker gave.
        """
        batch, group = self.batch, self._membership.group
        if batch is None:
            return []
        own = data if batch.count else b""
        try:
            found = [
                group.broadcast_bytes(own, self._executor.called_off, rank)
                for rank in range(group.size)
            ]
        except (BrokenGroupError, CancelledError):  # the next reduction meets it too, and recovers
            found = [data]
        return [part for part in found if part]

    @property
    def loss(self) -> torch.Tensor | float | None:
        """Of the step under way, over all workers, once it is summed; a tensor has one element.

        The mean over the samples of the global batch, or over what `agent.weight` said of them.
        """
        return self._training.losses.last

    @property
    def rate_factor(self) -> float:
        """What the first optimizer's rates are multiplied with in the step under way."""
        return self._training.lr_state.at(self._training.position.step + 1)

    @property
    def epochs_done(self) -> float:
        """Epochs of the job, a part of the running one too; with the step under way."""
        position, batch = self._training.position, self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        return position.epoch - 1 + cursor / max(1, self._training.stream.size)

    @property
    def stop_rule(self) -> StopRule | None:
        """The job file's; without a cluster None until `epochs` begins."""
        return self._training.stop_rule

    @property
    def schedule_batch(self) -> int:
        """Samples of a step as schedules count them."""
        return self._training.schedule_batch

    @property
    def epoch_steps(self) -> int:
        """Steps of the running epoch, done and to come, if the batch stays as it is."""
        position = self._training.position
        left = self._training.stream.steps_left(position.cursor, self._training.global_batch)
        return position.epoch_step + left

    @property
    def ends_epoch(self) -> bool:
        """Whether the present batch is the last one of the epoch, or of the job."""
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
        """A scheduler's step meanwhile is one of so many samples, or just one.

        Args:
            counts: whether schedulers that step meanwhile count steps of the loop; else epochs.
        """
        self._executor.counts_steps = counts
        try:
            yield
        finally:
            self._executor.counts_steps = True

    @property
    def epoch_is_open(self) -> bool:
        """Whether an epoch has begun whose report is to come."""
        return self._training.epoch_open

    def planned_steps(self, rule: StopRule) -> int | None:
        """Steps of a whole job with the batch that its rate is meant for: what schedules count in.

        Returns:
            None where neither epochs nor samples end it.
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

    def steps_to_come(self) -> int | None:
        """Steps behind the one under way, if the batch stays as it is; None: nobody knows."""
        rule, stream, position = self.stop_rule, self._training.stream, self._training.position
        if rule is None or (rule.epochs is None and rule.samples is None):
            return None
        batch = self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        size = max(1, self._training.schedule.at(position.step + 2).batch)
        whole, here = stream.steps_left(0, size), stream.steps_left(cursor, size)
        ends = []
        if rule.epochs is not None:
            ends.append(here + max(0, rule.epochs - position.epoch) * whole)
        if rule.samples is not None:
            left = rule.samples - position.samples_done - (cursor - position.cursor)
            beyond = left - (stream.size - cursor)
            if beyond <= 0:
                ends.append(max(0, -(-left // size)))
            else:
                epochs, rest = divmod(beyond, stream.size)
                ends.append(here + epochs * whole + -(-rest // size))
        return min(ends)


class ScriptQuestions:
    """Place, progress, batch and device of one worker; nothing here changes anything.

    Args:
        assignment: of this worker; None: it is alone.
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
        """This worker's place in its group, which may change; 0 prints and saves.

        Before the first epoch, the place that it is going to have.
        """
        if self._assignment is not None and not self._joined:
            return int(self._assignment.rank)
        return self._membership.rank

    @property
    def is_managed(self) -> bool:
        """Whether a cluster started this worker; else it is alone for ever."""
        return self._assignment is not None

    @property
    def world_size(self) -> int:
        """How many workers the group has at present, or is going to have at first."""
        return len(self._membership.workers)

    @property
    def step(self) -> int:
        """Steps that are done since the job began; a UsageError before `load`."""
        return self._loaded("step").position.step

    @property
    def device(self) -> torch.device:
        """Where model and batches live: the slot's GPU, or the CPU."""
        return self._membership.device

    @property
    def progress(self) -> Progress:
        """How much of the epoch and of the job is done, 0 to 1; a UsageError before `load`."""
        training = self._loaded("progress")
        if training.why_done:
            return Progress(1.0, 1.0)
        return progress_of(training.position, training.stream.size, training.stop_rule)

    @property
    def job_lr(self) -> float | None:
        """The job file's learning rate, at its first batch."""
        return self._assignment.group.lr if self._assignment is not None else None

    @property
    def epoch_samples(self) -> int:
        """||D||, samples of an epoch."""
        return self._training.stream.size

    @property
    def batch_size(self) -> int:
        """The global batch at present, samples per step; a UsageError before `load`."""
        return self._loaded("batch_size").global_batch

    @property
    def view(self) -> StepView:
        """Of the step under way, for a loop that is a framework's and not the script's."""
        return StepView(self._training, self._membership, self._executor)

    def _loaded(self, asked: str) -> TrainingState:
        if not self._training.is_loaded:
            raise UsageError(f"agent.{asked} before load()", "call agent.load(...) first")
        return self._training
