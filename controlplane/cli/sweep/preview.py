"""sweep preview: what a sweep would do and take, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import byte_count, print_data, span
from controlplane.cli.sweep.manifest import functions_of, run_here
from controlplane.client.jobfile import load_job
from controlplane.client.sweeps.preview import Preview, Range
from controlplane.client.sweeps.preview import preview as previewed
from controlplane.client.sweeps.runs import NoTorchError
from controlplane.client.sweeps.sweep import in_words, stated_sweep
from controlplane.sweeps.searchers.search import first_trials
from schemas.errors import BadFieldError
from schemas.jobs import JobSpec

SHORT_S: Final = 2.0  # a unit; what passes between two of them begins to count
SET_HELP = "KEY=VALUE over the file: space.lr=0.1, searcher.max_epochs=3"
UNIT_HELP = "seconds of one unit; default: one is trained here, where there is torch"
STATE_HELP = "megabytes of one state, with the optimizer's; default: measured with the unit"
MEASURE_HELP = "train a unit here to see how long it takes and how large a state is"


def preview(
    file: Path,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", help=SET_HELP)] = None,
    unit_s: Annotated[float | None, Parameter(help=UNIT_HELP)] = None,
    state_mb: Annotated[float | None, Parameter(help=STATE_HELP)] = None,
    measure: Annotated[bool, Parameter(help=MEASURE_HELP, negative="--no-measure")] = True,
    python: Annotated[str | None, Parameter(help="for the unit that is trained here")] = None,
    common: Common = COMMON,
) -> int:
    """Say what the sweep in FILE would do: configurations, units, hours, bytes that hop."""
    spec = load_job(file, set_ or ())
    sweep = stated_sweep(spec)
    for name, given in (("unit-s", unit_s), ("state-mb", state_mb)):
        if given is not None and not 0 < given < 1e9:  # noqa: PLR2004 - a bound against typing errors
            raise BadFieldError(
                f"--{name} {given:g} is out of range", "give a number above 0", name
            )
    state_bytes = None if state_mb is None else round(state_mb * 1e6)
    measured: dict[str, Any] | None = None
    note = ""
    if measure and (unit_s is None or state_bytes is None):
        if common.output == "table" and sys.stderr.isatty():
            sys.stderr.write("a unit is trained here (--no-measure: it is not)\n")
        try:
            measured = measured_unit(spec, python)
        except NoTorchError as error:
            note = f"nothing was measured: {error.message}"
    if measured is not None:
        unit_s = measured["seconds"] if unit_s is None else unit_s
        state_bytes = measured["state_bytes"] if state_bytes is None else state_bytes
    found = previewed(sweep, spec.slots, unit_s, state_bytes)
    if common.output in {"json", "jsonl"}:
        print_data({**msgspec.to_builtins(found), "measured": measured}, common.output)
        return Exit.OK
    for line in preview_lines(spec, found, measured):
        sys.stdout.write(f"{line}\n")
    if note:
        sys.stderr.write(f"ones: {note}; give --unit-s and --state-mb, or --python\n")
    return Exit.OK


def measured_unit(spec: JobSpec, python: str | None) -> dict[str, Any]:
    """Train the first configuration over the first partition, here.

    Args:
        python: interpreter that has torch; None: the sweep's, else this one.

    Returns:
        `seconds`, `input_s`, `eval_s`, `state_bytes`, `samples`, and `metrics`.

    Raises:
        BadFieldError: if a function of the sweep fails.
        NoTorchError: if no interpreter has torch.
    """
    sweep = stated_sweep(spec)
    first = first_trials(sweep.search)[0]
    task = {
        "functions": functions_of(sweep),
        "partitions": sweep.partitions,
        "seed": sweep.search.seed,
        "values": dict(first.values),  # type: ignore[union-attr] # what is first is added
        "metric": sweep.search.metric,
    }
    pythons = [python] if python else [*filter(None, [spec.python]), sys.executable]
    return run_here("elastic.hopper.try_unit", task, Path(spec.workdir), pythons, spec.env)


def preview_lines(
    spec: JobSpec, found: Preview, measured: dict[str, Any] | None = None
) -> list[str]:
    """A preview for people.

    Args:
        measured: of a unit that was trained here.
    """
    sweep = stated_sweep(spec)
    kind = type(sweep.search.searcher).__struct_config__.tag
    lines = [f"{spec.name}: {kind}, {sweep.search.mode} of {sweep.search.metric}"]
    lines += [f"  {name:15s} {in_words(one)}" for name, one in sweep.search.space.items()]
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
        hop = (
            f"{byte_count(found.state_bytes)} a state, at most {byte_count(round(found.hop_bytes))}"
        )
        lines.append(f"  {'hops':15s} {hop} in all")
    if found.unit_s is not None and found.unit_s < SHORT_S and sweep.partitions > 1:
        advice = "fewer partitions make longer units, and fewer hops"
        lines.append(f"  {'note':15s} units are shorter than {SHORT_S:g} s: {advice}")
    if found.useful_slots < spec.slots[1]:
        lines.append(f"  {'note':15s} no more than {found.useful_slots} slots can be busy at once")
    return lines


def _range(found: Range) -> str:
    if found.least == found.most:
        return f"{found.mean:.0f}"
    return f"about {found.mean:.0f} ({found.least:.0f} to {found.most:.0f})"
