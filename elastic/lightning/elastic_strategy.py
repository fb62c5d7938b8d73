"""The strategy that makes Lightning's `Trainer` one of several workers that look like one."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastic.lightning.epoch_loops import ElasticEpochLoop, ElasticFitLoop
from elastic.lightning.logged_values import SharedResults
from elastic.lightning.refused_options import refuse_options
from elastic.lightning.tracked_loops import TrackedLoops
from elastic.scaling_agent import ScalingAgent
from elastic.state.lr_state import scale_scheduler
from elastic.step.batch_loader import ElasticLoader
from elastic.step.loader_options import options_of
from elastic.training_errors import UsageError


class ElasticStrategy(SingleDeviceStrategy):
    """`Trainer(strategy=ElasticStrategy(), devices=1, ...)`: `fit` is elastic.

    The global batch is the loader's times `accumulate_grad_batches` to begin with; under a cluster
    that, the rate and the end of the job are the job file's.

    Args:
        agent: of this process; None: made here. On a GPU that another job is about to leave, make
            it before anything uses the GPU.
        lr_scaling: how the rate follows the batch, as in `ScalingAgent.load`.
        options: of `SingleDeviceStrategy`, by name.
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
        """Whether this worker prints and saves; another one may, later."""
        return self.agent.rank == 0

    @property
    def global_rank(self) -> int:
        """The present one."""
        return self.agent.rank

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """The agent knows it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Whoever is rank 0 now says and saves.

        Args:
            batch: passed over.
            batch_idx: passed over.
        """
        rank_zero_only.rank = self.agent.rank

    # --- what is trained

    def setup(self, trainer: Trainer) -> None:
        """As in any strategy; `fit` gets loops whose epochs the data end.

        Raises:
            UsageError: if the trainer's options cannot be kept exact.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_options(trainer)
            trainer.fit_loop.__class__ = ElasticFitLoop
            trainer.fit_loop.epoch_loop.__class__ = ElasticEpochLoop
            trainer.fit_loop.epoch_loop._results = SharedResults(self.agent)  # noqa: SLF001
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._passes = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = 1  # passes of a step, which the agent weighs

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:  # noqa: FBT001
        """Of a trainer that does not fit.

        Raises:
            UsageError: in `fit`.
        """
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            what, remedy = "fit(ckpt_path=...)", "leave it out: a job resumes by itself"
            raise UsageError(what, remedy, "ckpt_path")
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load(self, trainer: Trainer, data: DataLoader[Any]) -> ElasticLoader:
        """Model, optimizer and loader are the agent's from here on.

        Args:
            trainer: with all that it configured.
            data: that the script gave to train on.

        Raises:
            UsageError: if the agent cannot train it exactly.
        """
        agent, size = self.agent, int(data.batch_size or 1)
        options = options_of(data, agent.device)
        script_lr = float(self.optimizers[0].defaults["lr"])
        _, _, self.loader = agent.load(
            lambda: self.lightning_module,
            lambda _: self.optimizers[0],
            data.dataset,
            batch_size=size * self._passes,
            max_local_batch=size,
            schedule_batch=size * self._passes,
            lr_scaling=self._lr_scaling,
            **options,
        )
        factor = agent.job_lr / script_lr if agent.job_lr is not None and script_lr else 1.0
        for place, config in enumerate(self.lr_scheduler_configs):
            scale_scheduler(config.scheduler, factor)
            agent.track(**{f"configured scheduler {place + 1}": config.scheduler})
        self.tracked = TrackedLoops(trainer, agent)
        return self.loader
