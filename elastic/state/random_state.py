"""State and seeds of the random generators that a script is likely to use.

A job has one seed: the seed in the job file, or else the script's seed, or else 0. A script sets
its seed as it would without this library, with `torch.manual_seed` and similar functions. The
library detects the seed by comparing the generators with their state at its last check.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch

from elastic.collectives.backends import slot_device


def random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, Python, numpy and the slot's device."""
    state = host_random_state()
    if (device := slot_device()).type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def host_random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, Python and numpy, without the slot's device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`; on the CPU, the state of a device is ignored."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "device" in state and (device := slot_device()).type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"])
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415 - only if the script imported it

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002


def seed_by_rank(state: torch.Tensor, rank: int) -> None:
    """Seed the generators from rank 0's torch generator, differently for each rank."""
    digest = hashlib.blake2b(bytes(state.tolist()) + rank.to_bytes(4, "big"), digest_size=8)
    seed_generators(int.from_bytes(digest.digest(), "big") >> 1)


def seed_generators(seed: int) -> None:
    """Seed torch, Python, and numpy if it is imported; 0 <= seed < 2^63."""
    torch.manual_seed(seed)
    seed_host_generators(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the generators of torch, Python and numpy, without devices; 0 <= seed < 2^63."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    seed_numpy(seed)


def seed_numpy(seed: int) -> None:
    """Seed numpy's global generator with the lowest 32 bits of `seed`, if numpy is imported."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


DEFAULT_SEED: Final = 0
MAX_USER_SEED: Final = 2**32  # scripts use smaller seeds; torch's own initial seed has 64 bits
MIN_LIBRARY_SEED: Final = 2**62  # scripts use smaller seeds


class _GeneratorMarks:
    """State of the generators at the library's last check."""

    torch: int | None

    def __init__(self) -> None:
        """Record the state, except a torch seed that the script set before it imported this."""
        self.set()
        if torch.initial_seed() < MAX_USER_SEED:
            self.torch = None

    def set(self) -> None:
        """Record the current state of the generators."""
        self.torch = torch.initial_seed()
        self.python, self.numpy = random.getstate(), _numpy()


def _numpy() -> object:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


_marks: Final = _GeneratorMarks()


def seed_initial_generators(stated: int | None) -> None:
    """Seed a process before a script runs, so that every worker draws the same numbers.

    The seeds follow from the job file's seed, but no script would choose them.
    """
    seed = DEFAULT_SEED if stated is None else stated
    torch.default_generator.manual_seed(MIN_LIBRARY_SEED + seed % MIN_LIBRARY_SEED)
    random.seed(MIN_LIBRARY_SEED + seed % MIN_LIBRARY_SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed % MAX_USER_SEED, 1])
    _marks.set()


class JobSeed:
    """Seed of the job, as this worker knows it; `stated` is the seed in the job file."""

    def __init__(self, stated: int | None) -> None:
        self._stated = stated
        self.value = DEFAULT_SEED if stated is None else stated

    def begin(self, given: int | None) -> int | None:
        """Choose the seed and seed the generators. `given` is the seed that the script passed.

        If the script's seed is used, generators that the script seeded keep their state. Returns
        the script's seed if the job file overrides it, else None.
        """
        found = _script_seed() if given is None else given
        explicit = given if self._stated is None else self._stated
        if explicit is not None:
            self.value = explicit
            seed_generators(explicit)
        else:
            self.value = DEFAULT_SEED if found is None else found
            if found is None:
                torch.manual_seed(self.value)
            if random.getstate() == _marks.python:
                random.seed(self.value)
            if _numpy() == _marks.numpy:
                seed_numpy(self.value)
        _marks.set()
        return found if found != self.value else None

    def follow(self) -> int | None:
        """If the script seeded torch after the last check, call `begin` and return its result."""
        return None if _script_seed() is None else self.begin(None)


def _script_seed() -> int | None:
    """Return the seed that the script gave torch since the last check, or None."""
    seed = torch.initial_seed()
    return None if seed == _marks.torch else seed
