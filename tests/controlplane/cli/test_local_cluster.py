"""`ones local up` where there is no room, or no right."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.cli import local_cluster
from controlplane.cli.exit_codes import Exit, exit_code
from schemas.errors import OnesError, SettingsError
from tests.support.commands import ones

MIB = 1 << 20


def refused(home: Path) -> str:
    with pytest.raises(SettingsError) as error:
        local_cluster.up(dir_=home)
    assert exit_code(error.value) is Exit.USAGE
    return str(error.value)


def test_a_disk_without_room_is_refused_before_anything_lies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=17 * MIB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    home = tmp_path / "a" / "cluster"

    assert refused(home) == (
        f"{home}: 17 MiB are free on its disk, a cluster needs 128 MiB to begin; "
        "free space there, or choose another --dir"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (28, "No space left on device; free space there, or choose another --dir"),
        (13, "Permission denied; choose another --dir, or give {home} to ann"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_what_helps(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, _: str) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(local_cluster, "_write", write)
    monkeypatch.setattr(local_cluster.getpass, "getuser", lambda: "ann")

    expected = f"{tmp_path}/keys/authorised.toml: {said.format(home=tmp_path)}"
    assert refused(tmp_path) == expected


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    (disk / "filler").write_bytes(bytes(MIB))
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.root
def test_a_disk_that_is_really_full_is_named(full_disk: Path) -> None:
    done = ones("local", "up", "--dir", str(full_disk / "cluster"))

    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"ones: {full_disk}/cluster: 0 MiB are free on its disk, a cluster needs 128 MiB to "
        "begin; free space there, or choose another --dir\n"
    )


def test_agents_are_told_in_order_of_their_numbers_and_then_those_that_somebody_named(
    tmp_path: Path,
) -> None:
    for name in ("agent-10", "agent-2", "agent-left", "controller"):
        (tmp_path / f"{name}.toml").touch()

    found = [part.name for part in local_cluster._parts(tmp_path)]

    assert found == ["controller", "agent-2", "agent-10", "agent-left"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((2, 1, None), "slots = 4, not 2; edit agent-N.toml and restart, or give another --dir"),
        ((4, 3, None), "agents = 2, not 3; edit agent-N.toml and restart, or give another --dir"),
        ((None, 1, "fifo"), "policy = ones, not fifo; edit controller.toml and restart, or give another --dir"),
    ],
)  # fmt: skip
def test_a_cluster_of_other_settings_is_refused_and_not_started(
    asked: tuple[int | None, int, str | None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, agents, policy = asked
    local_cluster._create(tmp_path, slots=4, agents=2, policy="ones")
    monkeypatch.setattr(local_cluster._Part, "start", lambda _: pytest.fail("started"))

    with pytest.raises(OnesError) as error:
        local_cluster.up(dir_=tmp_path, slots=slots, agents=agents, policy=policy)

    assert str(error.value) == f"the cluster in {tmp_path} has {said}"
    assert exit_code(error.value) == 1
