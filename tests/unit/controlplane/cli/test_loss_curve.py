"""Losses of a job, their fit, and both as text and PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.cli import losses as loss_drawing
from controlplane.cli.losses import (
    LossCurve,
    LossPoint,
    describe_curve,
    loss_curve,
    loss_png,
    loss_terminal,
)
from schemas.errors import BadFieldError
from schemas.jobs import StopRule
from schemas.wire.client import JobDetail
from tests.support.commands import ones
from tests.support.schemas_examples import EXAMPLES

SAMPLES = 100  # of an epoch


def falling(epoch: int) -> float:
    return 2.0 / (1 + epoch) + 0.5


def job(
    losses: Mapping[int, float | None], state: str = "running", stop: StopRule | None = None,
    **summary: Any,
) -> JobDetail:  # fmt: skip
    """A job that reported so much after these epochs."""
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    epochs = tuple(
        msgspec.structs.replace(
            detail.epochs[0], epoch=epoch, train_loss=loss, epoch_samples=SAMPLES,
            samples_done=SAMPLES * epoch,
        )
        for epoch, loss in losses.items()
    )  # fmt: skip
    last = max(losses, default=0)
    told = {"state": state, "epoch": last, "train_loss": losses.get(last), **summary}
    return msgspec.structs.replace(
        detail, summary=msgspec.structs.replace(detail.summary, **told),
        spec=msgspec.structs.replace(detail.spec, stop=stop), epochs=epochs,
        samples_done=SAMPLES * last,
    )  # fmt: skip


def converging(epochs: int = 12, **more: Any) -> LossCurve:
    return loss_curve(job({epoch: falling(epoch) for epoch in range(1, epochs + 1)}, **more))


def test_a_curve_follows_the_reported_losses_and_continues_them() -> None:
    curve = converging(20)

    assert curve.form == "sublinear"
    assert curve.reported == tuple(LossPoint(e, falling(e)) for e in range(1, 21))
    assert [point.epoch for point in curve.predicted] == list(range(21, 41))
    for point in curve.predicted:
        assert point.loss == pytest.approx(falling(int(point.epoch)), rel=0.03)


@pytest.mark.parametrize(
    ("state", "stop", "ahead"),
    [
        ("running", None, 12), ("running", StopRule(epochs=15), 3), ("running", StopRule(epochs=12), 0),
        ("running", StopRule(epochs=500), 12), ("running", StopRule(samples=9), 12),
        ("succeeded", None, 0), ("failed", StopRule(epochs=15), 0),
    ],
)  # fmt: skip
def test_a_forecast_has_as_many_epochs_as_seen_within_the_stop_rule(
    state: str, stop: StopRule | None, ahead: int
) -> None:
    assert len(converging(12, state=state, stop=stop).predicted) == ahead


NEEDS = "  curve      none: a curve needs 3 losses, the job has reported {}".format


@pytest.mark.parametrize(
    ("losses", "lines"),
    [
        ({}, [NEEDS("none")]),
        ({1: None, 2: None}, [NEEDS("none")]),
        ({1: 0.75}, ["  loss       0.75 after epoch 1, lowest 0.75", NEEDS(1)]),
        ({1: 0.75, 2: math.nan, 3: 0.5, 4: math.inf}, [
            "  loss       0.5 after epoch 3, lowest 0.5",
            "  left out   2 losses that are not finite", NEEDS(2)]),
        ({1: math.nan}, ["  left out   1 loss that is not finite", NEEDS("none")]),
        (dict.fromkeys(range(1, 9), 0.25), [
            "  loss       0.25 after epoch 8, lowest 0.25",
            "  curve      none: the losses do not fall"]),
    ],
)  # fmt: skip
def test_losses_without_a_curve_state_the_reason(
    losses: dict[int, float | None], lines: list[str]
) -> None:
    curve = loss_curve(job(losses))

    assert describe_curve(curve) == ["digits-7  running", *lines]
    assert (curve.fitted, curve.predicted, curve.limit) == ((), (), None)


def test_a_curve_is_described_with_its_fit_and_forecast() -> None:
    name, loss, fit, predicted = describe_curve(converging(12, stop=StopRule(epochs=22)))

    assert name == "digits-7  running"
    assert loss == "  loss       0.6538 after epoch 12, lowest 0.6538"
    assert fit.startswith("  curve      falls ever more slowly, never below ")
    assert predicted.startswith("  predicted  0.64")
    assert " after epoch 13, 0.5" in predicted
    assert predicted.endswith(" after epoch 22")


def test_the_running_epoch_lies_in_the_middle_of_its_finished_part() -> None:
    detail = job({1: 2.0, 2: 1.0}, train_loss=0.875)

    under_way = loss_curve(msgspec.structs.replace(detail, samples_done=250))
    *_, legend = loss_terminal(under_way, 60).plain.splitlines()

    assert under_way.running == LossPoint(2.25, 0.875)
    assert describe_curve(under_way)[2] == "  now        0.875, mean of epoch 3 so far"
    assert legend == "● loss of each epoch   ◇ running epoch so far"
    assert loss_curve(msgspec.structs.replace(detail, samples_done=200)).running is None


@pytest.mark.parametrize("losses", [{1: 0.5}, {1: 0.5, 2: 0.5}, {1: 1e9, 2: 1e-3, 3: 1e-4}])
@pytest.mark.parametrize("width", [10, 80])
def test_any_losses_are_drawn_within_the_width(losses: dict[int, float | None], width: int) -> None:
    lines = loss_terminal(loss_curve(job(losses)), width).plain.splitlines()
    picture = lines[lines.index("") + 1 :]

    assert sum(line.count("●") for line in picture[:-1]) == len(losses)
    assert max(map(len, picture[:-1])) <= max(width, 32)


def test_a_picture_starts_at_the_top_left_and_ends_with_the_forecast() -> None:
    lines = loss_terminal(converging(12, stop=StopRule(epochs=22)), 60, rows=5).plain.splitlines()

    top, *_, bottom, axis, epochs, legend = lines[lines.index("") + 1 :]
    assert top.startswith("   1.5 ┤●")
    assert bottom.endswith("○")
    assert axis == "       └" + "─" * 51
    assert epochs.split() == ["1", "epochs", "22"]
    assert legend == "● loss of each epoch   · fitted curve   ○ predicted by the curve"


def test_a_job_without_losses_has_a_description_and_no_picture(tmp_path: Path) -> None:
    curve = loss_curve(job({}))

    assert loss_terminal(curve, 80).plain.splitlines() == describe_curve(curve)
    with pytest.raises(BadFieldError, match="digits-7 has reported no finite loss"):
        loss_png(curve, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("losses", [{1: 0.5}, {e: falling(e) for e in range(1, 9)}])
def test_losses_are_drawn_into_a_file(tmp_path: Path, losses: dict[int, float | None]) -> None:
    loss_png(loss_curve(job(losses)), tmp_path / "loss.png")

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that would be saved."""
    found: list[Any] = []
    monkeypatch.setattr(loss_drawing, "save", lambda figure, *_: found.append(figure))
    return found


def test_a_first_epoch_that_still_runs_is_drawn_without_batch_sizes(figures: list[Any]) -> None:
    detail = msgspec.structs.replace(job({}, train_loss=2.5), samples_done=50)

    loss_png(loss_curve(detail), Path("unused.png"))

    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "training loss of digits-7 (running)"


def test_a_drawn_loss_has_whole_epochs_batch_sizes_and_a_legend(figures: list[Any]) -> None:
    curve = loss_curve(job({1: 3.0, 2: 2.0, 3: 1.5}, stop=StopRule(epochs=4)))
    loss_png(curve, Path("unused.png"))

    losses, batch = figures[0].axes
    assert {tick % 1.0 for tick in losses.get_xticks()} == {0.0}
    assert batch.get_ylabel() == "global batch size"
    assert [*batch.get_yticks()] == sorted({size for _, size in curve.batches})
    assert {text.get_text() for text in figures[0].legends[0].get_texts()} == {
        "loss of each epoch", "fitted curve", "predicted by the curve", "lower bound of the curve",
        "batch size",
    }  # fmt: skip


def test_options_of_slots_over_time_are_refused_with_a_loss() -> None:
    said = ones("timeline", "--loss", "digits-1", "--last", "10m")

    assert (said.code, said.out) == (2, "")
    assert said.err == ("ones: --from and --last do not apply to --loss; omit them\n")
