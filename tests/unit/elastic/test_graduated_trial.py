"""A trial of a sweep continues as an elastic job over all partitions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.sweep_worker.unit import Unit, from_frames, import_functions
from elastic.sweep_worker.unit_runner import UnitRunner
from elastic.training_errors import UsageError
from elastic.worker.run_script import train_graduated
from schemas.host.state_files import header_of, read_frames
from schemas.ids import JobId, Rank, SlotId, Version, WorkerId
from schemas.jobs import SWEEP_SCRIPT, JobSpec
from schemas.nodes import Group, Member
from schemas.sweeps import TrialSpec
from schemas.transport.state_transfer import StateServer, StateUnavailableError
from schemas.wire.files import AskState
from schemas.wire.worker import Assignment
from tests.support import user_functions
from tests.support.user_functions import FUNCTIONS

folder = user_functions.folder

CPU = torch.device("cpu")


def after_an_epoch() -> tuple[bytes, str]:
    runner, values = UnitRunner(import_functions(FUNCTIONS), 2, CPU), {"lr": 0.1}
    frames = runner.begin("3", values, 7)
    for partition in (1, 0):
        result = runner.run(Unit("3", values, 1, partition, 2, 7, CPU), frames)
        frames = result.frames
    return b"".join([header_of(frames, result.digest), *frames]), result.digest


def assignment(trial: TrialSpec, folder: Path) -> Assignment:
    member = Member(
        rank=Rank(0), slot=SlotId("n/0"), local_batch=4, worker=WorkerId("s-t3-2.v1.r0")
    )
    return Assignment(
        job=JobId("s-t3-2"), version=Version(1), rank=Rank(0), slot=0,
        group=Group(version=Version(1), members=(member,), lr=None, base_batch=4),
        spec=JobSpec(name="s-t3", script=SWEEP_SCRIPT, batch_size=4, trial=trial),
        workdir=str(folder), checkpoints=str(folder), socket="", env={},
    )  # fmt: skip


def trial(sources: tuple[str, ...], digest: str, **changed: Any) -> TrialSpec:
    fields: dict[str, Any] = {
        "sweep": JobId("s-1"), "trial": 3, "values": {"lr": 0.1}, "functions": FUNCTIONS,
        "partitions": 2, "seed": 7, "epochs": 3, "epochs_done": 1, "version": 2, "digest": digest,
        "sources": sources, "states_key": "a key",
    }  # fmt: skip
    return TrialSpec(**{**fields, **changed})


@pytest.mark.usefixtures("folder")
def test_a_graduated_trial_trains_to_its_last_epoch(tmp_path: Path) -> None:
    content, digest = after_an_epoch()
    asked: list[AskState] = []

    def find(ask: AskState) -> list[bytes] | None:
        asked.append(ask)
        return [content] if ask.digest == digest else None

    seen = sys.modules[user_functions.NAME].seen
    seen.clear()  # of the sweep's units
    server = StateServer("127.0.0.1", lambda _: "a key", find)
    try:
        one = trial((server.address,), digest)
        train_graduated(assignment(one, tmp_path), one)
    finally:
        server.close()

    assert asked[0].job == "s-1"
    assert [(epoch, size, state) for epoch, size, _, _, state in seen] == [
        (2, 12, 2),
        (3, 12, 2),
    ]  # the optimizer's moments came along
    assert seen[0][3] == pytest.approx(0.025)  # and the scheduler's two steps
    begun_with = from_frames(read_frames(content, digest))["model"]["weight"]
    assert torch.equal(seen[0][2], begun_with)


@pytest.mark.usefixtures("folder")
def test_a_model_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    paths = {**FUNCTIONS, "model_fn": "user_functions:no_optimizer"}
    one = trial((), "", functions=paths)
    with pytest.raises(UsageError, match="return \\(model, optimizer\\)"):
        train_graduated(assignment(one, tmp_path), one)


@pytest.mark.usefixtures("folder")
def test_a_missing_state_is_named(tmp_path: Path) -> None:
    server = StateServer("127.0.0.1", lambda _: "a key", lambda _: None)
    try:
        one = trial((server.address,), "0" * 64)
        with pytest.raises(StateUnavailableError, match="state 2 of trial 3 is not available"):
            train_graduated(assignment(one, tmp_path), one)
    finally:
        server.close()
