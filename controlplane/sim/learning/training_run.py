"""Training loop of learned policies: from the first iteration, or a saved state, to a model file.

torch is imported when the first trainer is made.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from controlplane.policy.learned.model_file import ModelCard, encode_model
from controlplane.sim.analysis.plot_style import COLOURS, new_figure, save, tidy
from controlplane.sim.cluster import TrainingError
from controlplane.sim.models.recording import write_whole
from schemas.errors import install_hint

if TYPE_CHECKING:
    from controlplane.sim.learning.actor_critic import ActorCriticTrainer

Row = dict[str, float | str]  # values of one iteration; NaN: not measured
DOTS: Final = 40  # lines with at most this number of points have markers


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, one line per iteration, numbered from 1; NaN is an empty cell."""
    columns = list(rows[0]) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("iteration", *columns))
    for place, row in enumerate(rows, 1):
        writer.writerow((place, *(_cell(row[column]) for column in columns)))
    return text.getvalue()


def draw_curve(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw each numeric column over the iterations in its own panel.

    A text column contains the names of phases; lines show where the phase changes.
    """
    first = rows[0] if rows else {}
    columns = [name for name, value in first.items() if not isinstance(value, str)]
    phases = [name for name, value in first.items() if isinstance(value, str)]
    figure = new_figure(7.2, 0.6 + 1.6 * max(1, len(columns)))
    panels = figure.subplots(max(1, len(columns)), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axes, column) in enumerate(zip(panels, columns, strict=False)):
        values = {at: float(row[column]) for at, row in enumerate(rows, 1)}
        seen = {at: value for at, value in values.items() if not math.isnan(value)}
        axes.plot(
            list(seen),
            list(seen.values()),
            color=COLOURS[place % len(COLOURS)],
            linewidth=1.3,
            marker="o" if len(seen) <= DOTS else "",
            markersize=3,
        )
        axes.set_ylabel(column.replace("_", " "), fontsize="small")
        for phase in phases:
            for at in range(1, len(rows)):
                if rows[at][phase] != rows[at - 1][phase]:
                    axes.axvline(at + 0.5, color="#4d4d4d", linewidth=0.8, linestyle=":")
        tidy(axes)
    panels[-1].set_xlabel("iteration")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"


SAVE_S: Final = 30.0  # time between two saved states
Report = Callable[[int, int, Row], None]  # iterations done, total iterations, row of the curve


@dataclass(frozen=True, slots=True)
class Order:
    """The request for a training: policy, seed and output files."""

    policy: str
    seed: int
    out: Path  # model file; curve and saved state are written to its folder
    command: str  # recorded in the model's card
    cpu_s: float | None = None  # no iteration starts after this CPU time; None: no limit

    @property
    def curve(self) -> Path:
        """Path of the learning curve."""
        return self.out.with_suffix(".csv")

    @property
    def state(self) -> Path:
        """Path of the state that is saved during training."""
        return self.out.with_suffix(".training")


@dataclass(slots=True)
class TrainingStatus:
    """Progress of a training: iterations, CPU seconds, and the learning curve so far."""

    iteration: int = 0  # number of finished iterations
    cpu_s: float = 0.0  # CPU time, including earlier interrupted processes
    rows: list[Row] = field(default_factory=list)


class InterruptedTrainingError(TrainingError):
    """Raised at Ctrl-C; the training can be resumed."""


def train(
    trainer: ActorCriticTrainer, order: Order, *, resume: bool, report: Report
) -> TrainingStatus:
    """Train until the iterations or the CPU seconds are used up, then write the model.

    The state is saved every half minute, and at Ctrl-C, which discards the running iteration and
    raises `InterruptedTrainingError`. The state's file is removed after the model is written.
    `TrainingError` is raised if there is no usable state to resume, if a saved state exists
    although `resume` is False, or if a file cannot be written.
    """
    _check_place(order, resume=resume)
    done = _restored(trainer, order) if resume else TrainingStatus()
    spent_before, began = done.cpu_s, time.process_time()
    kept, kept_at = trainer.state(), time.monotonic()
    try:
        while done.iteration < trainer.iterations:
            if order.cpu_s is not None and done.cpu_s >= order.cpu_s:
                break
            row = trainer.iterate(done.iteration)
            state = trainer.state()
            done.cpu_s = spent_before + time.process_time() - began
            done.rows.append(row)
            done.iteration, kept = done.iteration + 1, state
            report(done.iteration, trainer.iterations, row)
            if time.monotonic() - kept_at > SAVE_S:
                _keep(trainer, order, done, kept)
                kept_at = time.monotonic()
    except KeyboardInterrupt:
        _keep(trainer, order, done, kept)
        problem = f"interrupted after {done.iteration} of {trainer.iterations} iterations"
        raise InterruptedTrainingError(problem, "repeat it with --resume to continue") from None
    _write(trainer, order, done)
    return done


def _check_place(order: Order, *, resume: bool) -> None:
    if not order.out.parent.is_dir():
        raise TrainingError(f"{order.out.parent}: no such folder", "create it, or choose another")
    if order.out.suffix != ".npz":
        raise TrainingError(f"{order.out}: a model's file ends in .npz", "choose such a name")
    if not resume and order.state.exists():
        problem = f"{order.state}: an interrupted training"
        raise TrainingError(problem, "resume it with --resume, or remove the file")


def _restored(trainer: ActorCriticTrainer, order: Order) -> TrainingStatus:
    state = _actor_critic().read_state(order.state)
    for name, value in _settings(trainer, order).items():
        saved = state.get("settings", {}).get(name)
        if saved != value:
            problem = f"{order.state}: a training with {name} {saved}, not {value}"
            raise TrainingError(problem, "use its settings, or remove it and start again")
    trainer.restore(state["trainer"])
    return TrainingStatus(state["iteration"], state["cpu_s"], state["rows"])


def _keep(
    trainer: ActorCriticTrainer, order: Order, done: TrainingStatus, state: dict[str, Any]
) -> None:
    settings, (iteration, cpu_s, rows) = _settings(trainer, order), astuple(done)
    saved = {"settings": settings, "iteration": iteration, "cpu_s": cpu_s, "rows": rows}
    _actor_critic().write_state(order.state, saved | {"trainer": state})


def _settings(trainer: ActorCriticTrainer, order: Order) -> dict[str, Any]:
    return {"policy": order.policy, "seed": order.seed, **trainer.settings}


def _actor_critic() -> Any:
    return importlib.import_module(f"{_PACKAGE}.actor_critic")


def _write(trainer: ActorCriticTrainer, order: Order, done: TrainingStatus) -> None:
    trained = trainer.trained()
    card = ModelCard(
        policy=order.policy,
        features=trained.features,
        shapes={},
        slots=trained.slots,
        cluster=trained.cluster,
        families=trained.families,
        command=order.command,
        seed=order.seed,
        date=datetime.now(tz=UTC).date().isoformat(),
        figures={"iterations": float(done.iteration), "cpu_s": round(done.cpu_s, 1)}
        | trained.figures,
    )
    write_whole(order.curve, as_csv(done.rows), TrainingError)
    write_whole(order.out, encode_model(card, trained.arrays), TrainingError)
    order.state.unlink(missing_ok=True)


_PACKAGE: Final = "controlplane.sim.learning"
ENVIRONMENTS: Final[Mapping[str, str]] = {  # policy -> module:class, called with the seed
    "drl": f"{_PACKAGE}.drl_environment:DrlEnvironment",
    "harmony-drl": f"{_PACKAGE}.harmony_environment:HarmonyEnvironment",
}


def make_trainer(policy: str, seed: int) -> ActorCriticTrainer:
    """Return a new trainer of a policy; raise `TrainingError` without environment or torch."""
    if policy not in ENVIRONMENTS:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise TrainingError(f"{policy!r} is not trained beforehand", f"choose one of {known}")
    try:
        importlib.import_module("torch")
    except ImportError:
        raise TrainingError("training a policy needs torch", install_hint("train")) from None
    module, _, name = ENVIRONMENTS[policy].partition(":")
    environment = getattr(importlib.import_module(module), name)(seed)
    return cast("ActorCriticTrainer", _actor_critic().ActorCriticTrainer(environment, seed))
