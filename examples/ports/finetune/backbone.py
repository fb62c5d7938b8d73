"""A backbone that has learnt the digits 0 to 4, and the images that it has not seen: 5 to 9."""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

FEATURES = 256
KNOWN = 5  # classes that the backbone is made with


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution that keeps the image's size, batch normalisation, ReLU."""
    kernel = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs), nn.ReLU())


class Backbone(nn.Sequential):
    """Maps images (N, 1, 8, 8) to features (N, 256)."""

    def __init__(self) -> None:
        """Build it with its initial weights."""
        stem = nn.Sequential(convolution(1, 32), convolution(32, 32), nn.MaxPool2d(2))
        top = nn.Sequential(convolution(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        super().__init__(stem, top)


class Classifier(nn.Module):
    """A head on a backbone whose first stage stays as it is, its running statistics included."""

    def __init__(self, backbone: Backbone) -> None:
        """Put a new head on `backbone`."""
        super().__init__()
        self.backbone = backbone
        self.backbone[0].requires_grad_(requires_grad=False)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(FEATURES, KNOWN))

    def train(self, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - torch's signature
        """Set the mode of all parts but the frozen first stage."""
        super().train(mode)
        self.backbone[0].eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to scores (N, 5) of the digits 5 to 9."""
        return self.head(self.backbone(images))


def load_images(*, known: bool) -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8) in [-1, 1] and labels from 0 to 4: to train on, and to test on.

    Args:
        known: the digits 0 to 4; else 5 to 9, which are labelled 0 to 4 too.
    """
    pixels, labels = load_digits(return_X_y=True)
    chosen = (labels < KNOWN) == known
    images = torch.tensor(pixels[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    targets = torch.tensor(labels[chosen] % KNOWN)
    split = train_test_split(images, targets, stratify=targets, test_size=0.4, random_state=0)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def pretrained(path: Path) -> Backbone:
    """The backbone, from `path` if it is there already; else it is trained and kept there."""
    backbone = Backbone()
    if not path.exists():
        outside = torch.get_rng_state()
        torch.manual_seed(0)
        backbone = trained()
        torch.set_rng_state(outside)
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(backbone.state_dict(), mine)
        mine.replace(path)
    backbone.load_state_dict(torch.load(path, weights_only=True))
    return backbone


def trained(epochs: int = 6) -> Backbone:
    """The first phase: a few epochs on the digits 0 to 4."""
    data, _ = load_images(known=True)
    backbone, head = Backbone(), nn.Linear(FEATURES, KNOWN)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data)).split(32):
            images, labels = data[batch]
            optimizer.zero_grad()
            cross_entropy(head(backbone(images)), labels).backward()
            optimizer.step()
    return backbone
