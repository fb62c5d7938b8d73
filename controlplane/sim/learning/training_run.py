"""A training from its first iteration, or from where it was interrupted, to a model's file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from controlplane.policy.learned.model_file import ModelCard, encode_model
from controlplane.sim.learning.learning_curve import Row, as_csv
from controlplane.sim.learning.saved_training import read_state, write_state
from controlplane.sim.learning.trainer import Trainer
from controlplane.sim.simulator_errors import TrainingError
from controlplane.sim.traces.atomic_file import write_whole

SAVE_S: Final = 30.0  # between saved states
Report = Callable[[int, int, Row], None]  # iterations done, of how many, row of the curve


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be trained, and where it goes."""

    policy: str
    seed: int
    out: Path  # the model; the curve and the state of the training lie beside it
    command: str  # that asks for it, for the model's card
    cpu_s: float | None = None  # the last iteration begins before so much is spent; None: all

    @property
    def curve(self) -> Path:
        """Where the learning curve goes."""
        return self.out.with_suffix(".csv")

    @property
    def state(self) -> Path:
        """Where the state is kept while it trains."""
        return self.out.with_suffix(".training")


@dataclass(slots=True)
class Progress:
    """How far a training has come."""

    iteration: int = 0  # finished ones
    cpu_s: float = 0.0  # of this process and those before it that were interrupted
    rows: list[Row] = field(default_factory=list)


class InterruptedTrainingError(TrainingError):
    """Somebody pressed Ctrl-C; nothing is lost."""


def train(trainer: Trainer, order: Order, *, resume: bool, report: Report) -> Progress:
    """Train until the iterations or the CPU seconds are used up, and write the model.

    The state is kept every half minute and at Ctrl-C, which gives up the iteration that is under
    way; the file of the state is removed when the model is written.

    Args:
        trainer: of the policy, with nothing trained yet.
        resume: go on from the state that an interrupted training left.

    Raises:
        InterruptedTrainingError: at Ctrl-C, when the state was kept.
        TrainingError: if there is no state to go on from, or one that must not be lost, or the
            disk does not take a file.
    """
    _check_place(order, resume=resume)
    done = _restored(trainer, order) if resume else Progress()
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
        what = f"interrupted after {done.iteration} of {trainer.iterations} iterations"
        raise InterruptedTrainingError(what, "the same with --resume goes on") from None
    _write(trainer, order, done)
    return done


def _check_place(order: Order, *, resume: bool) -> None:
    if not order.out.parent.is_dir():
        raise TrainingError(f"{order.out.parent}: no such folder", "make it, or choose another one")
    if order.out.suffix != ".npz":
        raise TrainingError(f"{order.out}: a model's file ends in .npz", "choose such a name")
    if not resume and order.state.exists():
        what = f"{order.state}: a training that was interrupted"
        raise TrainingError(what, "go on with --resume, or remove it")


def _restored(trainer: Trainer, order: Order) -> Progress:
    state = read_state(order.state)
    told = {"policy": order.policy, "seed": order.seed, **trainer.settings}
    for name, value in told.items():
        if state.get("told", {}).get(name) != value:
            was = state.get("told", {}).get(name)
            what = f"{order.state}: a training with {name} {was}, not {value}"
            raise TrainingError(what, "go on as it began, or remove it and begin anew")
    trainer.restore(state["trainer"])
    return Progress(state["iteration"], state["cpu_s"], state["rows"])


def _keep(trainer: Trainer, order: Order, done: Progress, state: dict[str, Any]) -> None:
    told = {"policy": order.policy, "seed": order.seed, **trainer.settings}
    write_state(
        order.state,
        {
            "told": told,
            "iteration": done.iteration,
            "cpu_s": done.cpu_s,
            "rows": done.rows,
            "trainer": state,
        },
    )


def _write(trainer: Trainer, order: Order, done: Progress) -> None:
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
