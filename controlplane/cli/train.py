"""`ones sim train`: train a learned policy in the simulator."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from controlplane.cli.output import Exit, print_data, print_error, print_table
from controlplane.cli.terminal import drawn
from controlplane.sim.learning.training_run import Row, draw_curve, make_trainer
from schemas.errors import BadFieldError

Output = Annotated[Literal["table", "json", "jsonl"], Parameter(name=["--output", "-o"])]
MIN_CPU_S: Final = 1.0
INTERRUPTED: Final = 130  # exit code of a program ended by Ctrl-C
Report = Callable[[int, int, Row], None]


def train(
    policy: str,
    /,
    *,
    out: Path,
    seed: int = 0,
    resume: bool = False,
    cpu_seconds: float | None = None,
    output: Output = "table",
) -> int:
    """Train a learned policy in the simulator, and write its model.

    The learning curve is written beside the model, as CSV and PNG. Ctrl-C loses nothing: the same
    command with --resume continues, and ends with the same model.

    Parameters
    ----------
    policy
        Name: drl or harmony-drl.
    out
        File of the model, NAME.npz; `[policy.options] model` names it in a cluster's settings.
    seed
        Seed of all random draws. Training traces have their own seeds, from 1000000 on.
    resume
        Continue an interrupted training.
    cpu_seconds
        Stop after the iteration in which this much CPU time is spent; default: all iterations.
    output
        Table for people, or JSON.
    """
    if seed < 0:
        raise BadFieldError(f"seed {seed} is negative", "give 0 or more", "seed")
    if cpu_seconds is not None and not cpu_seconds >= MIN_CPU_S:
        problem = f"{cpu_seconds} CPU seconds is too short"
        raise BadFieldError(problem, f"give {MIN_CPU_S:g} or more, or leave it out", "cpu_seconds")
    trainer = make_trainer(policy, seed)
    from controlplane.sim.learning import training_run  # noqa: PLC0415 - imports torch

    order = training_run.Order(
        policy, seed, out, _command(policy, out, seed, cpu_seconds), cpu_seconds
    )
    try:
        with _progress(policy) as report:
            done = training_run.train(trainer, order, resume=resume, report=report)
    except training_run.InterruptedTrainingError as error:
        print_error(error, output)
        return INTERRUPTED
    picture = out.with_suffix(".png")
    draw_curve(done.rows, picture, f"training of {policy}, seed {seed}")
    made = {
        "model": str(out),
        "curve": str(order.curve),
        "picture": str(picture),
        "iterations": done.iteration,
        "cpu_s": round(done.cpu_s, 1),
    }
    if output in {"json", "jsonl"}:
        print_data(made, output)
    else:
        print_table(tuple(made), [tuple(made.values())])
    return Exit.OK


def _command(policy: str, out: Path, seed: int, cpu_seconds: float | None) -> str:
    bound = "" if cpu_seconds is None else f" --cpu-seconds {cpu_seconds:g}"
    return f"ones sim train {policy} --out {shlex.quote(out.name)} --seed {seed}{bound}"


@contextlib.contextmanager
def _progress(policy: str) -> Iterator[Report]:
    shown = sys.stderr.isatty()

    def report(done: int, of: int, row: Row) -> None:
        if shown:
            text = "  ".join(f"{name} {_short(value)}" for name, value in row.items())
            drawn(sys.stderr).write(f"\r\x1b[Ktraining {policy}: {done}/{of}  {text}")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            sys.stderr.write("\n")


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
