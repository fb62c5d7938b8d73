"""Accelerate's `Accelerator` for elastic jobs; the agent provides batches, gradients and epochs."""

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

from elastic.agent import ScalingAgent, load_prepared
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.tracked_states import copy_to_host
from elastic.training_errors import UsageError


def encoded(value: Any) -> bytes:
    """Encode tensors from any device, numbers, text and containers of these."""
    return encode_metadata({"value": copy_to_host(value)})


def decoded(data: bytes) -> Any:
    """Decode the result of `encoded` on the host, without executing anything."""
    return decode_metadata(data)["value"]


def concatenated(parts: Sequence[Any], device: torch.device) -> Any:
    """Concatenate the tensors of all ranks, in the same containers as in each part.

    The parts differ only in the first dimension of their tensors. A scalar becomes one row.
    """

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([v.reshape(1) if v.dim() == 0 else v for v in values]).to(device)

    return _over(parts, join)


def reduced(parts: Sequence[tuple[int, Any]], reduction: str, device: torch.device) -> Any:
    """Reduce the (samples, value) pairs of all ranks, also inside of containers.

    `reduction` is "sum", or "mean" for the mean over all samples.
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


def _refused(problem: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        """Raise a UsageError, because the job does this itself."""
        raise UsageError(problem, remedy)

    return refuse


class ElasticAccelerator(Accelerator):
    """An `Accelerator` for a group that changes; the script sees a single process.

    The initial global batch is the training loader's batch times `gradient_accumulation_steps`.
    Under a cluster the job file overrides it. A share larger than the loader's batch (in the job
    file, `max_local_batch`) is processed in several passes; `sync_gradients` is true only in the
    last pass.

    Args:
        agent: agent of this process; if it is None, an agent is created.
        lr_scaling: rule by which the rate follows the batch, as in `ScalingAgent.load`.

    Raises:
        UsageError: if another library distributes the training.
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
            problem = f"Accelerate distributes the training itself ({self.distributed_type.value})"
            raise UsageError(problem, "leave its plugins out: the agent's group reduces gradients")
        self._passes = max(1, int(self.gradient_state.num_steps))
        self.gradient_accumulation_steps = 1  # no division of losses: the agent weighs passes

    # --- prepare

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare like `Accelerator.prepare`, with all objects to train in one call.

        Args:
            args: if an optimizer is among them, the model, all optimizers and the training loader
                must be, too. The first loader is the training loader. Every worker reads all data
                of the other loaders.

        Raises:
            UsageError: if an object is missing, or the agent cannot train exactly with it.
        """
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, **options)
        models = [each for each in args if isinstance(each, nn.Module)]
        loaders = [each for each in args if isinstance(each, DataLoader)]
        if len(models) != 1 or not loaders or self._trains:
            problem = "prepare() got an optimizer, but not one model and its training loader"
            remedy = "give all in one call; several models as one nn.ModuleDict"
            raise UsageError(problem, remedy)
        self._trains = True
        schedulers = [each for each in args if isinstance(each, LRScheduler)]
        loader = load_prepared(
            self.agent,
            models[0],
            optimizers,
            loaders[0],
            schedulers,
            passes=self._passes,
            lr_scaling=self._lr_scaling,
        )
        others = [each for each in args if each is not loaders[0]]
        made = super().prepare(*others, **options)
        prepared = iter(made if len(others) > 1 else [made])
        return tuple(loader if each is loaders[0] else next(prepared) for each in args)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the states of `objects`: they are restored after a pause and sent to newcomers."""
        for each in objects:
            self._custom_objects.append(each)
            self.agent.track(**{f"registered {len(self._custom_objects)}": each})

    # --- the loop

    def epochs(self, count: int, *, samples: int | None = None) -> Iterator[int]:
        """Run up to `count` epochs of the whole job, instead of `range(count)`.

        The job file's stop rule overrides `count`; see `ScalingAgent.epochs`.
        """
        return self.agent.epochs(count, samples=samples)

    def report(self, **metrics: Any) -> dict[str, float]:
        """End the epoch and report its metrics: numbers, or tensors with one element.

        See `ScalingAgent.report`.
        """
        return self.agent.report(**metrics)

    def weight(self, items: Any) -> None:
        """Declare that the batch's loss is a mean over `items` items; see `ScalingAgent.weight`."""
        self.agent.weight(items)

    def stop(self, why: str) -> None:
        """End the job after this epoch if rank 0 calls this; `why` is a reason of one line."""
        self.agent.stop(why)

    def _do_sync(self) -> None:
        """Set `sync_gradients` to True in the last pass of a step and outside of the loop."""
        batch = self.agent.view.batch
        self.gradient_state._set_sync_gradients(batch is None or batch.last)  # noqa: SLF001

    # --- values of all workers

    def gather(self, tensor: Any) -> Any:
        """Return the values of all workers, concatenated by rank.

        Outside of a training batch, `tensor` is returned.

        Args:
            tensor: a tensor or containers of tensors. Workers may have different lengths in the
                first dimension; workers without samples in the step contribute nothing.
        """
        parts = [decoded(part) for part in self.agent.view.gather(encoded(tensor))]
        return concatenated(parts, self.device) if parts else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Gather like `gather`. Outside of a training batch, every worker already has all data.

        Args:
            input_data: tensors, or containers of them.
            use_gather_object: used only outside of a training batch.
        """
        if self.agent.view.batch is not None:
            return self.gather(input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over all workers. Outside of a training batch, `tensor` is returned.

        Args:
            tensor: a tensor or containers of tensors, with equal shapes on all workers.
            reduction: "sum", "mean" (over all samples of the step) or "none".
            scale: ignored.
        """
        batch = self.agent.view.batch
        if batch is None or reduction == "none":
            return tensor
        parts = [decoded(p) for p in self.agent.view.gather(encoded((batch.count, tensor)))]
        return reduced(parts, reduction, self.device) if parts else tensor

    # --- one of the workers

    @property
    def is_main_process(self) -> bool:
        """True if this worker prints and saves now; another worker may do so later."""
        return self.agent.rank == 0

    is_local_main_process = is_main_process  # a job has one output over all nodes

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate `function` to run only on the main process; elsewhere it returns None."""

        def inner(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if function and self.is_main_process else None

        return inner

    def print(self, *args: Any, **options: Any) -> None:
        """Print on one worker only."""
        if self.is_main_process:
            print(*args, **options)  # noqa: T201 - required by the interface

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log to trackers on one worker only."""
        if self.is_main_process:
            super().log(values, step=step, **options)

    def save(self, *args: Any, **options: Any) -> None:
        """Save on one worker only."""
        if self.is_main_process:
            super().save(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the model on one worker only."""
        if self.is_main_process:
            super().save_model(*args, **options)

    def wait_for_everyone(self) -> None:
        """Do nothing: steps and reports synchronise, and workers at a barrier could not leave."""

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Do nothing: data that are created only once must exist before the job starts."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, *_: Any, **__: Any) -> Iterator[None]:
        """Do nothing: training with uneven shares is exact."""
        yield

    # --- refused

    save_state = _refused(
        "save_state() would store the state of one worker only",
        "leave it out: the job's state is saved at each epoch's end, and when the job is paused; "
        "use save_model() to export a model",
    )
    load_state = _refused(
        "load_state() would change the state of one worker only",
        "leave it out: a job resumes automatically",
    )
    skip_first_batches = _refused(
        "skip_first_batches() would leave out samples of the epoch",
        "leave it out: a resumed job continues at its position automatically",
    )
    check_trigger = _refused(
        "check_trigger() would leave the loop within an epoch",
        "use accelerator.stop(why), which ends the job with the epoch on all workers",
    )


__all__ = ["ElasticAccelerator"]
