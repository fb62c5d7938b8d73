"""A node that cannot start workers says so, and mends what it can."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeagent import health
from nodeagent.folders import NodeFolders
from nodeagent.health import HealthWatch, Place, checked_places
from schemas.errors import SettingsError

MIB = 1 << 20


class Node:
    """A watch over real folders and a file in the socket's place."""

    def __init__(self, home: Path) -> None:
        self.folders = NodeFolders(home / "run", home / "work", home / "checkpoints")
        self.folders.make()
        self.socket = self.folders.sockets / "agent.sock"
        self.socket.touch()
        self.listens = True
        self.listened = 0
        self.told: list[tuple[str, ...]] = []

    def listen(self) -> None:
        if not self.listens:
            raise SettingsError("cannot bind it", "choose another address")
        self.listened += 1
        self.socket.unlink(missing_ok=True)
        self.socket.touch()

    def watch(self, *places: Place) -> HealthWatch:
        own, shared = checked_places(self.folders, 0)
        return HealthWatch(
            places=places or own,
            shared=() if places else shared,
            socket=self.socket,
            listen=self.listen,
            changed=self.told.append,
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_deleted_folders_are_made_again_without_a_report(node: Node) -> None:
    watch = node.watch()
    folders = node.folders
    needed = (folders.run, folders.work, folders.checkpoints, folders.sockets)
    for path in needed:
        shutil.rmtree(path, ignore_errors=True)

    await watch.look()

    assert node.told == []
    assert node.socket.exists()
    new = folders.run / "new" / "inner"
    assert Place("run", new, 0).problem(full=False) == ""
    for path in (*needed, folders.run / "workers", new.parent, new):
        assert path.stat().st_mode & 0o777 == 0o700
        assert not list(path.glob(".*"))


async def test_a_fault_is_reported_until_it_is_repaired(node: Node) -> None:
    watch = node.watch()
    node.folders.work.rmdir()
    node.folders.work.touch()  # somebody put a file there

    await watch.look()
    await watch.look()
    node.folders.work.unlink()
    await watch.look()

    problem = f"work {node.folders.work}: File exists; check its file system"
    assert node.told == [(problem,), ()]
    assert watch.problems == ()


async def test_a_socket_that_cannot_be_bound_again_is_reported(node: Node) -> None:
    watch = node.watch()
    node.socket.unlink()
    node.listens = False

    await watch.look()
    node.listens = True
    await watch.look()

    why = "cannot bind it; choose another address"
    assert node.told == [(f"run {node.socket}: workers cannot connect: {why}",), ()]


async def test_a_foreign_socket_file_is_replaced(node: Node) -> None:
    watch = node.watch()
    other = node.socket.with_name("other")
    other.touch()
    other.rename(node.socket)

    await watch.look()
    await watch.look()

    assert (node.listened, node.told) == (1, [])


async def test_a_disk_is_full_below_the_reserve_and_has_room_at_twice_that(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=0, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    watch = node.watch(Place("work", node.folders.work, 10 * MIB))
    told: list[list[tuple[str, ...]]] = []
    for free in (11, 9, 8, 19, 20):
        disk.f_bavail = free * MIB
        await watch.look()
        told.append(list(node.told))

    full = (f"work {node.folders.work}: less than 10 MiB left; free space there",)
    assert told == [[], [full], [full], [full], [full, ()]]


async def test_a_disk_that_takes_no_file_is_full(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: Place) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Place, "_probe", no_room)
    await node.watch().look()

    folders = node.folders
    places = ((name, getattr(folders, name)) for name in ("run", "work", "checkpoints"))
    assert node.told == [
        tuple(f"{name} {path}: No space left on device; free space there" for name, path in places)
    ]


class Hanging(Place):
    """A place on a file system that does not answer."""

    answers = threading.Event()

    def problem(self, *, full: bool) -> str:
        self.answers.wait()
        return ""


async def test_a_hanging_file_system_is_reported_and_delays_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(health, "RESPONSE_TIMEOUT_S", 0.0)
    hanging = Hanging("checkpoints", Path("/shared"), 0)
    watch = node.watch(hanging, Place("work", node.folders.work, 0))
    shutil.rmtree(node.folders.work)

    only = ("checkpoints /shared: it does not respond; check its file system",)
    while watch.problems != only:
        await watch.look()
    assert node.folders.work.is_dir()
    Hanging.answers.set()
    while watch.problems:
        await watch.look()

    assert node.told[-2:] == [only, ()]
    assert len([t for t in threading.enumerate() if t.name == "look at /shared"]) <= 1


async def test_shared_folders_are_checked_less_often(node: Node) -> None:
    watch = node.watch()
    await watch.look(everything=False)
    node.folders.checkpoints.rmdir()
    node.folders.work.rmdir()

    await watch.look(everything=False)

    assert (node.folders.work.exists(), node.folders.checkpoints.exists()) == (True, False)
    for _ in range(health.SHARED_INTERVAL):
        await watch.look(everything=False)
    assert node.folders.checkpoints.exists()
