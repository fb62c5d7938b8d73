"""Commands of `ones sweep`: submission, changes of trials, and suggested configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from controlplane.cli.output import COMMON, Common, Exit, JobName, print_json, say
from controlplane.cli.submission import Submission, prepare, print_dry_run
from controlplane.cli.submit import Key, Project, Yes, send
from controlplane.cli.sweep import export, preview, tables
from controlplane.client import BlockingClient
from controlplane.client.archive import digest_of, pack, survey
from controlplane.client.client import Change
from controlplane.client.job_file import checked
from controlplane.client.spec_overrides import parsed, toml_value
from controlplane.client.sweeps.runs import read_manifest
from controlplane.client.sweeps.sampler import SamplerName
from controlplane.client.sweeps.sweep import format_values, stated_sweep
from schemas.errors import BadFieldError, suggestion
from schemas.sweeps import MAX_CONFIGURATIONS, Space, Value
from schemas.wire.client import SweepChanged

PARALLEL_HELP = "maximum of trials that train or wait for a slot (default: maximum of slots + 1)"


def sample(
    job: JobName,
    /,
    *,
    trials: Annotated[int, Parameter(help="target number of trials, including existing ones")],
    sampler: Annotated[SamplerName, Parameter(help="Optuna sampler; gp requires torch")] = "tpe",
    parallel: Annotated[int | None, Parameter(help=PARALLEL_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Extend sweep JOB with configurations that Optuna suggests whenever a trial ends."""
    for name, number in (("trials", trials), ("parallel", parallel)):
        if number is not None and not 1 <= number <= MAX_CONFIGURATIONS:
            problem = f"--{name} {number} is outside 1 to {MAX_CONFIGURATIONS}"
            raise BadFieldError(problem, "choose a number within it", name)

    def report(number: int, values: Mapping[str, Value]) -> None:
        if common.output != "json":  # one document, at the end
            row = {"job": job, "trial": number, "values": values}
            line = f"{job} trial {number}: {format_values(values)}"
            say(common, row, line, quiet=[str(number)])
            sys.stdout.flush()

    with BlockingClient(common.home) as client:
        count = client.sweep_run(job).sample(trials, sampler, parallel, report)
    if common.output == "json":
        print_json({"job": job, "trials": count})
    if count < trials:
        sys.stderr.write(f"ones: {job} ended with {count} configurations\n")
        return Exit.JOB_FAILED
    return Exit.OK


VALUES_HELP = "NAME=VALUE of the configuration: lr=0.1"
Values = Annotated[list[str] | None, Parameter(name="--set", help=VALUES_HELP)]
RESTS = "pauses after its unit"


def stop(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> None:
    """Stop TRIAL of sweep JOB, but keep its results."""
    _each(job, "stop", (trial, *more), common)


def pause(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> None:
    """Pause TRIAL of sweep JOB after its current unit."""
    _each(job, "pause", (trial, *more), common)


def resume(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> None:
    """Resume TRIAL of sweep JOB."""
    _each(job, "resume", (trial, *more), common)


def delete(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> None:
    """End TRIAL of sweep JOB and delete its states."""
    _each(job, "delete", (trial, *more), common)


def clone(job: JobName, trial: int, /, *, set_: Values = None, common: Common = COMMON) -> None:
    """Add a trial to sweep JOB that continues from the state of TRIAL, with some values changed."""
    _added(job, set_, common, parent=trial)


def add(job: JobName, /, *, set_: Values = None, common: Common = COMMON) -> None:
    """Add a configuration to sweep JOB; --set must give all values of its space."""
    _added(job, set_, common)


def _added(job: str, set_: Values, common: Common, parent: int | None = None) -> None:
    with BlockingClient(common.home) as client:
        values = values_of(set_ or (), client.sweep(job).spec.search.space)
        changed = client.change_sweep(job, "add", values=values, parent=parent)
    _say([changed], common, alone=True)


def values_of(assignments: Sequence[str], space: Space) -> dict[str, Value]:
    """Parse NAME=VALUE assignments for a space."""
    found: dict[str, Value] = {}
    for name, text in parsed(assignments, "write NAME=VALUE, such as lr=0.1"):
        if name not in space:
            hint = suggestion(name, space, f"one of {', '.join(space)}")
            raise BadFieldError(f"--set {name}: the space has no such value", hint, name)
        found[name] = typed(text, name, space)
    return found


def typed(text: str, name: str, space: Space) -> Value:
    """Convert a value to the type of an equal choice, or to a float if its parameter is real."""
    parameter, value = space[name], toml_value(text)
    for one in parameter.choice or ():
        if text == str(one) or (type(one) is type(value) and one == value):
            return one
    if parameter.form in {"uniform", "log_uniform"} and type(value) is int:
        return float(value)
    if not isinstance(value, str | int | float | bool):
        problem = f"--set {name}: {text[:60]!r} is not a value of a configuration"
        raise BadFieldError(problem, "give a string, a number or a boolean", name)
    return value


def _each(job: str, change: Change, trials: Sequence[int], common: Common) -> None:
    done: list[SweepChanged] = []
    try:
        with BlockingClient(common.home) as client:
            for trial in dict.fromkeys(trials):
                done.append(client.change_sweep(job, change, trial))  # noqa: PERF401 - results are kept if one is refused
    finally:
        _say(done, common, alone=len(trials) == 1, resting=change == "pause")


def _say(
    done: Sequence[SweepChanged], common: Common, *, alone: bool, resting: bool = False
) -> None:
    rows = [{"job": one.job, "trial": one.trial, "state": one.state} for one in done]
    states = [RESTS if resting and one.state == "training" else one.state for one in done]
    lines = [f"{o.job} trial {o.trial} {said}" for o, said in zip(done, states, strict=True)]
    if rows:
        quiet = (str(one.trial) for one in done)
        say(common, rows[0] if alone else rows, *lines, quiet=quiet)


SET_HELP = "KEY=VALUE, overrides the file: space.lr=0.1, searcher.max_epochs=3, slots=[1,4]"
MANIFEST_HELP = "manifest of an earlier sweep: repeats its space, searcher and seed"
WORKDIR_HELP = "with --manifest: folder of its functions (default: the snapshot in the cluster)"
CHANGED_HELP = "with --workdir: accept files that differ from the manifest's"


def submit(
    file: Path | None = None,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", help=SET_HELP)] = None,
    manifest: Annotated[Path | None, Parameter(help=MANIFEST_HELP)] = None,
    workdir: Annotated[Path | None, Parameter(help=WORKDIR_HELP)] = None,
    changed: Annotated[bool, Parameter(negative="", help=CHANGED_HELP)] = False,
    wait: Annotated[
        bool, Parameter(help="wait until the sweep ends; exit 1 and print the reason if it fails")
    ] = False,
    key: Key = None,
    project: Project = "",
    dry_run: Annotated[
        bool, Parameter(help="check the sweep and list its files without submitting")
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> int:
    """Submit the sweep that FILE (TOML) describes, with a snapshot of its working directory."""
    if (file is None) == (manifest is None):
        raise BadFieldError("give either FILE or --manifest", "see `ones sweep submit --help`")
    if file is not None:
        if workdir is not None or changed:
            raise BadFieldError("--workdir and --changed require --manifest", "omit them")
        ready = prepare(file, set_ or ())
        stated_sweep(ready.spec)
    else:
        assert manifest is not None  # noqa: S101 - one of both is given
        if set_:
            raise BadFieldError("--set requires FILE", "a manifest is repeated unchanged", "set")
        ready = from_manifest(manifest, workdir, changed=changed)
    ready = ready._replace(project=project)
    if dry_run:
        print_dry_run([ready], common)
        return Exit.OK
    try:
        return send([ready], key=key, wait=wait, yes=yes, common=common)
    except BadFieldError as error:
        if error.field != "snapshot" or not ready.stored:
            raise
        problem = f"the cluster no longer stores snapshot {ready.stored[:12]}"
        raise BadFieldError(problem, "name a copy of the files with --workdir", "workdir") from None


def from_manifest(file: Path, workdir: Path | None, *, changed: bool) -> Submission:
    """Prepare a sweep from the manifest of an earlier one.

    Without `workdir`, the cluster must still have the snapshot. With `changed`, the files in
    `workdir` may differ from the snapshot.
    """
    found = read_manifest(file)
    if workdir is None:
        if changed:
            raise BadFieldError("--changed requires --workdir", "give --workdir DIR", "changed")
        return Submission(file, found.spec, (), found.snapshot)
    spec = checked(msgspec.structs.replace(found.spec, workdir=str(workdir)), Path.cwd())
    digest = digest_of(pack(Path(spec.workdir)))
    if digest != found.snapshot and not changed:
        other = f"{digest[:12]}, not {found.snapshot[:12]}"
        problem = f"{spec.workdir} differs from the snapshot of {found.job}: {other}"
        hint = "remove added files, or accept the difference with --changed"
        raise BadFieldError(problem, hint, "workdir")
    return Submission(file, spec, survey(Path(spec.workdir)))


sweep = App(name="sweep", help="Train many configurations of one model, and keep the best.")
for command in (
    submit,
    preview.preview,
    tables.ls,
    tables.show,
    tables.best,
    stop,
    pause,
    resume,
    delete,
    clone,
    add,
    sample,
    export.export,
    preview.manifest,
    preview.replay,
):
    sweep.command(command)
TOP = "Show a sweep while it trains, every second until Ctrl-C."
sweep.command(tables.top, help=TOP)
sweep.command(export.plot, help="Draw the learning curves of a sweep into a PNG file.")
