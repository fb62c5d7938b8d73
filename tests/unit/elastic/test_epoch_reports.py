"""Epochs are reported with their checkpoints, also if rank 0 is lost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from elastic.sample_stream import SampleStream
from elastic.state.epoch_reports import EpochReports, EpochSummary
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.state_tensors import TensorState
from elastic.state.training_state import TrainingState, initial_training_state
from schemas.wire.agent import EpochReported


def training() -> TrainingState:
    made = initial_training_state(None)
    model = nn.Linear(1, 1)
    made.set_tensors(
        TensorState(model, torch.optim.SGD(model.parameters(), lr=0.1)), SampleStream(0, 10)
    )
    return made


class Told:
    def __init__(self) -> None:
        self.epochs: list[tuple[int, int, float]] = []

    def __call__(self, kind: type[Any], **values: Any) -> None:
        assert kind is EpochReported
        facts = values["facts"]
        self.epochs.append((facts.epoch, values["group"], facts.metrics["accuracy"]))


def end_three(reports: EpochReports, *, first: bool) -> None:
    for epoch, durable in ((1, 0), (2, 0), (3, 1)):
        summary = msgspec.msgpack.encode(EpochSummary({"accuracy": epoch / 4}, None, durable))
        reports.end_epoch(summary, float(epoch), version=1, first=first)


@pytest.mark.parametrize("newcomer", [False, True])
def test_the_next_rank_0_repeats_reports(tmp_path: Path, *, newcomer: bool) -> None:
    told, state = Told(), training()
    next_rank_0 = EpochReports(state, told)
    next_rank_0.open(tmp_path / "checkpoints")
    old = training() if newcomer else state
    end_three(EpochReports(old, Told()) if newcomer else next_rank_0, first=False)
    if newcomer:
        state.load_metadata(decode_metadata(encode_metadata(old.metadata())), rank=0)

    next_rank_0.report_again(2)
    next_rank_0.close()

    assert told.epochs == [(2, 2, 0.5), (3, 2, 0.75)]


def test_rank_0_reports_each_epoch_once(tmp_path: Path) -> None:
    told = Told()
    first = EpochReports(training(), told)
    first.open(tmp_path / "checkpoints")
    end_three(first, first=True)
    first.close()

    assert told.epochs == [(1, 1, 0.25), (2, 1, 0.5), (3, 1, 0.75)]
    assert first.summary({}, None) == msgspec.msgpack.encode(EpochSummary({}, None, 3))


@pytest.mark.parametrize(
    ("loss", "reported"),
    [
        (0.5, (0.5, False)),
        (None, (None, False)),
        (math.nan, (None, True)),
        (math.inf, (None, True)),
    ],
)
def test_a_loss_that_is_not_finite_is_reported_as_such(
    tmp_path: Path, loss: float | None, reported: tuple[float | None, bool]
) -> None:
    told: list[tuple[float | None, bool]] = []

    def report(_: type[Any], **values: Any) -> None:
        facts = values["facts"]
        told.append((facts.train_loss, facts.loss_is_not_finite))

    reports = EpochReports(training(), report)
    reports.open(tmp_path / "checkpoints")
    reports.end_epoch(msgspec.msgpack.encode(EpochSummary({}, loss)), 1.0, version=1, first=True)
    reports.close()

    assert told == [reported]


def test_a_report_has_the_trained_samples(tmp_path: Path) -> None:
    made = training()
    told: list[tuple[Any, ...]] = []
    names = ("epoch", "trained_samples", "epoch_samples", "left_early")

    def report(_: type[Any], **values: Any) -> None:
        told.append(tuple(getattr(values["facts"], name) for name in names))

    reports = EpochReports(made, report)
    reports.open(tmp_path / "checkpoints")
    summary = msgspec.msgpack.encode(EpochSummary({}, None))

    for cursors in ((4, 8, 10), (4, 8)):
        for cursor in cursors:
            made.commit_step(made.position.step + 1, cursor, version=1)
        reports.end_epoch(summary, 1.0, version=1, first=True)
    reports.close()

    assert told == [(1, 10, 10, False), (2, 8, 10, True)]
