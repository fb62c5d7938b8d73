"""Training steps over a group without jobs and orders: what a peer of the gradient tests runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from elastic.collectives.control_words import FIXED_WORDS, ControlWords, read_agreed_words
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous_store import connect_store
from elastic.sample_stream import passes
from elastic.step.gradient_reduction import Reducer
from tests.training.peers import RendezvousInfo

STEPS: Final = 5
SHARES: Final = {1: (7,), 2: (5, 2), 3: (4, 0, 3), 4: (1, 3, 0, 2)}  # by number of ranks
SHADOW: Final = 2


class Net(nn.Module):
    """Two layers, a head, and whatever a case does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 5)
        self.other = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Shared(Net):
    """One layer is passed twice, and one parameter is that of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        out: torch.Tensor = self.head(
            self.other(torch.tanh(self.second(torch.tanh(self.second(x)))))
        )
        return out


class Branching(Net):
    """A sample's sign decides about its way, so ranks use different parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        up = x[:, 0] > 0
        out = torch.zeros_like(hidden)
        if up.any():
            out[up] = self.second(hidden[up])
        if not up.all():
            out[~up] = self.other(hidden[~up])
        head: torch.Tensor = self.head(out)
        return head


class Checkpointed(Net):
    """Blocks that are computed again, in passes of their own inside the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for block in (self.second, self.other, self.second):
            hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=True))
        out: torch.Tensor = self.head(hidden)
        return out


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    net: Callable[[], nn.Module] = Net
    bound: int = 100  # samples in one pass
    every: int = 1  # batches to one optimizer step
    to_none: bool = True
    clip: float = 0.0
    adam: bool = False

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same on every rank."""
        torch.manual_seed(1)
        net = self.net().double()
        if self.adam:
            return net, torch.optim.AdamW(net.parameters(), lr=0.01)
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def update(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step."""
        if self.clip:
            nn.utils.clip_grad_norm_(net.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.to_none)


CASES: Final = (
    Case("uneven shares, one of them empty, unused parameters"),
    Case("Adam", adam=True),
    Case("branches that differ from rank to rank", net=Branching),
    Case("shared weights", net=Shared),
    Case("reentrant checkpoints", net=Checkpointed),
    Case("passes", bound=2),
    Case("passes over branches and checkpoints", net=Branching, bound=1),
    Case("passes over reentrant checkpoints", net=Checkpointed, bound=2),
    Case("zeros instead of None", to_none=False),
    Case("zeros instead of None, in passes", to_none=False, bound=2, net=Branching),
    Case("two batches to a step", every=2),
    Case("two batches to a step, over branches", every=2, net=Branching),
    Case("two batches to a step, in passes", every=2, bound=2, net=Branching),
    Case("two batches to a step, zeros instead of None", every=2, to_none=False),
    Case("clipped gradients", clip=0.05),
)


def batches(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches of a run."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS * 2):
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        yield x, x.prod(dim=1, keepdim=True)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over the batch, as torch's losses are."""
    return nn.functional.mse_loss(net(x), y)


def alone(case: Case, size: int) -> list[torch.Tensor]:
    """The parameters that one process gets from whole batches."""
    net, optimizer = case.build()
    for place, (x, y) in enumerate(batches(size), start=1):
        loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
        if place % case.every == 0:
            case.update(net, optimizer)
    return [parameter.detach().clone() for parameter in net.parameters()]


class Together:
    """One rank's reducer, driven as a member drives it."""

    def __init__(self, group: ProcessGroup, net: nn.Module) -> None:
        self._group = group
        self._cancel = threading.Event()
        self.reducer = Reducer(net.parameters(), self._over)
        self._weight, self._last, self._count = 0.0, True, 0
        self.seen: list[int] = []  # samples that all ranks had in a step

    def begin(self, count: int, total: int, *, last: bool, alone: bool) -> None:
        """The script gets `count` of `total` samples."""
        self._weight, self._last, self._count = count / total, last, count
        self.reducer.active = self._group.size > 1 or not alone

    def _over(self) -> None:
        reducer = self.reducer
        reducer.losses.clear()
        if not reducer.active:
            return
        if not self._last:
            reducer.accumulate(self._weight)
            return
        bucket, tail = reducer.pack(self._weight, FIXED_WORDS)
        tail[1:FIXED_WORDS] = torch.tensor(ControlWords(self._count).encode(), dtype=tail.dtype)
        self._group.all_reduce(bucket, self._cancel)
        told = read_agreed_words(tail.tolist(), self._group.size)
        reducer.unpack(told.used)
        self.seen.append(told.samples)


def together(case: Case, group: ProcessGroup, shares: Sequence[int]) -> list[torch.Tensor]:
    """The parameters that this rank of a group gets from its shares."""
    net, optimizer = case.build()
    driver = Together(group, net)
    begin = sum(shares[: group.rank])
    total = sum(shares)
    for place, (x, y) in enumerate(batches(total), start=1):
        mine = slice(begin, begin + shares[group.rank])
        own_x, own_y = x[mine], y[mine]
        parts = passes(len(own_x), case.bound) if len(own_x) else (0,)
        start = 0
        for number, count in enumerate(parts, start=1):
            driver.begin(count, total, last=number == len(parts), alone=len(parts) == 1)
            piece = slice(start, start + count)
            px, py = (own_x[piece], own_y[piece]) if count else (x[:SHADOW], y[:SHADOW])
            loss_of(net, px, py).backward()  # type: ignore[no-untyped-call]
            start += count
        if place % case.every == 0:
            case.update(net, optimizer)
    driver.reducer.close()
    return [parameter.detach().clone() for parameter in net.parameters()]


def furthest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def differences(meeting: RendezvousInfo) -> dict[str, float]:
    """How far this rank's parameters are from those of one process, by case."""
    group = meeting.group()
    shares = SHARES[meeting.size]
    return {
        case.name: furthest(together(case, group, shares), alone(case, sum(shares)))
        for case in CASES
    }


def against_ddp(meeting: RendezvousInfo) -> float:
    """How far this rank's parameters are from those of torch's own way, for equal shares."""
    case = Case("", clip=1.0)
    group = meeting.group()
    shares = [3] * meeting.size
    ours = together(case, group, shares)
    store = connect_store(meeting.store, 99)
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.size)
    net, optimizer = case.build()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    for x, y in batches(sum(shares)):
        mine = slice(3 * meeting.rank, 3 * meeting.rank + 3)
        loss_of(wrapped, x[mine], y[mine]).backward()  # type: ignore[no-untyped-call]
        case.update(net, optimizer)
    return furthest(ours, [parameter.detach() for parameter in net.parameters()])
