"""The state of every random generator that a script is likely to use."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from elastic.collectives.device_backends import slot_device


def random_state() -> dict[str, Any]:
    """The state of every generator that a script is likely to use."""
    state = host_random_state()
    if (device := slot_device()).type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def host_random_state() -> dict[str, Any]:
    """The same, without the slot's device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since `random_state` gave `state`.

    Args:
        state: of torch, Python, and, where it was in use, numpy and the slot's device; the
            device's is passed over on a host without.
    """
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "device" in state and (device := slot_device()).type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"])
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415 - only where the script used it before

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002


def seed_apart(state: torch.Tensor, rank: int) -> None:
    """Draw random numbers that follow from rank 0's, and differ from rank to rank.

    Args:
        state: of rank 0's torch generator, shape (bytes,).
        rank: of this worker when it started.
    """
    digest = hashlib.blake2b(bytes(state.tolist()) + rank.to_bytes(4, "big"), digest_size=8)
    seed_generators(int.from_bytes(digest.digest(), "big") >> 1)


def seed_generators(seed: int) -> None:
    """Begin all random numbers anew: torch's, Python's, and numpy's where it is in use.

    Args:
        seed: not negative, below 2^63.
    """
    torch.manual_seed(seed)
    seed_host_generators(seed)


def seed_host_generators(seed: int) -> None:
    """The same, without devices.

    Args:
        seed: not negative, below 2^63.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    seed_numpy(seed)


def seed_numpy(seed: int) -> None:
    """Begin the random numbers of numpy's global generator anew, if numpy is in use.

    Args:
        seed: not negative; its lowest 32 bits count.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
