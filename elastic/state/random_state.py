"""The state of every random generator that a script is likely to use.

The one seed of a job: the job file's, else the script's own, else 0.

A script says its seed as it would without this library, by `torch.manual_seed` and its kin. That
shows in the generators: what they were when the library looked last, and what they are.
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


DEFAULT: Final = 0
SMALL: Final = 2**32  # torch begins with 64 random bits; what people write is below
APART: Final = 2**62  # from here on are seeds that nobody writes


class _Marks:
    """What the generators were when the library looked last."""

    def __init__(self) -> None:
        """Look now; a small seed is the script's, which gave it before it imported us."""
        self.torch: int | None = None
        self.python: object = None
        self.numpy: object = None
        self.set()
        if torch.initial_seed() < SMALL:
            self.torch = None

    def set(self) -> None:
        """Look now; whatever the generators are is known."""
        self.torch = torch.initial_seed()
        self.python, self.numpy = random.getstate(), _numpy()


def _numpy() -> object:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


_marks: Final = _Marks()


def begin_generators(stated: int | None) -> None:
    """Begin a process in which a script is about to run: every worker draws the same numbers.

    They follow from the job's seed, but each generator's own is none that a script would give it.

    Args:
        stated: the job file's; None: it has none.
    """
    seed = DEFAULT if stated is None else stated
    torch.default_generator.manual_seed(APART + seed % APART)  # a slot's device is not touched yet
    random.seed(APART + seed % APART)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed % SMALL, 1])
    _marks.set()


class JobSeed:
    """Which seed counts, as far as this worker knows; in a group rank 0's is everybody's.

    Args:
        stated: the job file's; None: the script decides.
    """

    def __init__(self, stated: int | None) -> None:
        self._stated = stated
        self.value = DEFAULT if stated is None else stated

    def begin(self, given: int | None) -> int | None:
        """Bring all generators in line; what the script seeded itself stays, if its seed counts.

        Args:
            given: by the script as an argument; None: it may have seeded torch.

        Returns:
            The script's seed, if the job file's wins over it.
        """
        found = _found() if given is None else given
        ruling = given if self._stated is None else self._stated
        if ruling is not None:
            self.value = ruling
            seed_generators(ruling)
        else:
            self.value = DEFAULT if found is None else found
            if found is None:
                torch.manual_seed(self.value)
            if random.getstate() == _marks.python:
                random.seed(self.value)
            if _numpy() == _marks.numpy:
                seed_numpy(self.value)
        _marks.set()
        return found if found != self.value else None

    def follow(self) -> int | None:
        """The same, if the script seeded torch since `begin`; else nothing changes.

        Returns:
            As `begin` does.
        """
        return None if _found() is None else self.begin(None)


def _found() -> int | None:
    """The seed that the script gave torch since the library looked last."""
    seed = torch.initial_seed()
    return None if seed == _marks.torch else seed
