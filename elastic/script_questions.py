"""What a script may ask of its worker at any time; what a checkpoint may say otherwise, later."""

from __future__ import annotations

import torch

from elastic.group.membership import Membership
from elastic.samples.progress_shares import Progress, progress_of
from elastic.state.training_state import TrainingState
from elastic.step.step_executor import StepExecutor
from elastic.step.step_view import StepView
from elastic.training_errors import UsageError
from schemas.messages.worker import Assignment


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
