"""Replay of a trial: train it again, alone, and compare digests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

from elastic.sweep_worker.unit import Unit, from_frames, import_functions
from elastic.sweep_worker.unit_runner import UnitRunner
from elastic.training_errors import ElasticError

USAGE: Final = 2


def replay(task: dict[str, Any]) -> dict[str, Any]:
    """Train over the same partitions in the same order.

    `task` has `functions` (paths by field), `partitions`, `seed`, `model` (a file, or None), and
    `visits`: `config`, `values`, `epoch`, `partition`, `version` and `digest` of each.

    Returns:
        `equal`; `first_difference`: the first visit with another state, or None; `units`.

    Raises:
        ElasticError: if a function fails.
        OSError: if the model cannot be written.
    """
    functions = import_functions(task["functions"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = UnitRunner(functions, task["partitions"], device)
    first = task["visits"][0]
    frames = runner.begin(first["config"], first["values"], task["seed"])
    different: dict[str, Any] | None = None
    for visit in task["visits"]:
        unit = Unit(
            visit["config"],
            visit["values"],
            visit["epoch"],
            visit["partition"],
            task["partitions"],
            task["seed"],
            device,
        )
        result = runner.run(unit, frames)
        frames = result.frames
        if different is None and result.digest != visit["digest"]:
            different = {**visit, "found": result.digest}
    if task["model"] is not None:
        torch.save(from_frames(frames)["model"], task["model"])
    return {
        "equal": different is None,
        "first_difference": different,
        "units": len(task["visits"]),
    }


def main() -> None:
    """Run the task; on errors print one line and exit with 1."""
    if len(sys.argv) != USAGE:
        sys.stderr.write("usage: python -P -m elastic.sweep_worker.replay TASK\n")
        sys.exit(USAGE)
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as in workers
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        result = replay(task)
    except (ElasticError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        sys.exit(1)
    sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
