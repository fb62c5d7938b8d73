"""What a `DataLoader` that somebody else made says of its batches, for the agent's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from elastic.training_errors import UsageError


def options_of(loader: DataLoader[Any], device: torch.device) -> dict[str, Any]:
    """Options of `ScalingAgent.load` that give the batches of `loader`.

    Args:
        loader: shuffled by torch's own sampler; one of an iterable dataset is in its order.
        device: of the worker; on the CPU nothing is pinned.

    Raises:
        UsageError: if `loader` chooses samples in another way than the agent does.
    """
    if loader.batch_size is None:
        what = "the training loader has a batch sampler of its own, or none"
        raise UsageError(what, "give DataLoader(data, batch_size=..., shuffle=True)", "batch_size")
    streams = isinstance(loader.dataset, IterableDataset)
    if not streams and type(loader.sampler) is not RandomSampler:
        what = f"the training loader has a {type(loader.sampler).__name__}"
        remedy = "shuffle=True: an epoch has every sample once, shuffled by the job's seed"
        raise UsageError(what, remedy, "shuffle")
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory and device.type != "cpu",
        "drop_last": loader.drop_last,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    return options
