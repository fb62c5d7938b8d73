"""Training loop of learned policies: from the first iteration, or a saved state, to a model file.

Also the `Trainer` protocol, the registry of trainers, saved states and learning curves. torch is
imported with the first trainer.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch

from controlplane.policy.learned.model_file import ModelCard, encode_model
from controlplane.prediction import FloatArray
from controlplane.sim.analysis.plot_style import COLOURS, new_figure, save, tidy
from controlplane.sim.cluster import TrainingError
from controlplane.sim.models.recording import write_whole

FORMAT: Final = 1


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Save the state of a training: tensors, numbers, texts, lists and dictionaries.

    Raises:
        TrainingError: if the file cannot be written.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_whole(path, buffer.getvalue(), TrainingError)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state that `write_state` saved; nothing is unpickled.

    Raises:
        TrainingError: if the state is missing, damaged or of another version.
    """
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        hint = "leave out --resume to start one"
        raise TrainingError(f"{path}: no training was interrupted here", hint) from None
    except Exception as error:  # noqa: BLE001 - torch raises whatever a damaged file makes it
        problem = f"{path}: damaged state of a training ({type(error).__name__})"
        raise TrainingError(problem, "remove the file, and start again without --resume") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        problem = f"{path}: a state of another version"
        raise TrainingError(problem, "remove the file, and start again without --resume")
    return state


Row = dict[str, float | str]  # of one iteration; NaN: not measured
DOTS: Final = 40  # up to this many points, lines have markers


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, one iteration per line, counted from 1; NaN is an empty cell."""
    columns = list(rows[0]) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("iteration", *columns))
    for place, row in enumerate(rows, 1):
        writer.writerow((place, *(_cell(row[column]) for column in columns)))
    return text.getvalue()


def draw_curve(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw every numeric column over the iterations, one panel each.

    A text column names phases, whose changes are marked.

    Raises:
        ResultsError: if matplotlib is missing, or the file cannot be written.
    """
    first = rows[0] if rows else {}
    columns = [name for name, value in first.items() if not isinstance(value, str)]
    phases = [name for name, value in first.items() if isinstance(value, str)]
    figure = new_figure(7.2, 0.6 + 1.6 * max(1, len(columns)))
    panels = figure.subplots(max(1, len(columns)), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axes, column) in enumerate(zip(panels, columns, strict=False)):
        points = [(at, float(row[column])) for at, row in enumerate(rows, 1)]
        seen = [(at, value) for at, value in points if not math.isnan(value)]
        axes.plot(
            [at for at, _ in seen],
            [value for _, value in seen],
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


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training: the parts of a model's card that only the trainer knows."""

    features: int  # version of the policy's inputs
    slots: tuple[int, int]  # smallest and largest training cluster
    cluster: str  # description of these clusters and their jobs
    figures: dict[str, float]  # achieved results
    arrays: dict[str, FloatArray]
    families: tuple[str, ...] = ()  # of jobs, by class number


class Trainer(Protocol):
    """Trainer of one policy, iteration by iteration.

    Everything that an iteration draws comes from the seed and the iteration's number, so that a
    resumed training ends like an uninterrupted one.
    """

    @property
    def settings(self) -> Mapping[str, float | str]:
        """Hyperparameters; a saved training resumes only with equal ones."""
        ...

    @property
    def iterations(self) -> int:
        """Total number of iterations."""
        ...

    def iterate(self, iteration: int) -> dict[str, float | str]:
        """Run one iteration, possibly for seconds; return a row of the curve, of fixed columns."""
        ...

    def state(self) -> dict[str, Any]:
        """Return a copy of the state: tensors, numbers, texts, lists and dictionaries."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state of `state`, saved under equal settings."""
        ...

    def trained(self) -> Trained:
        """Return the current model."""
        ...


SAVE_S: Final = 30.0  # between saved states
Report = Callable[[int, int, Row], None]  # iterations done, total iterations, row of the curve


@dataclass(frozen=True, slots=True)
class Order:
    """Order of a training: policy, seed and output files."""

    policy: str
    seed: int
    out: Path  # model file; curve and saved state go beside it
    command: str  # recorded in the model's card
    cpu_s: float | None = None  # no iteration starts after this; None: no limit

    @property
    def curve(self) -> Path:
        """Path of the learning curve."""
        return self.out.with_suffix(".csv")

    @property
    def state(self) -> Path:
        """Path of the saved state during training."""
        return self.out.with_suffix(".training")


@dataclass(slots=True)
class TrainingStatus:
    """Progress of a training."""

    iteration: int = 0  # finished iterations
    cpu_s: float = 0.0  # including earlier, interrupted processes
    rows: list[Row] = field(default_factory=list)


class InterruptedTrainingError(TrainingError):
    """Raised at Ctrl-C; the training can be resumed."""


def train(trainer: Trainer, order: Order, *, resume: bool, report: Report) -> TrainingStatus:
    """Train until the iterations or the CPU seconds are used up, and write the model.

    The state is saved every half minute and at Ctrl-C, which discards the running iteration. The
    file of the state is removed when the model is written.

    Raises:
        InterruptedTrainingError: at Ctrl-C, after saving the state.
        TrainingError: if there is no state to resume from, a state that must not be lost, or a
            file cannot be written.
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


def _restored(trainer: Trainer, order: Order) -> TrainingStatus:
    state = read_state(order.state)
    settings = {"policy": order.policy, "seed": order.seed, **trainer.settings}
    for name, value in settings.items():
        if state.get("told", {}).get(name) != value:
            saved = state.get("told", {}).get(name)
            problem = f"{order.state}: a training with {name} {saved}, not {value}"
            raise TrainingError(problem, "use its settings, or remove it and start again")
    trainer.restore(state["trainer"])
    return TrainingStatus(state["iteration"], state["cpu_s"], state["rows"])


def _keep(trainer: Trainer, order: Order, done: TrainingStatus, state: dict[str, Any]) -> None:
    settings = {"policy": order.policy, "seed": order.seed, **trainer.settings}
    write_state(
        order.state,
        {
            "told": settings,
            "iteration": done.iteration,
            "cpu_s": done.cpu_s,
            "rows": done.rows,
            "trainer": state,
        },
    )


def _write(trainer: Trainer, order: Order, done: TrainingStatus) -> None:
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
        figures={
            "iterations": float(done.iteration),
            "cpu_s": round(done.cpu_s, 1),
            **trained.figures,
        },
    )
    write_whole(order.curve, as_csv(done.rows), TrainingError)
    write_whole(order.out, encode_model(card, trained.arrays), TrainingError)
    order.state.unlink(missing_ok=True)


TRAINERS: Final[Mapping[str, str]] = {  # policy -> module:class, called with the seed
    "drl": "controlplane.sim.learning.drl_trainer:DrlTrainer",
    "harmony-drl": "controlplane.sim.learning.harmony_trainer:HarmonyDrlTrainer",
}


def make_trainer(policy: str, seed: int) -> Trainer:
    """Return a new trainer of a policy.

    Raises:
        TrainingError: if the policy is not trained in advance, or torch is missing.
    """
    if policy not in TRAINERS:
        known = ", ".join(sorted(TRAINERS))
        raise TrainingError(f"{policy!r} is not trained beforehand", f"choose one of {known}")
    try:
        importlib.import_module("torch")
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[train]'"
        raise TrainingError("training a policy needs torch", hint) from None
    module, _, name = TRAINERS[policy].partition(":")
    return cast("Trainer", getattr(importlib.import_module(module), name)(seed))
