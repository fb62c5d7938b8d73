"""The network, so that `plain.py` and `train.py` differ only in how they train it."""

import torch
from torch import Tensor, nn


class DigitsTransformer(nn.Module):
    """An encoder over the 16 patches of 2 x 2 pixels of an image, then a linear classifier."""

    def __init__(self, width: int = 48, layers: int = 2, classes: int = 10) -> None:
        """Build `layers` blocks that are `width` wide."""
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.classifier = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to class scores (N, classes)."""
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.classifier(self.blocks(patches).mean(dim=1))
