"""Trial runs of units and replays of trials without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.sweep_worker.alone import main, replay, try_unit
from elastic.sweep_worker.unit import Unit, import_functions
from elastic.sweep_worker.unit_runner import UnitRunner
from elastic.training_errors import UsageError
from tests.support import user_functions
from tests.support.user_functions import FUNCTIONS

folder = user_functions.folder

VISITS = [(1, 1), (1, 0), (2, 0)]  # epoch, partition


def trained(values: dict[str, Any]) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    runner = UnitRunner(import_functions(FUNCTIONS), 2, cpu)
    frames, found = runner.begin("3", values, 7), []
    for version, (epoch, partition) in enumerate(VISITS, start=1):
        result = runner.run(Unit("3", values, epoch, partition, 2, 7, cpu), frames)
        frames = result.frames
        found.append(
            {"config": "3", "values": values, "epoch": epoch, "partition": partition,
             "version": version, "digest": result.digest}
        )  # fmt: skip
    return found


def task(visits: list[dict[str, Any]], model: Path | None = None) -> dict[str, Any]:
    where = None if model is None else str(model)
    return {"functions": FUNCTIONS, "partitions": 2, "seed": 7, "visits": visits, "model": where}


def test_a_replayed_trial_is_equal(folder: Path) -> None:
    visits = trained({"lr": 0.1})

    assert replay(task(visits, folder / "model.pt")) == {
        "equal": True, "first_difference": None, "units": 3
    }  # fmt: skip
    assert torch.load(folder / "model.pt", weights_only=True).keys() == {"weight", "bias"}


@pytest.mark.usefixtures("folder")
def test_a_replay_names_the_first_different_unit() -> None:
    visits = trained({"lr": 0.1})
    visits[1]["digest"] = "another"

    found = replay(task(visits))

    assert not found["equal"]
    assert found["first_difference"]["version"] == 2


@pytest.mark.usefixtures("folder")
def test_a_trial_unit_is_measured() -> None:
    asked = {"functions": FUNCTIONS, "partitions": 2, "seed": 7, "values": {"lr": 0.1}}

    found = try_unit({**asked, "metric": "score"})

    assert found["samples"] == 6
    assert found["state_bytes"] > 3 * 3 * 4  # Adam has two more of each parameter
    assert found["metrics"].keys() == {"score"}
    with pytest.raises(UsageError, match="no function returned the metric 'skore', only score"):
        try_unit({**asked, "metric": "skore"})


@pytest.mark.slow
def test_the_result_is_the_last_line_of_output(folder: Path) -> None:
    file = folder / "task.json"
    asked = {"functions": FUNCTIONS, "partitions": 2, "seed": 7, "metric": "score"}
    file.write_text(json.dumps({**asked, "values": {"lr": 0.1}}))

    command = [sys.executable, "-P", "-m", "elastic.sweep_worker.alone", str(file)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    assert json.loads(done.stdout.splitlines()[-1])["samples"] == 6


def test_a_failing_function_is_named_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "task.json"
    asked = {"functions": FUNCTIONS, "partitions": 2, "seed": 7, "values": {}, "metric": "score"}
    file.write_text(json.dumps(asked))
    monkeypatch.setattr(sys, "argv", ["try_unit", str(file)])
    monkeypatch.chdir(folder)

    with pytest.raises(SystemExit) as left:
        main()

    said = capsys.readouterr().err
    assert (left.value.code, said.count("\n")) == (1, 1)
    assert "model_fn raised KeyError: 'lr'" in said
