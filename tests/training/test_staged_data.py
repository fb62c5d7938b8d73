"""Data of a partition are read once on a node."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from elastic.sweep_worker.staged_data import DataDiffersError, StagedData, count_samples
from tests.support.same_values import same
from tests.training.peers import FORKS

X = torch.arange(24.0).view(6, 4)


def never() -> Any:
    raise AssertionError("it was read again")


class Lazy(Dataset[int]):
    def __init__(self, size: int = 3) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        return at


@pytest.mark.parametrize("data", [
    X,
    TensorDataset(X, torch.arange(6)),
    (X.to(torch.bfloat16), [torch.tensor([True]), "text", b"bytes", None, 3, 0.5]),
    {"images": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), 7: X.t()},
    [np.arange(6, dtype="int16").reshape(2, 3), np.float32([0.5]), np.zeros((0, 3))],
    (torch.empty(0, 3), torch.tensor(1 + 2j)),
    [X[1:3], np.arange(3, dtype="uint16")],
], ids=["tensor", "dataset", "tuple", "mapping", "arrays", "odd", "parts"])  # fmt: skip
def test_staged_data_are_equal(tmp_path: Path, data: Any) -> None:
    first = StagedData(tmp_path).get(2, lambda: data)
    second = StagedData(tmp_path).get(2, never)

    assert same(data, first)
    assert same(data, second)


def test_columns_are_staged_densely(tmp_path: Path) -> None:
    columns = {"tensor": X[:, 1:3], "array": X.numpy()[:, ::-1]}

    found = StagedData(tmp_path).get(0, lambda: columns)

    expected = {"tensor": X[:, 1:3].contiguous(), "array": X.numpy()[:, ::-1].copy()}
    assert same(expected, found)


def test_partitions_and_evaluation_are_separate(tmp_path: Path) -> None:
    staged = StagedData(tmp_path)
    found = [staged.get(at, lambda at=at: torch.tensor([at or 9])) for at in (0, 1, None)]

    assert [int(one) for one in found] == [9, 1, 9]
    assert same(StagedData(tmp_path).get(None, never), torch.tensor([9]))


def test_writes_into_staged_data_stay_private(tmp_path: Path) -> None:
    first = StagedData(tmp_path).get(0, X.clone)
    first.zero_()

    assert same(StagedData(tmp_path).get(0, never), X)


def test_unstaged_data_must_keep_their_size(tmp_path: Path) -> None:
    StagedData(tmp_path).get(0, Lazy)

    assert len(StagedData(tmp_path).get(0, Lazy)) == 3
    with pytest.raises(DataDiffersError, match="4 samples of partition 0, but 3 in"):
        StagedData(tmp_path).get(0, lambda: Lazy(4))


@pytest.mark.parametrize("data", [
    Lazy(), [torch.nn.Parameter(X)], {"x": X.to_sparse()}, np.array([None]), np.array(["text"]),
    np.arange(3, dtype=">i4"), TensorDataset(X.clone().requires_grad_()), iter([1]), Path(),
], ids=[
    "object", "parameter", "sparse", "objects", "texts", "big-endian", "with gradients", "iterator",
    "path",
])  # fmt: skip
def test_other_data_are_read_by_each_worker(tmp_path: Path, data: Any) -> None:
    assert [StagedData(tmp_path).get(0, lambda: data) is data for _ in range(2)] == [True, True]


def test_a_part_of_a_tensor_is_staged_without_the_rest(tmp_path: Path) -> None:
    StagedData(tmp_path).get(0, lambda: torch.zeros(1 << 20)[:3])

    assert (tmp_path / "partition-0.data").stat().st_size < 10_000


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file_is_staged_again(tmp_path: Path, kept: int) -> None:
    StagedData(tmp_path).get(0, lambda: X)
    path = tmp_path / "partition-0.data"
    path.write_bytes(path.read_bytes()[:kept])

    assert same(StagedData(tmp_path).get(0, lambda: X), X)
    assert same(StagedData(tmp_path).get(0, never), X)


def test_a_users_error_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="it was read again"):
        StagedData(tmp_path).get(0, never)

    assert same(StagedData(tmp_path).get(0, lambda: X), X)


@pytest.mark.parametrize(("data", "count"), [
    (X, 6),
    (TensorDataset(X), 6),
    ((X, X), 6),
    ({"x": X, "y": 3}, 6),
    ([X, X], 2),
    (DataLoader(TensorDataset(X), batch_size=4), 6),
    (Subset(TensorDataset(X), [0, 5]), 2),
    (iter([1]), 1),
    (Lazy(0), 1),
])  # fmt: skip
def test_samples_are_counted_by_kind(data: Any, count: int) -> None:
    assert count_samples(data) == count


@pytest.mark.slow
def test_one_worker_of_a_node_reads_at_a_time(tmp_path: Path) -> None:
    first, second = (FORKS.Process(target=_stage, args=(tmp_path,)) for _ in range(2))
    first.start()
    second.start()
    first.join(60)
    second.join(60)

    assert (first.exitcode, second.exitcode) == (0, 0)
    assert (tmp_path / "read").read_text() == "x"
    assert multiprocessing.active_children() == []


def _stage(folder: Path) -> None:
    def read() -> torch.Tensor:
        with (folder / "read").open("a") as noted:
            noted.write("x")
        while not (_somebody_waits(folder) or (folder / "read").read_text() == "xx"):
            os.sched_yield()
        return X

    assert same(StagedData(folder).get(0, read), X)


def _somebody_waits(folder: Path) -> bool:
    inode = (folder / "partition-0.lock").stat().st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{inode} " in line for line in lines)
