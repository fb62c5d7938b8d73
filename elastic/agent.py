"""`ScalingAgent`, the object through which a training script takes part in an elastic job.

Scripts and framework adapters also read the worker's properties from it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elastic import fault_points
from elastic.collectives.backends import slot_device, use_local_rank
from elastic.data_digest import data_digest
from elastic.group.launched_group import LaunchedGroup, launched_group
from elastic.group.membership import Membership
from elastic.group.order_listener import OrderListener
from elastic.group.transitions import GroupTransitions
from elastic.hooks import (
    hold_device,
    patch_optimizer_step,
    track_averaged_models,
    track_grad_scalers,
    track_lr_schedulers,
    warm_up,
)
from elastic.metrics import describe_rule
from elastic.reporting import SampleRecords, WorkerReporter, identity
from elastic.sample_stream import (
    Progress,
    SampleStream,
    ScheduleRow,
    progress_of,
    split,
)
from elastic.stall_watch import StallWatch
from elastic.state import checkpoints
from elastic.state.carried_state import LINE, CarriedRows, CarriedState
from elastic.state.epoch_reports import EpochReports, steps_report
from elastic.state.learning_rates import (
    DOUBLING_STEPS,
    choose_lr_scaling,
    scale_scheduler,
    set_learning_rate,
)
from elastic.state.random_state import JobSeed
from elastic.state.state_tensors import Optimizers, TensorState, optimizers_by_name
from elastic.state.training_state import TrainingState, initial_training_state
from elastic.step.batch_loader import ElasticLoader, loader_options
from elastic.step.gradient_reduction import Reducer
from elastic.step.optimizer_turns import GradientOrigins, OptimizerTurns
from elastic.step.script_collectives import ScriptCollectives
from elastic.step.step_executor import StepExecutor, StepView
from elastic.tracking import tracked
from elastic.training_errors import UsageError
from elastic.usage_checks import (
    build,
    dataset_size,
    metric_value,
    metric_values,
    min_step_samples,
    refuse_columns,
    refuse_lazy,
    refuse_sharded,
    refuse_single_samples,
    refuse_sparse,
    refuse_unreduced,
    without_sampling_options,
)
from schemas.codec import ASSIGNMENT
from schemas.host.fork_server import process_age_s
from schemas.ids import Version
from schemas.jobs import StopRule
from schemas.wire.agent import (
    JOIN,
    StepsReported,
    TrainingFinished,
    WorkerReady,
    WorkerStalled,
)
from schemas.wire.worker import Assignment

WORKER: Final = "ONES_WORKER"  # the worker's folder; the worker sets both for its children
WORKER_PID: Final = "ONES_WORKER_PID"


class ScalingAgent:
    """Worker of a job. If the job file and the script set the same value, the job file wins.

    Args:
        assignment: assignment of this worker. If it is None, no cluster started the worker, and the
            script decides everything.
        folder: folder of the worker's files; None without an assignment.
        launched: group of the launcher that started this process without a cluster, if any.
    """

    def __init__(
        self,
        assignment: Assignment | None,
        folder: Path | None,
        launched: LaunchedGroup | None = None,
    ) -> None:
        self._folder = folder
        self._assignment = assignment
        self._launched = launched
        self._joined = False
        self._imports_s = process_age_s() if assignment is not None else 0.0
        if launched is not None:
            use_local_rank(launched.local_rank)
        training = self._training = initial_training_state(assignment)
        membership = self._membership = Membership.begin(assignment, slot_device(), launched)
        own = weakref.ref(self)  # hooks of torch keep the reporter, and must not keep the loader

        def is_leader() -> bool:
            agent = own()
            return agent is not None and agent.rank == 0

        self._reporter = WorkerReporter(assignment, is_leader)
        self._last_warning = ""  # warning about the loss of the previous epoch
        report = self._reporter.report
        self._epochs = EpochReports(training, tracked(report, assignment))
        granted = assignment is None or assignment.granted
        self._listener = OrderListener(membership, report, granted=granted)
        if not granted:
            hold_device(self._listener.await_slot)
        self._records = SampleRecords(training.recent, lambda: training.stream)
        transitions = self._transitions = GroupTransitions(
            membership,
            self._listener,
            training,
            epochs=self._epochs,
            records=self._records,
            report=report,
        )
        self._executor = StepExecutor(membership, transitions, training, self._records)
        self.view = StepView(training, membership, self._executor)  # for the loop of a framework
        self._collectives = ScriptCollectives(membership, training, transitions, self._executor)
        self._reporter.open(folder, self._listener.receive)
        self._reducer: Reducer | None = None
        self._seed = JobSeed(assignment.spec.stated_seed if assignment else None)
        self._train_set: Dataset[Any]  # set by `load`, as the next
        self._loader: ElasticLoader
        self._parameters = 0
        self._resumed_epoch = 0

    @classmethod
    def from_env(cls, seed: int | None = None) -> ScalingAgent:
        """Create the agent of this process and seed all random generators.

        Without a cluster, the worker trains in the group that torchrun, srun or mpirun started, or
        alone.

        The job file's seed overrides `seed`, and `seed` overrides a seed that the script passed to
        `torch.manual_seed` before this call or before `load`. The default is 0. If the seed of
        `torch.manual_seed` is used, generators that the script seeded keep their state.

        Args:
            seed: seed of the job, for the order of samples and all random numbers.

        Raises:
            UsageError: if the worker started this process, for example to load data.
        """
        folder = Path(os.environ[WORKER]) if os.environ.get(WORKER) else None
        assignment = None
        if folder is not None:
            _require_own_process()
            assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
        launched = launched_group(os.environ) if assignment is None else None
        agent = cls(assignment, folder, launched)
        agent._reporter.log_override("seed", agent._seed.begin(seed), agent._seed.value)
        return agent

    # --- read-only

    @property
    def rank(self) -> int:
        """Rank of this worker in its group. The rank can change; rank 0 prints and saves.

        Before the first epoch, this is the rank that the worker will have.
        """
        if self._assignment is not None and not self._joined:
            return int(self._assignment.rank)
        return self._membership.rank

    @property
    def is_managed(self) -> bool:
        """True if a cluster started this worker; otherwise its group never changes."""
        return self._assignment is not None

    @property
    def world_size(self) -> int:
        """Number of workers in the current group, or in the first group until it has formed."""
        return len(self._membership.workers)

    @property
    def step(self) -> int:
        """Number of steps done since the start of the job; raises UsageError before `load`."""
        return self._require_loaded("step").position.step

    @property
    def device(self) -> torch.device:
        """Device of model and batches: the slot's GPU, or the CPU."""
        return self._membership.device

    @property
    def progress(self) -> Progress:
        """Finished fractions of the epoch and the job, 0 to 1; raises UsageError before `load`."""
        training = self._require_loaded("progress")
        if training.why_done:
            return Progress(1.0, 1.0)
        return progress_of(training.position, training.stream.size, training.stop_rule)

    @property
    def job_lr(self) -> float | None:
        """Learning rate that the job file sets for the job's first batch, or None."""
        return self._assignment.group.lr if self._assignment is not None else None

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch (||D||)."""
        return self._training.stream.size

    @property
    def batch_size(self) -> int:
        """Current global batch, samples per step; raises UsageError before `load`."""
        return self._require_loaded("batch_size").global_batch

    # --- load

    def load(
        self,
        build_model: Callable[[], nn.Module],
        build_optimizer: Callable[[list[nn.Parameter]], Optimizers],
        train_set: Dataset[Any],
        *,
        batch_size: int,
        lr: float | None = None,
        lr_scaling: str = "auto",
        lr_doubling_steps: int = DOUBLING_STEPS,
        columns: int | None = None,
        carried_dim: int = 1,
        max_local_batch: int | None = None,
        schedule_batch: int | None = None,
        epoch_steps: int | None = None,
        **loader_options: Any,
    ) -> tuple[nn.Module, Optimizers, ElasticLoader]:
        """Build model, optimizer and loader.

        Args:
            build_model: called without arguments; returns the module, preferably on the host. A
                `.cuda()` inside waits for the slot.
            build_optimizer: called with `list(model.parameters())`, which are then on the slot's
                device. Returns an optimizer, or a tuple, list or dict of several. Example: `lambda
                parameters: torch.optim.SGD(parameters, lr=0.1)`.
            train_set: map-style dataset, which is shuffled, or an iterable dataset with a length,
                which is not shuffled: each worker reads all of it and uses its share.
            batch_size: global batch, samples per step; the job file overrides it.
            lr: learning rate of the first optimizer at `batch_size`; the job file overrides it.
                Parameter groups and other optimizers keep the ratios that `build_optimizer` gave
                them. None keeps the optimizers' own rates.
            lr_scaling: rule by which the rate follows a change of the batch: "linear", "sqrt" (by
                the square root) or "none". "auto" chooses for each optimizer: sqrt for Adam-like
                ones, otherwise linear.
            lr_doubling_steps: the rate grows by at most 2x in this many steps; 0 for no limit.
            columns: number of sequences that are read in parallel. Samples are in the order of the
                data, and sample i continues sample i - columns; see `carried`. If it is None,
                samples are independent.
            carried_dim: dimension of `carried` tensors along which the samples lie: 1 in torch's
                LSTM and GRU, 0 in their cells.
            max_local_batch: samples that fit the device at once. A worker processes a larger share
                of a step in several passes, with the same gradients as the whole share. The job
                file overrides it. The default is `batch_size`.
            schedule_batch: global batch of the steps that schedulers count, if the schedulers were
                created before `load`. The default is the job's first batch.
            epoch_steps: steps of the job's first batch in an epoch, which ends with a checkpoint
                and a report. The default is one pass over `train_set`. The passes go on from epoch
                to epoch, each with every sample once.
            loader_options: options of torch's DataLoader. `drop_last=True` leaves out the samples
                at the end of an epoch that do not fill a step; their number depends on the current
                batch.

        Returns:
            The model and the result of `build_optimizer`, restored from the last checkpoint if
            there is one, and the loader.

        Raises:
            UsageError: at the second call, or if a group could not train exactly with these
                objects; the error says what to do.
            CheckpointError: if the job cannot resume from its checkpoint.
        """
        if self._training.is_loaded:
            hint = "put all trained modules into one; build_optimizer may return several optimizers"
            raise UsageError("load() was called twice", hint)
        version = self._assignment.version if self._assignment else None
        fault_points.reach("load", rank=self.rank, version=version)
        self._train_set, size = train_set, dataset_size(train_set)
        self._reporter.log_override("seed", self._seed.follow(), self._seed.value)
        model, built = build(build_model, build_optimizer, self._place_model)
        tensors = TensorState(model, optimizers_by_name(built, model))
        refuse_unreduced(tensors.parameters())
        if self.is_managed:
            refuse_sparse(model)
        drop_last = bool(loader_options.get("drop_last"))
        shuffled = not isinstance(train_set, IterableDataset) and columns is None
        stream = SampleStream(self._seed.value, size, min_step_samples(model), drop_last, shuffled)
        self._training.set_tensors(tensors, stream)
        self._training.script_schedule_batch = schedule_batch
        self._set_batch_and_rate(tensors, batch_size, lr, lr_scaling, lr_doubling_steps)
        if epoch_steps is not None:
            self._training.divide_passes(epoch_steps)
        largest = self._assignment.spec.batch_limit if self._assignment else batch_size
        refuse_columns(columns, largest)
        if columns is not None:
            self._training.carried = CarriedState(columns, carried_dim, self.device)
            self._executor.carried = CarriedRows(self._training.carried)
        bound = self._pass_limit(max_local_batch, batch_size + stream.min_samples - 1)
        refuse_single_samples(min(self.batch_size, size), bound, stream.min_samples)
        options = without_sampling_options(loader_options, shuffled=shuffled)
        loader = self._hook_training(tensors, train_set, bound, options)
        self._resume()
        self._parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        track = self._training.track
        track_lr_schedulers(
            tensors.optimizers, lambda **made: track(made), self._executor.schedule_steps
        )
        track_grad_scalers(self._training.track_scaler)
        track_averaged_models(self._executor)
        self._training.begin_timing()
        self._loader = loader
        return model, built, loader

    def _place_model(self, model: nn.Module) -> nn.Module:
        """Check the model and move it to the slot's device once the slot is granted."""
        refuse_sharded(model)
        refuse_lazy(model)
        self._listener.await_slot()
        return model.to(self.device)

    def _set_batch_and_rate(
        self, tensors: TensorState, batch_size: int, lr: float | None, scaling: str, doubling: int
    ) -> None:
        """Set the optimizers' rates and their rules. The job file overrides rate and batch."""
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size} is below 1", "raise it", "batch_size")
        rules = [choose_lr_scaling(optimizer, scaling) for optimizer in tensors.optimizers]
        base_batch, training = batch_size, self._training
        if self._assignment is None:
            shares = tuple(split(batch_size, self.world_size))
            training.schedule.announce([ScheduleRow(1, shares, self.rank)])
        else:
            group = self._assignment.group
            base_batch = group.base_batch or group.global_batch
            job_batch = self._assignment.spec.batch_size
            self._reporter.log_override("batch_size", batch_size, job_batch)
            if group.lr is not None:
                self._reporter.log_override("lr", lr, group.lr)
                lr = group.lr
        if lr is not None:
            set_learning_rate(tensors.optimizers, lr)
        training.lr_state.begin(rules, base_batch, training.global_batch, doubling)

    def _hook_training(
        self, tensors: TensorState, train_set: Dataset[Any], bound: int, options: dict[str, Any]
    ) -> ElasticLoader:
        """Patch the optimizers, hook the gradients, and create the loader."""
        training, executor, turns = self._training, self._executor, None
        for optimizer in tensors.optimizers:
            patch_optimizer_step(optimizer, executor)
        if len(tensors.optimizers) > 1:
            if self.is_managed:  # a remainder in the last step must not need a second pass
                bound += training.stream.min_samples - 1
            turns = OptimizerTurns(training, GradientOrigins(tensors.trained()))
        self._reducer = Reducer(tensors.trained(), executor.backward_finished)
        loader = ElasticLoader(
            train_set,
            training=training,
            transitions=self._transitions,
            executor=executor,
            bound=bound,
            device=self.device,
            worker=self._membership.own_id or f"rank {self.rank}",
            options=options,
        )
        executor.set_reducer(self._reducer, loader.depth, turns)
        return loader

    def _pass_limit(self, script: int | None, alone: int) -> int:
        """Return the maximum samples of a pass.

        The first value that is set decides: the job file's, then `script`, then the job's default.
        Without a cluster, `alone` is the default.
        """
        if script is not None and script < 1:
            raise UsageError(f"max_local_batch {script} is below 1", "raise it", "max_local_batch")
        spec = self._assignment.spec if self._assignment else None
        if spec is not None and spec.max_local_batch is not None:
            self._reporter.log_override("max_local_batch", script, spec.max_local_batch)
            return spec.max_local_batch
        if script is not None:
            return script
        return spec.pass_limit if spec is not None else alone

    def _require_loaded(self, name: str) -> TrainingState:
        if not self._training.is_loaded:
            raise UsageError(f"agent.{name} was used before load()", "call agent.load(...) first")
        return self._training

    def _require_joined(self, name: str) -> None:
        if not self._joined:
            problem = f"agent.{name} was used before the first epoch"
            raise UsageError(
                problem, "call it in the loop over agent.epochs(...) or agent.steps(...)"
            )

    def track(self, **stateful: Any) -> None:
        """Keep the states of these objects in checkpoints and transfers.

        Each object needs a `state_dict`. Call `track` before the first epoch. In a resumed job the
        objects have their states once `track` and `load` have returned. Mappings are restored as
        dicts, and named tuples as tuples.
        Schedulers of torch, classes derived from them and torch's gradient scalers are tracked
        automatically if they are created after `load`. So is each `AveragedModel` of torch that is
        created between `load` and the first epoch.
        """
        self._training.track(stateful)

    def weight(self, items: float) -> None:
        """Declare that the current batch's loss is a mean over `items` items, for example tokens.

        Without this call, the loss is a mean over the samples. Call `weight` in every batch, before
        `backward()`: gradients are then the mean over all items of the global batch. The call has
        no effect for a worker that processes its batch alone.

        Args:
            items: number of items in this worker's batch, or a tensor with one element.

        Raises:
            UsageError: outside of the loop over the loader, or if `items` is not a number >= 0.
        """
        self._executor.set_items(metric_value("items", items))

    @property
    def carried(self) -> Any:
        """The state that the script carries from batch to batch, as it was before this batch.

        Write `scores, agent.carried = model(inputs, agent.carried)` in every batch, before
        `backward()`. The state is detached and has one row per sample of the current batch. It is
        None if all these samples start their columns, as in the first batch of an epoch. If only
        some samples start their columns, their rows are zeros.

        Raises:
            UsageError: outside of the loop over the loader, or without `load(columns=...)`.
        """
        return self._carried_rows().current()

    @carried.setter
    def carried(self, state: Any) -> None:
        """Set the state after this batch: a tensor, or tuples, lists and dicts of tensors."""
        self._carried_rows().set_next(state)

    def _carried_rows(self) -> CarriedRows:
        self._require_loaded("carried")
        if self._executor.carried is None:
            problem = "agent.carried was used without columns"
            raise UsageError(problem, f"call agent.load(..., columns=N), then {LINE}")
        return self._executor.carried

    def _resume(self) -> None:
        assignment, training = self._assignment, self._training
        point = assignment.group.resume if assignment is not None else None
        if assignment is not None and point is not None:
            folder = Path(assignment.checkpoints)
            self._resumed_epoch = self._epochs.resume(folder, point, assignment.version)
        position = training.position
        if position.step:
            at = f"step {position.step}, samples {position.samples_done}"
            self._reporter.log(f"resumes after epoch {self._resumed_epoch}, {at}")

    def _join(self) -> None:
        """Report that this worker is ready and wait until it is a member of its group."""
        assignment, training = self._assignment, self._training
        connection = self._reporter.connection
        self._joined = True
        if assignment is None or connection is None or self._folder is None:
            self._executor.check_tracked()
            if self._launched is not None:
                depth = self._membership.prefetched_steps
                group = self._launched.connect(self.device, depth)
                self._transitions.join_launched(group)
                training.begin_timing()
            return
        self._epochs.open(Path(assignment.checkpoints))
        atexit.register(checkpoints.drain_checkpoints)  # if the script leaves its loop early
        if assignment.spec.record_samples:
            self._records.open(self._folder / "samples")
        if training.restore_loaded():
            self._reporter.log(
                "the script changed the model after agent.load(); the checkpoint's model was "
                "restored; set initial weights in build_model"
            )
        self._executor.check_tracked()
        warm_up(self.device)
        fault_points.reach("ready", rank=assignment.rank, version=assignment.version)
        self._reporter.report(
            WorkerReady,
            epoch_samples=training.stream.size,
            resumed_epoch=self._resumed_epoch,
            parameters=self._parameters,
            store_port=self._store_port(assignment),
            data_digest=data_digest(self._train_set),
            imports_s=self._imports_s,
        )
        if assignment.rank == 0:
            self._epochs.report_missing_epochs()
        self._transitions.join()
        self._executor.in_loop = assignment.kind != JOIN
        if assignment.kind != JOIN:
            training.lr_state.follow_batch(self.batch_size, training.position.step)
        watch = StallWatch(threading.get_ident())
        connection.set_telemetry(lambda: self._telemetry(assignment, watch))
        training.begin_timing()

    def _store_port(self, assignment: Assignment) -> int:
        if assignment.rank or len(assignment.group.members) == 1:
            return 0
        oldest = self._membership.version
        return self._listener.stores.serve(assignment.version, oldest=oldest)

    # --- the loop

    def epochs(self, count: int, *, samples: int | None = None) -> Iterator[int]:
        """Run up to `count` epochs, numbered from 0; the job file's stop rule overrides `count`.

        A resumed job starts with the first unfinished epoch. Under a cluster the first epoch starts
        once this worker's group has formed.

        Args:
            count: epochs of the whole job, including those before a resume; ignored if `samples` is
                given or the job file has a stop rule.
            samples: number of samples of the whole job after which training ends, even within an
                epoch; ignored if the job file has a stop rule.

        Yields:
            The number of the epoch that starts, from 0.

        Raises:
            UsageError: before `load`, at the second call, if the length of the data set changed
                since `load`, or if a tracked state cannot be transferred.
            LeftGroup: if this worker is no longer in the group; the exception ends the script.
        """
        training = self._require_loaded("epochs()")
        if self._joined:
            raise UsageError("epochs() was called twice", "use one loop over all epochs of the job")
        if training.stop_rule is None:
            rule = StopRule(epochs=count) if samples is None else StopRule(samples=samples)
            training.stop_rule = rule
        elif training.stop_rule.epochs != count:
            described = describe_rule(training.stop_rule)
            own = f"{count}" if samples is None else f"{samples} samples"
            self._reporter.log(f"stop {described} of the job file overrides the script's {own}")
        self._join()
        while not training.why_done:
            self._executor.check_size(dataset_size(self._train_set))
            training.epoch_open = True
            training.losses.take()
            training.begin_timing()
            yield training.position.epoch - 1
            if training.epoch_open:
                self.report()
        if self._epochs.close() and self.rank == 0:
            self._reporter.report(TrainingFinished, reason=training.why_done)
        if self._reducer is not None:
            self._reducer.close()

    def steps(
        self, count: int, metrics: Callable[[], Mapping[str, float]] | None = None
    ) -> Iterator[Any]:
        """Run a job of `count` steps of its first batch, without a loop over epochs.

        If the scheduler changes the batch, the number of steps changes, and the number of samples
        stays. Each epoch ends with a checkpoint and a report; `load(epoch_steps=...)` sets its
        length. The job file's stop rule overrides `count`.

        Args:
            count: steps of the whole job, including those before a resume.
            metrics: called at the end of each epoch, on all workers; returns what `report` gets.

        Yields:
            The batches of the loader, one for each step or pass.

        Raises:
            UsageError: as `epochs`.
        """
        training = self._require_loaded("steps()")
        for _ in self.epochs(0, samples=count * training.schedule_batch):
            yield from self._loader
            if metrics is not None:
                self.report(**metrics())

    def report(self, **metrics: float) -> dict[str, float]:
        """End the epoch and report its metrics. In a group, rank 0's metrics apply to all workers.

        Args:
            metrics: numbers, or tensors with one element; `loss` replaces the training loss that
                the agent recorded in `backward()`.

        Returns:
            Rank 0's metrics, on every rank.

        Raises:
            UsageError: outside of an epoch, if a metric is not a number, or if there are too many.
            MissingMetricError: if the stop rule needs a metric that is missing.
        """
        if not self._training.epoch_open:
            raise UsageError(
                "report() was called outside of an epoch", "call it once in each epoch"
            )
        now = time.monotonic()
        training = self._training
        self._executor.finish_last()
        for note in training.skip_notes():
            self._reporter.log(f"epoch {training.position.epoch}: {note}")
        if left := training.left_early():
            self._reporter.log(left)
        numbers = metric_values(metrics)
        loss = numbers.pop("loss", training.losses.take())
        warning = training.loss_warning(loss) if training.position.cursor else ""
        if warning and warning != self._last_warning:  # do not repeat it in each epoch
            self._reporter.log(f"epoch {training.position.epoch}: {warning}")
        self._last_warning = warning
        summary = self._executor.end_epoch(self._epochs.summary(numbers, loss))
        training.epoch_open = False
        version = self._membership.version
        return self._epochs.end_epoch(summary, now, version=version, first=self.rank == 0)

    # --- collectives

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, concatenated in the order of the global batch.

        All workers must call it equally often. In the loop over the loader, `rows` has equally many
        rows for each sample of the worker's batch, and gradients flow back to all workers. Call it
        there once per step, before `backward()`; a contrastive loss over the global batch is then
        that of one process. Between epochs, any numbers of rows are concatenated, without
        gradients.

        Args:
            rows: shape (rows, ...), on the worker's device.

        Raises:
            UsageError: before the first epoch, or if the worker takes its share of the step in
                several passes.
        """
        self._require_joined("all_gather")
        return self._collectives.all_gather(rows)

    @property
    def batch_offset(self) -> int:
        """Position of this worker's first sample in the global batch, and in gathered rows.

        It is 0 outside of the loop over the loader, and in a worker without samples in the step.
        """
        return self._collectives.batch_offset

    def all_reduce(self, value: torch.Tensor | float) -> torch.Tensor:
        """Return the sum of the workers' values, on the worker's device.

        All workers must call it equally often. In the loop over the loader, gradients flow back to
        all workers, and workers without samples in the step add zeros.

        Raises:
            UsageError: before the first epoch, or if the worker takes its share of the step in
                several passes.
        """
        self._require_joined("all_reduce")
        return self._collectives.all_reduce(value)

    def barrier(self) -> None:
        """Wait until all workers of the group have called it."""
        self._require_joined("barrier")
        self._collectives.barrier()

    def evaluate_loader(
        self, dataset: Dataset[Any], batch_size: int, **options: Any
    ) -> Iterator[Any]:
        """Yield this worker's batches of `dataset`, in no particular order.

        The workers of the group read each sample once together. If one is lost meanwhile, the
        others read its part again. Add up results with `all_reduce`, together with the number of
        samples. All workers must call it, between epochs or in the loop over the loader.

        Args:
            dataset: map-style dataset.
            batch_size: samples of a worker's batch.
            options: other options of torch's DataLoader.
        """
        self._require_joined("evaluate_loader")
        return self._collectives.evaluate_loader(dataset, batch_size, **options)

    def stop(self, why: str) -> None:
        """Request the end of the job. If rank 0 requests it, the next `report` ends the job.

        Args:
            why: one line, for the job's history.
        """
        self._training.stop_request = why

    def _telemetry(
        self, assignment: Assignment, watch: StallWatch
    ) -> Iterator[StepsReported | WorkerStalled]:
        training, version = self._training, Version(self._membership.version)
        if training.epoch_open and not self.rank:
            yield steps_report(training, assignment, version)
        step = training.position.step
        if not training.why_done and (stall := watch.look(version, step)) is not None:
            yield WorkerStalled(
                **identity(assignment),
                group=version,
                step=step,
                idle_s=stall.idle_s,
                waits_s=stall.waits_s,
                at=stall.at,
            )


def load_prepared(
    agent: ScalingAgent,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: DataLoader[Any],
    schedulers: Sequence[LRScheduler],
    *,
    passes: int,
    lr_scaling: str,
) -> ElasticLoader:
    """Load objects that a script built for a single process; return the elastic loader.

    The script uses `passes` batches of `loader` for a step.

    Raises:
        UsageError: if a group could not train exactly with these objects.
    """
    size, script_lr = int(loader.batch_size or 1), float(optimizers[0].defaults["lr"])
    options = loader_options(loader, agent.device)
    _, _, elastic = agent.load(
        lambda: model,
        lambda _: optimizers[0] if len(optimizers) == 1 else tuple(optimizers),
        loader.dataset,
        batch_size=size * passes,
        max_local_batch=size,
        schedule_batch=size * passes,
        lr_scaling=lr_scaling,
        **options,
    )
    factor = agent.job_lr / script_lr if agent.job_lr is not None and script_lr else 1.0
    for place, scheduler in enumerate(schedulers):
        scale_scheduler(scheduler, factor)
        agent.track(**{f"prepared scheduler {place + 1}": scheduler})
    return elastic


def _require_own_process() -> None:
    """Check that this process is the worker, and not one of its children.

    Raises:
        UsageError: if the worker is another process.
    """
    own = str(os.getpid())
    if (pid := os.environ.get(WORKER_PID, own)) != own:
        raise UsageError(
            f"process {own} was started by the script of worker process {pid}",
            'put the training below if __name__ == "__main__":, so that only the worker runs it',
        )
