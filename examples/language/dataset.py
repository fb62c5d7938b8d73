"""CPython's own help texts (`pydoc_data.topics`) as bytes, cut into windows."""

import re
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def read_text() -> str:
    """Return all help topics; a paragraph that several topics share is kept once.

    The topics quote one another: without this, much of the held-out text would also be trained on.
    """
    paragraphs = re.split(r"\n{2,}", "\n\n".join(topics[name] for name in sorted(topics)))
    return "\n\n".join(dict.fromkeys(paragraphs))


def windows(text: Tensor, context: int) -> TensorDataset:
    """Cut bytes (T,) into inputs and targets, both (N, context); targets are one byte ahead."""
    count = (len(text) - 1) // context
    inputs = text[: count * context].reshape(count, context)
    targets = text[1 : count * context + 1].reshape(count, context)
    return TensorDataset(inputs, targets)


def load_split(context: int, held_out: float = 0.1) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, held out) windows; the held-out text is the last `held_out` of the whole."""
    text = torch.tensor(list(read_text().encode()))
    cut = round(len(text) * (1 - held_out))
    return windows(text[:cut], context), windows(text[cut:], context)
