"""Train a recurrent language model whose hidden state lives on from batch to batch."""

import argparse
import math
import re
from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--seed", type=int, default=0)
COLUMNS = 32  # texts that are read side by side
WINDOW = 40  # bytes of each in a batch; gradients end where it begins
BYTES = 256
TRAINED_ON, HELD_OUT = 160_000, 30_000  # bytes


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into columns, and those into windows: sample i goes on where i - COLUMNS ended."""

    def __init__(self, text: Tensor) -> None:
        """Cut `text`, bytes of shape (T,)."""
        self.height = (len(text) - 1) // COLUMNS // WINDOW
        used = self.height * WINDOW * COLUMNS
        self.inputs = text[:used].view(COLUMNS, self.height, WINDOW)
        self.targets = text[1 : used + 1].view(COLUMNS, self.height, WINDOW)

    def __len__(self) -> int:
        """Windows of all columns."""
        return self.height * COLUMNS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (WINDOW,); targets are one byte ahead."""
        row, column = divmod(index, COLUMNS)
        return self.inputs[column, row], self.targets[column, row]


class Reader(nn.Module):
    """An LSTM over bytes."""

    def __init__(self, width: int = 96) -> None:
        """Build embedding, LSTM and output layer."""
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width // 2)
        self.memory = nn.LSTM(width // 2, width, batch_first=True)
        self.output = nn.Linear(width, BYTES)

    def forward(
        self, text: Tensor, hidden: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map bytes (N, T) to scores (N, T, 256) of the next ones; the state behind them."""
        features, hidden = self.memory(self.bytes(text), hidden)
        return self.output(features), hidden


def load_split() -> tuple[Columns, Tensor]:
    """CPython's help texts, repeated paragraphs once: to train on, and bytes to test on."""
    paragraphs = re.split(r"\n{2,}", "\n\n".join(topics[name] for name in sorted(topics)))
    text = torch.tensor(list("\n\n".join(dict.fromkeys(paragraphs)).encode()))
    return Columns(text[:-HELD_OUT][:TRAINED_ON]), text[-HELD_OUT:]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at the rate of the command line."""
    return torch.optim.Adam(parameters, lr=args.lr)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Perplexity on text that is not trained on, read as one column."""
    model.eval()
    text = text.to(device)
    scores, _ = model(text[None, :-1], None)
    model.train()
    return math.exp(cross_entropy(scores[0], text[1:]).item())


args = parser.parse_args()
torch.manual_seed(args.seed)
data, held_out = load_split()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Reader().to(device)
optimizer = adam(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=COLUMNS)
for epoch in range(args.epochs):
    hidden = None
    for inputs, targets in loader:
        optimizer.zero_grad()
        scores, hidden = model(inputs.to(device), hidden)
        hidden = tuple(part.detach() for part in hidden)
        cross_entropy(scores.flatten(0, 1), targets.to(device).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    perplexity = evaluate(model, held_out)
    print(f"epoch {epoch + 1}  perplexity {perplexity:.3f}", flush=True)
