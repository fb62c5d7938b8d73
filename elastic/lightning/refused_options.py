"""Options of Lightning's trainer that an elastic job cannot keep exact."""

from __future__ import annotations

from typing import Any

from elastic.training_errors import UsageError


def refuse_options(trainer: Any) -> None:
    """See to it that the group can train what the trainer's options say.

    Args:
        trainer: about to fit.

    Raises:
        UsageError: otherwise; it names the option and what to do.
    """
    every = trainer.val_check_interval
    whole = "leave it out: an epoch has every sample once"
    for found, option, remedy in (
        (trainer.limit_train_batches != 1.0, "limit_train_batches", whole),
        (trainer.overfit_batches > 0, "overfit_batches", whole),
        (bool(trainer.fast_dev_run), "fast_dev_run", whole),
        (
            trainer.reload_dataloaders_every_n_epochs > 0,
            "reload_dataloaders_every_n_epochs",
            "leave it out: the job's loader lives as long as the job",
        ),
        (
            isinstance(every, float) and every != 1.0,
            f"val_check_interval={every}",
            "1.0, or a whole number of steps: a part of an epoch has other steps when it grows",
        ),
        (
            not trainer.lightning_module.automatic_optimization,
            "automatic_optimization=False",
            "write the loop with ScalingAgent, which trains with several optimizers",
        ),
    ):
        if found:
            raise UsageError(f"{option} cannot be kept exact", remedy, option.partition("=")[0])
