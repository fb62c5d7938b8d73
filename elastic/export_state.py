"""`python -P -m elastic.export_state CHECKPOINT FILE` writes the model's plain `state_dict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import torch

from elastic.state.checkpoint_files import load_checkpoint
from elastic.training_errors import CheckpointError

USAGE: Final = 2


def export_state(checkpoint: Path, target: Path) -> int:
    """Write the model's state out of a checkpoint, whole or not at all.

    Args:
        checkpoint: of a job.
        target: for `torch.load(target, weights_only=True)`; one that is there is replaced.

    Returns:
        How many tensors it has.

    Raises:
        CheckpointError: if `checkpoint` cannot be read.
        OSError: if `target` cannot be written.
    """
    state = load_checkpoint(checkpoint)["model"]
    fresh = target.with_name(f".{target.name}.part")
    try:
        with fresh.open("wb") as file:
            torch.save(state, file)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return len(state)


def main() -> None:
    """Do what the command line says; exit 1 and one line where it cannot be done."""
    if len(sys.argv) != USAGE + 1:
        sys.stderr.write("usage: python -P -m elastic.export_state CHECKPOINT FILE\n")
        sys.exit(USAGE)
    try:
        sys.stdout.write(f"{export_state(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
