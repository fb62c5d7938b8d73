"""Train GloVe word embeddings on CPython's help texts."""

from collections.abc import Iterable

import torch
from dataset import load_pairs
from model import GloVe, weighted_error
from torch import Tensor, nn

from elastic import ScalingAgent

EPOCHS = 32
LR = 0.02
WORDS = 1000


def build_model() -> GloVe:
    """Build the embeddings with their initial values."""
    return GloVe(WORDS)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build Adagrad, which gives rare words larger steps."""
    return torch.optim.Adagrad(parameters, lr=LR, weight_decay=3e-5)


@torch.no_grad()
def evaluate(model: nn.Module, pairs: Tensor, log_counts: Tensor) -> float:
    """Return the weighted error on pairs that are not trained on."""
    device = next(model.parameters()).device
    model.eval()
    error = weighted_error(model(pairs.to(device)), log_counts.to(device)).item()
    model.train()
    return error


def main() -> None:
    """Train, print the held-out error after each epoch, then the neighbours of a few words."""
    torch.manual_seed(0)
    vocabulary, data, held_out = load_pairs(WORDS)
    agent = ScalingAgent.from_env()
    model, optimizer, loader = agent.load(build_model, build_optimizer, data, batch_size=768, lr=LR)
    for epoch in agent.epochs(EPOCHS):
        for pairs, log_counts in loader:
            optimizer.zero_grad()
            weighted_error(model(pairs), log_counts).backward()
            optimizer.step()
        error = evaluate(model, *held_out.tensors)
        print(f"epoch {epoch + 1:2}  error {error:.4f}", flush=True)
        agent.report(error=error)
    for word in ("list", "class", "exception", "float", "keyword", "module"):
        neighbours = model.neighbours(vocabulary.index(word), count=5)
        print(f"{word}: {', '.join(vocabulary[i] for i in neighbours)}")


if __name__ == "__main__":
    main()
