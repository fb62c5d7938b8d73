"""Units without a cluster: a trial run of one unit with measurements, and the replay of a trial.

Run as `python -P -m elastic.sweep_worker.alone TASK`. TASK is a JSON file; a task with `visits` is
a replay.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from elastic.sweep_worker.unit import Unit, from_frames, import_functions, size
from elastic.sweep_worker.unit_runner import UnitRunner
from elastic.training_errors import ElasticError, UsageError

USAGE: Final = 2
LONG_UNIT_S: Final = 60.0  # only a shorter unit is run again for a better estimate


def try_unit(task: dict[str, Any]) -> dict[str, Any]:
    """Train the first unit of a configuration, and evaluate the result.

    `task` has `functions` (import paths by field), `partitions`, `seed`, `values` and `metric`. The
    result has `seconds` (of user code), `input_s`, `eval_s`, `state_bytes`, `samples` and
    `metrics`.
    """
    functions = import_functions(task["functions"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = UnitRunner(functions, task["partitions"], device)
    unit = Unit("0", task["values"], 1, 0, task["partitions"], task["seed"], device)
    began = time.perf_counter()
    runner.data(0)
    staged = time.perf_counter()
    state = runner.begin("0", task["values"], task["seed"])
    first = runner.run(unit, state)
    seconds = time.perf_counter() - staged
    if seconds < LONG_UNIT_S:  # in a long unit, the costs before the first step are small
        begin = time.perf_counter()
        runner.run(unit, state)
        seconds = time.perf_counter() - begin
    metrics, eval_s = dict(first.metrics), 0.0
    if functions.eval_fn is not None:
        runner.data(None)
        begin = time.perf_counter()
        result = runner.run(unit, state, evaluate=True)
        eval_s = max(0.0, time.perf_counter() - begin - seconds)
        metrics |= result.scores
    if task["metric"] not in metrics:
        known = ", ".join(sorted(metrics)) or "nothing"
        problem = f"no function returned the metric {task['metric']!r}, only {known}"
        raise UsageError(problem, "return it from eval_fn or train_fn", "metric")
    return {
        "seconds": seconds,
        "input_s": staged - began,
        "eval_s": eval_s,
        "state_bytes": size(first.frames),
        "samples": first.samples,
        "metrics": metrics,
    }


def replay(task: dict[str, Any]) -> dict[str, Any]:
    """Train a trial again, over the same partitions in the same order, and compare digests.

    `task` has `functions` (import paths by field), `partitions`, `seed`, `model` (output file or
    None) and `visits`, each with `config`, `values`, `epoch`, `partition`, `version` and `digest`.
    The result has `equal`, `first_difference` (a visit, or None) and `units`, the number of visits.
    """
    functions = import_functions(task["functions"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = UnitRunner(functions, task["partitions"], device)
    first = task["visits"][0]
    frames = runner.begin(first["config"], first["values"], task["seed"])
    different: dict[str, Any] | None = None
    for visit in task["visits"]:
        where = visit["config"], visit["values"], visit["epoch"], visit["partition"]
        unit = Unit(*where, task["partitions"], task["seed"], device)
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
    """Run the task and print its result as JSON. On an error, print one line and exit with 1."""
    if len(sys.argv) != USAGE:
        sys.stderr.write("usage: python -P -m elastic.sweep_worker.alone TASK\n")
        sys.exit(USAGE)
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as in workers
    if "visits" in task:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        result = replay(task) if "visits" in task else try_unit(task)
    except (ElasticError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        sys.exit(1)
    sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
