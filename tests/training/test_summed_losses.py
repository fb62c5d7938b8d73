"""Losses that are sums over the batch are recognised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.checkpoint import checkpoint

from elastic.usage_checks import SumCertainty, sum_certainty

SAMPLES: Final = 8
SCALE: Final = 2.0**16


class Batch:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.x = torch.randn(SAMPLES, 6)
        self.out = self.net(self.x)
        self.log = self.out.log_softmax(dim=1)
        self.y = torch.randint(0, 4, (SAMPLES,))
        self.t = torch.rand(SAMPLES, 4)
        self.w = torch.rand(SAMPLES)
        self.weight = self.net[0].weight
        self.n = SAMPLES
        self.images = torch.randn(SAMPLES, 3, 5, 5)
        self.tokens = torch.randn(SAMPLES, 3, 6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def penalty(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.net.parameters()]).sum()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out)
        return out.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * 2 * out / out.numel()


Loss = Callable[[Batch], torch.Tensor]

SUMS: Final[dict[str, Loss]] = {
    "mse": lambda b: F.mse_loss(b.out, b.t, reduction="sum"),
    "mse as a module": lambda b: nn.MSELoss(reduction="sum")(b.out, b.t),
    "cross entropy": lambda b: F.cross_entropy(b.out, b.y, reduction="sum"),
    "label smoothing": lambda b: F.cross_entropy(b.out, b.y, reduction="sum", label_smoothing=0.1),
    "nll": lambda b: F.nll_loss(b.log, b.y, reduction="sum"),
    "nll of images": lambda b: F.cross_entropy(
        nn.Conv2d(3, 4, 1)(b.images), torch.zeros(SAMPLES, 5, 5).long(), reduction="sum"
    ),
    "binary": lambda b: F.binary_cross_entropy(b.out.sigmoid(), b.t, reduction="sum"),
    "binary of logits": lambda b: F.binary_cross_entropy_with_logits(b.out, b.t, reduction="sum"),
    "smooth l1": lambda b: F.smooth_l1_loss(b.out, b.t, reduction="sum"),
    "huber": lambda b: F.huber_loss(b.out, b.t, reduction="sum"),
    "soft margin": lambda b: F.soft_margin_loss(b.out, b.t, reduction="sum"),
    "multi margin": lambda b: F.multi_margin_loss(b.out, b.y, reduction="sum"),
    "multilabel margin": lambda b: F.multilabel_margin_loss(b.out, b.t.long(), reduction="sum"),
    "scaled": lambda b: b.scaler.scale(F.mse_loss(b.out, b.t, reduction="sum")),
    "cast": lambda b: F.mse_loss(b.out.bfloat16(), b.t.bfloat16(), reduction="sum").float(),
    "a sum beside a mean": lambda b: F.mse_loss(b.out, b.t) + F.cross_entropy(b.out, b.y, reduction="sum"),
    "a sum and a penalty": lambda b: F.mse_loss(b.out, b.t, reduction="sum") + 1e-3 * b.penalty(),
    "an autoencoder's": lambda b: F.binary_cross_entropy(b.out.sigmoid(), b.t, reduction="sum")
    - 0.5 * (1 + b.out - b.out.exp()).sum(),
    "losses of samples, added": lambda b: F.cross_entropy(b.out, b.y, reduction="none").sum(),
    "losses of values, added": lambda b: F.mse_loss(b.out, b.t, reduction="none").sum(dim=1).sum(),
    "means of samples, added": lambda b: F.mse_loss(b.out, b.t, reduction="none").mean(dim=-1).sum(),
    "tokens": lambda b: F.cross_entropy(
        nn.Linear(6, 4)(b.tokens).view(-1, 4), torch.zeros(24).long(), reduction="sum"
    ),
    "embeddings": lambda b: F.mse_loss(nn.Embedding(9, 4)(b.y), b.t, reduction="sum"),
    "checkpointed": lambda b: F.mse_loss(
        checkpoint(b.net, b.x, use_reentrant=False), b.t, reduction="sum"  # type: ignore[arg-type]
    ),
    "of a compiled model": lambda b: F.mse_loss(
        torch.compile(b.net, backend="aot_eager")(b.x), b.t, reduction="sum"
    ),
}  # fmt: skip
UNCLEAR: Final[dict[str, Loss]] = {
    "l1": lambda b: F.l1_loss(b.out, b.t, reduction="sum"),
    "kl": lambda b: F.kl_div(b.log, b.t, reduction="sum"),
    "class probabilities": lambda b: F.cross_entropy(b.out, b.t, reduction="sum"),
    "by hand": lambda b: (b.out - b.t).pow(2).sum(),
    "by index": lambda b: -b.log[range(SAMPLES), b.y].sum(),
    "weighed": lambda b: (F.cross_entropy(b.out, b.y, reduction="none") * b.w / b.w.sum() * 1.0).sum(),
    "class weights": lambda b: F.cross_entropy(b.out, b.y, torch.rand(4), reduction="sum"),
    "weights of values": lambda b: F.binary_cross_entropy_with_logits(b.out, b.t, (b.w / b.w.sum())[:, None], reduction="sum"),
    "divided before": lambda b: F.nll_loss(b.log / b.n, b.y, reduction="sum"),
    "factors": lambda b: F.mse_loss((nn.Embedding(9, 4)(b.y) * b.out).sum(dim=1), b.w, reduction="sum"),
    "means of the batch": lambda b: F.mse_loss(nn.Linear(4, SAMPLES)(b.out).mean(dim=0), torch.ones(SAMPLES), reduction="sum"),
}  # fmt: skip
RIGHT: Final[dict[str, Loss]] = {
    "mse": lambda b: F.mse_loss(b.out, b.t),
    "cross entropy": lambda b: F.cross_entropy(b.out, b.y),
    "label smoothing": lambda b: F.cross_entropy(b.out, b.y, label_smoothing=0.1),
    "class weights": lambda b: F.cross_entropy(b.out, b.y, torch.rand(4)),
    "scaled": lambda b: b.scaler.scale(F.mse_loss(b.out, b.t)),
    "a sum, divided": lambda b: F.mse_loss(b.out, b.t, reduction="sum") / len(b.x),
    "a sum, multiplied": lambda b: F.mse_loss(b.out, b.t, reduction="sum") * (1 / b.n),
    "a sum, divided and scaled": lambda b: b.scaler.scale(F.mse_loss(b.out, b.t, reduction="sum") / b.n),
    "smoothing, divided": lambda b: F.cross_entropy(b.out, b.y, reduction="sum", label_smoothing=0.1) / b.n,
    "losses, added and divided": lambda b: F.cross_entropy(b.out, b.y, reduction="none").sum() / b.n,
    "losses, divided and added": lambda b: (F.cross_entropy(b.out, b.y, reduction="none") / b.n).sum(),
    "two means": lambda b: F.mse_loss(b.out, b.t) + F.cross_entropy(b.out, b.y),
    "two means, weighed": lambda b: 0.7 * F.mse_loss(b.out, b.t) - 0.3 * b.out.mean(),
    "a weighed sum beside a mean": lambda b: torch.add(
        F.mse_loss(b.out, b.t), F.mse_loss(b.out, b.t, reduction="sum"), alpha=1 / b.n
    ),
    "weights, divided": lambda b: (b.w * F.cross_entropy(b.out, b.y, reduction="none")).sum() / b.w.sum(),
    "means of features, added": lambda b: F.mse_loss(b.out, b.t, reduction="none").mean(dim=0).sum(),
    "batchmean": lambda b: F.kl_div(b.log, b.t, reduction="batchmean"),
    "a penalty": lambda b: F.mse_loss(b.out, b.t) + b.penalty(),
    "near the old weights": lambda b: F.mse_loss(b.out, b.t)
    + F.mse_loss(b.weight, torch.zeros(5, 6), reduction="sum"),
    "orthogonal weights": lambda b: F.mse_loss(b.out, b.t)
    + F.mse_loss(nn.Parameter(torch.rand(SAMPLES, 9)) @ nn.Parameter(torch.rand(9, 4)), b.t, reduction="sum"),
    "a function": lambda b: Own.apply(b.out),  # type: ignore[no-untyped-call]
    "a leaf": lambda b: b.w.sum().requires_grad_(),
    "compiled, where nothing is seen": lambda b: torch.compile(lambda x: (b.net(x) ** 2).sum(), backend="aot_eager")(b.x),
    "a compiled sum, divided inside": lambda b: torch.compile(
        lambda x: F.mse_loss(b.net(x), b.t, reduction="sum") / b.n, backend="aot_eager"
    )(b.x),
}  # fmt: skip


CASES: Final = [
    pytest.param(loss, certainty, id=kind, marks=[pytest.mark.slow] if "compiled" in kind else [])
    for losses, certainty in (
        (SUMS, SumCertainty.CERTAIN),
        (UNCLEAR, SumCertainty.POSSIBLE),
        (RIGHT, SumCertainty.NO),
    )
    for kind, loss in losses.items()
]


@pytest.mark.parametrize(("loss", "certainty"), CASES)
def test_a_sum_over_the_batch_is_recognised(loss: Loss, certainty: SumCertainty) -> None:
    assert sum_certainty(loss(Batch()), SAMPLES, SCALE) is certainty
