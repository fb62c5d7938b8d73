"""`ones sweep preview`, `manifest` and `replay`: estimate, record and repeat a sweep."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, JobName, print_data, say
from controlplane.cli.progress import progress
from controlplane.client import BlockingClient
from controlplane.client.formats import byte_count, span
from controlplane.client.interpreters import NoTorchError, run_module
from controlplane.client.job_file import load_job
from controlplane.client.sweeps.preview import Preview, Range
from controlplane.client.sweeps.preview import preview as previewed
from controlplane.client.sweeps.runs import Manifest, read_manifest, write_manifest
from controlplane.client.sweeps.sweep import describe_parameter, stated_sweep
from controlplane.sweeps.search import first_trials
from schemas.errors import BadFieldError
from schemas.jobs import JobSpec

THREADS: Final = (
    "results depend on the number of threads: set OMP_NUM_THREADS to that of the workers, from "
    "[env] or else usable cores / slots of their node"
)
REPLAY_TIMEOUT_S: Final = 24 * 3600.0
PYTHON_HELP = "interpreter that has torch (default: the sweep's, else this one)"


def manifest(job: JobName, file: Path | None = None, /, *, common: Common = COMMON) -> None:
    """Write the manifest of sweep JOB into FILE (JSON): spec, digest of its snapshot, ledger."""
    with BlockingClient(common.home) as client:
        found = client.sweep_run(job).manifest()
    if file is None:
        said = msgspec.json.decode(msgspec.json.encode(found))  # NaN becomes null
        print_data(said, common.output)
        return
    write_manifest(found, file)
    row = {"job": job, "file": str(file), "trials": len(found.trials), "units": len(found.units)}
    say(common, row, f"{file}: {len(found.trials)} trials, {len(found.units)} units")


def replay(
    file: Path,
    /,
    *,
    trial: Annotated[int, Parameter(help="number of the trial")],
    workdir: Annotated[
        Path | None, Parameter(help="working directory (default: that of the manifest)")
    ] = None,
    model: Annotated[Path | None, Parameter(help="file for the model")] = None,
    python: Annotated[str | None, Parameter(help=PYTHON_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Train one trial of a manifest again on this host, and compare the digest of every unit."""
    found = read_manifest(file)
    visits = found.visits(trial)
    if not visits:
        raise BadFieldError(f"trial {trial} finished no unit", "name another trial", "trial")
    folder = Path(found.spec.workdir) if workdir is None else workdir
    if not folder.is_dir():
        problem = f"{folder}, the working directory of {file}, does not exist"
        raise BadFieldError(problem, "name it with --workdir", "workdir")
    task = replay_task(found, trial) | {"model": None if model is None else str(model.resolve())}
    result = train_here(found.spec, task, folder, python)
    equal = result["equal"]
    row = {"job": found.job, "trial": trial, **result}
    if equal:
        text = f"trial {trial}: all {len(visits)} units equal, bit by bit"
    else:
        at = result["first_difference"]
        unit = f"(epoch {at['epoch']}, partition {at['partition']})"
        text = f"trial {trial}: differs from unit {at['version']} on {unit}"
    say(common, row, text)
    if not equal and common.output == "table":
        sys.stderr.write(f"ones: {THREADS}\n")
    return Exit.OK if equal else Exit.JOB_FAILED


def replay_task(found: Manifest, trial: int) -> dict[str, Any]:
    """Return the task that makes `elastic.sweep_worker.alone` repeat a trial."""
    sweep = found.spec.stated_sweep
    assert sweep is not None  # noqa: S101 - checked by read_manifest
    values = {one.number: one.values for one in found.trials}
    return {
        "functions": sweep.functions,
        "partitions": sweep.partitions,
        "seed": sweep.search.seed,
        "visits": [
            {
                "config": str(unit.values_of),
                "values": values[unit.values_of],
                "epoch": unit.epoch,
                "partition": unit.partition,
                "version": unit.version,
                "digest": unit.digest,
            }
            for unit in found.visits(trial)
        ],
    }


def train_here(
    spec: JobSpec, task: dict[str, Any], workdir: Path, python: str | None
) -> dict[str, Any]:
    """Run `elastic.sweep_worker.alone` with a task in `workdir`; return its result."""
    pythons = [python] if python else [*filter(None, [spec.python]), sys.executable]
    lacks = ("No module named 'torch'", "No module named 'elastic'")
    with tempfile.TemporaryDirectory(prefix="ones-") as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task), encoding="utf-8")
        said = run_module(
            pythons,
            ("elastic.sweep_worker.alone", str(file)),
            lacks=lacks,
            failure="training on this host fails",
            field="workdir",
            cwd=workdir,
            timeout=REPLAY_TIMEOUT_S,
            env={"OMP_NUM_THREADS": "1", **os.environ, **spec.env},
        )
    return dict(json.loads(said.strip().splitlines()[-1]))


SHORT_UNIT_S: Final = 2.0  # shorter units make the time between units significant
SET_HELP = "KEY=VALUE, overrides the file: space.lr=0.1, searcher.max_epochs=3"
UNIT_HELP = "seconds per unit (default: measured on this host, if torch is installed)"
STATE_HELP = "megabytes of a state, with the optimizer's (default: measured with the unit)"
MEASURE_HELP = "train a unit on this host to measure its duration and the size of a state"


def preview(
    file: Path,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", help=SET_HELP)] = None,
    unit_s: Annotated[float | None, Parameter(help=UNIT_HELP)] = None,
    state_mb: Annotated[float | None, Parameter(help=STATE_HELP)] = None,
    measure: Annotated[bool, Parameter(help=MEASURE_HELP, negative="--no-measure")] = True,
    python: Annotated[str | None, Parameter(help="interpreter for the measured unit")] = None,
    common: Common = COMMON,
) -> None:
    """Estimate the sweep in FILE: configurations, units, hours, and bytes moved between workers."""
    spec = load_job(file, set_ or ())
    sweep = stated_sweep(spec)
    for name, given in (("unit-s", unit_s), ("state-mb", state_mb)):
        if given is not None and not 0 < given < 1e9:  # noqa: PLR2004 - a bound against typing errors
            problem = f"--{name} {given:g} is out of range"
            raise BadFieldError(problem, "give a number above 0", name)
    state_bytes = None if state_mb is None else round(state_mb * 1e6)
    measured: dict[str, Any] | None = None
    note = ""
    if measure and (unit_s is None or state_bytes is None):
        what = "training a unit on this host (--no-measure skips this)"
        try:
            with progress(common.output, what):
                measured = measured_unit(spec, python)
        except NoTorchError as error:
            note = f"not measured: {error.message}"
    if measured is not None:
        unit_s = measured["seconds"] if unit_s is None else unit_s
        state_bytes = measured["state_bytes"] if state_bytes is None else state_bytes
    found = previewed(sweep, spec.slots, unit_s, state_bytes)
    lines = preview_lines(spec, found, measured)
    say(common, {**msgspec.to_builtins(found), "measured": measured}, *lines, quiet=lines)
    if note and not common.in_json:
        sys.stderr.write(f"ones: {note}; give --unit-s and --state-mb, or --python\n")


def measured_unit(spec: JobSpec, python: str | None) -> dict[str, Any]:
    """Train the first configuration on the first partition, on this host.

    Returns `seconds`, `input_s`, `eval_s`, `state_bytes`, `samples`, and `metrics`.
    """
    sweep = stated_sweep(spec)
    first = first_trials(sweep.search)[0]
    task = {
        "functions": sweep.functions,
        "partitions": sweep.partitions,
        "seed": sweep.search.seed,
        "values": dict(first.values),  # type: ignore[union-attr] # what is first is added
        "metric": sweep.search.metric,
    }
    return train_here(spec, task, Path(spec.workdir), python)


def preview_lines(
    spec: JobSpec, found: Preview, measured: dict[str, Any] | None = None
) -> list[str]:
    """Return a preview as lines for people; `measured` describes a unit trained on this host."""
    sweep = stated_sweep(spec)
    kind = type(sweep.search.searcher).__struct_config__.tag
    lines = [f"{spec.name}: {kind}, {sweep.search.mode} of {sweep.search.metric}"]
    lines += [f"  {name:15s} {describe_parameter(one)}" for name, one in sweep.search.space.items()]
    added = "" if found.trials.most == found.configurations else ", with copies "
    trials = f"{found.configurations}{added and added + _range(found.trials)}"
    saved = 1 - found.units.mean / found.units_to_the_end
    less = f", {saved:.0%} less than all to the end" if saved > 0.005 else ""  # noqa: PLR2004
    per = f"{sweep.partitions} partition{'s' * (sweep.partitions != 1)}"
    lines += [
        f"  {'configurations':15s} {trials}",
        f"  {'epochs':15s} {_range(found.epochs)} in all, at most {sweep.search.epochs} each",
        f"  {'units':15s} {_range(found.units)} over {per}{less}",
    ]
    if measured is not None:
        lines.append(
            f"  {'a unit':15s} {measured['seconds']:.3g} s here, {measured['samples']} samples; "
            f"data {measured['input_s']:.3g} s, evaluation {measured['eval_s']:.3g} s"
        )
    elif found.unit_s is not None:
        lines.append(f"  {'a unit':15s} {found.unit_s:.3g} s")
    for one in found.slots:
        slots = f"{one.slots} slot{'s' * (one.slots != 1)}"
        busy = f", {one.busy:.0%} of the slots' time trains" if one.busy < 0.995 else ""  # noqa: PLR2004
        lines.append(f"  {'on ' + slots:15s} about {span(one.hours * 3600)}{busy}")
    if found.state_bytes is not None and found.hop_bytes is not None:
        moved = byte_count(round(found.hop_bytes))
        hops = f"{byte_count(found.state_bytes)} a state, at most {moved} in all"
        lines.append(f"  {'hops':15s} {hops}")
    if found.unit_s is not None and found.unit_s < SHORT_UNIT_S and sweep.partitions > 1:
        advice = "fewer partitions make longer units, and fewer hops"
        lines.append(f"  {'note':15s} units are shorter than {SHORT_UNIT_S:g} s: {advice}")
    if found.useful_slots < spec.slots[1]:
        lines.append(f"  {'note':15s} no more than {found.useful_slots} slots can be busy at once")
    return lines


def _range(found: Range) -> str:
    if found.least == found.most:
        return f"{found.mean:.0f}"
    return f"about {found.mean:.0f} ({found.least:.0f} to {found.most:.0f})"
