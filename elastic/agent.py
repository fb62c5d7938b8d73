"""The handle that a training script holds."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from elastic import fault_points
from elastic.agent_properties import ScriptQuestions
from elastic.collectives.backends import slot_device
from elastic.group.membership import Membership
from elastic.group.order_listener import OrderListener
from elastic.group.transitions import GroupTransitions
from elastic.hooks import hold_device, track_grad_scalers, track_lr_schedulers, warm_up
from elastic.metrics import describe_rule
from elastic.reporting import SampleRecords, WorkerVoice
from elastic.sample_stream import SampleStream
from elastic.state import checkpoints
from elastic.state.carried_state import CarriedState
from elastic.state.epoch_reports import EpochReports, steps_report
from elastic.state.initial_batch_and_rate import begin_batch_and_rate
from elastic.state.learning_rates import DOUBLING_STEPS
from elastic.state.random_state import JobSeed
from elastic.state.state_tensors import Optimizers, TensorState, optimizers_by_name
from elastic.state.training_state import training_of
from elastic.step.batch_loader import ElasticLoader
from elastic.step.carried_rows import LINE, CarriedRows
from elastic.step.gradient_bucket import Reducer
from elastic.step.hooked_training import hook_training
from elastic.step.step_executor import StepExecutor
from elastic.training_errors import UsageError
from elastic.usage_checks import (
    build,
    dataset_size,
    least_samples,
    metric_value,
    metric_values,
    refuse_columns,
    refuse_lazy,
    refuse_sharded,
    refuse_single_samples,
    refuse_unreduced,
    without_choice,
)
from schemas.codec import ASSIGNMENT
from schemas.ids import Version
from schemas.jobs import StopRule
from schemas.wire.agent import JOIN, StepsReported, TrainingFinished, WorkerReady
from schemas.wire.worker import Assignment

WORKER: Final = "ONES_WORKER"  # the worker's folder, when an agent started the process


class ScalingAgent(ScriptQuestions):
    """One worker of a job: under a cluster what the job file says, else what the script says.

    Args:
        assignment: of this worker; None: it is alone, and the script decides everything.
        folder: the worker's files; None without an assignment.
    """

    def __init__(self, assignment: Assignment | None, folder: Path | None) -> None:
        self._folder = folder
        training = training_of(assignment)
        membership = Membership.begin(assignment, slot_device())
        self._voice = WorkerVoice(assignment, lambda: self.rank == 0)
        self._doubt = ""  # what was said of the loss of the epoch before
        report = self._voice.report
        self._epochs = EpochReports(training, report)
        granted = assignment is None or assignment.granted
        self._listener = OrderListener(membership, report, granted=granted)
        if not granted:
            hold_device(self._listener.await_slot)
        self._records = SampleRecords(training.recent)
        transitions = self._transitions = GroupTransitions(
            membership,
            self._listener,
            training,
            epochs=self._epochs,
            records=self._records,
            report=report,
        )
        executor = StepExecutor(membership, transitions, training, self._records)
        super().__init__(assignment, training, membership, executor)
        self._voice.open(folder, self._listener.receive)
        self._reducer: Reducer | None = None
        self._seed = JobSeed(assignment.spec.stated_seed if assignment else None)
        self._parameters = 0
        self._resumed_epoch = 0

    @classmethod
    def from_env(cls, seed: int | None = None) -> ScalingAgent:
        """The agent of this process, with all random generators seeded.

        The job file's seed wins over `seed`, which wins over what the script gave
        `torch.manual_seed`, here or before `load`; else it is 0. Where the last of these counts,
        generators that the script seeded itself stay as they are.

        Args:
            seed: of the job: its samples' order and all random numbers.
        """
        folder = Path(os.environ[WORKER]) if os.environ.get(WORKER) else None
        assignment = None
        if folder is not None:
            assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
        agent = cls(assignment, folder)
        agent._voice.say_wins("seed", agent._seed.begin(seed), agent._seed.value)
        return agent

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
        **loader_options: Any,
    ) -> tuple[nn.Module, Optimizers, ElasticLoader]:
        """Build model, optimizer and loader.

        Args:
            build_model: called with nothing, returns the module, best on the host; a `.cuda()` in
                it waits for the slot.
            build_optimizer: called with `list(model.parameters())`, on the slot's device by then;
                returns an optimizer of them, or a tuple, list or dict of several:
                `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`.
            train_set: map-style dataset, which is shuffled, or an iterable one with a length, which
                is not: each worker reads all of it, and takes its part.
            batch_size: global, samples per step; the job file's wins.
            lr: learning rate at that batch, of the first optimizer; the job file's wins. Groups of
                parameters and other optimizers keep the ratios that `build_optimizer` gave them.
                None keeps the optimizers' own.
            lr_scaling: how the rate follows a batch that changes: "linear" with it, "sqrt" with its
                square root, "none"; "auto": sqrt for Adam and its kin, else linear, each for
                itself.
            lr_doubling_steps: steps in which the rate grows by at most 2x; 0: all at once.
            columns: sequences that are read side by side: samples come in the order of the data,
                and sample i goes on where sample i - columns ended; see `carried`. None: every
                sample stands for itself.
            carried_dim: dimension of `carried` tensors in which the samples lie: 1 in torch's LSTM
                and GRU, 0 in their cells.
            max_local_batch: samples that fit the device at once; a worker takes a larger share of a
                step in passes, whose gradients are those of the whole share. The job file's wins.
                None: `batch_size`.
            schedule_batch: global batch whose steps schedulers count, where they were made before
                `load`; None: the job's first one.
            loader_options: of torch's DataLoader. `drop_last=True` leaves out the samples of an
                epoch that make no whole step: how many they are follows the batch of the moment.

        Returns:
            The model and what `build_optimizer` gave, from the last checkpoint if there is one,
            and the loader.

        Raises:
            UsageError: if the group cannot train this exactly, or a second time; the error says
                what to do.
            CheckpointError: if the job should resume and cannot.
        """
        if self._training.is_loaded:
            hint = "give one module with all that is trained; build_optimizer may return several"
            raise UsageError("load() a second time", hint)
        fault_points.reach("load", rank=self.rank, version=self._version)
        size = dataset_size(train_set)
        self._voice.say_wins("seed", self._seed.follow(), self._seed.value)
        model, built = build(build_model, build_optimizer, self._place)
        tensors = TensorState(model, optimizers_by_name(built, model))
        refuse_unreduced(tensors.parameters())
        drop_last = bool(loader_options.get("drop_last"))
        shuffled = not isinstance(train_set, IterableDataset) and columns is None
        stream = SampleStream(self._seed.value, size, least_samples(model), drop_last, shuffled)
        self._training.use(tensors, stream)
        self._training.own_schedule_batch = schedule_batch
        self._records.use(self._training.stream)
        for both in begin_batch_and_rate(
            self._training,
            tensors.optimizers,
            self._assignment,
            batch_size=batch_size,
            lr=lr,
            scaling=lr_scaling,
            doubling=lr_doubling_steps,
        ):
            self._voice.say_wins(*both)
        largest = self._assignment.spec.batch_limit if self._assignment else batch_size
        refuse_columns(columns, largest)
        if columns is not None:
            self._training.carried = CarriedState(columns, carried_dim, self.device)
            self._executor.carried = CarriedRows(self._training.carried)
        bound = self._pass_limit(max_local_batch, batch_size + stream.least - 1)
        refuse_single_samples(min(self.batch_size, size), bound, stream.least)
        options = without_choice(loader_options, shuffled=shuffled)
        self._reducer, loader = hook_training(
            self._training,
            self._transitions,
            self._executor,
            tensors,
            train_set,
            bound=bound,
            managed=self.is_managed,
            device=self.device,
            options=options,
        )
        self._resume()
        self._parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        track_lr_schedulers(tensors.optimizers, self.track, self._executor.schedule_steps)
        track_grad_scalers(self._training.found_scaler)
        self._training.begin_timing()
        return model, built, loader

    def _place(self, model: nn.Module) -> nn.Module:
        """Check the model and move it to the slot's device, which may have to become free."""
        refuse_sharded(model)
        refuse_lazy(model)
        self._listener.await_slot()
        return model.to(self.device)

    def _pass_limit(self, script: int | None, alone: int) -> int:
        """Return how many samples this worker takes at once.

        Args:
            script: what the script says; None: nothing.
        """
        if script is not None and script < 1:
            raise UsageError(f"max_local_batch {script} is below 1", "raise it", "max_local_batch")
        spec = self._assignment.spec if self._assignment else None
        if spec is not None and spec.max_local_batch is not None:
            self._voice.say_wins("max_local_batch", script, spec.max_local_batch)
            return spec.max_local_batch
        if script is not None:
            return script
        return spec.pass_limit if spec is not None else alone

    def track(self, **stateful: Any) -> None:
        """Keep these in checkpoints and transfers too: anything with a `state_dict`.

        Call it before the first epoch; in a resumed job they have their state back when it and
        `load` have returned, with mappings as dicts and named tuples as tuples. Schedulers of
        torch, and classes derived from them, are tracked by themselves if they are made after
        `load`; so are torch's gradient scalers.
        """
        self._training.track(stateful)

    def weight(self, items: float) -> None:
        """Say what the loss of the present batch is a mean over, if not over its samples: tokens.

        Call it in every batch, before `backward()`: gradients are then the mean over all items of
        the global batch. It changes nothing for a worker that is alone with its batch.

        Args:
            items: of this worker's batch; a number, or a tensor with one element.

        Raises:
            UsageError: outside of the loop over the loader, or if `items` is no number from 0 on.
        """
        self._executor.weigh(metric_value("items", items))

    @property
    def carried(self) -> Any:
        """State that lives from batch to batch: of this batch's columns, before it.

        `scores, agent.carried = model(inputs, agent.carried)`, in every batch and before
        `backward()`. It comes back detached, with the parts of the samples that are in the batch
        at hand; None where all their columns begin, as in the first batch of an epoch, and zeros
        for those that begin beside others.

        Raises:
            UsageError: outside of the loop over the loader, or without `load(columns=...)`.
        """
        return self._carried_rows().give()

    @carried.setter
    def carried(self, state: Any) -> None:
        """What they are behind it: a tensor, or tuples, lists and dicts of tensors."""
        self._carried_rows().take(state)

    def _carried_rows(self) -> CarriedRows:
        self._loaded("carried")
        if self._executor.carried is None:
            what = "agent.carried without columns"
            raise UsageError(what, f"say agent.load(..., columns=N), then {LINE}")
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
            self._voice.say(f"resumes after epoch {self._resumed_epoch}, {at}")

    @property
    def _version(self) -> int | None:
        return self._assignment.version if self._assignment else None

    def _join(self) -> None:
        """Say that this worker is ready, and wait until it is a member of its group."""
        assignment, channel, training = self._assignment, self._voice.channel, self._training
        self._joined = True
        if assignment is None or channel is None or self._folder is None:
            self._executor.check_tracked()
            return
        self._epochs.open(Path(assignment.checkpoints))
        atexit.register(checkpoints.drain_checkpoints)  # for scripts that leave their loop
        if assignment.spec.record_samples:
            self._records.open(self._folder / "samples")
        if training.put_back():
            self._voice.say(
                "the script changed the model after agent.load(): it is that of the checkpoint "
                "again; set first weights in build_model"
            )
        self._executor.check_tracked()
        warm_up(self.device)
        fault_points.reach("ready", rank=assignment.rank, version=assignment.version)
        self._voice.report(
            WorkerReady,
            epoch_samples=training.stream.size,
            resumed_epoch=self._resumed_epoch,
            parameters=self._parameters,
            store_port=self._store_port(assignment),
        )
        if assignment.rank == 0:
            self._epochs.report_unheard()
        self._transitions.join()
        self._records.use(training.stream)  # whose seed is rank 0's now
        if assignment.kind != JOIN:
            training.lr_state.follow_batch(self.batch_size, training.position.step)
        channel.tell_steps(self._steps)
        training.begin_timing()

    def _store_port(self, assignment: Assignment) -> int:
        """Serve the store of the group that starts, if this is its rank 0."""
        if assignment.rank or len(assignment.group.members) == 1:
            return 0
        oldest = self._membership.version
        return self._listener.stores.serve(assignment.version, oldest=oldest)

    # --- the loop

    def epochs(self, count: int, *, samples: int | None = None) -> Iterator[int]:
        """Run up to `count` epochs, counted from 0 as `range` does; the job file's stop rule wins.

        A resumed job begins with the first epoch that is not finished. Under a cluster the first
        epoch begins when this worker's group is there.

        Args:
            count: of the whole job, also in a resumed one; passed over if there are `samples`, or
                the job file has a stop rule.
            samples: of the whole job, after which training ends within an epoch too; the same.

        Yields:
            The number of the epoch that begins, from 0.

        Raises:
            UsageError: before `load`, or a second time, or if the parameters that are trained
                changed since `load`, or if a tracked state cannot be handed over.
            LeftGroup: where this worker is not in the group any more; its script ends with it.
        """
        training = self._loaded("epochs()")
        if self._joined:
            raise UsageError("epochs() a second time", "loop once, over all epochs of the job")
        if training.stop_rule is None:
            rule = StopRule(epochs=count) if samples is None else StopRule(samples=samples)
            training.stop_rule = rule
        elif training.stop_rule.epochs != count:
            described = describe_rule(training.stop_rule)
            own = f"{count}" if samples is None else f"{samples} samples"
            self._voice.say(f"stop {described} of the job file wins over the script's {own}")
        self._join()
        while not training.why_done:
            self._executor.check_trained()
            training.epoch_open = True
            training.losses.take()
            training.begin_timing()
            yield training.position.epoch - 1
            if training.epoch_open:
                self.report()
        self._finish()

    def report(self, **metrics: float) -> dict[str, float]:
        """End the epoch with what it achieved; in a group, rank 0's numbers are everybody's.

        Args:
            metrics: numbers, or tensors with one element; `loss` replaces the training loss that
                the agent saw in `backward()`.

        Returns:
            Rank 0's numbers, on every rank.

        Raises:
            UsageError: outside of an epoch, or if a metric is no number or there are too many.
            MissingMetricError: if the stop rule looks at a metric that is not there.
        """
        if not self._training.epoch_open:
            raise UsageError("report() outside of an epoch", "call it once in each epoch")
        now = time.monotonic()
        training = self._training
        if left := training.left_early():
            self._voice.say(left)
        numbers = metric_values(metrics)
        loss = numbers.pop("loss", training.losses.take())
        doubt = training.loss_doubt(loss) if training.position.cursor else ""
        if doubt and doubt != self._doubt:  # once, and not in each epoch again
            self._voice.say(f"epoch {training.position.epoch}: {doubt}")
        self._doubt = doubt
        summary = self._executor.end_epoch(self._epochs.summary(numbers, loss))
        training.epoch_open = False
        version = self._membership.version
        return self._epochs.end_epoch(summary, now, version=version, first=self.rank == 0)

    def stop(self, why: str) -> None:
        """Ask for the end of the job with this epoch: `report` then ends it, if rank 0 asked.

        Args:
            why: one line, for the job's history.
        """
        self._training.stop_wish = why

    def _finish(self) -> None:
        if self._epochs.close() and self.rank == 0:
            self._voice.report(TrainingFinished, why=self._training.why_done)
        if self._reducer is not None:
            self._reducer.close()

    # --- steps

    def _steps(self) -> StepsReported | None:
        assignment, training = self._assignment, self._training
        if assignment is None or not training.epoch_open or self.rank:
            return None
        return steps_report(training, assignment, Version(self._membership.version))
