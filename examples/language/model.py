"""A decoder-only transformer over bytes; `plain.py` and `train.py` share it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

BYTES = 256


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        """Build projections for `heads` heads of `width // heads` features."""
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Mix features (N, T, width) over the positions up to each one."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project_in(features).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        """Build a block that maps `width` features to as many."""
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.GELU(),
            nn.Linear(3 * width, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Refine features (N, T, width)."""
        features = features + self.attention(features)
        return features + self.perceptron(features)


class ByteTransformer(nn.Module):
    """Predicts each next byte from at most `context` bytes before it."""

    def __init__(self, context: int, width: int = 48, heads: int = 2, depth: int = 2) -> None:
        """Build `depth` blocks between the embeddings and the output layer."""
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (N, T) to scores of the next byte, shape (N, T, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        features = self.bytes(text) + self.positions(positions)
        return self.output(self.blocks(features))
