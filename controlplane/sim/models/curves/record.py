"""Trains for real and writes down what each training lost, iteration by iteration."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import scipy
import sklearn
from sklearn.exceptions import ConvergenceWarning

from controlplane.sim.models.curves.loss_curves import LossCurve, RecordedCurves
from controlplane.sim.models.curves.trainings import Training, all_trainings
from controlplane.sim.simulator_errors import TraceError

DIGITS: Final = 7  # significant ones that are kept
COMMAND: Final = "ones sim record-curves FILE --seed {seed}"


def record(
    seed: int,
    date: str,
    families: Sequence[str] = (),
    done: Callable[[str], object] = lambda _: None,
) -> RecordedCurves:
    """Train, and keep the losses.

    Args:
        date: of today, ISO 8601.
        families: whose trainings run; none: all.
        done: called with the name of each training that is over.

    Returns:
        Losses to `DIGITS` significant digits; other versions of the libraries give other ones.

    Raises:
        TraceError: if there is no such family.
    """
    trainings = all_trainings()
    known = list(dict.fromkeys(training.family for training in trainings))
    unknown = [name for name in families if name not in known]
    if unknown:
        what = f"nobody trains {unknown[0][:60]!r} here"
        raise TraceError(what, f"choose from {', '.join(known)}", "families")
    curves = []
    for training in trainings:
        if families and training.family not in families:
            continue
        curves.append(_curve(training, seed))
        done(training.name)
    return RecordedCurves(
        command=COMMAND.format(seed=seed),
        date=date,
        seed=seed,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "scikit-learn": sklearn.__version__,
        },
        curves=tuple(curves),
    )


def _curve(training: Training, seed: int) -> LossCurve:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration at a time never does
        losses = training.run(seed)
    return LossCurve(
        name=training.name,
        family=training.family,
        convergence=training.convergence,
        data=training.data,
        settings=training.settings,
        losses=tuple(float(f"{loss:.{DIGITS}g}") for loss in losses),
    )
