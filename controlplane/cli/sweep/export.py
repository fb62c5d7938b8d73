"""`ones sweep export`: epochs as CSV or for TensorBoard, and the best model."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, JobName, print_data
from controlplane.cli.terminal import drawn
from controlplane.client import BlockingClient
from controlplane.client.sweeps.tables import epoch_rows
from schemas.errors import BadFieldError, SettingsError
from schemas.wire.client import SweepDetail

CSV_HELP = "file for every epoch of every trial; - is the standard output"
BOARD_HELP = "folder for TensorBoard scalars, a run for each trial"
MODEL_HELP = "file for the model as a plain state_dict: torch.load(FILE, weights_only=True)"


def export(
    job: JobName,
    /,
    *,
    csv_: Annotated[
        Path | None, Parameter(name="--csv", allow_leading_hyphen=True, help=CSV_HELP)
    ] = None,
    model: Annotated[Path | None, Parameter(help=MODEL_HELP)] = None,
    trial: Annotated[int | None, Parameter(help="trial of the model (default: the best)")] = None,
    tensorboard: Annotated[Path | None, Parameter(help=BOARD_HELP)] = None,
    python: Annotated[str | None, Parameter(help="interpreter that has torch, for --model")] = None,
    common: Common = COMMON,
) -> int:
    """Write results of sweep JOB: curves as CSV or for TensorBoard, the best model for torch."""
    if csv_ is None and model is None and tensorboard is None:
        hint = "give --csv FILE, --model FILE or --tensorboard DIR"
        raise BadFieldError("nothing to export", hint, "csv")
    if trial is not None and model is None:
        raise BadFieldError("--trial requires --model", "give --model FILE", "trial")
    made: dict[str, Any] = {"job": job, "csv": None, "tensorboard": None, "model": None}
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
        if csv_ is not None:
            count = write_csv(detail, csv_)
            made["csv"] = {"file": str(csv_), "epochs": count}
        if tensorboard is not None:
            count = write_scalars(detail, tensorboard)
            made["tensorboard"] = {"folder": str(tensorboard), "scalars": count}
        if model is not None:
            one = client.sweep_run(job).export(model, trial, python)
            made["model"] = {"file": str(one.path), "trial": one.trial, "epoch": one.epoch}
    if common.output in {"json", "jsonl"}:
        print_data(made, common.output)
    elif common.output == "table" and str(csv_) != "-":
        _say(made)
    return Exit.OK


def write_csv(detail: SweepDetail, path: Path) -> int:
    """Write every epoch of every trial to a file or `-`, one per line; return their number.

    Raises:
        BadFieldError: if the file cannot be written.
    """
    rows = epoch_rows(detail)
    values = [f"config.{name}" for name in detail.spec.search.space]
    metrics = sorted({name for one in detail.trials for each in one.metrics for name in each})
    columns = ["trial", "parent", *values, "epoch", "ended", *metrics]

    def write(out: TextIO) -> None:
        writer = csv.DictWriter(out, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)

    if str(path) == "-":
        write(sys.stdout if sys.stdout.isatty() else drawn(sys.stdout))
    else:
        _into(path, write)
    return len(rows)


def write_scalars(detail: SweepDetail, folder: Path) -> int:
    """Write the metrics of every epoch for TensorBoard, a run for each trial; return their number.

    Raises:
        SettingsError: if tensorboardX is not installed.
        BadFieldError: if the folder cannot be written.
    """
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 - seldom needed, not always there
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[tensorboard]'"
        raise SettingsError("--tensorboard needs tensorboardX", hint, "tensorboard") from None
    count = 0
    try:
        for trial in detail.trials:
            if not trial.metrics:
                continue
            with SummaryWriter(str(folder / f"trial-{trial.number}")) as writer:
                text = "  \n".join(f"{name}: {value}" for name, value in trial.values.items())
                writer.add_text("configuration", text)
                for row in epoch_rows(detail, (trial.number,)):
                    for name in trial.metrics[row["epoch"] - trial.first_epoch]:
                        writer.add_scalar(name, row[name], row["epoch"], row["ended"])
                        count += 1
    except OSError as error:
        problem = f"{folder}: {error.strerror}"
        raise BadFieldError(problem, "choose another folder", "tensorboard") from None
    return count


def _into(path: Path, write: Callable[[TextIO], None]) -> None:
    fresh = path.with_name(f".{path.name}.part")
    try:
        with fresh.open("w", encoding="utf-8", newline="") as out:
            write(out)
        fresh.replace(path)
    except OSError as error:
        raise BadFieldError(f"{path}: {error.strerror}", "choose another file", "csv") from None


def _say(made: dict[str, Any]) -> None:
    if made["csv"]:
        sys.stdout.write(f"{made['csv']['file']}: {made['csv']['epochs']} epochs\n")
    if made["tensorboard"]:
        board = made["tensorboard"]
        sys.stdout.write(f"{board['folder']}: {board['scalars']} scalars; ")
        sys.stdout.write(f"tensorboard --logdir {board['folder']}\n")
    if made["model"]:
        model = made["model"]
        which = f"trial {model['trial']} after {model['epoch']:g} epochs"
        sys.stdout.write(f"{model['file']}: {which}\n")
