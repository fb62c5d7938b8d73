"""The state of a training on disk: whole or not at all, and never unpickled."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import torch

from controlplane.sim.simulator_errors import TrainingError
from controlplane.sim.traces.atomic_file import write_whole

FORMAT: Final = 1


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Keep the state of a training.

    Args:
        state: tensors, numbers, texts, lists and dictionaries.

    Raises:
        TrainingError: if the disk does not take it.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_whole(path, buffer.getvalue(), TrainingError)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` kept.

    Raises:
        TrainingError: if there is none, or it is damaged or of another version.
    """
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        hint = "leave out --resume to begin one"
        raise TrainingError(f"{path}: no training was interrupted here", hint) from None
    except Exception as error:  # noqa: BLE001 - torch raises whatever a damaged file makes it
        what = f"{path}: no whole state of a training ({type(error).__name__})"
        raise TrainingError(what, "remove it, and begin anew without --resume") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        what = f"{path}: a state that this version does not read"
        raise TrainingError(what, "remove it, and begin anew without --resume")
    return state
