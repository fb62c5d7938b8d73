"""Name of a learned policy to its trainer; torch is imported when one is made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, cast

from controlplane.sim.learning.trainer import Trainer
from controlplane.sim.simulator_errors import TrainingError

TRAINERS: Final[Mapping[str, str]] = {  # policy -> module:class, called with the seed
    "drl": "controlplane.sim.learning.drl.trainer:DrlTrainer",
    "harmony-drl": "controlplane.sim.learning.harmony_drl.trainer:HarmonyDrlTrainer",
}


def make_trainer(policy: str, seed: int) -> Trainer:
    """A new trainer of that policy.

    Raises:
        TrainingError: if that policy learns nothing beforehand, or torch is missing.
    """
    if policy not in TRAINERS:
        known = ", ".join(sorted(TRAINERS))
        raise TrainingError(f"{policy!r} is not trained beforehand", f"choose one of {known}")
    try:
        importlib.import_module("torch")
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[train]'"
        raise TrainingError("training a policy needs torch", hint) from None
    module, _, name = TRAINERS[policy].partition(":")
    return cast("Trainer", getattr(importlib.import_module(module), name)(seed))
