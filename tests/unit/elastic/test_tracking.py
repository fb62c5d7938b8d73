"""Scalars of epochs for other services: what is sent, once, and what a failing service costs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic import tracking
from elastic.tracking import Tracker, scalars, tracked
from schemas.epochs import EpochFacts
from schemas.jobs import JobSpec
from schemas.wire.agent import EpochReported, StepsReported

SPEC = JobSpec(name="toy", script="train.py", batch_size=20, track="tensorboard")


def epoch(number: int) -> EpochFacts:
    return EpochFacts(
        epoch=number, step=10 * number, samples_done=400 * number, epoch_samples=400,
        samples_per_s=100.0, train_loss=0.5 / number, metrics={"accuracy": 0.75},
        global_batch=64, lr=0.1,
    )  # fmt: skip


class Service:
    """A service that notes what it gets, and may fail."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.got: list[tuple[dict[str, float], int]] = []
        self.fails, self.closed = fails, threading.Event()

    def open(self, job: str, spec: JobSpec) -> Any:
        if self.fails is not None:
            raise self.fails

        def log(values: Mapping[str, float], step: int) -> None:
            self.got.append((dict(values), step))

        return log, self.closed.set


def test_an_epoch_has_its_loss_metrics_batch_rate_and_speed() -> None:
    assert scalars(epoch(1)) == {
        "loss": 0.5, "lr": 0.1, "batch_size": 64.0, "samples_per_s": 100.0, "epoch": 1.0,
        "accuracy": 0.75,
    }  # fmt: skip


def test_each_epoch_is_sent_once_and_the_run_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(tracking.OPENERS, "mlflow", service.open)  # type: ignore[arg-type]
    tracker = Tracker("mlflow", "toy-1", SPEC)

    for number in (1, 2, 2, 1, 3):  # reported again after a loss
        tracker.add(epoch(number))
    tracker.close()

    assert [step for _, step in service.got] == [10, 20, 30]
    assert service.closed.is_set()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("No module named 'mlflow'"), "No module named 'mlflow'; install it"),
        (ConnectionError("refused"), "ConnectionError: refused; no more epochs are sent"),
    ],
)
def test_a_service_that_fails_costs_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tracking.OPENERS, "mlflow", Service(fails=error).open)  # type: ignore[arg-type]
    tracker = Tracker("mlflow", "toy-1", SPEC)

    for number in range(1, 4):
        tracker.add(epoch(number))
    tracker.close()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[ones] track = 'mlflow': {said}")


def test_reports_go_on_and_only_epochs_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    service, reports = Service(), list[Any]()
    monkeypatch.setitem(tracking.OPENERS, "tensorboard", service.open)  # type: ignore[arg-type]
    assignment: Any = type("Assignment", (), {"job": "toy-1", "spec": SPEC})()

    def report(kind: Any, **_: Any) -> None:
        reports.append(kind)

    reporting = tracked(report, assignment)
    reporting(StepsReported, step=1)
    reporting(EpochReported, facts=epoch(1))

    assert reports == [StepsReported, EpochReported]
    assert tracked(report, None) is report


def test_tensorboard_gets_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("tensorboard", "toy-1", SPEC)

    tracker.add(epoch(1))
    tracker.close()

    (file,) = (tmp_path / "tensorboard" / "toy-1").iterdir()
    assert b"batch_size" in file.read_bytes()
