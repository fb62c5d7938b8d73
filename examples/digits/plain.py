"""Train a small convolutional network on scikit-learn's digits."""

from collections.abc import Iterable

import torch
from dataset import load_split
from model import DigitsNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

EPOCHS = 28
LR = 0.01


def build_model() -> nn.Module:
    """Build the network with its initial weights."""
    return DigitsNet()


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build SGD with momentum and a little weight decay."""
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=5e-4)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of digits that are recognised."""
    device = next(model.parameters()).device
    model.eval()
    predicted = model(images.to(device)).argmax(dim=1)
    accuracy = (predicted == labels.to(device)).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    """Train, and print the held-out accuracy after each epoch."""
    torch.manual_seed(0)
    data, held_out = load_split()
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    loader = DataLoader(data, batch_size=64, shuffle=True)
    for epoch in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
        accuracy = evaluate(model, *held_out.tensors)
        print(f"epoch {epoch + 1:2}  accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
