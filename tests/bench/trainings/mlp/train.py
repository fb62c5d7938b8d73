"""Train a perceptron of two hidden layers on scikit-learn's digits, by SGD with momentum."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic import ScalingAgent

LR = 0.05


def main() -> None:
    """Train, and report the held-out accuracy and loss after each epoch."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    agent = ScalingAgent.from_env()
    model, optimizer, loader = agent.load(
        lambda: nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=1e-4),
        TensorDataset(train_x, train_y),
        batch_size=32,
        lr=LR,
    )
    for _ in agent.epochs(20):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            said = model(test_x)
        accuracy = (said.argmax(dim=1) == test_y).float().mean().item()
        agent.report(accuracy=accuracy, held_out_loss=cross_entropy(said, test_y).item())


if __name__ == "__main__":
    main()
