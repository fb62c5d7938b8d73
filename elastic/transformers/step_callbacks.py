"""What has to happen before and behind all other callbacks of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from elastic.transformers.trainer_mixin import ElasticMixin

STEPS = "steps"  # the strategies' value


class FirstCallback(TrainerCallback):
    """Sets the counts that others look at."""

    def __init__(self, trainer: ElasticMixin) -> None:
        """Begin."""
        self._trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Join the group, before anybody is told that training begins."""
        self._trainer.begin_job()
        agent = self._trainer.agent
        state.num_train_epochs = self._planned_epochs(args)
        if state.global_step or not agent.view.has_state:
            args.eval_on_start = False  # it is not the start

    def _planned_epochs(self, args: TrainingArguments) -> int:
        rule = self._trainer.agent.view.stop_rule
        return rule.epochs if rule is not None and rule.epochs else int(args.num_train_epochs)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Whoever is rank 0 now says and saves."""
        state.is_world_process_zero = state.is_local_process_zero = self._trainer.agent.rank == 0

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The job's own counts; as many steps are planned as the batch of the moment takes."""
        view = self._trainer.agent.view
        if view.batch is not None:
            state.global_step = view.batch.step
        state.epoch = view.epochs_done
        to_come = view.steps_to_come()
        # The data end the job: its last step may have to be taken anew.
        state.max_steps = state.global_step + max(1, 1 if to_come is None else to_come)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The last step counts; behind the job's last one come evaluation and checkpoint."""
        view = self._trainer.agent.view
        self._trainer.end_batches()
        if view.steps_to_come() == 0 and view.has_state:
            due = state.global_step % max(1, int(state.eval_steps or 1)) != 0
            if args.eval_strategy == STEPS and due and args.eval_delay <= state.global_step:
                control.should_evaluate = True
            if args.save_strategy == STEPS:
                control.should_save = True


class LastCallback(TrainerCallback):
    """Takes back what others asked for where it cannot be: nobody but rank 0 ends a job."""

    def __init__(self, trainer: ElasticMixin) -> None:
        """Begin."""
        self._trainer = trainer

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Nothing is looked at or kept of a step that is taken anew, or of half a state."""
        self._pass_over(control)
        self._agree_on_stop(control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The same."""
        self._pass_over(control)
        self._agree_on_stop(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """A worker's numbers may differ from another's: rank 0's say whether the job ends."""
        self._agree_on_stop(control)

    def _pass_over(self, control: TrainerControl) -> None:
        view = self._trainer.agent.view
        if view.is_dropped or not view.has_state:
            control.should_log = control.should_evaluate = control.should_save = False

    def _agree_on_stop(self, control: TrainerControl) -> None:
        """In a group the job ends with its epoch; alone at once, as in `Trainer`."""
        agent = self._trainer.agent
        if control.should_training_stop and agent.view.epoch_is_open:
            agent.stop("a callback of the trainer stopped it")
            control.should_training_stop = agent.world_size == 1
