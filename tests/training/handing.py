"""Functions that peers run in tests of state transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from elastic.state.portions import encode_metadata
from elastic.state.state_tensors import TensorState
from elastic.state.transfer import IncomingState, OutgoingState, broadcast_state
from elastic.step.forward_state import ForwardState
from elastic.training_errors import BrokenGroupError
from tests.training.peers import CPU, RendezvousInfo


class Zoo(nn.Module):
    """Parameters and buffers of kinds that need care."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Linear(120, 90)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.short = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.norm(self.conv(x)).mean() * self.scalar
        wide: torch.Tensor = self.wide(x.new_ones(1, 120))
        return seen + wide.square().mean()


Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def amsgrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that reads memory element by element, whatever the strides."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def extra(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a parameter that the model does not have."""
    own = nn.Parameter(torch.full((4,), 2.0))
    own.grad = torch.ones(4)
    groups: list[dict[str, Any]] = [{"params": list(parameters)}, {"params": [own], "lr": 0.5}]
    return torch.optim.Adam(groups, lr=0.01)


MAKERS: Final = {maker.__name__: maker for maker in (momentum, adam, amsgrad, fused, extra)}


def zoo(make: Maker, seed: int, steps: int = 2) -> TensorState:
    torch.manual_seed(seed)
    model = Zoo()
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape).to(parameter.dtype))
    for _ in range(steps):
        model(torch.randn(2, 3, 6, 6)).backward()
        optimizer.step()
    state = TensorState(model, optimizer)
    state.buffers()[-1].add_(seed)
    model.turned.add_(seed)  # type: ignore[operator]
    model.count.add_(seed)  # type: ignore[operator]
    return state


def written(state: TensorState) -> list[tuple[str, list[float]]]:
    """Return all tensors as numbers; every bit survives in float64."""
    tensors = [t for unit in state.units(CPU) for t in unit] + state.buffers()
    return [(str(t.dtype), t.double().reshape(-1).tolist()) for t in tensors]


def hand_over(
    meeting: RendezvousInfo, name: str, members: int, steps: int
) -> list[tuple[str, list[float]]]:
    group = meeting.group()
    make = MAKERS[name]
    newcomers = list(range(members, meeting.size))
    cancel = threading.Event()
    full = meeting.rank < members
    state = zoo(make, 1) if full else zoo(make, 50 + meeting.rank, steps=0)
    common: dict[str, Any] = {
        "group": group, "state": state, "senders": members, "first": 1, "steps": steps,
    }  # fmt: skip
    transfer: OutgoingState | IncomingState
    if full:
        metadata = {"structure": state.structure(CPU)} if meeting.rank == 0 else None
        transfer = OutgoingState(**common, newcomers=newcomers, metadata=metadata)
    else:
        transfer = IncomingState(**common)
    forward_state = ForwardState(state)
    for step in range(1, steps + 1):
        transfer.begin_portion(step)
        forward_state.exchange(group, 0, cancel)
        if isinstance(transfer, OutgoingState):
            transfer.await_sent(cancel)
        else:
            transfer.take_portion(step, cancel, lambda _: None)
        group.all_reduce(torch.ones(1), cancel)
    return written(state)


def hand_metadata_over(meeting: RendezvousInfo, numbers: int) -> str | list[float]:
    """Return tracked state of so many numbers as a newcomer receives it, or why it does not."""
    group, cancel, received = meeting.group(), threading.Event(), list[dict[str, Any]]()
    state = zoo(momentum, 1)
    common: dict[str, Any] = {"group": group, "state": state, "senders": 1, "first": 1, "steps": 1}
    said: str | list[float] = ""
    if meeting.rank == 0:
        tracked = torch.arange(float(numbers)) if numbers else threading.Event()
        whole = {"structure": state.structure(CPU), "tracked": {"ema": tracked}}
        outgoing = OutgoingState(**common, newcomers=[1], metadata=whole)
        outgoing.begin_portion(1)
        outgoing.await_sent(cancel)
    else:
        try:
            IncomingState(**common).take_portion(1, cancel, received.append)
        except BrokenGroupError as error:
            said = error.message
        else:
            said = received[0]["tracked"]["ema"][-2:].tolist()
    group.all_reduce(torch.ones(1), cancel)
    return said


def give_all(
    meeting: RendezvousInfo, name: str, source: int
) -> tuple[bytes, list[tuple[str, list[float]]]]:
    group = meeting.group()
    has = meeting.rank == source
    state = zoo(MAKERS[name], 1 if has else 50 + meeting.rank, steps=2 if has else meeting.rank)
    header = encode_metadata({"structure": state.structure(CPU)}) if has else b""
    said = broadcast_state(state, group, source, header, threading.Event())
    return said, written(state)
