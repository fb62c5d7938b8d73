"""Options of a trainer that an elastic job cannot keep exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import IterableDataset

from elastic.training_errors import UsageError

if TYPE_CHECKING:
    from elastic.transformers.trainer_mixin import ElasticMixin


def refuse_options(trainer: ElasticMixin) -> None:
    """See to it that the group can train what the arguments say.

    Raises:
        UsageError: otherwise; it names the option and what to do.
    """
    made: Any = trainer
    args = made.args
    args._n_gpu = min(args.n_gpu, 1)  # noqa: SLF001 - as `Trainer` itself does; no DataParallel
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
    ):
        if found:
            raise UsageError(f"{option} cannot be kept exact", remedy, option.partition("=")[0])
    if isinstance(made.model, nn.DataParallel):
        raise UsageError("the model is an nn.DataParallel", "give the plain module", "model")
