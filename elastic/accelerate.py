"""Accelerate's `Accelerator`, whose batches, gradients and epochs are the agent's.

Values of several workers, put together; pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elastic.agent import ScalingAgent
from elastic.state.learning_rates import scale_scheduler
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.tracked_states import copy_to_host
from elastic.step.batch_loader import options_of
from elastic.training_errors import UsageError


def encoded(value: Any) -> bytes:
    """Bytes of tensors, numbers, text and their containers, which nothing executes.

    Args:
        value: on any device.
    """
    return encode_metadata({"value": copy_to_host(value)})


def decoded(data: bytes) -> Any:
    """The reverse, on the host.

    Args:
        data: what `encoded` gave on some worker.
    """
    return decode_metadata(data)["value"]


def concatenated(parts: Sequence[Any], device: torch.device) -> Any:
    """Tensors of all parts one behind the other, in the containers that each part has.

    Args:
        parts: by rank, alike but for the tensors' first dimension; scalars become one row each.
    """

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([v.reshape(1) if v.dim() == 0 else v for v in values]).to(device)

    return _over(parts, join)


def reduced(parts: Sequence[tuple[int, Any]], reduction: str, device: torch.device) -> Any:
    """Sum over all parts, or mean over their samples, in the containers that each part has.

    Args:
        parts: (samples, value) by rank.
        reduction: "sum" or "mean".
    """
    counts = [count for count, _ in parts]

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        weights = counts if reduction == "mean" else [1] * len(values)
        total = sum(value * weight for value, weight in zip(values, weights, strict=True))
        whole = sum(counts) if reduction == "mean" else 1
        return torch.as_tensor(total / max(1, whole)).to(device)

    return _over([value for _, value in parts], join)


def _over(parts: Sequence[Any], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return join(parts)
    if isinstance(first, Mapping):
        return {key: _over([part[key] for part in parts], join) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_over(list(each), join) for each in zip(*parts, strict=True))
    return list(parts)


class ElasticAccelerator(Accelerator):
    """`Accelerator` in a group that changes; to a script it looks like one process.

    The global batch is the training loader's times `gradient_accumulation_steps` to begin with;
    under a cluster the job file's wins. Larger shares than the loader's batch (the job file's
    `max_local_batch`) are taken in passes, in which `sync_gradients` is false.

    Args:
        args: of `Accelerator`.
        agent: of this process; None: made here.
        lr_scaling: how the rate follows the batch, as in `ScalingAgent.load`.
        options: of `Accelerator`, by name.

    Raises:
        UsageError: if something else distributes the training.
    """

    def __init__(
        self,
        *args: Any,
        agent: ScalingAgent | None = None,
        lr_scaling: str = "auto",
        **options: Any,
    ) -> None:
        self.agent = agent or ScalingAgent.from_env()
        self._lr_scaling = lr_scaling
        self._trains = False
        options.setdefault("cpu", self.agent.device.type == "cpu")
        super().__init__(*args, **options)
        if self.distributed_type != DistributedType.NO:
            what = f"Accelerate distributes the training itself ({self.distributed_type.value})"
            raise UsageError(what, "leave its plugins out: the agent's group reduces gradients")
        self._passes = max(1, int(self.gradient_state.num_steps))
        self.gradient_accumulation_steps = 1  # the agent weighs passes, so nothing divides losses

    # --- prepare

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As `Accelerator.prepare`: model, optimizers and the training loader come in one call.

        Args:
            args: the first loader beside an optimizer is the one that is trained on; others give
                all of their data to every worker.
            options: of `Accelerator.prepare`.

        Raises:
            UsageError: if something is missing, or the agent cannot train it exactly.
        """
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, **options)
        models = [each for each in args if isinstance(each, nn.Module)]
        loaders = [each for each in args if isinstance(each, DataLoader)]
        if len(models) != 1 or not loaders or self._trains:
            what = "prepare() got an optimizer, but not one model and its training loader"
            remedy = "give all in one call; several models as one nn.ModuleDict"
            raise UsageError(what, remedy)
        self._trains = True
        schedulers = [each for each in args if isinstance(each, LRScheduler)]
        loader = self._load(models[0], optimizers, loaders[0], schedulers)
        others = [each for each in args if each is not loaders[0]]
        made = super().prepare(*others, **options)
        prepared = iter(made if len(others) > 1 else [made])
        return tuple(loader if each is loaders[0] else next(prepared) for each in args)

    def _load(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loader: DataLoader[Any],
        schedulers: list[LRScheduler],
    ) -> Any:
        agent, options = self.agent, options_of(loader, self.agent.device)
        size = int(loader.batch_size or 1)
        rates = [float(each.defaults["lr"]) for each in optimizers]
        _, _, elastic = agent.load(
            lambda: model,
            lambda _: optimizers[0] if len(optimizers) == 1 else tuple(optimizers),
            loader.dataset,
            batch_size=size * self._passes,
            max_local_batch=size,
            schedule_batch=size * self._passes,
            lr_scaling=self._lr_scaling,
            **options,
        )
        factor = agent.job_lr / rates[0] if agent.job_lr is not None and rates[0] else 1.0
        for place, scheduler in enumerate(schedulers):
            scale_scheduler(scheduler, factor)
            agent.track(**{f"prepared scheduler {place + 1}": scheduler})
        return elastic

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep these with the job: they come back after a pause and reach workers that join.

        Args:
            objects: each has `state_dict` and `load_state_dict`.
        """
        for each in objects:
            self._custom_objects.append(each)
            self.agent.track(**{f"registered {len(self._custom_objects)}": each})

    # --- the loop

    def epochs(self, count: int, *, samples: int | None = None) -> Iterator[int]:
        """In the place of `range(count)`: see `ScalingAgent.epochs`.

        Args:
            count: of the whole job; the job file's stop rule wins.
        """
        return self.agent.epochs(count, samples=samples)

    def report(self, **metrics: Any) -> dict[str, float]:
        """End the epoch with what it achieved: see `ScalingAgent.report`.

        Args:
            metrics: numbers, or tensors with one element.
        """
        return self.agent.report(**metrics)

    def weight(self, items: Any) -> None:
        """Say what the loss of this batch is a mean over, if not its samples.

        Args:
            items: tokens, say; a number, or a tensor with one element.
        """
        self.agent.weight(items)

    def stop(self, why: str) -> None:
        """End the job with this epoch, if rank 0 calls it.

        Args:
            why: one line.
        """
        self.agent.stop(why)

    def _do_sync(self) -> None:
        """A step's last pass is the one that counts."""
        batch = self.agent.view.batch
        self.gradient_state._set_sync_gradients(batch is None or batch.last)  # noqa: SLF001

    # --- values of all workers

    def gather(self, tensor: Any) -> Any:
        """In a training batch the values of all workers, in the order of ranks; else as it is.

        Args:
            tensor: or containers of tensors; workers may have different lengths in the first
                dimension, and those without samples of the step give none.
        """
        parts = [decoded(part) for part in self.agent.view.gather(encoded(tensor))]
        return concatenated(parts, self.device) if parts else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        """The same; outside of a training batch every worker has all of the data.

        Args:
            input_data: tensors, or containers of them.
            use_gather_object: passed over outside of a training batch.
        """
        if self.agent.view.batch is not None:
            return self.gather(input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """In a training batch over all workers; "mean" is one over all samples of the step.

        Args:
            tensor: or containers of tensors, of equal shapes on all workers.
            reduction: "sum", "mean" or "none".
            scale: passed over.
        """
        batch = self.agent.view.batch
        if batch is None or reduction == "none":
            return tensor
        parts = [decoded(p) for p in self.agent.view.gather(encoded((batch.count, tensor)))]
        return reduced(parts, reduction, self.device) if parts else tensor

    # --- one of the workers

    @property
    def is_main_process(self) -> bool:
        """Whether this worker prints and saves; another one may, later."""
        return self.agent.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """The same: a job's output is one."""
        return self.agent.rank == 0

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate `function` to run where `is_main_process` is true when it is called.

        Args:
            function: gives None elsewhere.
        """

        def inner(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if function and self.is_main_process else None

        return inner

    def print(self, *args: Any, **options: Any) -> None:
        """Once for the job.

        Args:
            args: of `print`.
            options: of `print`.
        """
        if self.is_main_process:
            print(*args, **options)  # noqa: T201 - its name says it

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """To trackers, once for the job.

        Args:
            values: by name.
            options: of `Accelerator.log`.
        """
        if self.is_main_process:
            super().log(values, step=step, **options)

    def save(self, *args: Any, **options: Any) -> None:
        """Once for the job.

        Args:
            args: of `Accelerator.save`.
        """
        if self.is_main_process:
            super().save(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Once for the job.

        Args:
            args: of `Accelerator.save_model`.
        """
        if self.is_main_process:
            super().save_model(*args, **options)

    def wait_for_everyone(self) -> None:
        """Nothing: each step and each report is a meeting, and others could not be left."""

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Nothing, for the same reason: data that are made once are made before the job."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, *_: Any, **__: Any) -> Iterator[None]:
        """Nothing: uneven shares are exact."""
        yield

    # --- refused

    def save_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            UsageError: always.
        """
        what = "save_state() keeps what one of several workers has"
        remedy = "leave it out: the job's state is kept at each epoch's end, and when it is paused"
        raise UsageError(what, f"{remedy}; save_model() for a model to take away")

    def load_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            UsageError: always.
        """
        what = "load_state() changes what one of several workers has"
        raise UsageError(what, "leave it out: a job goes on from where it was by itself")

    def skip_first_batches(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            UsageError: always.
        """
        what = "skip_first_batches() leaves out samples of the epoch"
        raise UsageError(what, "leave it out: a resumed job begins where it was by itself")

    def check_trigger(self) -> NoReturn:
        """Refused.

        Raises:
            UsageError: always.
        """
        what = "check_trigger() leaves the loop in the midst of an epoch"
        raise UsageError(what, "accelerator.stop(why): the job ends with the epoch, for all")


__all__ = ["ElasticAccelerator"]
