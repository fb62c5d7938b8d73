"""Train a small transformer that reads scikit-learn's digits row by row, by AdamW."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic import ScalingAgent

LR = 0.001
WIDTH = 32


class RowReader(nn.Module):
    """Eight rows of eight pixels are the words of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(8, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.classify = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits, shape (B, 10).

        Args:
            images: shape (B, 8, 8).
        """
        scores: Tensor = self.classify(self.encoder(self.embed(images) + self.place).mean(dim=1))
        return scores


def main() -> None:
    """Train, and report the held-out accuracy and loss after each epoch."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    agent = ScalingAgent.from_env()
    model, optimizer, loader = agent.load(
        RowReader,
        lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01),
        TensorDataset(train_x, train_y),
        batch_size=32,
        lr=LR,
    )
    for _ in agent.epochs(24):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            said = model(test_x)
        model.train()
        accuracy = (said.argmax(dim=1) == test_y).float().mean().item()
        agent.report(accuracy=accuracy, held_out_loss=cross_entropy(said, test_y).item())


if __name__ == "__main__":
    main()
