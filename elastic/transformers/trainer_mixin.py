"""Hugging Face's `Trainer`, fed by the agent: samples, passes, steps and epochs are the job's."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from elastic.scaling_agent import ScalingAgent
from elastic.step.batch_loader import ElasticLoader
from elastic.training_errors import UsageError
from elastic.transformers.refused_options import refuse_options
from elastic.transformers.step_callbacks import FirstCallback, LastCallback
from elastic.transformers.tracked_trainer import TrackedTrainer
from schemas.jobs import StopRule

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object  # what it is mixed into is behind it

NO_METRICS: Final = ("_runtime", "_samples_per_second", "_steps_per_second")
IGNORED: Final = -100  # label that losses pass over
END: Final = object()


class ElasticMixin(Mixed):
    """Put it before `Trainer`: `class ElasticTrainer(ElasticMixin, Trainer)`.

    The global batch is `per_device_train_batch_size * gradient_accumulation_steps` to begin with;
    under a cluster that, the rate and the end of the job are the job file's. A share that is larger
    than `per_device_train_batch_size` (the job file's `max_local_batch`) is taken in passes.

    Args:
        args: of `Trainer`.
        agent: of this process; None: made here. On a GPU that another job is about to leave, make
            it before anything uses the GPU.
        lr_scaling: how the rate follows the batch, as in `ScalingAgent.load`.
        options: of `Trainer`, by name.

    Raises:
        UsageError: if an option cannot be kept exact.
    """

    _batches: Iterator[Any]  # of the running epoch

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
        self._at_once = self._train_batch_size
        self._batch = self._at_once * self.args.gradient_accumulation_steps
        if self.agent.is_managed:  # a bar is no log, and whoever is rank 0 later has none
            self.pop_callback(ProgressCallback)
            if not self.args.disable_tqdm:
                self.add_callback(PrinterCallback)

    # --- what is loaded

    def get_train_dataloader(self) -> ElasticLoader:
        """The job's loader; model and optimizer are the agent's from here on."""
        if self._epochs is not None:
            what = "train() was called a second time"
            raise UsageError(what, "a job trains once: raise num_train_epochs, or the job's stop")
        args = self.args
        if args.device != self.agent.device:
            what = f"the arguments say {args.device}, the slot is {self.agent.device}"
            raise UsageError(what, "set use_cpu=True, or make the worker see one GPU", "use_cpu")
        _, _, loader = self.agent.load(
            lambda: self.model,
            lambda _: self.create_optimizer(),
            self.train_dataset,
            batch_size=self._batch,
            max_local_batch=self._at_once,
            lr_scaling=self._lr_scaling,
            **self._loader_options(),
        )
        self._loader = loader
        args.gradient_accumulation_steps = 1  # a step's passes are taken in `training_step`
        return loader

    def _loader_options(self) -> dict[str, Any]:
        args = self.args
        collate = self._get_collator_with_removed_columns(
            self.data_collator,
            description="Training",
        )
        options: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and self.agent.device.type != "cpu",
            "drop_last": args.dataloader_drop_last,
        }
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        return options

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A scheduler of the very optimizer that the agent knows, so it travels with it.

        Args:
            optimizer: None: the trainer's.
        """
        inner = optimizer or self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return super().create_scheduler(num_training_steps, inner)

    # --- how long it trains

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[Any, ...]:
        """As the job's end says; schedules count steps of the batch that the rate is meant for.

        Args:
            args: the script's: they say when the job ends if the job file does not.
        """
        values = super().set_initial_training_values(args, dataloader)
        _, per_epoch, examples, _, _, steps, planned = values
        rule = self.agent.view.stop_rule or self._own_rule(per_epoch, examples)
        planned = self.agent.view.planned_steps(rule) or planned
        samples = rule.samples or examples * (rule.epochs or math.ceil(args.num_train_epochs))
        # The agent ends the job: epochs and batches are not counted beside it.
        return sys.maxsize, per_epoch, examples, samples, self.agent.batch_size, steps, planned

    def _own_rule(self, per_epoch: int, examples: int) -> StopRule:
        """What the arguments say, in samples where they mean a part of an epoch."""
        args = self.args
        if args.max_steps > 0:
            epochs, rest = divmod(args.max_steps, per_epoch)
            return StopRule(samples=epochs * examples + min(rest * self._batch, examples))
        if float(args.num_train_epochs).is_integer():
            return StopRule(epochs=int(args.num_train_epochs))
        return StopRule(samples=round(args.num_train_epochs * examples))

    def begin_job(self) -> None:
        """Join the group; in a resumed job the trainer has its state back."""
        agent, loader = self.agent, self._loader
        rule = self._own_rule(len(loader), agent.epoch_samples)
        agent.track(trainer=TrackedTrainer(self))
        if self.lr_scheduler is not None and not self._created_lr_scheduler:
            agent.track(lr_scheduler=self.lr_scheduler)
        self._initial_global_step = 0  # the loss that `train` returns is that of the whole job
        self._epochs = agent.epochs(rule.epochs or 1, samples=rule.samples)
        self._epoch = next(self._epochs, None)

    # --- the loop

    def _run_epoch(self, **values: Any) -> None:
        """One epoch of the job: its batches end it, and its report comes behind the evaluation."""
        control = self.control
        if self._epoch is None or self._epochs is None:
            control.should_training_stop = True
            return
        values |= {"epoch": self._epoch, "num_update_steps_per_epoch": sys.maxsize}
        super()._run_epoch(**values)
        self.end_batches()
        self.agent.report(**self._evaluated)
        self._epoch = next(self._epochs, None)
        control = self.control
        control.should_training_stop = self._epoch is None
        if self._epoch is None:
            self.state.max_steps = self.state.global_step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """The first pass of the next step; its other passes are drawn in `training_step`.

        Args:
            epoch_iterator: over the agent's loader; where it ends, the epoch does.
            num_batches: 1.
        """
        self._batches = epoch_iterator
        inputs = next(epoch_iterator, END)
        if inputs is END:
            self.control.should_epoch_stop = True
            return [], None
        return [inputs], None

    def end_batches(self) -> None:
        """The last step counts, also if a callback ended the epoch behind it."""
        close = getattr(getattr(self, "_batches", None), "close", None)
        if close is not None:
            close()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """All passes of a step; gradients are those of the global batch behind it.

        Args:
            num_items_in_batch: passed over: each pass counts its own.

        Returns:
            The loss over the global batch, of all workers; shape ().
        """
        view = self.agent.view
        while True:
            items = self._weigh(inputs)
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

    def _weigh(self, inputs: Any) -> Any:
        """Say what the loss of this pass is a mean over; what it is to be divided by, or None."""
        counted = self._get_num_items_in_batch([inputs], self.args.device)
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            if counted is not None:
                self.agent.weight(counted)
            return counted
        items = counted
        if items is None and not labels.is_floating_point():
            shifted = self._loss_shifts_labels
            items = (labels[..., 1:] if shifted else labels).ne(IGNORED).sum()
        if items is None:
            return None
        if labels.dim() > 1:
            self.agent.weight(items)
        elif int(items) != len(labels):
            what = f"a sample has no label ({IGNORED})"
            raise UsageError(
                what, "leave it out of the dataset: its batch counts samples", "labels"
            )
        return None if counted is None else counted.clamp(min=1)

    # --- what is said and kept

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """As `Trainer.evaluate`, on the whole of the data in every worker; kept for the report.

        Args:
            args: of `Trainer.evaluate`.
        """
        metrics: dict[str, float] = super().evaluate(*args, **options)
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "epoch" and not name.endswith(NO_METRICS):
                self._evaluated[name] = float(value)
        return metrics

    def is_world_process_zero(self) -> bool:
        """Whether this worker prints and saves; another one may, later."""
        return self.agent.rank == 0

    def is_local_process_zero(self) -> bool:
        """The same: a job's output is one."""
        return self.agent.rank == 0

    def save_model(self, *args: Any, **options: Any) -> None:
        """Of rank 0 only.

        Args:
            args: of `Trainer.save_model`.
        """
        if self.is_world_process_zero():
            super().save_model(*args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Of rank 0 only; all know where the best one is."""
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
            return
        state = self.state
        if state.best_global_step:
            folder = self._get_output_dir(trial)
            state.best_model_checkpoint = f"{folder}/checkpoint-{state.best_global_step}"

    def _get_learning_rate(self) -> float:
        """The rate in force, which follows the batch."""
        return float(super()._get_learning_rate()) * self.agent.view.rate_factor

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Of the whole step, from what this worker's part takes."""
        flops = float(super().floating_point_ops(inputs))
        batch = self.agent.view.batch
        return flops if batch is None else flops * batch.total / max(1, len(batch.ids))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """As `Trainer.train`; it resumes by itself, from where the job was.

        Args:
            resume_from_checkpoint: None.
            args: of `Trainer.train`.

        Raises:
            UsageError: if it should resume from the trainer's own checkpoints.
            LeftGroup: where this worker is not in the job's group any more.
        """
        if resume_from_checkpoint:
            what = "train(resume_from_checkpoint=...)"
            remedy = "leave it out: a job goes on from its last finished epoch by itself"
            raise UsageError(what, remedy, "resume_from_checkpoint")
        handler = self.callback_handler
        others = [c for c in handler.callbacks if c not in (self._first, self._last)]
        handler.callbacks = [self._first, *others, self._last]
        return super().train(None, *args, **options)


class ElasticTrainer(ElasticMixin, Trainer):
    """`Trainer` as an elastic job."""
