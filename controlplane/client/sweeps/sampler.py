"""Configurations suggested by Optuna, from a study rebuilt from the sweep's trials at each call.

Only the sweep has state, so the sampling can continue after any crash. The sampler's seed
combines the sweep's seed and the number of the new trial; with one fixed seed, a rebuilt study
would suggest the same values again.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Final, Literal

from controlplane.sweeps.configurations import conditions_first, stream
from schemas.errors import SettingsError, install_hint
from schemas.sweeps import Parameter, Space, Value
from schemas.wire.client import SweepDetail, TrialInfo

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

SamplerName = Literal["tpe", "gp"]
FAILED_STATES: Final = frozenset({"failed", "deleted"})
COMPLETE_STATES: Final = frozenset({"done", "graduated"})


def suggested(detail: SweepDetail, sampler: SamplerName = "tpe") -> dict[str, Value]:
    """Return values for the next configuration of a sweep, given all its trials.

    The sampler is `tpe` (tree-structured Parzen estimator) or `gp` (Gaussian process; requires
    torch). A `SettingsError` says that Optuna is not installed.
    """
    optuna = _optuna()
    space, search = detail.spec.search.space, detail.spec.search
    direction = "maximize" if search.mode == "max" else "minimize"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns of experimental features
        seed = stream(search.seed, sampler, len(detail.trials)).randrange(2**32)
        study = optuna.create_study(direction=direction, sampler=_sampler(sampler, seed))
        study.add_trials([_study_trial(space, search.metric, one) for one in detail.trials])
        return _suggest_all(space, study.ask())


def _optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415 - slow to import, and optional
    except ImportError:
        raise SettingsError("samplers need Optuna", install_hint("optuna"), "sampler") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _sampler(name: SamplerName, seed: int) -> BaseSampler:
    from optuna import samplers  # noqa: PLC0415

    if name == "gp":
        return samplers.GPSampler(seed=seed)
    return samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True, group=True)


def _study_trial(space: Space, metric: str, trial: TrialInfo) -> FrozenTrial:
    """Convert a trial for Optuna. A stopped trial becomes a pruned one with its scores so far."""
    from optuna.trial import TrialState, create_trial  # noqa: PLC0415

    names = [name for name in space if _fits(space[name], trial.values.get(name))]
    scores = {
        trial.first_epoch + at: value
        for at, one in enumerate(trial.metrics)
        if (value := one.get(metric)) is not None and math.isfinite(value)
    }
    if trial.state in FAILED_STATES or (trial.state in COMPLETE_STATES and not scores):
        state = TrialState.FAIL
    elif trial.state in COMPLETE_STATES:
        state = TrialState.COMPLETE
    else:
        state = TrialState.PRUNED if scores else TrialState.RUNNING
    return create_trial(
        state=state,
        params={name: trial.values[name] for name in names},
        distributions={name: _distribution(space[name]) for name in names},
        intermediate_values=scores,
        value=scores[max(scores)] if state == TrialState.COMPLETE else None,
    )


def _fits(parameter: Parameter, value: Value | None) -> bool:
    if value is None:
        return False
    if parameter.choice is not None:
        return value in parameter.choice
    least, most = parameter.bounds
    return not isinstance(value, str) and least <= value <= most


def _distribution(parameter: Parameter) -> BaseDistribution:
    from optuna import distributions  # noqa: PLC0415

    if parameter.choice is not None:
        return distributions.CategoricalDistribution(parameter.choice)
    least, most = parameter.bounds
    log = parameter.form.startswith("log")
    if parameter.form in {"integer", "log_integer"}:
        return distributions.IntDistribution(int(least), int(most), log=log)
    return distributions.FloatDistribution(least, most, log=log)


def _suggest_all(space: Space, trial: Trial) -> dict[str, Value]:
    """Suggest values in the order of the space; omit parameters with an unmet condition."""
    found: dict[str, Value] = {}
    for name in conditions_first(space):
        parameter = space[name]
        conditions = parameter.when.items()
        if all(other in found and found[other] in allowed for other, allowed in conditions):
            found[name] = _suggest(trial, name, parameter)
    return {name: found[name] for name in space if name in found}


def _suggest(trial: Trial, name: str, parameter: Parameter) -> Value:
    if parameter.choice is not None:
        return trial.suggest_categorical(name, parameter.choice)  # type: ignore[return-value]
    least, most = parameter.bounds
    log = parameter.form.startswith("log")
    if parameter.form in {"integer", "log_integer"}:
        return trial.suggest_int(name, int(least), int(most), log=log)
    return trial.suggest_float(name, least, most, log=log)
