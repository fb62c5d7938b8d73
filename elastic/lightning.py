"""Lightning strategy for elastic jobs. A `Trainer` is one of several workers that act as one.

Lightning's loops end an epoch when the job's data end. Values that a module logs in training are
means over all workers, whatever `sync_dist` says. Lightning's counts are sent to newcomers and kept
in checkpoints.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastic.agent import ScalingAgent, load_prepared
from elastic.sample_stream import MicroBatch
from elastic.step.batch_loader import ElasticLoader
from elastic.training_errors import UsageError
from elastic.usage_checks import refuse_inexact
from schemas.jobs import StopRule


class ElasticFetcher(_DataFetcher):
    """Data fetcher over the agent's loader; it knows which batch is the last of an epoch."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        super().__init__()
        self._strategy = strategy
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> ElasticFetcher:
        """Start to iterate over the rest of the running epoch."""
        self.fetched, self.done = 0, False
        self._batches = iter(self._strategy.loader or ())
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Return the next batch, in the form that Lightning expects."""
        batch = next(self._batches)
        if self._strategy.tracked is not None:
            self._strategy.tracked.begin_batch()
        self.done = self._strategy.agent.view.ends_epoch
        return batch, self.fetched, 0

    def end(self) -> bool:
        """Commit the last step; return True if the step was dropped and has to be repeated."""
        dropped = self._strategy.agent.view.is_dropped
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        return dropped


class ElasticEpochLoop(_TrainingEpochLoop):
    """Loop over one training epoch of the job."""

    def on_run_start(self, data_fetcher: Any) -> None:
        """Start a new iteration for every epoch, including the first one."""
        iter(data_fetcher)
        data_fetcher._start_profiler = self._on_before_fetch  # noqa: SLF001
        data_fetcher._stop_profiler = self._on_after_fetch  # noqa: SLF001

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Pass a stop request to the agent; in a group, rank 0 ends the job after the epoch."""
        super().on_advance_end(data_fetcher)
        agent = self.trainer.strategy.agent
        if self.trainer.should_stop and agent.world_size > 1:
            agent.stop("a callback of the trainer stopped it")
            self.trainer.should_stop = False

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:  # noqa: FBT001
        """Let schedulers that count epochs step once, whatever the size of the last step is."""
        view = self.trainer.strategy.agent.view
        with view.counting_steps(interval == "step"):
            super()._update_learning_rates(interval, update_plateau_schedulers)


class ElasticFitLoop(_FitLoop):
    """Loop over all epochs of the job. This class replaces the class of a trainer's loop."""

    @property
    def max_batches(self) -> int | float:
        """Planned number of steps of the running epoch; only the last step reaches this number."""
        planned: int | float = self.__dict__.get("max_batches", math.inf)
        strategy = self.trainer.strategy
        if strategy.loader is None or planned == 0:
            return planned
        ready = self.epoch_loop.batch_progress.current.ready
        if self.epoch_loop.batch_progress.is_last_batch:
            return int(ready)
        return int(max(strategy.agent.view.epoch_steps, ready + 1))

    @max_batches.setter
    def max_batches(self, value: float) -> None:
        """Set the number of batches in the script's loader, which applies until the job starts."""
        self.__dict__["max_batches"] = value

    def setup_data(self) -> None:
        """Replace the script's loader by the agent's loader, once an optimizer exists."""
        super().setup_data()
        strategy, trainer = self.trainer.strategy, self.trainer
        if strategy.loader is not None or not strategy.optimizers or self._combined_loader is None:
            return
        loaders = self._combined_loader.flattened
        if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            problem = "fit() got several training loaders, or not a DataLoader"
            raise UsageError(problem, "give one DataLoader: put several datasets into one")
        strategy.load(trainer, loaders[0])
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = math.inf  # validate after the last batch, at any number
        self._data_fetcher = ElasticFetcher(strategy)
        self._data_fetcher.setup(self._combined_loader)

    def on_run_start(self) -> None:
        """Join the group; in a resumed job, restore the counts of the loops."""
        agent: ScalingAgent = self.trainer.strategy.agent
        own = self._own_rule(agent)
        agent.track(loops=self.trainer.strategy.tracked)
        self.epoch_loop.max_steps = -1  # no limit here: the agent's limit is in samples
        self._epochs = agent.epochs(own.epochs or 1, samples=own.samples)
        self._epoch = next(self._epochs, None)
        rule = agent.view.stop_rule
        self.max_epochs = rule.epochs if rule is not None and rule.epochs else -1
        current = self.epoch_progress.current  # restart the interrupted epoch
        current.ready = current.started = current.completed = current.processed
        super().on_run_start()

    def _own_rule(self, agent: ScalingAgent) -> StopRule:
        size, batch = agent.epoch_samples, agent.view.schedule_batch
        limit = self.max_epochs if self.max_epochs and self.max_epochs > 0 else None
        if self.max_steps > 0:
            epochs, rest = divmod(self.max_steps, agent.view.planned_steps(StopRule(epochs=1)) or 1)
            samples = epochs * size + min(rest * batch, size)
            return StopRule(samples=samples if limit is None else min(samples, limit * size))
        return StopRule(epochs=limit or 1000)

    def advance(self) -> None:
        """Run one epoch; repeat its last step if the group broke and the step was dropped."""
        while True:
            super().advance()
            if not self._data_fetcher.end():
                return

    def on_advance_end(self) -> None:
        """Run the epoch's hooks and report the epoch; rank 0 decides whether the job ends."""
        agent = self.trainer.strategy.agent
        super().on_advance_end()
        if self.trainer.should_stop:
            agent.stop("a callback of the trainer stopped it")
        numbers = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        agent.report(**{name: value for name, value in numbers.items() if name != "loss"})
        self._epoch = next(self._epochs, None)
        self.trainer.should_stop = self._epoch is None

    @property
    def done(self) -> bool:
        """True if the job is done."""
        begun = "_epochs" in vars(self)
        return self._epoch is None if begun else bool(vars(self).get("max_batches") == 0)


class SharedResults(_ResultCollection):
    """Logged results, averaged over the samples of the global batch in every step.

    So all workers have the same numbers, and no results of the epoch are lost when a worker leaves.
    """

    def __init__(self, agent: ScalingAgent) -> None:
        super().__init__(training=True)
        self._agent = agent
        self.owed: dict[str, tuple[Any, Any]] = {}  # sums from before a pause in this epoch

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value that this worker logs."""
        metric, batch = self[key], self._agent.view.batch
        if key in self.owed:
            value_owed, samples_owed = self.owed.pop(key)
            metric.value = metric.value + value_owed
            metric.cumulated_batch_size = metric.cumulated_batch_size + samples_owed
        if batch is None or not metric.is_tensor:
            super().update_metrics(key, value, batch_size)
            return
        if metric.meta.is_mean_reduction and not metric.meta.sync.rank_zero_only:
            super().update_metrics(key, *self._over_workers(value, batch.count))
        elif batch.count:
            super().update_metrics(key, value, batch_size)
        else:  # this worker has no samples in the step
            super().update_metrics(key, torch.zeros_like(value), 0)

    def _over_workers(self, value: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        own = torch.stack([value.detach().double().cpu(), torch.tensor(count).double()])
        parts = self._agent.view.gather(own.numpy().tobytes())
        if not parts:
            return torch.zeros_like(value), 0
        rows = [torch.frombuffer(bytearray(part), dtype=torch.float64) for part in parts]
        pairs = torch.stack(rows)
        total = pairs[:, 1].sum()
        mean = (pairs[:, 0] * pairs[:, 1]).sum() / total
        return mean.to(value.dtype).to(value.device), int(total)


def refuse_options(trainer: Any) -> None:
    """Refuse trainer options with which a group cannot train exactly."""
    every = trainer.val_check_interval
    whole = "leave it out: an epoch has every sample once"
    for found, option, remedy in (
        (trainer.limit_train_batches != 1.0, "limit_train_batches", whole),
        (trainer.overfit_batches > 0, "overfit_batches", whole),
        (bool(trainer.fast_dev_run), "fast_dev_run", whole),
        (
            trainer.reload_dataloaders_every_n_epochs > 0,
            "reload_dataloaders_every_n_epochs",
            "leave it out: a job has one loader",
        ),
        (
            isinstance(every, float) and every != 1.0,
            f"val_check_interval={every}",
            "set 1.0 or a whole number of steps: the steps of a part change with the batch",
        ),
        (
            not trainer.lightning_module.automatic_optimization,
            "automatic_optimization=False",
            "write the loop with ScalingAgent, which trains with several optimizers",
        ),
    ):
        refuse_inexact(option, remedy, found=found)


class TrackedLoops:
    """Tracked state: counts of the loops, sums of logged values, and callbacks.

    Lightning counts during a step, while the agent keeps and sends states between two steps. So the
    counts of the current step are stored separately and are not part of the state. If a state
    arrives during a step, these counts are added to the state.
    """

    def __init__(self, trainer: Trainer, agent: ScalingAgent) -> None:
        self._trainer: Any = trainer
        self._agent = agent
        self._before: dict[str, Any] | None = None  # state before the current batch
        self._batch: MicroBatch | None = None

    def begin_batch(self) -> None:
        """Record a batch that the loop has received but not counted yet."""
        before, batch = self._current_state(), self._agent.view.batch
        if batch is not None and not batch.first and self._before is not None:
            before["sums"] = self._before["sums"]  # dropping a step drops all of its passes
        self._before, self._batch = before, batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the current step: numbers, text, tensors and their containers."""
        before = self._before if self._in_batch() else None
        return before if before is not None else self._current_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, from this worker or another."""
        counts = state["counts"]
        sums: Mapping[str, Any] = state["sums"]
        if self._in_batch() and self._before is not None:
            now = self._current_state()
            counts = _advanced(counts, now["counts"], self._before["counts"])
            sums = _advanced_sums(sums, now["sums"], self._before["sums"])
            self._before = {**self._before, "counts": state["counts"], "sums": state["sums"]}
        for name, progress in self._progresses().items():
            progress.load_state_dict(counts[name])
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = counts["stepped"]  # noqa: SLF001
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        after_pass = not self._in_batch() and self._batch is not None and not self._batch.last
        for key, (value, samples) in sums.items():
            if key in results and not after_pass:  # after a pass, only the counts are undone
                results[key].value = torch.as_tensor(value).to(results[key].value)
                results[key].cumulated_batch_size = torch.as_tensor(samples)
            elif key not in results:
                results.owed[key] = value, samples
        call._call_callbacks_load_state_dict(  # noqa: SLF001
            self._trainer, {"callbacks": state["callbacks"]}
        )

    def _in_batch(self) -> bool:
        return self._batch is not None and self._agent.view.batch is self._batch

    def _progresses(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
        }

    def _current_state(self) -> dict[str, Any]:
        epoch = self._trainer.fit_loop.epoch_loop
        counts = {
            name: copy.deepcopy(progress.state_dict())
            for name, progress in self._progresses().items()
        }
        sums = {
            key: (metric.value, metric.cumulated_batch_size)
            for key, metric in epoch._results.items()  # noqa: SLF001
            if metric.is_tensor and metric.meta.is_mean_reduction
        } | epoch._results.owed  # noqa: SLF001
        callbacks = call._call_callbacks_state_dict(self._trainer)  # noqa: SLF001
        counts["stepped"] = epoch._batches_that_stepped  # noqa: SLF001
        return {"counts": counts, "sums": sums, "callbacks": callbacks}


def _advanced(state: Any, now: Any, before: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _advanced(state[key], now[key], before[key]) for key in state}
    if isinstance(state, bool):
        return now
    return state + now - before


def _advanced_sums(
    state: Mapping[str, Any], now: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sums in `state` plus the growth from `before` to `now`; a missing sum is 0."""
    moved = {}
    for key, (value, samples) in now.items():
        base = before.get(key, (0.0, 0))
        sent = state.get(key, (0.0, 0))
        moved[key] = (sent[0] + value - base[0], sent[1] + samples - base[1])
    return moved


class ElasticStrategy(SingleDeviceStrategy):
    """Strategy that makes `fit` elastic: `Trainer(strategy=ElasticStrategy(), devices=1, ...)`.

    The initial global batch is the loader's batch times `accumulate_grad_batches`. Under a cluster
    the job file overrides this batch, the learning rate and the end of the job.

    Args:
        agent: agent of this process; if it is None, an agent is created. If another job is about to
            leave the GPU, create the agent before the first use of the GPU.
        lr_scaling: rule by which the rate follows the batch, as in `ScalingAgent.load`.
    """

    strategy_name = "elastic"

    def __init__(
        self, agent: ScalingAgent | None = None, lr_scaling: str = "auto", **options: Any
    ) -> None:
        self.agent = agent or ScalingAgent.from_env()
        self._lr_scaling = lr_scaling
        self._passes = 1
        self.loader: ElasticLoader | None = None
        self.tracked: TrackedLoops | None = None
        super().__init__(device=self.agent.device, **options)

    # --- one of the workers

    @property
    def is_global_zero(self) -> bool:
        """True if this worker prints and saves now; another worker may do so later."""
        return self.agent.rank == 0

    @property
    def global_rank(self) -> int:
        """Rank in the current group."""
        return self.agent.rank

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """Ignore the assigned rank, because the agent decides the rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the current rank 0 print and save."""
        rank_zero_only.rank = self.agent.rank

    # --- setup and loading

    def setup(self, trainer: Trainer) -> None:
        """Set up the trainer; for `fit`, install loops that end an epoch when the data end."""
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_options(trainer)
            trainer.fit_loop.__class__ = ElasticFitLoop
            trainer.fit_loop.epoch_loop.__class__ = ElasticEpochLoop
            trainer.fit_loop.epoch_loop._results = SharedResults(self.agent)  # noqa: SLF001
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._passes = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = 1  # the agent weighs the passes of a step

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:  # noqa: FBT001
        """Load a checkpoint outside of `fit`.

        Raises:
            UsageError: in `fit`.
        """
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            problem, remedy = "fit(ckpt_path=...)", "leave it out: a job resumes automatically"
            raise UsageError(problem, remedy, "ckpt_path")
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load(self, trainer: Trainer, data: DataLoader[Any]) -> ElasticLoader:
        """Pass model, optimizer and loader to the agent; return the elastic loader.

        Args:
            trainer: trainer, after its configuration.
            data: training loader of the script.

        Raises:
            UsageError: if a group could not train exactly with these objects.
        """
        self.loader = load_prepared(
            self.agent,
            self.lightning_module,
            self.optimizers[:1],
            data,
            [config.scheduler for config in self.lr_scheduler_configs],
            passes=self._passes,
            lr_scaling=self._lr_scaling,
        )
        self.tracked = TrackedLoops(trainer, self.agent)
        return self.loader


__all__ = ["ElasticStrategy"]
