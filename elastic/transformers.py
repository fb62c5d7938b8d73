"""Hugging Face's `Trainer` for elastic jobs; the agent decides samples, passes, steps and epochs.

The trainer's own counts are sent to newcomers and kept in checkpoints.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from elastic.agent import ScalingAgent
from elastic.step.batch_loader import ElasticLoader
from elastic.training_errors import UsageError
from elastic.usage_checks import refuse_inexact
from schemas.jobs import StopRule

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object  # for a mixin: in a subclass, the trainer's class is the next base


def refuse_options(trainer: ElasticMixin) -> None:
    """Refuse arguments with which a group cannot train exactly."""
    made: Any = trainer
    args = made.args
    args._n_gpu = min(args.n_gpu, 1)  # noqa: SLF001 - as `Trainer` does; avoids DataParallel
    made._train_batch_size = args.train_batch_size  # noqa: SLF001
    distributed = "the agent's group reduces gradients: a worker holds the whole model"
    shuffles = args.train_sampling_strategy == "random"
    streams = isinstance(made.train_dataset, IterableDataset)
    for found, option, remedy in (
        (args.auto_find_batch_size, "auto_find_batch_size", "set max_local_batch in the job file"),
        (made.is_deepspeed_enabled, "deepspeed", distributed),
        (made.is_fsdp_enabled or made.is_fsdp_xla_enabled, "fsdp", distributed),
        (getattr(args, "parallelism_config", None) is not None, "parallelism_config", distributed),
        (args.world_size > 1, "torch.distributed", "start it with ones submit, not with torchrun"),
        (
            not shuffles and not streams,
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "leave it out: samples are shuffled by the job's seed; an IterableDataset is not",
        ),
        (
            args.include_num_input_tokens_seen != "no",
            "include_num_input_tokens_seen",
            "leave it out: a worker sees the tokens of its own share only",
        ),
        *(
            (overridden, f"an own {name}", "weight the losses: an epoch has every sample once")
            for name, overridden in _own_loading(trainer).items()
        ),
    ):
        refuse_inexact(option, remedy, found=found)
    if isinstance(made.model, nn.DataParallel):
        raise UsageError("the model is an nn.DataParallel", "give the plain module", "model")


def _own_loading(trainer: ElasticMixin) -> dict[str, bool]:
    """Return which methods that choose the samples differ from those of transformers."""
    loader: Any = super(ElasticMixin, trainer).get_train_dataloader
    kind: Any = type(trainer)
    return {
        "get_train_dataloader": loader.__func__ is not Trainer.get_train_dataloader
        or kind.get_train_dataloader is not ElasticMixin.get_train_dataloader,
        "_get_train_sampler": kind._get_train_sampler is not Trainer._get_train_sampler,  # noqa: SLF001
    }


STEPS = "steps"  # value of eval_strategy and save_strategy


class FirstCallback(TrainerCallback):
    """Callback that runs before all others and sets the counts that they read."""

    def __init__(self, trainer: ElasticMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join the group before the other callbacks see the start of training."""
        self._trainer.begin_job()
        agent = self._trainer.agent
        rule = agent.view.stop_rule
        own = int(args.num_train_epochs)
        state.num_train_epochs = rule.epochs if rule is not None and rule.epochs else own
        if state.global_step or not agent.view.has_state:
            args.eval_on_start = False  # training has already started

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the current rank 0 print and save."""
        state.is_world_process_zero = state.is_local_process_zero = self._trainer.agent.rank == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the job's counts, and plan as many steps as the current batch size needs."""
        view = self._trainer.agent.view
        if view.batch is not None:
            state.global_step = view.batch.step
        state.epoch = view.epochs_done
        to_come = view.remaining_steps()
        # The end of the data ends the job, because the last step may have to be repeated.
        state.max_steps = state.global_step + max(1, 1 if to_come is None else to_come)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the last step. After the job's last step, request evaluation and checkpoint."""
        view = self._trainer.agent.view
        self._trainer.end_batches()
        if view.remaining_steps() == 0 and view.has_state:
            due = state.global_step % max(1, int(state.eval_steps or 1)) != 0
            if args.eval_strategy == STEPS and due and args.eval_delay <= state.global_step:
                control.should_evaluate = True
            if args.save_strategy == STEPS:
                control.should_save = True


class LastCallback(TrainerCallback):
    """Callback that runs after all others and withdraws requests that a group cannot fulfil."""

    def __init__(self, trainer: ElasticMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Skip logs and saves if the step is dropped or the state is partial; agree on a stop."""
        view = self._trainer.agent.view
        if view.is_dropped or not view.has_state:
            control.should_log = control.should_evaluate = control.should_save = False
        self._agree_on_stop(control)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let rank 0 decide whether the job ends, because workers' metrics can differ."""
        self._agree_on_stop(control)

    def _agree_on_stop(self, control: TrainerControl) -> None:
        """Turn a callback's stop into the end of the job, in a group only after the epoch."""
        agent = self._trainer.agent
        if control.should_training_stop and agent.view.epoch_is_open:
            agent.stop("a callback of the trainer stopped it")
            control.should_training_stop = agent.world_size == 1


COUNTS: Final = (
    "epoch", "global_step", "max_steps", "total_flos", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
TOTALS: Final = ("_total_loss_scalar", "_globalstep_last_logged")


class TrackedTrainer:
    """Tracked state of a trainer: counts, history, losses so far, and callbacks."""

    def __init__(self, trainer: ElasticMixin) -> None:
        self._trainer: Any = trainer
        self._lines: list[str] = []  # encoded history: each entry is encoded only once

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, text, tensors and their containers."""
        trainer = self._trainer
        state, history = trainer.state, trainer.state.log_history
        del self._lines[len(history) :]
        self._lines += [json.dumps(entry, default=float) for entry in history[len(self._lines) :]]
        return {
            "counts": {name: _plain(getattr(state, name)) for name in COUNTS},
            "history": list(self._lines),
            "loss": trainer._tr_loss,  # noqa: SLF001 - name in `Trainer`
            "totals": {name: getattr(trainer, name) for name in TOTALS},
            "evaluated": dict(trainer._evaluated),  # noqa: SLF001
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, from this worker or another."""
        trainer = self._trainer
        for name, value in state["counts"].items():
            setattr(trainer.state, name, value)
        self._lines = list(state["history"])
        trainer.state.log_history[:] = [json.loads(line) for line in self._lines]
        trainer._tr_loss = torch.as_tensor(  # noqa: SLF001
            state["loss"], device=trainer.args.device
        ).clone()
        for name, value in state["totals"].items():
            setattr(trainer, name, value)
        trainer._evaluated = dict(state["evaluated"])  # noqa: SLF001
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        handler = self._trainer.callback_handler
        return [each for each in handler.callbacks if isinstance(each, ExportableState)]


def _plain(value: Any) -> Any:
    """Return a numpy number as a Python number, because metadata are decoded without numpy."""
    return value.item() if hasattr(value, "item") else value


TIMING_SUFFIXES: Final = ("_runtime", "_samples_per_second", "_steps_per_second")
IGNORED_LABEL: Final = -100  # label that losses ignore
END: Final = object()


class ElasticMixin(Mixed):
    """Mixin that makes a trainer elastic: `class ElasticTrainer(ElasticMixin, Trainer)`.

    The initial global batch is `per_device_train_batch_size * gradient_accumulation_steps`. Under a
    cluster the job file overrides this batch, the learning rate and the end of the job. A share
    larger than `per_device_train_batch_size` (in the job file, `max_local_batch`) is processed in
    several passes.

    Args:
        agent: agent of this process; if it is None, an agent is created. If another job is about to
            leave the GPU, create the agent before the first use of the GPU.
        lr_scaling: rule by which the rate follows the batch, as in `ScalingAgent.load`.

    Raises:
        UsageError: if a group cannot train exactly with an option.
    """

    _batches: Iterator[Any]  # batches of the running epoch

    def __init__(
        self,
        *args: Any,
        agent: ScalingAgent | None = None,
        lr_scaling: str = "auto",
        **options: Any,
    ) -> None:
        self.agent = agent or ScalingAgent.from_env()
        self._lr_scaling = lr_scaling
        self._first = FirstCallback(self)
        self._last = LastCallback(self)
        self._epochs: Iterator[int] | None = None
        self._epoch: int | None = None
        self._evaluated: dict[str, float] = {}
        super().__init__(*args, **options)
        refuse_options(self)
        self._pass_size = self._train_batch_size
        self._batch = self._pass_size * self.args.gradient_accumulation_steps
        if self.agent.is_managed:  # a log needs lines; a later rank 0 would have no progress bar
            self.pop_callback(ProgressCallback)
            if not self.args.disable_tqdm:
                self.add_callback(PrinterCallback)

    # --- loading

    def get_train_dataloader(self) -> ElasticLoader:
        """Return the job's loader, after model and optimizer have been passed to the agent.

        Raises:
            UsageError: at the second call of `train`, or if the device is not the slot's.
        """
        if self._epochs is not None:
            remedy = "raise num_train_epochs or the job's stop rule: a job trains once"
            raise UsageError("train() was called twice", remedy)
        args = self.args
        if args.device != self.agent.device:
            problem = f"the arguments say {args.device}, the slot is {self.agent.device}"
            remedy = "set use_cpu=True, or make one GPU visible to the worker"
            raise UsageError(problem, remedy, "use_cpu")
        _, _, loader = self.agent.load(
            lambda: self.model,
            lambda _: self.create_optimizer(),
            self.train_dataset,
            batch_size=self._batch,
            max_local_batch=self._pass_size,
            lr_scaling=self._lr_scaling,
            **self._loader_options(),
        )
        self._loader = loader
        args.gradient_accumulation_steps = 1  # `training_step` runs all passes of a step
        return loader

    def _loader_options(self) -> dict[str, Any]:
        args = self.args
        options: dict[str, Any] = {
            "collate_fn": self._get_collator_with_removed_columns(
                self.data_collator, description="Training"
            ),
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and self.agent.device.type != "cpu",
            "drop_last": args.dataloader_drop_last,
        }
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        return options

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create a scheduler for the agent's own (innermost) optimizer, so that it is tracked.

        If `optimizer` is None, the trainer's optimizer is used.
        """
        inner = optimizer or self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return super().create_scheduler(num_training_steps, inner)

    # --- end of the job

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[Any, ...]:
        """Plan the job by its stop rule, in steps of the batch for which the rate is meant.

        Without a stop rule in the job file, `args` decide when the job ends.
        """
        values = super().set_initial_training_values(args, dataloader)
        _, per_epoch, examples, _, _, steps, planned = values
        rule = self.agent.view.stop_rule or self._own_rule(per_epoch, examples)
        planned = self.agent.view.planned_steps(rule) or planned
        samples = rule.samples or examples * (rule.epochs or math.ceil(args.num_train_epochs))
        # The agent ends the job, so the trainer does not count epochs and batches.
        return sys.maxsize, per_epoch, examples, samples, self.agent.batch_size, steps, planned

    def _own_rule(self, per_epoch: int, examples: int) -> StopRule:
        args = self.args
        if args.max_steps > 0:
            epochs, rest = divmod(args.max_steps, per_epoch)
            return StopRule(samples=epochs * examples + min(rest * self._batch, examples))
        if float(args.num_train_epochs).is_integer():
            return StopRule(epochs=int(args.num_train_epochs))
        return StopRule(samples=round(args.num_train_epochs * examples))

    def begin_job(self) -> None:
        """Join the group; in a resumed job, restore the trainer's state."""
        agent, loader = self.agent, self._loader
        rule = self._own_rule(len(loader), agent.epoch_samples)
        agent.track(trainer=TrackedTrainer(self))
        if self.lr_scheduler is not None and not self._created_lr_scheduler:
            agent.track(lr_scheduler=self.lr_scheduler)
        self._initial_global_step = 0  # `train` returns the loss of the whole job
        self._epochs = agent.epochs(rule.epochs or 1, samples=rule.samples)
        self._epoch = next(self._epochs, None)

    # --- the loop

    def _run_epoch(self, **values: Any) -> None:
        """Run one epoch until its batches end, and report the epoch after the evaluation."""
        if self._epoch is None or self._epochs is None:
            self.control.should_training_stop = True
            return
        values |= {"epoch": self._epoch, "num_update_steps_per_epoch": sys.maxsize}
        super()._run_epoch(**values)
        self.end_batches()
        self.agent.report(**self._evaluated)
        self._epoch = next(self._epochs, None)
        self.control.should_training_stop = self._epoch is None
        if self._epoch is None:
            self.state.max_steps = self.state.global_step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return the first pass of the next step; `training_step` draws the other passes.

        The epoch ends with `epoch_iterator`, which iterates over the agent's loader.
        """
        self._batches = epoch_iterator
        inputs = next(epoch_iterator, END)
        if inputs is END:
            self.control.should_epoch_stop = True
            return [], None
        return [inputs], None

    def end_batches(self) -> None:
        """Commit the last step, even if a callback ended the epoch after the step."""
        close = getattr(getattr(self, "_batches", None), "close", None)
        if close is not None:
            close()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run all passes of a step. Afterwards the gradients are those of the global batch.

        `num_items_in_batch` is ignored, because each pass counts its own items. Returns the loss
        over the global batch of all workers, shape ().
        """
        view = self.agent.view
        while True:
            items = self._set_weight(inputs)
            own: torch.Tensor = super().training_step(model, inputs, items)
            batch = view.batch
            if batch is None or batch.last:
                break
            inputs = next(self._batches, END)
            if inputs is END:
                break
        loss = view.loss
        if loss is None or view.is_dropped:
            return own
        return torch.as_tensor(loss, dtype=own.dtype, device=own.device)

    def _set_weight(self, inputs: Any) -> Any:
        """Pass the number of items in the loss to the agent; return the divisor of the loss.

        Returns None if the trainer does not count items.
        """
        counted = self._get_num_items_in_batch([inputs], self.args.device)
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            if counted is not None:
                self.agent.weight(counted)
            return counted
        items = counted
        if items is None and not labels.is_floating_point():
            shifted = self._loss_shifts_labels
            items = (labels[..., 1:] if shifted else labels).ne(IGNORED_LABEL).sum()
        if items is None:
            return None
        if labels.dim() > 1:
            self.agent.weight(items)
        elif int(items) != len(labels):
            problem = f"a sample has no label ({IGNORED_LABEL})"
            hint = "leave it out of the dataset: its batch counts samples"
            raise UsageError(problem, hint, "labels")
        return None if counted is None else counted.clamp(min=1)

    # --- evaluation, saving and logs

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate on all data in every worker, like `Trainer.evaluate`, and keep the metrics."""
        metrics: dict[str, float] = super().evaluate(*args, **options)
        for name, value in metrics.items():
            if (
                isinstance(value, int | float)
                and name != "epoch"
                and not name.endswith(TIMING_SUFFIXES)
            ):
                self._evaluated[name] = float(value)
        return metrics

    def is_world_process_zero(self) -> bool:
        """Return whether this worker prints and saves now; another worker may do so later."""
        return self.agent.rank == 0

    is_local_process_zero = is_world_process_zero  # a job has one output over all nodes

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the model on rank 0."""
        if self.is_world_process_zero():
            super().save_model(*args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save on rank 0; the other ranks only record the path of the best checkpoint."""
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
            return
        state = self.state
        if state.best_global_step:
            folder = self._get_output_dir(trial)
            state.best_model_checkpoint = f"{folder}/checkpoint-{state.best_global_step}"

    def _get_learning_rate(self) -> float:
        """Return the rate in force, which follows the batch."""
        return float(super()._get_learning_rate()) * self.agent.view.rate_factor

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Return the operations of the whole step, extrapolated from this worker's samples."""
        flops = float(super().floating_point_ops(inputs))
        batch = self.agent.view.batch
        return flops if batch is None else flops * batch.total / max(1, len(batch.ids))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train like `Trainer.train`; the job resumes automatically.

        Args:
            resume_from_checkpoint: must be None.

        Raises:
            UsageError: if `resume_from_checkpoint` is set.
            LeftGroup: if this worker is no longer in the job's group.
        """
        if resume_from_checkpoint:
            problem = "train(resume_from_checkpoint=...)"
            remedy = "leave it out: a job resumes from its last finished epoch automatically"
            raise UsageError(problem, remedy, "resume_from_checkpoint")
        handler = self.callback_handler
        others = [c for c in handler.callbacks if c not in (self._first, self._last)]
        handler.callbacks = [self._first, *others, self._last]
        return super().train(None, *args, **options)


class ElasticTrainer(ElasticMixin, Trainer):
    """`Trainer` as an elastic job."""


__all__ = ["ElasticMixin", "ElasticTrainer"]
