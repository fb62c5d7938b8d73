"""Scalars of a job's epochs for TensorBoard, MLflow or Weights & Biases (`track` in its job file).

A tracker runs in a thread of rank 0, so that training never waits for it. What a tracker cannot
take is named once in the job's output, and the training continues.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from elastic.reporting import Report
from schemas.epochs import EpochFacts
from schemas.jobs import JobSpec
from schemas.wire.agent import EpochReported
from schemas.wire.worker import Assignment

MAX_WAITING: Final = 1000  # epochs; later ones are dropped while a tracker hangs
END_S: Final = 30.0  # time for the last epochs when the job ends
TENSORBOARD_FOLDER: Final = "tensorboard"  # in the job's working directory
Log = Callable[[Mapping[str, float], int], None]  # values by name, and the step
Close = Callable[[], object]


def scalars(facts: EpochFacts) -> dict[str, float]:
    """Return the values of an epoch by name."""
    known = {
        "loss": facts.train_loss, "lr": facts.lr, "batch_size": float(facts.global_batch),
        "samples_per_s": facts.samples_per_s, "epoch": float(facts.epoch),
        "noise_scale": facts.noise_scale, **facts.metrics,
    }  # fmt: skip
    return {name: value for name, value in known.items() if value is not None}


def tracked(report: Report, assignment: Assignment | None) -> Report:
    """Return a function that reports like `report`, and passes epochs on to the job's tracker."""
    service = "" if assignment is None else assignment.spec.stated_track
    if assignment is None or not service:
        return report
    tracker = Tracker(service, assignment.job, assignment.spec)

    def reporting(kind: Any, **fields: Any) -> None:
        report(kind, **fields)
        if kind is EpochReported:
            tracker.add(fields["facts"])

    return reporting


class Tracker:
    """Thread that passes the scalars of epochs to one service. It starts with the first epoch."""

    def __init__(self, service: str, job: str, spec: JobSpec) -> None:
        self._open = OPENERS[service]
        self._service, self._job, self._spec = service, job, spec
        self._waiting: queue.Queue[EpochFacts | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._last = 0  # epochs are reported again after a loss

    def add(self, facts: EpochFacts) -> None:
        """Pass an epoch on, unless it was passed on before."""
        if facts.epoch <= self._last:
            return
        self._last = facts.epoch
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        try:
            self._waiting.put_nowait(facts)
        except queue.Full:
            self._say(f"epoch {facts.epoch} is dropped: earlier ones still wait")

    def close(self) -> None:
        """Pass the last epochs on, within some seconds."""
        if self._thread is not None:
            try:
                self._waiting.put(None, timeout=END_S)
            except queue.Full:
                return
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            log, close = self._open(self._job, self._spec)
            while (facts := self._waiting.get()) is not None:
                log(scalars(facts), facts.step)
            close()
        except ImportError as error:
            self._say(f"{error}; install it for the job's interpreter")
        except Exception as error:  # noqa: BLE001 - any service may raise anything
            self._say(f"{type(error).__name__}: {error}; no more epochs are sent")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"[ones] track = {self._service!r}: {text}\n")


def _tensorboard(job: str, _: JobSpec) -> tuple[Log, Close]:
    from tensorboardX import SummaryWriter  # noqa: PLC0415 - not always installed

    writer = SummaryWriter(os.path.join(TENSORBOARD_FOLDER, job))  # noqa: PTH118 - relative

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _mlflow(job: str, spec: JobSpec) -> tuple[Log, Close]:
    import mlflow  # noqa: PLC0415 - not always installed

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(spec.name)
    experiment = found.experiment_id if found else client.create_experiment(spec.name)
    runs = client.search_runs([experiment], f"tags.`ones.job` = '{job}'", max_results=1)
    run = runs[0] if runs else client.create_run(experiment, tags={"ones.job": job}, run_name=job)
    known = {"batch_size": spec.batch_size, "script": spec.script, "args": " ".join(spec.args)}
    for name, value in known.items():
        client.log_param(run.info.run_id, name, value)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            client.log_metric(run.info.run_id, name, value, step=step)

    return log, lambda: client.set_terminated(run.info.run_id)


def _wandb(job: str, spec: JobSpec) -> tuple[Log, Close]:
    import wandb  # noqa: PLC0415 - not always installed

    known = {"batch_size": spec.batch_size, "script": spec.script, "args": list(spec.args)}
    run = wandb.init(project=spec.name, id=job, name=job, resume="allow", config=known)
    return (lambda values, step: run.log(dict(values), step=step)), run.finish


OPENERS: Final[Mapping[str, Callable[[str, JobSpec], tuple[Log, Close]]]] = {
    "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb,
}  # fmt: skip
