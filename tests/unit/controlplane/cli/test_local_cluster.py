"""`ones local up` and `down`: a full disk, missing permissions, and refused settings."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from controlplane.cli import local, operators
from controlplane.cli.output import Exit, exit_code
from nodeagent.__main__ import _end_workers as end_workers_of
from nodeagent.settings import AgentSettings, Controller
from schemas.errors import OnesError, SettingsError
from tests.support.commands import ones

MIB = 1 << 20


def refused(home: Path) -> str:
    with pytest.raises(SettingsError) as error:
        local.up(dir_=home)
    assert exit_code(error.value) is Exit.USAGE
    return str(error.value)


def test_a_full_disk_is_refused_before_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=17 * MIB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    home = tmp_path / "a" / "cluster"

    assert refused(home) == (
        f"{home}: only 17 MiB free on its disk; a cluster needs 128 MiB; "
        "free disk space, or choose another --dir"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (28, "No space left on device; free disk space, or choose another --dir"),
        (13, "Permission denied; choose another --dir, or give {home} to ann"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_a_remedy(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, _: str) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(local, "write_settings", write)
    monkeypatch.setattr(local.getpass, "getuser", lambda: "ann")

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
        f"ones: {full_disk}/cluster: only 0 MiB free on its disk; a cluster needs "
        "128 MiB; free disk space, or choose another --dir\n"
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cluster of two agents, of which nothing runs."""
    (tmp_path / "controller.toml").write_text("")
    (tmp_path / "agent-1.toml").write_text('node = "node-1"\nrun = "run/node-1"\n')
    (tmp_path / "agent-2.toml").write_text('node = "node-2"\nrun = "run/node-2"\n')
    return tmp_path


def test_parts_are_sorted_by_number_and_found_by_the_pid_file_of_their_settings(home: Path) -> None:
    (home / "agent-1.toml").write_text('pid_file = "own/one.pid"\n')
    (home / "agent-2.toml").write_text("pid_file = [")
    for name in ("agent-10", "agent-left"):
        (home / f"{name}.toml").touch()

    found = [(part.name, str(part.pid_file.relative_to(home))) for part in local.parts_of(home)]

    assert found == [
        ("controller", "run/controller.pid"), ("agent-1", "own/one.pid"),
        ("agent-2", "run/agent-2.pid"), ("agent-10", "run/agent-10.pid"),
        ("agent-left", "run/agent-left.pid"),
    ]  # fmt: skip


def test_a_copy_of_an_agents_file_is_refused(home: Path) -> None:
    (home / "client.toml").write_text('endpoint = "tcp://127.0.0.1:1"\n')
    (home / "agent-2.toml").write_text('node = "node-2"\npid_file = "run/agent-1.pid"\n')

    assert refused(home) == (
        f"{home}/agent-2.toml: pid_file: {home}/run/agent-1.pid is also that of agent-1; "
        "give each its own; `ones node template NAME` prints settings of a new node"
    )


def test_all_parts_are_stopped_and_possible_leftovers_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(local, "stop", lambda part: stopped.append(part.name))
    monkeypatch.setattr(
        local,
        "_end_workers",
        lambda part: "workers of agent-1 may be left (why)" if part.name == "agent-1" else "",
    )

    with pytest.raises(SettingsError) as error:
        local.down(dir_=home)

    assert stopped == ["controller", "agent-1", "agent-2", "web"]
    assert str(error.value) == (
        f"cluster in {home} is not down: workers of agent-1 may be left (why); "
        "resolve this, then run `ones local down` again"
    )


def test_workers_are_ended_with_settings_that_an_agent_refuses_but_only_in_their_folder(
    home: Path,
) -> None:
    agent = home / "agent-1.toml"
    agent.write_text(f'{agent.read_text()}slots = "many"\n')

    assert end_workers_of(agent) == 0
    agent.write_text('node = "node-1"\nrun = 7\n')
    with pytest.raises(SettingsError, match='run: Expected `str`, got `int`; write run = "run"'):
        end_workers_of(agent)


@pytest.mark.parametrize(
    ("pid", "command", "problem"),
    [
        (7, b"", "agent-1, process 7, belongs to another user"),
        (0, b"/usr/bin/other", "{} is locked by a process that cannot be identified"),
        (7, b"/usr/bin/other", "{} is locked by process 7, which is not agent-1"),
    ],
)
def test_a_foreign_process_is_named_and_one_that_only_locks_the_pid_file_not_signalled(
    home: Path, pid: int, command: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_pid: int, _signal: int) -> None:
        assert not command, "signalled"
        raise PermissionError

    part = local.parts_of(home)[1]
    monkeypatch.setattr(local, "pid_of", lambda _: pid)
    monkeypatch.setattr(local, "_command", lambda _: command)
    monkeypatch.setattr(os, "kill", kill)

    assert local.stop(part) == problem.format(part.pid_file)


def test_the_settings_of_a_new_node_are_complete() -> None:
    text = operators.TEMPLATE.format(node="gpu-7", host="::1", agents=7701)

    assert msgspec.convert(tomllib.loads(text), AgentSettings) == AgentSettings(
        node="gpu-7", key="keys/gpu-7.key_secret", run="run/gpu-7", work="state/work/gpu-7",
        checkpoints="state/checkpoints", pid_file="run/agent-gpu-7.pid",
        controller=Controller(host="::1", agents=7701),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((2, 1, None), "slots = 4, not 2; edit agent-N.toml and restart, or give another --dir"),
        ((4, 3, None), "agents = 2, not 3; edit agent-N.toml and restart, or give another --dir"),
        ((None, 1, "fifo"), "policy = ones, not fifo; edit controller.toml and restart, or give another --dir"),
    ],
)  # fmt: skip
def test_a_cluster_of_other_settings_is_refused_and_not_started(
    asked: tuple[int | None, int, str | None], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slots, agents, policy = asked
    local._create(tmp_path, slots=4, agents=2, policy="ones")
    monkeypatch.setattr(local.Part, "start", lambda _: pytest.fail("started"))

    with pytest.raises(OnesError) as error:
        local.up(dir_=tmp_path, slots=slots, agents=agents, policy=policy)

    assert str(error.value) == f"the cluster in {tmp_path} has {said}"
    assert exit_code(error.value) == 1


def test_without_a_folder_the_cluster_of_other_commands_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def bring_up(home: Path, *_: object) -> dict[str, int]:
        started.append(home)
        (home / "client.toml").parent.mkdir()
        (home / "client.toml").write_text('endpoint = "tcp://127.0.0.1:7702"')
        return {"controller": 1}

    monkeypatch.setattr(local, "_bring_up", bring_up)
    monkeypatch.setenv("ONES_HOME", str(tmp_path / "mine"))

    local.up()
    with pytest.raises(SettingsError) as error:
        local.down()

    assert started == [tmp_path / "mine"]
    assert str(error.value).startswith(f"no cluster in {tmp_path / 'mine'}; ")
