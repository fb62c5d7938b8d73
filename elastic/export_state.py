"""Export of a model's plain `state_dict`: `python -P -m elastic.export_state CHECKPOINT FILE`.

The input is a checkpoint of a job or the state file of a sweep's trial.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch

from elastic.state.checkpoints import load_checkpoint
from elastic.sweep_worker.unit import StateFramesError, from_frames
from elastic.training_errors import CheckpointError
from schemas.host.state_files import MAGIC, DamagedStateError, read_frames

USAGE: Final = 2


def export_state(checkpoint: Path, target: Path) -> int:
    """Write a checkpoint's model state to `target`, atomically; return the number of tensors.

    `checkpoint` is the checkpoint of a job, or the state file of a sweep. `target` is then readable
    by `torch.load(target, weights_only=True)`.
    """
    state = _model_of(checkpoint)
    fresh = target.with_name(f".{target.name}.part")
    try:
        with fresh.open("wb") as file:
            torch.save(state, file)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return len(state)


def _model_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    if begin == MAGIC:
        return dict(from_frames(read_frames(path.read_bytes()))["model"])
    return dict(load_checkpoint(path)["model"])


def main() -> None:
    """Run the command line. On an error, print one line and exit with 1."""
    if len(sys.argv) != USAGE + 1:
        sys.stderr.write("usage: python -P -m elastic.export_state CHECKPOINT FILE\n")
        sys.exit(USAGE)
    try:
        sys.stdout.write(f"{export_state(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
    except (CheckpointError, DamagedStateError, StateFramesError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
