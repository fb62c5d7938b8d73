"""Kinds of models and optimizers that a group has to train as one process does, in one process.

The ranks of a group are replicas here, each with a reducer of its own; their buckets are added up by
hand. What is compared with: one process on whole batches (float64), or one that takes each batch in
the ranks' chunks (rounding control).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
        out: torch.Tensor = self.head(torch.tanh(self.conv(x)).mean(dim=(2, 3)))
        return out


def channels_last() -> nn.Module:
    """The same, as `channels_last` lays it out."""
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
        out: torch.Tensor = self.head(torch.tanh(x @ self.turned @ self.gaps))
        return out


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
        """In the order of a step."""
        return [self.second, self.other]

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        for block in self.blocks(step):
            weight = next(block.parameters())
            x = torch.tanh(self.through(block, x.to(weight.dtype)))
        out: torch.Tensor = self.head(x.to(self.head.weight.dtype))
        return out

    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        """What `block` makes of `x`."""
        return block(x)


class Changing(Layers):
    """Another layer is unused in each step."""

    def blocks(self, step: int) -> list[nn.Module]:
        return [self.second] if step % 2 else [self.other]


class Reentrant(Layers):
    """Blocks are computed again in passes of their own."""

    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=True)


class NonReentrant(Layers):
    """Blocks are computed again by hooks of saved tensors."""

    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)


def mixed() -> nn.Module:
    """Three types in one model."""
    made = Layers()
    made.second.to(torch.bfloat16)
    made.other.to(torch.float16)
    return made


def compiled() -> nn.Module:
    """What `torch.compile` gives."""
    made: Any = torch.compile(Layers(), backend="aot_eager")
    return made  # type: ignore[no-any-return]


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
        """Build them; the same every time.

        Args:
            step: the number of the step that is under way.
            narrow: in types of 2 and 4 bytes, and of several; else in float64.
            leave: these kinds out.
        """
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
    """A model of one type with an optimizer."""

    net: str
    optimizer: str
    dtype: torch.dtype

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same every time."""
        torch.manual_seed(1)
        net = NETS[self.net]()
        if self.net != "mixed types":
            net = net.to(self.dtype)
        return net, OPTIMIZERS[self.optimizer]([p for p in net.parameters() if p.requires_grad])


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches of a run."""
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(sum(SHARES), 48, generator=generator) for _ in range(STEPS)]
    return [(x.to(dtype), x.sum(dim=1, keepdim=True).sin().to(dtype)) for x in whole]


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """A mean over the batch."""
    return nn.functional.mse_loss(net(x, step), y)


def _chunks() -> list[slice]:
    ends = [sum(SHARES[:rank]) for rank in range(len(SHARES) + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def in_a_group(kind: Kind) -> list[list[torch.Tensor]]:
    """The parameters of each rank."""
    ranks = [kind.build() for _ in SHARES]
    reducers = [Reducer(net.parameters(), lambda: None) for net, _ in ranks]
    for step, (x, y) in enumerate(batches(kind.dtype)):
        _reduced_step(ranks, reducers, x, y, step)
    for reducer in reducers:
        reducer.close()
    return [[p.detach() for p in net.parameters()] for net, _ in ranks]


def _reduced_step(
    ranks: Sequence[tuple[nn.Module, torch.optim.Optimizer]],
    reducers: Sequence[Reducer],
    x: torch.Tensor,
    y: torch.Tensor,
    step: int,
) -> None:
    packed = []
    for (net, _), reducer, part in zip(ranks, reducers, _chunks(), strict=True):
        mine = part if part.stop > part.start else slice(0, 2)
        reducer.active = True
        loss_of(net, x[mine], y[mine], step).backward()  # type: ignore[no-untyped-call]
        packed.append(reducer.pack((part.stop - part.start) / len(x), 1))
    total = torch.stack([bucket for bucket, _ in packed]).sum(dim=0)
    for (_, optimizer), reducer, (bucket, tail) in zip(ranks, reducers, packed, strict=True):
        bucket.copy_(total)
        reducer.unpack([count > 0 for count in tail.tolist()[1:]])
        optimizer.step()
        optimizer.zero_grad()


def alone(kind: Kind, *, chunked: bool) -> list[torch.Tensor]:
    """The parameters that one process gets: of whole batches, or of each batch in chunks."""
    net, optimizer = kind.build()
    for step, (x, y) in enumerate(batches(kind.dtype)):
        if chunked:
            _chunked_backward(net, x, y, step)
        else:
            loss_of(net, x, y, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
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
    """The largest difference; not a number if there is one that is not."""
    apart = [(a.double() - b.double()).abs().max() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(apart).max())
