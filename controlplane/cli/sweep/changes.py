"""stop, pause, resume, delete, clone and add: a user's hand on single trials."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_json, print_line
from controlplane.client import BlockingClient
from controlplane.client.spec_overrides import toml_value
from controlplane.client.sweeps.requests import Change
from schemas.errors import BadFieldError, suggestion
from schemas.messages.client import SweepChanged
from schemas.sweeps import Space, Value

VALUES_HELP = "NAME=VALUE of the configuration: lr=0.1"
Values = Annotated[list[str] | None, Parameter(name="--set", help=VALUES_HELP)]
RESTS = "rests after its unit"


def stop(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> int:
    """End TRIAL of sweep JOB; what it reached counts."""
    return _each(job, "stop", (trial, *more), common)


def pause(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> int:
    """Let TRIAL of sweep JOB rest after its unit, until it is resumed."""
    return _each(job, "pause", (trial, *more), common)


def resume(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> int:
    """Let TRIAL of sweep JOB train on."""
    return _each(job, "resume", (trial, *more), common)


def delete(job: JobName, trial: int, /, *more: int, common: Common = COMMON) -> int:
    """End TRIAL of sweep JOB and drop its states."""
    return _each(job, "delete", (trial, *more), common)


def clone(job: JobName, trial: int, /, *, set_: Values = None, common: Common = COMMON) -> int:
    """Add a trial to sweep JOB that goes on from the state of TRIAL, with some values changed."""
    with BlockingClient(common.home) as client:
        space = client.sweep(job).spec.search.space
        values = values_of(set_ or (), space)
        changed = client.change_sweep(job, "add", values=values, parent=trial)
    _say([changed], common, alone=True)
    return Exit.OK


def add(job: JobName, /, *, set_: Values = None, common: Common = COMMON) -> int:
    """Add a configuration to sweep JOB, with all values of its space."""
    with BlockingClient(common.home) as client:
        space = client.sweep(job).spec.search.space
        changed = client.change_sweep(job, "add", values=values_of(set_ or (), space))
    _say([changed], common, alone=True)
    return Exit.OK


def values_of(assignments: Sequence[str], space: Space) -> dict[str, Value]:
    """Values that a user typed, of a space.

    Raises:
        BadFieldError: if one has no such form, or there is no such name.
    """
    found: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            what = f"--set {assignment!r} is no assignment"
            raise BadFieldError(what, "write NAME=VALUE, such as lr=0.1", "set")
        if name not in space:
            hint = suggestion(name, space, f"one of {', '.join(space)}")
            raise BadFieldError(f"--set {name}: the space has no such value", hint, name)
        found[name] = typed(text, name, space)
    return found


def typed(text: str, name: str, space: Space) -> Value:
    """A value as its form has it: a text among choices stays one, a whole number may be real.

    Raises:
        BadFieldError: if it is no text, number or truth value.
    """
    parameter, value = space[name], toml_value(text)
    for one in parameter.choice or ():
        if text == str(one) or (type(one) is type(value) and one == value):
            return one
    if parameter.form in {"uniform", "log_uniform"} and type(value) is int:
        return float(value)
    if not isinstance(value, str | int | float | bool):
        what = f"--set {name}: {text[:60]!r} is no value of a configuration"
        raise BadFieldError(what, "give a text, a number or a truth value", name)
    return value


def _each(job: str, change: Change, trials: Sequence[int], common: Common) -> int:
    done: list[SweepChanged] = []
    try:
        with BlockingClient(common.home) as client:
            for trial in dict.fromkeys(trials):
                done.append(client.change_sweep(job, change, trial))  # noqa: PERF401 - kept if one is refused
    finally:
        _say(done, common, alone=len(trials) == 1, resting=change == "pause")
    return Exit.OK


def _say(
    done: Sequence[SweepChanged], common: Common, *, alone: bool, resting: bool = False
) -> None:
    rows = [{"job": one.job, "trial": one.trial, "state": one.state} for one in done]
    if common.output == "json" and rows:
        print_json(rows[0] if alone else rows)
    for one, row in zip(done, rows, strict=True):
        if common.output == "jsonl":
            print_line(row)
        elif common.output == "quiet":
            sys.stdout.write(f"{one.trial}\n")
        elif common.output == "table":
            said = RESTS if resting and one.state == "training" else one.state
            sys.stdout.write(f"{one.job} trial {one.trial} {said}\n")
