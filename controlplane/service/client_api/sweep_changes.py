"""What a user wants of a trial, checked before it becomes an input."""

from __future__ import annotations

from controlplane.core.inputs import SweepChangeRequested
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep
from controlplane.service.client_api.sweep_replies import sweep_of, trial_state
from schemas.errors import BadFieldError
from schemas.messages.client import ChangeSweep, SweepChanged
from schemas.sweeps import MAX_CONFIGURATIONS, SweepSpec, Value, check_values


def known_change(job: Job, request: ChangeSweep, user: str) -> int | None:
    """The trial of a request that was done already; None if it was not.

    Args:
        request: the same key was used before, or not.

    Raises:
        BadFieldError: if the job is no sweep.
    """
    sweep, _ = sweep_of(job)
    return sweep.keys.get(f"{user}/{request.key}") if request.key else None


def changed(job: Job, sweep: JobSweep, number: int) -> SweepChanged:
    """The answer to a request that was done."""
    return SweepChanged(job=job.job, trial=number, state=trial_state(sweep, number))


def checked_change(job: Job, request: ChangeSweep, user: str) -> SweepChangeRequested:
    """A request as an input, if it can be done.

    Returns:
        A new trial that has a parent has the parent's values, too, where it has none of its own.

    Raises:
        BadFieldError: naming the field and the remedy.
    """
    sweep, spec = sweep_of(job)
    if job.ended:
        raise BadFieldError(f"job: {job.job} has {job.phase.value}", "submit it again", "job")
    values = dict(request.values)
    if request.change == "add":
        values = _values_of_new(sweep, spec, request)
    else:
        _check_trial(sweep, request)
    return SweepChangeRequested(
        job=job.job,
        user=user,
        change=request.change,
        trial=None if request.change == "add" else request.trial,
        values=values,
        parent=request.parent if request.change == "add" else None,
        key=request.key,
    )


def _values_of_new(sweep: JobSweep, spec: SweepSpec, request: ChangeSweep) -> dict[str, Value]:
    trials = sweep.engine.state.trials
    if len(trials) >= MAX_CONFIGURATIONS:
        what = f"change: the sweep has {len(trials)} trials, the most that there may be"
        raise BadFieldError(what, "submit another sweep", "change")
    values = dict(request.values)
    if request.parent is not None:
        _check_number(sweep, "parent", request.parent)
        _check_left(sweep, request.parent)
        values = {**trials[request.parent].values, **values}
    check_values(spec.search.space, values)
    return dict(values)


def _check_left(sweep: JobSweep, parent: int) -> None:
    state = sweep.engine.state
    if state.models[parent].whole_epochs >= state.spec.epochs:
        what = f"parent: trial {parent} has trained all {state.spec.epochs} epochs"
        remedy = "nothing is left to train from it: add one without a parent"
        raise BadFieldError(what, remedy, "parent")


def _check_trial(sweep: JobSweep, request: ChangeSweep) -> None:
    if request.trial is None:
        what = f"trial: {request.change} is of one trial"
        raise BadFieldError(what, "name its number", "trial")
    _check_number(sweep, "trial", request.trial)
    trial = sweep.engine.state.trials[request.trial]
    if trial.ended and request.change != "delete":
        what = f"trial: {trial.number} is {trial.ended} already"
        raise BadFieldError(what, "add one with it as `parent` to go on from its state", "trial")
    if request.change == "resume" and trial.number not in sweep.engine.state.paused:
        what = f"trial: {trial.number} is not paused"
        raise BadFieldError(what, "it goes on by itself", "trial")


def _check_number(sweep: JobSweep, field: str, number: int) -> None:
    many = len(sweep.engine.state.trials)
    if not 0 <= number < many:
        what = f"{field}: there is no trial {number}"
        raise BadFieldError(what, f"give one of 0 to {many - 1}", field)
