"""manifest and replay: everything that a sweep was, and a trial of it trained again, alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_data
from controlplane.client import BlockingClient
from controlplane.client.sweeps.manifest import Manifest, read_manifest, write_manifest
from controlplane.client.sweeps.runs import NoTorchError
from schemas.errors import BadFieldError

THREADS: Final = (
    "bits depend on the number of threads: set OMP_NUM_THREADS to what the workers had, that of "
    "[env] or else usable cores / slots of their node"
)
REPLAY_S: Final = 24 * 3600.0
PYTHON_HELP = "interpreter that has torch; default: the sweep's, else this one"


def manifest(job: JobName, file: Path | None = None, /, *, common: Common = COMMON) -> int:
    """Write what sweep JOB was into FILE (JSON): its spec, its snapshot's digest and its ledger."""
    with BlockingClient(common.home) as client:
        found = client.sweep_run(job).manifest()
    if file is None:
        said = msgspec.json.decode(msgspec.json.encode(found))  # NaN is null
        print_data(said, common.output)
        return Exit.OK
    write_manifest(found, file)
    row = {"job": job, "file": str(file), "trials": len(found.trials), "units": len(found.units)}
    if common.output in {"json", "jsonl"}:
        print_data(row, common.output)
    elif common.output == "table":
        sys.stdout.write(f"{file}: {len(found.trials)} trials, {len(found.units)} units\n")
    return Exit.OK


def replay(
    file: Path,
    /,
    *,
    trial: Annotated[int, Parameter(help="to train again")],
    workdir: Annotated[Path | None, Parameter(help="default: as the manifest says")] = None,
    model: Annotated[Path | None, Parameter(help="write its model here")] = None,
    python: Annotated[str | None, Parameter(help=PYTHON_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Train one trial of a manifest again, here and alone, and compare the digest of every unit."""
    found = read_manifest(file)
    visits = found.visits(trial)
    if not visits:
        raise BadFieldError(f"trial {trial} finished no unit", "name another", "trial")
    folder = Path(found.spec.workdir) if workdir is None else workdir
    if not folder.is_dir():
        what = f"{folder}, the working directory of {file}, is not here"
        raise BadFieldError(what, "name it with --workdir", "workdir")
    choice = [python] if python else [*filter(None, [found.spec.python]), sys.executable]
    task = replay_task(found, trial) | {"model": None if model is None else str(model.resolve())}
    result = run_here("elastic.hopper.replay", task, folder, choice, found.spec.env)
    equal = result["equal"]
    row = {"job": found.job, "trial": trial, **result}
    if common.output in {"json", "jsonl"}:
        print_data(row, common.output)
    elif common.output == "table":
        if equal:
            sys.stdout.write(f"trial {trial}: all {len(visits)} units equal, bit by bit\n")
        else:
            at = result["first_difference"]
            sys.stdout.write(
                f"trial {trial}: differs from unit {at['version']} on "
                f"(epoch {at['epoch']}, partition {at['partition']})\n"
            )
            sys.stderr.write(f"ones: {THREADS}\n")
    return Exit.OK if equal else Exit.JOB_FAILED


def replay_task(found: Manifest, trial: int) -> dict[str, Any]:
    """What `elastic.hopper.replay` is told."""
    sweep = found.spec.stated_sweep
    assert sweep is not None  # noqa: S101 - read_manifest looked
    values = {one.number: one.values for one in found.trials}
    return {
        "functions": functions_of(sweep),
        "partitions": sweep.partitions,
        "seed": sweep.search.seed,
        "visits": [
            {
                "config": str(unit.by),
                "values": values[unit.by],
                "epoch": unit.epoch,
                "partition": unit.partition,
                "version": unit.version,
                "digest": unit.digest,
            }
            for unit in found.visits(trial)
        ],
    }


def functions_of(sweep: Any) -> dict[str, str]:
    """Paths of a sweep's functions, by field."""
    names = ("input_fn", "model_fn", "train_fn", "eval_fn")
    return {name: path for name in names if (path := getattr(sweep, name)) is not None}


def run_here(
    module: str,
    task: dict[str, Any],
    workdir: Path,
    pythons: list[str],
    env: Mapping[str, str],
) -> dict[str, Any]:
    """Let a module of the training library do something in a working directory.

    Args:
        module: run as `python -P -m MODULE TASK`; prints one JSON document as its last line.
        pythons: interpreters; the first that has torch is taken.

    Raises:
        BadFieldError: if it fails, with the last line that it said.
        NoTorchError: if none has torch.
    """
    with tempfile.TemporaryDirectory(prefix="ones-") as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task), encoding="utf-8")
        for python in pythons:
            command = [python, "-P", "-m", module, str(file)]
            try:
                done = subprocess.run(  # noqa: S603 - an interpreter that the user or the job names
                    command, cwd=workdir, capture_output=True, text=True, check=False,
                    timeout=REPLAY_S, env={"OMP_NUM_THREADS": "1", **os.environ, **env},
                )  # fmt: skip
            except OSError:
                continue
            if done.returncode == 0:
                answer = json.loads(done.stdout.strip().splitlines()[-1])
                return dict(answer)
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            if "No module named 'torch'" not in said and "No module named 'elastic'" not in said:
                raise BadFieldError(f"trained here it fails: {said}", "", "workdir")
    hint = "name one that has torch and this library with --python"
    raise NoTorchError(f"no torch in {' or '.join(pythons)}", hint, "python")
