"""Train a byte-level language model on CPython's help texts."""

import math
from collections.abc import Iterable

import torch
from dataset import load_split
from model import ByteTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elastic import ScalingAgent

EPOCHS = 8
LR = 3e-3
CONTEXT = 64


def build_model() -> nn.Module:
    """Build the transformer with its initial weights."""
    return ByteTransformer(CONTEXT)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build AdamW with the usual settings for transformers."""
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.98), weight_decay=0.1)


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per byte, in nats."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the loss on text that is not trained on."""
    device = next(model.parameters()).device
    model.eval()
    loss = next_byte_loss(model(inputs.to(device)), targets.to(device)).item()
    model.train()
    return loss


def main() -> None:
    """Train, and print the held-out loss and perplexity after each epoch."""
    torch.manual_seed(0)
    data, held_out = load_split(CONTEXT)
    agent = ScalingAgent.from_env()
    model, optimizer, loader = agent.load(build_model, build_optimizer, data, batch_size=32, lr=LR)
    for epoch in agent.epochs(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            next_byte_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = evaluate(model, *held_out.tensors)
        print(f"epoch {epoch + 1}  loss {loss:.4f}  perplexity {math.exp(loss):.3f}", flush=True)
        agent.report(validation_loss=loss, perplexity=math.exp(loss))


if __name__ == "__main__":
    main()
