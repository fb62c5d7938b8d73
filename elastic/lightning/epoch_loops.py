"""Lightning's loops, whose epochs end where the job's data do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils.data import DataLoader

from elastic.scaling_agent import ScalingAgent
from elastic.training_errors import UsageError
from schemas.jobs import StopRule

if TYPE_CHECKING:
    from elastic.lightning.elastic_strategy import ElasticStrategy


class ElasticFetcher(_DataFetcher):
    """Gives the batches of the agent's loader, and knows the last one of an epoch."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        """Begin with nothing.

        Args:
            strategy: has the loader.
        """
        super().__init__()
        self._strategy = strategy
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> ElasticFetcher:
        """Begin the rest of the running epoch."""
        self.fetched, self.done = 0, False
        self._batches = iter(self._strategy.loader or ())
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """The next batch, in Lightning's form."""
        batch = next(self._batches)
        if self._strategy.tracked is not None:
            self._strategy.tracked.begin_batch()
        self.done = self._strategy.agent.view.ends_epoch
        return batch, self.fetched, 0

    def end(self) -> bool:
        """The last step counts; whether it is taken anew instead."""
        dropped = self._strategy.agent.view.is_dropped
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        return dropped


class ElasticEpochLoop(_TrainingEpochLoop):
    """One epoch of the job."""

    def on_run_start(self, data_fetcher: Any) -> None:
        """Each epoch has batches of its own, the first one too."""
        iter(data_fetcher)
        data_fetcher._start_profiler = self._on_before_fetch  # noqa: SLF001
        data_fetcher._stop_profiler = self._on_after_fetch  # noqa: SLF001

    def on_advance_end(self, data_fetcher: Any) -> None:
        """In a group a job that is stopped ends with its epoch, by rank 0's word."""
        super().on_advance_end(data_fetcher)
        agent = self.trainer.strategy.agent
        if self.trainer.should_stop and agent.world_size > 1:
            agent.stop("a callback of the trainer stopped it")
            self.trainer.should_stop = False

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:  # noqa: FBT001
        """Those that count epochs step once, whatever the step is that ends the epoch."""
        view = self.trainer.strategy.agent.view
        with view.counting_steps(interval == "step"):
            super()._update_learning_rates(interval, update_plateau_schedulers)


class ElasticFitLoop(_FitLoop):
    """All epochs of the job; its class replaces that of a trainer's own loop."""

    @property
    def max_batches(self) -> int | float:
        """Steps of the running epoch, as planned now; never reached before the epoch's last one."""
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
        """Before there is a job: of the script's loader."""
        self.__dict__["max_batches"] = value

    def setup_data(self) -> None:
        """The agent's loader takes the place of the script's, once there is an optimizer."""
        super().setup_data()
        strategy, trainer = self.trainer.strategy, self.trainer
        if strategy.loader is not None or not strategy.optimizers or self._combined_loader is None:
            return
        loaders = self._combined_loader.flattened
        if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            what = "fit() got several training loaders, or one of its own kind"
            raise UsageError(what, "give one DataLoader: put several datasets into one")
        strategy.load(trainer, loaders[0])
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = math.inf  # behind the last batch, whichever it is
        self._data_fetcher = ElasticFetcher(strategy)
        self._data_fetcher.setup(self._combined_loader)

    def on_run_start(self) -> None:
        """Join the group; in a resumed job the loops have their counts back."""
        agent: ScalingAgent = self.trainer.strategy.agent
        own = self._own_rule(agent)
        agent.track(loops=self.trainer.strategy.tracked)
        self.epoch_loop.max_steps = -1  # in samples: it is no count of steps
        self._epochs = agent.epochs(own.epochs or 1, samples=own.samples)
        self._epoch = next(self._epochs, None)
        rule = agent.view.stop_rule
        self.max_epochs = rule.epochs if rule is not None and rule.epochs else -1
        current = self.epoch_progress.current  # of an epoch that was under way: it begins again
        current.ready = current.started = current.completed = current.processed
        super().on_run_start()

    def _own_rule(self, agent: ScalingAgent) -> StopRule:
        """What the trainer's options say."""
        size, batch = agent.epoch_samples, agent.view.schedule_batch
        if self.max_steps > 0:
            epochs, rest = divmod(self.max_steps, agent.view.planned_steps(StopRule(epochs=1)) or 1)
            samples = epochs * size + min(rest * batch, size)
            limit = self.max_epochs if self.max_epochs and self.max_epochs > 0 else None
            return StopRule(samples=samples if limit is None else min(samples, limit * size))
        return StopRule(epochs=self.max_epochs if self.max_epochs and self.max_epochs > 0 else 1000)

    def advance(self) -> None:
        """One epoch; if its last step is dropped, with the group that broke, that step again."""
        while True:
            super().advance()
            if not self._data_fetcher.end():
                return

    def on_advance_end(self) -> None:
        """The epoch's hooks, then its report: rank 0 says whether the job ends."""
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
        """Whether the job is."""
        begun = "_epochs" in vars(self)
        return self._epoch is None if begun else bool(vars(self).get("max_batches") == 0)
