"""Checkpoints and tracked states."""

from __future__ import annotations

import errno
import random
import threading
from collections import OrderedDict, defaultdict
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import to_builtins
from torch import nn

from elastic.sample_stream import SampleStream, Schedule, ScheduleRow
from elastic.state import checkpoints
from elastic.state.checkpoints import (
    FORMAT,
    CheckpointWriter,
    checkpoint_path,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from elastic.state.epoch_reports import EpochReports
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.random_state import random_state, restore_random_state
from elastic.state.state_tensors import TensorState
from elastic.state.tracked_states import TrackedStates, copy_to_host
from elastic.state.training_state import TrainingState
from elastic.training_errors import CheckpointError
from schemas.epochs import EpochFacts
from schemas.ids import Version
from schemas.nodes import ResumePoint


def point(epoch: int) -> ResumePoint:
    return ResumePoint(epoch=epoch, version=Version(3))


def test_the_last_two_checkpoints_stay(tmp_path: Path) -> None:
    durable: list[tuple[int, bool]] = []
    writer = CheckpointWriter(tmp_path)
    for epoch in (1, 2, 3, 4):
        content = {"epoch": epoch, "model": {"w": torch.full((3,), float(epoch))}}
        file = checkpoint_path(tmp_path, point(epoch))
        writer.write(point(epoch), content, lambda e=epoch, f=file: durable.append((e, f.exists())))
    writer.close()

    assert durable == [(1, True), (2, True), (3, True), (4, True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-000003.v3.pt",
        "epoch-000004.v3.pt",
    ]
    loaded = load_checkpoint(checkpoint_path(tmp_path, point(4)))
    assert loaded["epoch"] == 4
    assert loaded["model"]["w"].tolist() == [4.0, 4.0, 4.0]


class Moments(NamedTuple):
    mean: torch.Tensor
    samples: int


def test_a_copy_keeps_containers() -> None:
    state: dict[str, Any] = {
        "named": Moments(torch.ones(1), 2),
        "shape": torch.Size([2, 3]),
        "ordered": OrderedDict(a=[(1, 2.0)]),
        "missing": defaultdict(int, b=None),
        "largest": torch.tensor([1, 3]).max(0),
    }

    copy = copy_to_host(state)

    assert copy == {**state, "ordered": {"a": [(1, 2.0)]}, "missing": {"b": None}}
    kinds = [type(value) for value in copy.values()]
    assert kinds == [Moments, torch.Size, dict, dict, torch.return_types.max]
    state["named"].mean.zero_()
    assert copy["named"].mean.tolist() == [1.0]


def test_a_named_tuple_is_read_back_as_a_tuple(tmp_path: Path) -> None:
    state = {"average": Moments(torch.ones(2), 3), "shapes": [torch.Size([2])]}
    save_checkpoint({"format": FORMAT, **state}, tmp_path / "x.pt")

    for read in (load_checkpoint(tmp_path / "x.pt"), decode_metadata(encode_metadata(state))):
        mean, count = read["average"]
        assert (type(read["average"]), mean.tolist(), count) == (tuple, [1, 1], 3)
        assert read["shapes"] == [torch.Size([2])]


def written(folder: Path, *names: str) -> None:
    for name in names:
        epoch, version = map(int, name.split(".v"))
        path = checkpoint_path(folder, ResumePoint(epoch=epoch, version=Version(version)))
        reported = [
            {"facts": to_builtins(facts(one)), "group": Version(version)}
            for one in range(1, epoch + 1)
        ]
        save_checkpoint({"format": FORMAT, "epoch": epoch, "reported": reported}, path)


@pytest.mark.parametrize(("files", "found"), [
    (["3.v3"], "3.v3"),
    (["4.v3", "5.v3"], "5.v3"),  # it went on and dropped what the controller knew
    (["3.v3", "4.v3"], "4.v3"),
    (["4.v5", "5.v5"], "5.v5"),  # the group after it did, and was lost with its reports
    (["9.v3", "4.v5"], "4.v5"),  # the older group trains on, where nobody reaches it
    (["3.v3", "4.v7"], "3.v3"),  # of a group after the one that begins: it cannot be
    (["2.v5"], None),
    ([], None),
])  # fmt: skip
def test_a_job_resumes_from_the_latest_continuation(
    files: list[str], found: str | None, tmp_path: Path
) -> None:
    written(tmp_path, *files)

    path = find_checkpoint(tmp_path, point(3), 7)

    name = path.name if path.exists() else None
    assert name == (None if found is None else f"epoch-00000{found}.pt")


def facts(epoch: int) -> EpochFacts:
    return EpochFacts(
        epoch=epoch, step=epoch, samples_per_s=1.0, train_loss=None, metrics={}, global_batch=1,
        lr=0.1,
    )  # fmt: skip


def test_missing_epochs_are_reported_once(tmp_path: Path) -> None:
    written(tmp_path, "6.v5")
    said: list[dict[str, object]] = []
    training = TrainingStub()
    epochs = EpochReports(training, lambda _, **what: said.append(what))  # type: ignore[arg-type]

    assert epochs.resume(tmp_path, point(3), 7) == 6
    epochs.report_missing_epochs()
    epochs.report_missing_epochs()

    assert said == [{"facts": facts(epoch), "group": 5} for epoch in (4, 5, 6)]


class TrainingStub:
    reported: list[dict[str, object]]

    def load_checkpoint(self, content: dict[str, Any]) -> None:
        self.reported = content["reported"]


class OnlyHalf(FileIO):
    """A file that accepts a part of each write, as Linux does of more than 2 GiB."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(memoryview(data)[: -(-len(data) // 2)])


@pytest.mark.parametrize("size", [3, 100_000])
def test_partial_writes_give_a_whole_checkpoint(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FileIO", OnlyHalf)
    weights = torch.arange(size)

    save_checkpoint({"format": FORMAT, "w": weights}, tmp_path / "x.pt")

    assert load_checkpoint(tmp_path / "x.pt")["w"].equal(weights)


class Disk:
    """A disk with room for `room` bytes; while it is full, its files accept nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        disk = self
        self.room = room
        self.full = threading.Event()

        class File(FileIO):
            def write(self, data: bytes) -> int:  # type: ignore[override]
                taken = memoryview(data)[: disk.room]
                if not taken:
                    disk.full.set()
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= len(taken)
                return super().write(taken)

        monkeypatch.setattr(checkpoints, "FileIO", File)
        monkeypatch.setattr(checkpoints, "RETRY_INTERVAL_S", 0.01)


@pytest.mark.parametrize("room", [0, 100_000], ids=["nothing", "a part"])
def test_a_full_disk_loses_no_epoch(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[int] = []
    weights = torch.ones(100_000)
    disk = Disk(monkeypatch, room)
    writer = CheckpointWriter(tmp_path)
    for epoch in (1, 2, 3, 4):
        writer.write(point(epoch), {"epoch": epoch, "w": weights}, partial(durable.append, epoch))
        assert disk.full.wait(5)
    assert durable == []
    disk.room = 1 << 30
    writer.close()

    assert durable == [1, 2, 3, 4]
    found = load_checkpoint(find_checkpoint(tmp_path, point(2), 4))
    assert (found["epoch"], found["w"].equal(weights)) == (4, True)


@pytest.mark.parametrize("room", [0, 1000, 100_000], ids=["nothing", "a header", "a part"])
def test_a_full_disk_keeps_the_old_checkpoint(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[int] = []
    weights = torch.zeros(100_000)
    writer = CheckpointWriter(tmp_path)
    writer.write(point(1), {"epoch": 1, "w": weights}, partial(durable.append, 1))
    writer.close()
    Disk(monkeypatch, room)
    monkeypatch.setattr(checkpoints, "CLOSE_TIMEOUT_S", 0.05)
    writer = CheckpointWriter(tmp_path)
    writer.write(point(2), {"epoch": 2, "w": weights}, partial(durable.append, 2))

    with pytest.raises(CheckpointError, match=r"No space left on device; free space at"):
        writer.close()
    assert durable == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001.v3.pt"]
    assert load_checkpoint(find_checkpoint(tmp_path, point(1), 4))["w"].equal(weights)


def test_an_unreadable_state_is_an_error(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.write(point(1), {"tracked": {"scheduler": Path("a class that torch refuses")}}, print)

    with pytest.raises(CheckpointError, match="track only states that can be pickled"):
        writer.close()
    assert list(tmp_path.glob("*.pt")) == []


def test_a_damaged_or_missing_checkpoint_is_named(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, point(1))
    with pytest.raises(CheckpointError, match="set `checkpoints` of every agent to the same"):
        load_checkpoint(path)
    save_checkpoint({"format": FORMAT}, path)
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=r"epoch-000001.v3.pt cannot be read"):
        load_checkpoint(path)
    torch.save({"format": FORMAT, "evil": Path}, path)  # would execute code
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)


def test_a_checkpoint_restores_random_numbers(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(torch.rand(1)), float(np.random.rand())]  # noqa: NPY002, S311

    path = tmp_path / "x.pt"
    save_checkpoint({"format": FORMAT, "random": random_state()}, path)
    first = draw()
    restore_random_state(load_checkpoint(path)["random"])

    assert draw() == first


def resumed_training() -> tuple[TrainingState, nn.Module, torch.optim.Optimizer]:
    training = TrainingState(Schedule(ScheduleRow(1, (1,), 0)), stop_rule=None)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    training.set_tensors(TensorState(model, optimizer), SampleStream(0, 4))
    nn.init.ones_(model.weight)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 1), 2.0)
    training.load_checkpoint(training.checkpoint())
    return training, model, optimizer


def test_weights_set_after_load_are_replaced() -> None:
    training, model, optimizer = resumed_training()
    model.weight.data.fill_(7.0)  # as DCGAN's weights_init does, unseen by version counters
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.25

    restore_loaded = [training.restore_loaded(), training.restore_loaded()]

    kept = optimizer.state[model.weight]["momentum_buffer"].item()
    assert restore_loaded == [True, False]
    assert (model.weight.item(), kept, optimizer.param_groups[0]["lr"]) == (1.0, 2.0, 0.25)


def test_an_unchanged_model_is_not_restored() -> None:
    training, _, _ = resumed_training()

    assert not training.restore_loaded()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_late_object_rolls_back_to_its_first_state() -> None:
    tracked, new, resumed = TrackedStates(), Counter(), Counter()
    tracked.load({"resumed": {"count": 5}})
    copy = tracked.states()
    tracked.add("new", new)
    tracked.add("resumed", resumed)
    new.count, resumed.count = 1, 6

    tracked.load(copy)

    assert (new.count, resumed.count) == (0, 5)
