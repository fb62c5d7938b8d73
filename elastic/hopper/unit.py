"""One unit: a configuration's pass over one partition, with randomness of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class Unit:
    """What `train_fn` and `eval_fn` may want to know of what they do.

    Everything random in a unit follows from (seed, config, epoch, partition), never from a worker
    or a time: before user code runs torch's, Python's and numpy's generators begin at `seed`.
    """

    config: str  # of the sweep, such as "7"
    values: Mapping[str, Any]  # of the configuration
    epoch: int  # 1-based
    partition: int  # 0-based; in an evaluation the last one that was visited
    partitions: int
    sweep_seed: int
    device: torch.device

    @property
    def seed(self) -> int:
        """Of this unit, not negative, below 2^63."""
        return keyed_seed(self.sweep_seed, self.config, self.epoch, self.partition)

    def loader(
        self, data: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> DataLoader[Any]:
        """A loader over the partition, in an order that follows from the unit alone.

        Args:
            batch_size: samples a step; partitions of a multiple of it have no short last step.
            shuffle: in another order in each unit.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(data, batch_size, shuffle=shuffle, generator=generator, **options)


def keyed_seed(*key: int | str) -> int:
    """The seed of a key, the same on every machine; not negative, below 2^63.

    Args:
        key: of whom the random numbers are for.
    """
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
