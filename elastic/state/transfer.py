"""A job's state on its way to those who have not got it: beside training, or all at once.

Between two steps the state of all full members is equal. So the members share the work: each sends
its part, while the next step's forward and backward passes run, which do not change it. What is
small or no tensor travels in a header through the group's store.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from elastic import testing
from elastic.collectives.control_words import DIGEST_PARTS
from elastic.collectives.process_group import LONG, Group, agree, as_bytes
from elastic.training_errors import ElasticError

IN_PLACE: Final = 16 << 10  # bytes; smaller pieces travel together, copied
SAMPLED: Final = 1024  # numbers of a tensor that its checksum looks at


@dataclass(slots=True)
class Unit:
    """What belongs to one parameter: itself and what the optimizer keeps for it."""

    tensors: list[torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class State:
    """The tensors of a job: parameters, buffers, and what the optimizer keeps.

    The order of everything is that of the model and of the optimizer's groups, so two workers that
    ran the same script agree on it without a word.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def parameters(self) -> list[torch.Tensor]:
        """Of the model, then what only the optimizer knows; each once."""
        found: dict[int, torch.Tensor] = {id(p): p for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            found.update({id(p): p for p in group["params"] if id(p) not in found})
        return list(found.values())

    def trained(self) -> list[nn.Parameter]:
        """Parameters that gradients are made for."""
        return [p for p in self.parameters() if isinstance(p, nn.Parameter) and p.requires_grad]

    def units(self, device: torch.device) -> list[Unit]:
        """One for each parameter: itself and its optimizer state that lives on `device`."""
        units = []
        for parameter in self.parameters():
            kept = self._kept(parameter)
            tensors = [kept[key] for key in sorted(kept) if _travels(kept[key], device)]
            units.append(Unit([parameter.detach(), *tensors]))
        return units

    def buffers(self) -> list[torch.Tensor]:
        """Of the model, in its order."""
        return [buffer.detach() for buffer in self.model.buffers()]

    def structure(self, device: torch.device) -> list[dict[str, Any]]:
        """What the optimizer keeps for each parameter, with values of what does not travel."""
        described = []
        for parameter in self.parameters():
            entry: dict[str, Any] = {}
            for key, value in sorted(self._kept(parameter).items()):
                if _travels(value, device):
                    entry[key] = {"shape": list(value.shape), "dtype": str(value.dtype)}
                else:
                    host = value.detach().clone() if isinstance(value, torch.Tensor) else value
                    entry[key] = {"value": host}
            described.append(entry)
        return described

    def adopt(self, structure: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Make room for the state that `structure` describes.

        Raises:
            ElasticError: if this worker's model is not that of the others.
        """
        parameters = self.parameters()
        if len(structure) != len(parameters):
            what = f"the group trains {len(structure)} parameters, this worker {len(parameters)}"
            raise ElasticError(what, "build_model must build the same model in every worker")
        for parameter, entry in zip(parameters, structure, strict=True):
            kept = {}
            for key, said in entry.items():
                if "value" in said:
                    kept[key] = said["value"]
                    continue
                dtype = getattr(torch, said["dtype"].removeprefix("torch."))
                kept[key] = torch.zeros(
                    said["shape"], dtype=dtype, device=device
                )  # steps before it comes
            if kept:
                self.optimizer.state[parameter] = kept
            else:
                self.optimizer.state.pop(parameter, None)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of the optimizer's groups."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def take_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The reverse."""
        for group, was in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(was)

    def size(self) -> int:
        """Bytes that a newcomer needs."""
        device = self.parameters()[0].device
        return sum(unit.size for unit in self.units(device))

    def digest(self) -> bytes:
        """A checksum of a sample of everything; equal where the state is equal."""
        hashed = hashlib.blake2b(digest_size=DIGEST_PARTS)
        picked: dict[torch.dtype, list[torch.Tensor]] = {}
        for unit in self.units(self.parameters()[0].device):
            for tensor in unit.tensors:
                flat = tensor.reshape(-1)
                stride = max(1, flat.numel() // SAMPLED)
                picked.setdefault(tensor.dtype, []).append(flat[::stride])
        for dtype in sorted(picked, key=str):
            joined = torch.cat(picked[dtype]).cpu().contiguous()
            hashed.update(as_bytes(_flat(joined)))
        return hashed.digest()

    def _kept(self, parameter: torch.Tensor) -> dict[str, Any]:
        found = self.optimizer.state.get(parameter, {})
        return dict(found)


def _travels(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


# --- the header


def packed(header: Mapping[str, Any]) -> bytes:
    """Bytes of a header; nothing in it is executed when it is read."""
    out = io.BytesIO()
    torch.save(dict(header), out)
    return out.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """The reverse of `packed`."""
    header: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return header


# --- beside training


def portions(sizes: Sequence[int], steps: int) -> list[list[int]]:
    """Which units go in each of `steps` steps, of about equal bytes, in order.

    Parameters of one portion are sent in one step, after which the newcomer's optimizer keeps
    them: so each portion is of one moment, and needs not be that of the others.

    Args:
        sizes: bytes of each unit.
        steps: over how many.
    """
    total = sum(sizes) or 1
    found: list[list[int]] = [[] for _ in range(steps)]
    done = 0
    for index, size in enumerate(sizes):
        found[min(steps - 1, done * steps // total)].append(index)
        done += size
    return found


@dataclass(frozen=True, slots=True)
class Parts:
    """What one member sends of a portion: large pieces as they lie, small ones together."""

    large: list[torch.Tensor]  # views of bytes
    small: list[torch.Tensor]

    def and_then(self, other: Parts) -> Parts:
        """Both, this one first."""
        return Parts([*self.large, *other.large], [*self.small, *other.small])


def parts(tensors: Sequence[torch.Tensor], member: int, members: int) -> Parts:
    """The part of `tensors`, seen as one row of bytes, that `member` of `members` sends."""
    flat = [_flat(tensor) for tensor in tensors]
    total = sum(piece.numel() for piece in flat)
    begin, end = total * member // members, total * (member + 1) // members
    begin, end = begin // 64 * 64, end if member + 1 == members else end // 64 * 64
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    at = 0
    for piece in flat:
        low, high = max(begin - at, 0), min(end - at, piece.numel())
        at += piece.numel()
        if low < high:
            (large if high - low >= IN_PLACE else small).append(piece[low:high])
    return Parts(large, small)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _contiguous(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(what travels, what it stands for): the same, but for tensors with gaps."""
    for tensor in tensors:
        yield (tensor if tensor.is_contiguous() else tensor.contiguous()), tensor


class Transfer:
    """One portion on its way, in a thread of its own."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error = ""

    def _run(self, work: Any) -> None:
        try:
            work()
        except (RuntimeError, testing.InjectedError) as error:
            self.error = str(error).partition("\n")[0][:300] or type(error).__name__
        self.done.set()

    def _start(self, work: Any, name: str) -> None:
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()


class Sending(Transfer):
    """This member's part of a portion, to every newcomer; buffers are rank 0's alone."""

    def __init__(
        self,
        group: Group,
        portion: Sequence[Unit],
        members: int,
        newcomers: Sequence[int],
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        tensors = [tensor for unit in portion for tensor in unit.tensors]
        held = [travelling for travelling, _ in _contiguous(tensors)]
        mine = parts(held, group.rank, members)
        if group.rank == 0:
            own = [travelling for travelling, _ in _contiguous(buffers)]
            held += own
            mine = mine.and_then(parts(own, 0, 1))
        together = torch.cat(mine.small) if mine.small else None
        corrupt = testing.reach("handover.send", rank=group.rank, version=group.version)
        if corrupt and together is not None:
            together = -together - 1  # whatever it is, it is something else now

        def work() -> None:
            pieces = [*mine.large, *([] if together is None else [together])]
            for to in newcomers:
                for pending in [group.send(piece, to) for piece in pieces]:
                    pending.wait(LONG)
            held.clear()

        self._start(work, "send")


class Receiving(Transfer):
    """A portion from all members, as far as possible into its place."""

    def __init__(
        self,
        group: Group,
        portion: Sequence[Unit],
        members: int,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        tensors = [tensor for unit in portion for tensor in unit.tensors]
        pairs = list(_contiguous(tensors))
        received = [parts([to for to, _ in pairs], member, members) for member in range(members)]
        of_first = list(_contiguous(buffers))
        received[0] = received[0].and_then(parts([to for to, _ in of_first], 0, 1))
        pairs += of_first
        together = [
            torch.empty(sum(p.numel() for p in part.small), dtype=torch.uint8, device=group.device)
            for part in received
        ]
        self._pairs, self._received, self._together = pairs, received, together

        def work() -> None:
            testing.reach("handover.receive", rank=group.rank, version=group.version)
            for member, part in enumerate(received):
                pieces = [*part.large, *([together[member]] if part.small else [])]
                for pending in [group.receive(piece, member) for piece in pieces]:
                    pending.wait(LONG)

        self._start(work, "receive")

    def put_in_place(self) -> None:
        """Deal out what came together; on the training thread, when `done`."""
        for part, together in zip(self._received, self._together, strict=True):
            start = 0
            for piece in part.small:
                piece.copy_(together[start : start + piece.numel()])
                start += piece.numel()
        for travelled, stands_for in self._pairs:
            if travelled is not stands_for:
                stands_for.copy_(travelled)


# --- all at once


def broadcast(
    state: State, group: Group, source: int, header: bytes, cancel: threading.Event
) -> bytes:
    """Give every rank the header and the whole state of rank `source`; training waits meanwhile.

    Raises:
        BrokenGroupError: if a peer is gone.
        CancelledError: if `cancel` is set.
    """
    said = agree(group, header, cancel, source)
    if group.rank != source:
        state.adopt(unpacked(said)["structure"], group.device)
    tensors = [tensor for unit in state.units(group.device) for tensor in unit.tensors]
    small: list[torch.Tensor] = []
    for travelling, tensor in _contiguous([*tensors, *state.buffers()]):
        if _flat(travelling).numel() < IN_PLACE:
            small.append(tensor)
            continue
        fresh = travelling.clone()  # an operation that is given up keeps what it was given
        group.broadcast(_flat(fresh), source, cancel)
        if group.rank != source:
            tensor.copy_(fresh)
    if small:
        together = torch.cat([_flat(tensor.contiguous()) for tensor in small])
        group.broadcast(together, source, cancel)
        if group.rank != source:
            start = 0
            for tensor in small:
                size = tensor.numel() * tensor.element_size()
                piece = together[start : start + size].clone()  # aligned for any type
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
                start += size
    return said
