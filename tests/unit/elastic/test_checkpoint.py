"""The way back: atomic, exact, and never in training's way."""

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

from elastic.batches import Schedule, ScheduleRow
from elastic.sample_stream import SampleStream
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
from elastic.state.tracked_states import copy_to_host
from elastic.state.training_state import TrainingState
from elastic.training_errors import CheckpointError
from schemas.epochs import EpochFacts
from schemas.ids import Version
from schemas.nodes import ResumePoint


def point(epoch: int) -> ResumePoint:
    return ResumePoint(epoch=epoch, version=Version(3))


def test_what_is_written_is_read_back_and_only_the_last_two_stay(tmp_path: Path) -> None:
    durable: list[int] = []
    writer = CheckpointWriter(tmp_path)
    for epoch in (1, 2, 3, 4):
        content = {"epoch": epoch, "model": {"w": torch.full((3,), float(epoch))}}
        writer.write(point(epoch), content, partial(durable.append, epoch))
    writer.close()

    assert durable == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-000003.v3.pt",
        "epoch-000004.v3.pt",
    ]
    loaded = load_checkpoint(checkpoint_path(tmp_path, point(4)))
    assert loaded["epoch"] == 4
    assert loaded["model"]["w"].tolist() == [4.0, 4.0, 4.0]


def test_a_copy_does_not_change_when_training_goes_on() -> None:
    weights = torch.zeros(3)
    copy = copy_to_host({"a": [weights, (weights, 1)]})

    weights.add_(1)

    assert copy["a"][0].tolist() == [0, 0, 0]
    assert copy["a"][1][0].tolist() == [0, 0, 0]


class Moments(NamedTuple):
    mean: torch.Tensor
    samples: int


def test_a_copy_has_the_same_containers_and_mappings_as_dicts() -> None:
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
    assert copy["named"].mean is not state["named"].mean


def test_a_named_tuple_is_read_back_as_a_tuple(tmp_path: Path) -> None:
    state = {"average": Moments(torch.ones(2), 3), "shapes": [torch.Size([2])]}
    save_checkpoint({"format": FORMAT, **state}, tmp_path / "x.pt")

    for read in (load_checkpoint(tmp_path / "x.pt"), decode_metadata(encode_metadata(state))):
        mean, count = read["average"]
        assert (type(read["average"]), mean.tolist(), count) == (tuple, [1, 1], 3)
        assert read["shapes"] == [torch.Size([2])]


def test_an_epoch_is_durable_only_when_its_file_is_there(tmp_path: Path) -> None:
    seen: list[bool] = []
    done = threading.Event()

    def durable() -> None:
        seen.append(checkpoint_path(tmp_path, point(1)).exists())
        done.set()

    writer = CheckpointWriter(tmp_path)
    writer.write(point(1), {"epoch": 1}, durable)
    writer.close()

    assert (seen, done.is_set()) == ([True], True)


def test_a_full_disk_does_not_stop_training_and_no_epoch_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, tried = threading.Event(), threading.Event()
    save = save_checkpoint

    def full(content: dict[str, object], path: Path) -> None:
        if not room.is_set():
            tried.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoints, "save_checkpoint", full)
    monkeypatch.setattr(checkpoints, "RETRY_INTERVAL_S", 0.01)
    durable: list[int] = []
    writer = CheckpointWriter(tmp_path)
    for epoch in (1, 2, 3, 4):
        writer.write(point(epoch), {"epoch": epoch}, partial(durable.append, epoch))
        assert tried.wait(5)
    assert durable == []
    room.set()
    writer.close()

    assert durable == [1, 2, 3, 4]
    newest = find_checkpoint(tmp_path, point(2), 4)
    assert load_checkpoint(newest)["epoch"] == 4


def written(folder: Path, *names: str) -> None:
    for name in names:
        epoch, version = map(int, name.split(".v"))
        path = checkpoint_path(folder, ResumePoint(epoch=epoch, version=Version(version)))
        reported = [
            {"facts": to_builtins(facts(one)), "group": Version(version)}
            for one in range(1, epoch + 1)
        ]
        save_checkpoint({"format": FORMAT, "epoch": epoch, "reported": reported}, path)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["3.v3"], "3.v3"),
        (["4.v3", "5.v3"], "5.v3"),  # it went on and dropped what the controller knew
        (["3.v3", "4.v3"], "4.v3"),
        (["4.v5", "5.v5"], "5.v5"),  # the group after it did, and was lost with its reports
        (["9.v3", "4.v5"], "4.v5"),  # the older group trains on, where nobody reaches it
        (["3.v3", "4.v7"], "3.v3"),  # of a group after the one that begins: it cannot be
        (["2.v5"], None),
        ([], None),
    ],
)
def test_a_job_goes_on_from_the_furthest_that_continues_what_is_known(
    files: list[str], found: str | None, tmp_path: Path
) -> None:
    written(tmp_path, *files)

    path = find_checkpoint(tmp_path, point(3), 7)

    name = path.name if path.exists() else None
    assert name == (None if found is None else f"epoch-00000{found}.pt")


def facts(epoch: int) -> EpochFacts:
    return EpochFacts(
        epoch=epoch,
        step=epoch,
        samples_per_s=1.0,
        train_loss=None,
        metrics={},
        global_batch=1,
        lr=0.1,
    )


def test_a_worker_says_of_the_epochs_that_nobody_had_heard_of(tmp_path: Path) -> None:
    written(tmp_path, "6.v5")
    said: list[dict[str, object]] = []
    training = TrainingStub()
    epochs = EpochReports(training, lambda _, **what: said.append(what))  # type: ignore[arg-type]

    assert epochs.resume(tmp_path, point(3), 7) == 6
    epochs.report_missing_epochs()
    epochs.report_missing_epochs()

    assert said == [{"facts": facts(epoch), "group": 5} for epoch in (4, 5, 6)]


class TrainingStub:
    """What a checkpoint is loaded into."""

    reported: list[dict[str, object]]

    def load_checkpoint(self, content: dict[str, Any]) -> None:
        self.reported = content["reported"]


class OnlyHalf(FileIO):
    """Takes a part of each write, as Linux does of more than 2 GiB."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(memoryview(data)[: -(-len(data) // 2)])


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_file_that_takes_a_part_of_each_write_gets_the_whole_checkpoint(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FileIO", OnlyHalf)
    weights = torch.arange(size)

    save_checkpoint({"format": FORMAT, "w": weights}, tmp_path / "x.pt")

    assert load_checkpoint(tmp_path / "x.pt")["w"].equal(weights)


class Disk:
    """A disk with room for `room` bytes at first; while it is full, its files take nothing."""

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


@pytest.mark.parametrize("room", [0, 1000, 100_000], ids=["nothing", "a header", "a part"])
def test_on_a_disk_that_fills_up_the_old_checkpoint_stays_and_the_new_one_is_not_reported(
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


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_device_without_room_says_so(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.pt").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint({"format": FORMAT, "w": torch.zeros(size)}, tmp_path / "x.pt")


def test_a_checkpoint_is_written_when_a_disk_that_filled_up_under_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[int] = []
    disk = Disk(monkeypatch, room=100_000)
    writer = CheckpointWriter(tmp_path)
    writer.write(point(1), {"epoch": 1, "w": torch.ones(100_000)}, partial(durable.append, 1))
    assert disk.full.wait(5)
    disk.room = 1 << 30
    writer.close()

    assert durable == [1]
    assert load_checkpoint(checkpoint_path(tmp_path, point(1)))["w"].equal(torch.ones(100_000))


def test_a_state_that_cannot_be_read_back_is_told(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.write(point(1), {"tracked": {"scheduler": Path("a class that torch refuses")}}, print)

    with pytest.raises(CheckpointError, match="track only states that can be pickled"):
        writer.close()
    assert list(tmp_path.glob("*.pt")) == []


def test_a_damaged_or_missing_checkpoint_says_which_and_why(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, point(1))
    with pytest.raises(CheckpointError, match="set `checkpoints` of every agent to the same"):
        load_checkpoint(path)
    save_checkpoint({"format": FORMAT}, path)
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=r"epoch-000001.v3.pt cannot be read"):
        load_checkpoint(path)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, point(1))
    torch.save({"format": FORMAT, "evil": Path}, path)

    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(torch.rand(1)), float(np.random.rand())]  # noqa: NPY002, S311

    path = tmp_path / "x.pt"
    save_checkpoint({"format": FORMAT, "random": random_state()}, path)
    first = draw()
    restore_random_state(load_checkpoint(path)["random"])

    assert draw() == first


def resumed_training() -> tuple[TrainingState, nn.Module, torch.optim.Optimizer]:
    """A job that has just loaded its checkpoint, whose weights are 1 and momentum 2."""
    training = TrainingState(Schedule(ScheduleRow(1, (1,), 0)), stop_rule=None, rank=0)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    training.set_tensors(TensorState(model, optimizer), SampleStream(0, 4))
    nn.init.ones_(model.weight)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 1), 2.0)
    training.load_checkpoint(training.checkpoint())
    return training, model, optimizer


def test_weights_that_a_script_sets_behind_load_do_not_replace_those_of_a_checkpoint() -> None:
    training, model, optimizer = resumed_training()
    model.weight.data.fill_(7.0)  # as DCGAN's weights_init does, unseen by version counters
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.25

    restore_loaded = [training.restore_loaded(), training.restore_loaded()]

    kept = optimizer.state[model.weight]["momentum_buffer"].item()
    assert restore_loaded == [True, False]
    assert (model.weight.item(), kept, optimizer.param_groups[0]["lr"]) == (1.0, 2.0, 0.25)


def test_a_script_that_leaves_the_model_as_it_was_loaded_hears_nothing() -> None:
    training, _, _ = resumed_training()

    assert not training.restore_loaded()
