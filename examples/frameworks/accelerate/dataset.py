"""Scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels, split once and for all."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset


def load_split(held_out: float = 0.25) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, held out): images (1, 8, 8) in [-1, 1] and labels, stratified by class."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    targets = torch.tensor(labels)
    train, test = train_test_split(
        torch.arange(len(targets)).numpy(), test_size=held_out, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])
