"""A worker's files on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elastic import reporting
from elastic.reporting import AppendFile
from elastic.worker.run_script import LossyOutput


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self._write = os.write
        monkeypatch.setattr("elastic.reporting.os.write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        return self._write(descriptor, taken)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_records_wait_for_room(disk: Disk, tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "reports")
    file.append(b"first ")
    disk.room = 3
    file.append(b"second ")
    file.append(b"third ")
    assert (tmp_path / "reports").read_bytes() == b"first sec"
    assert not file.flush()

    disk.room = 1000

    assert file.flush()
    assert (tmp_path / "reports").read_bytes() == b"first second third "


def test_too_many_waiting_bytes_are_refused(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "MAX_WAITING_BYTES", 10)
    file = AppendFile(tmp_path / "samples")
    disk.room = 0
    file.append(b"x" * 10)

    with pytest.raises(OSError, match="No space left"):
        file.append(b"x")


@pytest.mark.parametrize(("writes", "log"), [
    (
        [(1000, b"before\n"), (2, b"lost\n"), (1000, b"after\n")],
        "before\nlo\n[ones] 3 bytes of output were lost: the disk was full\nafter\n",
    ),
    (
        [(0, b"lost\n"), (8, b"this too\n"), (1000, b"after\n")],
        "\n[ones] \n[ones] 14 bytes of output were lost: the disk was full\nafter\n",
    ),
], ids=["a part is lost", "the note is cut"])  # fmt: skip
def test_output_without_room_is_counted(
    disk: Disk, tmp_path: Path, writes: list[tuple[int, bytes]], log: str
) -> None:
    with (tmp_path / "log").open("wb") as file:
        output = LossyOutput(file.fileno())
        for room, data in writes:
            disk.room = room
            assert output.write(data) == len(data)

    assert (tmp_path / "log").read_text() == log
