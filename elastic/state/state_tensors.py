"""Tensors of a job: parameters, buffers and optimizer state, in the same order on all workers.

The order is that of the model and of the optimizers' groups, so workers that ran the same script
agree on the order without communication. A script can have several optimizers, in any container.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic.collectives.control_words import DIGEST_BYTES
from elastic.collectives.process_group import as_byte_row, as_bytes
from elastic.training_errors import CheckpointError, ElasticError, UsageError

HASHED: Final = frozenset({bool, int, float, str, tuple})  # types of hyperparameters
DIGEST_SAMPLES: Final = 1024  # numbers that the checksum samples from each tensor
ROUNDING: Final = 1e-4  # relative difference that devices of other kinds can cause


class StateSample(NamedTuple):
    """Sample of a worker's state, by which differences between workers are found and named."""

    numbers: dict[str, Any]  # hyperparameters
    tensors: dict[str, torch.Tensor]  # part of each tensor, in one dimension

    def copy(self) -> StateSample:
        """Return a copy that later steps do not change."""
        return StateSample(
            self.numbers, {name: part.clone() for name, part in self.tensors.items()}
        )

    def differences(self, other: StateSample) -> list[str]:
        """Return what differs from `other` by more than rounding, hyperparameters first."""
        found = [
            f"{name} {value} instead of {other.numbers[name]}"
            for name, value in self.numbers.items()
            if name in other.numbers and value != other.numbers[name]
        ]
        for name, part in self.tensors.items():
            same = other.tensors.get(name)
            if same is None or same.shape != part.shape or not part.numel():
                continue
            ours, theirs = part.double(), same.double()
            apart = float((ours - theirs).abs().max())
            if not apart <= ROUNDING * float(theirs.abs().max()):
                found.append(f"{name} by {apart:.3g}")
        return found


GROUPS_REMEDY: Final = (
    "create all groups in build_optimizer: a worker that joins calls only that, and no later "
    "add_param_group"
)


class TensorState:
    """Tensors of a job: parameters, buffers, optimizer state, and running averages of parameters.

    `optimizers` is one optimizer, or a mapping from names to several. Optimizers can have
    parameters that are not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self.model = model
        self.named = (
            {"0": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else dict(optimizers)
        )
        self.optimizers = list(self.named.values())
        self.optimizer = self.optimizers[0]
        self._group_sizes = self._sizes()  # parameters of each group, at `load`
        self._averaged: list[AveragedModel] = []
        self._modules: list[nn.Module] | None = None  # of model and averages; None: to be found
        self._rates = ("", b"")  # hyperparameters at the last checksum, and the checksum
        self._averages: dict[int, list[torch.Tensor]] = {}  # by id of the averaged parameter

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def parameters(self) -> list[torch.Tensor]:
        """Return each parameter once, the model's first, then those that only optimizers have."""
        found: dict[int, torch.Tensor] = {id(p): p for p in self.model.parameters()}
        for group in self.groups:
            found.update({id(p): p for p in group["params"] if id(p) not in found})
        return list(found.values())

    def outside(self) -> list[torch.Tensor]:
        """Return the parameters that only optimizers have."""
        return self.parameters()[len(list(self.model.parameters())) :]

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.groups]

    def check_groups(self) -> None:
        """Refuse parameter groups that were added or changed since `load`."""
        if (now := self._sizes()) != self._group_sizes:
            problem = (
                "the optimizer's parameter groups changed after load(): "
                f"{len(self._group_sizes)} with {sum(self._group_sizes)} parameters became "
                f"{len(now)} with {sum(now)}"
            )
            raise UsageError(problem, GROUPS_REMEDY)

    def add_averaged(self, averaged: AveragedModel, source: nn.Module) -> bool:
        """Add the averages of the parameters of `source`; return True if they were added.

        They are not added if the job does not train `source`, or if they lie on another device.
        """
        known = {id(parameter) for parameter in self.parameters()}
        pairs = list(zip(averaged.module.parameters(), source.parameters(), strict=True))
        if any(id(own) not in known or own.device != average.device for average, own in pairs):
            return False
        for average, own in pairs:
            self._averages.setdefault(id(own), []).append(average)
            averaged.n_averaged = averaged.n_averaged.to(own.device)  # torch leaves it on the host
        self._averaged.append(averaged)
        self._modules = None
        return True

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require gradients."""
        return [p for p in self.parameters() if isinstance(p, nn.Parameter) and p.requires_grad]

    def units(self, device: torch.device) -> list[list[torch.Tensor]]:
        """Return each parameter with its averages and its optimizer state on `device`.

        Other state is metadata. The tensors can be overwritten between two backward passes of a
        batch: the script's autograd graph stays valid.
        """
        units = []
        for parameter in self.parameters():
            kept = self._optimizer_state(parameter)
            tensors = [kept[key] for key in sorted(kept) if _travels(kept[key], device)]
            averages = [average.data for average in self._averages.get(id(parameter), ())]
            units.append([parameter.data, *tensors, *averages])
        return units

    def unit_sizes(self, device: torch.device) -> list[int]:
        """Return the size in bytes of each unit."""
        return [sum(tensor.nbytes for tensor in unit) for unit in self.units(device)]

    def buffers(self) -> list[torch.Tensor]:
        """Return buffers of model and averages; like `units`, they can be overwritten safely."""
        if self._modules is None:
            every = (self.model, *self._averaged)
            self._modules = [part for module in every for part in module.modules()]
        found: dict[int, torch.Tensor] = {}
        for module in self._modules:
            for buffer in module._buffers.values():  # noqa: SLF001 - `buffers()` is slow
                if buffer is not None:
                    found[id(buffer)] = buffer.data
        return list(found.values())

    def limited_embeddings(self) -> list[nn.Module]:
        """Return the embeddings with `max_norm`, whose weights forward passes change."""
        kinds = nn.Embedding | nn.EmbeddingBag
        modules = [module for module in self.model.modules() if isinstance(module, kinds)]
        return [module for module in modules if module.max_norm is not None]

    def structure(self, device: torch.device) -> list[dict[str, Any]]:
        """Return the optimizer state of each parameter, and an empty entry for each average.

        Parameters are in the order of `parameters`. State on `device` is described by shape,
        strides and type; other state is included.
        """
        described = []
        for parameter in self.parameters():
            entry: dict[str, Any] = {}
            for key, value in sorted(self._optimizer_state(parameter).items()):
                if _travels(value, device):
                    entry[key] = {
                        "shape": list(value.shape),
                        "strides": list(dense_strides(value)),
                        "dtype": str(value.dtype),
                    }
                else:
                    host = value.detach().clone() if isinstance(value, torch.Tensor) else value
                    entry[key] = {"value": host}
            described.append(entry)
        return [*described, *({} for _ in self._averaged)]

    def adopt(self, structure: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Allocate zeros for the optimizer state that another member's `structure` describes."""
        parameters = self.parameters()
        if len(structure) != (own := len(parameters) + len(self._averaged)):
            problem = f"the group has {len(structure)} parameters and averaged models, this worker"
            hint = (
                "build_model must build the same model in every worker, and an AveragedModel must "
                "be created before the first epoch"
            )
            raise ElasticError(f"{problem} {own}", hint)
        for parameter, entry in zip(parameters, structure, strict=False):
            kept: dict[str, Any] = {}
            for key, described in entry.items():
                if "value" in described:
                    kept[key] = described["value"]
                    continue
                dtype = getattr(torch, described["dtype"].removeprefix("torch."))
                room = torch.empty_strided(
                    described["shape"], described["strides"], dtype=dtype, device=device
                )
                kept[key] = room.zero_()  # zeros for the steps before the state arrives
            self._set_optimizer_state(parameter, kept)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of the optimizers' groups."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.groups
        ]

    def load_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of `hyperparameters`."""
        if len(groups) != len(self.groups):
            problem = (
                f"the job trains {len(groups)} parameter groups, this worker {len(self.groups)}"
            )
            raise UsageError(problem, GROUPS_REMEDY)
        for group, values in zip(self.groups, groups, strict=True):
            group.update(values)

    def sample(self) -> StateSample:
        """Return a sample of the state, which differs if states differ in more than a few places.

        A scheduler, or the script, can set hyperparameters that differ by rank.
        """
        return StateSample(self._numbers(), self._sampled())

    def digest(self) -> bytes:
        """Return a checksum of a sample of the tensors; equal states have equal checksums."""
        hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
        picked: dict[torch.dtype, list[torch.Tensor]] = {}
        for part in self._sampled().values():
            picked.setdefault(part.dtype, []).append(part)
        for dtype in sorted(picked, key=str):
            joined = torch.cat(picked[dtype]).cpu().contiguous()
            hashed.update(as_bytes(as_byte_row(joined)))
        return hashed.digest()

    def rates_digest(self, stepped: Sequence[bool]) -> bytes:
        """Return a checksum of all hyperparameters on the host and of `stepped`.

        `stepped` has a flag for each optimizer: True if it has stepped since the last step.
        """
        values = [
            value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for group in self.groups
            for value in group.values()
            if type(value) in HASHED or (isinstance(value, torch.Tensor) and value.is_cpu)
        ]
        text = repr((values, *stepped))
        if text != self._rates[0]:
            digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
            self._rates = text, digest
        return self._rates[1]

    def _numbers(self) -> dict[str, Any]:
        """Return the hyperparameters that are on the host, by name."""
        found: dict[str, Any] = {}
        for index, group in enumerate(self.groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    found[f"{key} of group {index}"] = value.tolist()
                elif type(value) in HASHED:
                    found[f"{key} of group {index}"] = value
        return found

    def _sampled(self) -> dict[str, torch.Tensor]:
        """Return up to `DIGEST_SAMPLES` numbers of each tensor, in one dimension, by name."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        named = {f"buffer {name}": buffer for name, buffer in self.model.named_buffers()}
        device = self.parameters()[0].device
        for index, parameter in enumerate(self.parameters()):
            name = names.get(id(parameter), f"parameter {index}")
            named[name] = parameter.data
            for key, value in sorted(self._optimizer_state(parameter).items()):
                if _travels(value, device):
                    named[f"{key} of {name}"] = value
        flat = {name: tensor.detach().reshape(-1) for name, tensor in named.items()}
        return {name: row[:: max(1, row.numel() // DIGEST_SAMPLES)] for name, row in flat.items()}

    def _optimizer_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's optimizer state, with keys `index:name` for several optimizers."""
        if len(self.optimizers) == 1:
            return dict(self.optimizer.state.get(parameter, {}))
        return {
            f"{place}:{key}": value
            for place, optimizer in enumerate(self.optimizers)
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def _set_optimizer_state(self, parameter: torch.Tensor, kept: dict[str, Any]) -> None:
        """Set a parameter's optimizer state to a result of `_optimizer_state`."""
        parts: list[dict[str, Any]] = [{} for _ in self.optimizers]
        if len(parts) == 1:
            parts = [kept]
        else:
            for key, value in kept.items():
                place, _, name = key.partition(":")
                parts[int(place)][name] = value
        for optimizer, own in zip(self.optimizers, parts, strict=True):
            if own:
                optimizer.state[parameter] = own
            else:
                optimizer.state.pop(parameter, None)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of `tensor`; fused optimizers require dense state."""
    return torch.empty_like(tensor, device="meta").stride()


def _travels(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


Optimizers = TypeVar(  # one optimizer, or several in the script's container
    "Optimizers",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)


def optimizers_by_name(built: Any, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return all optimizers by name, in the script's order, or refuse `built`.

    The name is the key in a mapping, otherwise the index from "0". Several optimizers must train
    parameters of `model` only, because checkpoints have no other parameters.
    """
    if isinstance(built, Mapping):
        named = {str(key): value for key, value in built.items()}
    elif isinstance(built, list | tuple):
        named = {str(place): value for place, value in enumerate(built)}
    else:
        named = {"0": built}
    unknown = [each for each in named.values() if not isinstance(each, torch.optim.Optimizer)]
    others = sorted({type(each).__name__ for each in unknown})
    if others or len({id(each) for each in named.values()}) != max(1, len(named)):
        problem = f"build_optimizer() returned {', '.join(others) or 'none, or one twice'}"
        raise UsageError(problem, "return one optimizer, or a tuple, list or dict of them")
    known = {id(parameter) for parameter in model.parameters()}
    for name, each in named.items():
        held = [p for group in each.param_groups for p in group["params"]]
        if len(named) > 1 and any(id(parameter) not in known for parameter in held):
            found = f"optimizer {name} ({type(each).__name__})"
            problem = f"{found} trains parameters outside of the model"
            hint = "return one module with all trained parameters from build_model"
            raise UsageError(problem, hint)
    return named


def optimizer_states(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """Return a checkpoint's entry, `optimizer` for one optimizer, `optimizers` for several."""
    states = {name: each.state_dict() for name, each in optimizers.items()}
    return {"optimizers": states} if len(states) > 1 else {"optimizer": next(iter(states.values()))}


def load_optimizer_states(
    optimizers: Mapping[str, torch.optim.Optimizer], content: Mapping[str, Any]
) -> None:
    """Load the entry that `optimizer_states` returned, from the checkpoint `content`."""
    states = content.get("optimizers")
    if states is None:
        states = {next(iter(optimizers)): content["optimizer"]}
    if set(states) != set(optimizers):
        has = "one optimizer" if "optimizer" in content else f"optimizers {', '.join(states)}"
        problem = f"the checkpoint has {has}, build_optimizer() returned {', '.join(optimizers)}"
        raise CheckpointError(
            problem, "return the optimizers that the job started with, by the same names"
        )
    for name, each in optimizers.items():
        each.load_state_dict(states[name])
