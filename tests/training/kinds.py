"""Kinds of models and optimizers that a group trains as one process does.

The ranks are replicas in this process, each with a reducer; their buckets are added by hand. They
are compared with one process on whole batches (float64), or with one that takes each batch in the
ranks' chunks (rounding control).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.sample_stream import passes
from elastic.step.gradient_reduction import Reducer

STEPS: Final = 4
SHARES: Final = (3, 0, 2)  # samples of a step by rank


class Pictures(nn.Module):
    """A convolution, whose weight has another order of dimensions in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, _: int) -> torch.Tensor:
        x = x.reshape(len(x), 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.head(torch.tanh(self.conv(x)).mean(dim=(2, 3)))


def channels_last() -> nn.Module:
    made: nn.Module = Pictures().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not next(made.parameters()).is_contiguous()
    return made


class Transposed(nn.Module):
    """Parameters that are views of others, dense and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 48).t() / 7)
        self.gaps = nn.Parameter(torch.randn(5, 10)[:, ::2] / 3)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, _: int) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.turned @ self.gaps))


class Layers(nn.Module):
    """Layers of different types, one of which may be left out of a step."""

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(48, 6)
        self.second = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)
        if tied:
            self.other.weight = self.second.weight
        if frozen:
            self.second.requires_grad_(requires_grad=False)

    def blocks(self, _: int) -> list[nn.Module]:
        return [self.second, self.other]

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        for block in self.blocks(step):
            weight = next(block.parameters())
            x = torch.tanh(self.through(block, x.to(weight.dtype)))
        return self.head(x.to(self.head.weight.dtype))

    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(x)


class Branching(Layers):
    """A sample's sign decides about its way, so ranks use different parameters."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden, up = torch.tanh(self.first(x)), x[:, 0] > 0
        out = torch.zeros_like(hidden)
        if up.any():
            out[up] = self.second(hidden[up])
        if not up.all():
            out[~up] = self.other(hidden[~up])
        return self.head(out)


class Changing(Layers):
    def blocks(self, step: int) -> list[nn.Module]:
        return [self.second] if step % 2 else [self.other]


class Reentrant(Layers):
    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=True)


class NonReentrant(Layers):
    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)


def mixed() -> nn.Module:
    made = Layers()
    made.second.to(torch.bfloat16)
    made.other.to(torch.float16)
    return made


def compiled() -> nn.Module:
    return torch.compile(Layers(), backend="aot_eager")


NETS: Final[dict[str, Callable[[], nn.Module]]] = {
    "channels_last": channels_last,
    "transposed": Transposed,
    "tied": lambda: Layers(tied=True),
    "frozen": lambda: Layers(frozen=True),
    "unused parameters that change": Changing,
    "mixed types": mixed,
    "reentrant checkpoints": Reentrant,
    "checkpoints without": NonReentrant,
    "compiled": compiled,
}
NARROW: Final = {  # by type
    torch.bfloat16: ("channels_last", "tied", "unused parameters that change", "frozen"),
    torch.float16: ("channels_last", "tied", "reentrant checkpoints"),
    torch.float32: ("mixed types", "transposed", "unused parameters that change"),
}


class Together(nn.Module):
    """Models of many kinds side by side: rows of six numbers go in, a number of each comes out."""

    def __init__(self, step: Callable[[], int], *, narrow: bool, leave: Sequence[str] = ()) -> None:
        """Build the models: `narrow` in types of 2 and 4 bytes, and of several; else in float64."""
        super().__init__()
        kinds = NARROW if narrow else {torch.float64: [k for k in NETS if k != "mixed types"]}
        self._step = step
        self.parts = nn.ModuleDict()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        for dtype, names in kinds.items():
            for name in names:
                if name not in leave:
                    part = NETS[name]()
                    self.parts[f"{name} {dtype}".replace(".", " ")] = (
                        part if name == "mixed types" else part.to(dtype)
                    )
        torch.set_default_dtype(before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.repeat(1, 8)
        found = [
            part(rows.to(next(part.parameters()).dtype), self._step()).to(x.dtype)
            for part in self.parts.values()
        ]
        return torch.cat(found, dim=1)


OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-4, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-4, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-4, amsgrad=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
}
IN_TORCH: Final = {("unused parameters that change", "SGD fused")}  # what torch itself cannot do


@dataclass(frozen=True)
class Kind:
    net: str
    optimizer: str
    dtype: torch.dtype

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = Branching() if self.net == "branches" else NETS[self.net]()
        if self.net != "mixed types":
            net = net.to(self.dtype)
        return net, OPTIMIZERS[self.optimizer]([p for p in net.parameters() if p.requires_grad])


@dataclass(frozen=True)
class Way:
    """How steps are taken."""

    bound: int = 100  # samples of a pass
    every: int = 1  # batches of an optimizer's step
    to_none: bool = True
    clip: float = 0.0

    def update(
        self, number: int, trained: Sequence[tuple[nn.Module, torch.optim.Optimizer]]
    ) -> None:
        for net, optimizer in trained if number % self.every == 0 else ():
            if self.clip:
                nn.utils.clip_grad_norm_(net.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.to_none)


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(sum(SHARES), 48, generator=generator) for _ in range(STEPS)]
    return [(x.to(dtype), x.sum(dim=1, keepdim=True).sin().to(dtype)) for x in whole]


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return nn.functional.mse_loss(net(x, step), y)


def _chunks() -> list[slice]:
    ends = [sum(SHARES[:rank]) for rank in range(len(SHARES) + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def in_a_group(kind: Kind, way: Way = Way()) -> list[list[torch.Tensor]]:
    ranks = [kind.build() for _ in SHARES]
    reducers = [Reducer(net.parameters(), lambda: None) for net, _ in ranks]
    for step, (x, y) in enumerate(batches(kind.dtype)):
        packed = []
        for (net, _), reducer, part in zip(ranks, reducers, _chunks(), strict=True):
            reducer.active = True
            *earlier, last = passes(part.stop - part.start, way.bound)
            start = part.start
            for count in earlier:
                mine = slice(start, start + count)
                loss_of(net, x[mine], y[mine], step).backward()  # type: ignore[no-untyped-call]
                reducer.accumulate(count / len(x))
                start += count
            mine = slice(start, start + last) if last else slice(0, 2)
            loss_of(net, x[mine], y[mine], step).backward()  # type: ignore[no-untyped-call]
            packed.append(reducer.pack(last / len(x), 1))
        total = torch.stack([bucket for bucket, _ in packed]).sum(dim=0)
        for reducer, (bucket, tail) in zip(reducers, packed, strict=True):
            bucket.copy_(total)
            reducer.unpack([count > 0 for count in tail.tolist()[1:]])
        way.update(step + 1, ranks)
    for reducer in reducers:
        reducer.close()
    return [[p.detach() for p in net.parameters()] for net, _ in ranks]


def alone(kind: Kind, way: Way = Way(), *, chunked: bool = False) -> list[torch.Tensor]:
    """Return the parameters of one process that takes whole batches, or each batch in chunks."""
    net, optimizer = kind.build()
    for step, (x, y) in enumerate(batches(kind.dtype)):
        if chunked:
            _chunked_backward(net, x, y, step)
        else:
            loss_of(net, x, y, step).backward()  # type: ignore[no-untyped-call]
        way.update(step + 1, [(net, optimizer)])
    return [parameter.detach() for parameter in net.parameters()]


def _chunked_backward(net: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    trained = [p for p in net.parameters() if p.requires_grad]
    wide = torch.promote_types(x.dtype, torch.float32)
    sums: list[torch.Tensor | None] = [None] * len(trained)
    for part in _chunks():
        count = part.stop - part.start
        if not count:
            continue
        loss_of(net, x[part], y[part], step).backward()  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(trained):
            if parameter.grad is not None:
                own = parameter.grad.to(wide) * (count / len(x))
                known = sums[index]
                sums[index] = own if known is None else known + own
            parameter.grad = None
    for parameter, gradient in zip(trained, sums, strict=True):
        if gradient is not None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def furthest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference; NaN if one is NaN."""
    apart = [(a.double() - b.double()).abs().max() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(apart).max())
