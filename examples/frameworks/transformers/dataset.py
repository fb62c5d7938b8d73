"""CPython's own help texts (`pydoc_data.topics`) as bytes, in samples as the Trainer wants them."""

import re
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

CONTEXT = 64


class Windows(Dataset[dict[str, Tensor]]):
    """Cuts bytes (T,) into windows (CONTEXT,); the model shifts the labels itself."""

    def __init__(self, text: Tensor) -> None:
        """Cut the text into windows; a shorter remainder is dropped."""
        self.windows = text[: len(text) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)

    def __len__(self) -> int:
        """Windows."""
        return len(self.windows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """Return a window as inputs and labels."""
        return {"input_ids": self.windows[place], "labels": self.windows[place]}


def load_split(held_out: float = 0.1) -> tuple[Windows, Windows]:
    """Return (train, held out); a paragraph that several topics share is kept once."""
    paragraphs = re.split(r"\n{2,}", "\n\n".join(topics[name] for name in sorted(topics)))
    text = torch.tensor(list("\n\n".join(dict.fromkeys(paragraphs)).encode()))
    cut = round(len(text) * (1 - held_out))
    return Windows(text[:cut]), Windows(text[cut:])
