"""Clean-up after ended jobs: marks, and deletion by age and size."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from nodeagent import ended_jobs
from nodeagent.ended_jobs import (
    MARKS,
    MIN_AGE_FOR_SIZE_S,
    MIN_UNREPORTED_AGE_S,
    OWNERS,
    DiskLimits,
    EndedJobs,
    KeepLimits,
    Leftovers,
    mark_used,
)
from nodeagent.errors import StartError
from nodeagent.folders import NodeFolders
from nodeagent.job_folders import MARK
from nodeagent.owned_files import Owner, bytes_below, remove_tree
from nodeagent.settings import AgentSettings
from schemas.ids import JobId
from tests.support.file_trees import tree

NOW: Final = 10_000_000.0
DAY: Final = 86_400.0
MUCH: Final = 1 << 40
WEEK: Final = KeepLimits(7 * DAY, MUCH)
NONE: Final = frozenset[str]()


class Folder:
    """A folder of jobs' folders."""

    def __init__(self, area: Leftovers) -> None:
        self.area = area
        area.root.mkdir(parents=True)

    def job(self, name: str, *, ended: float | None = None, changed: float = 0.0) -> None:
        """Add a job with 8 KiB that ended, and was changed last, so many days ago."""
        folder = self.area.root / name
        (folder / "lib").mkdir(parents=True)
        for file in ("a", "lib/b"):
            (folder / file).write_bytes(os.urandom(4096))
        _at(folder, changed)
        if ended is not None:
            self.area.note(JobId(name), ended=True)
            _at(self.area.root / MARKS / name, ended)

    def keeps(self, kept: KeepLimits, busy: frozenset[str] = NONE) -> list[str]:
        """Delete what is due; the jobs that are left."""
        self.area.delete(kept, busy, NOW, {})
        return self.left

    @property
    def left(self) -> list[str]:
        return sorted(
            path.name for path in self.area.root.iterdir() if path.name not in {MARKS, OWNERS}
        )

    @property
    def marked(self) -> list[str]:
        return sorted(path.name for path in (self.area.root / MARKS).iterdir())


def _at(path: Path, days_ago: float) -> None:
    os.utime(path, (NOW - days_ago * DAY,) * 2)


@pytest.fixture
def shared(tmp_path: Path) -> Folder:
    return Folder(Leftovers(tmp_path / "checkpoints", shared=True))


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    return Folder(Leftovers(tmp_path / "work", marker_file="mark"))


def test_folders_of_jobs_that_ended_long_ago_are_deleted_with_their_marks(shared: Folder) -> None:
    shared.job("old-1", ended=8.0)
    shared.job("new-2", ended=6.0, changed=9.0)
    shared.job("paused-3", changed=90.0)

    assert shared.keeps(WEEK) == ["new-2", "paused-3"]
    assert shared.marked == ["new-2"]


def test_a_known_or_restarted_job_stays_and_a_repeated_end_counts_from_the_first(
    shared: Folder,
) -> None:
    for name in ("busy-1", "again-2", "old-3"):
        shared.job(name, ended=8.0)
    shared.area.note(JobId("again-2"), ended=False)
    shared.area.note(JobId("never-4"), ended=False)
    shared.area.note(JobId("old-3"), ended=True)

    assert shared.keeps(WEEK, frozenset({"busy-1"})) == ["again-2", "busy-1"]
    assert shared.marked == ["busy-1"]


def test_the_oldest_folders_are_deleted_beyond_the_size_limit_unless_they_are_young(
    shared: Folder,
) -> None:
    for name, ended in (("a-1", 3.0), ("b-2", 2.0), ("c-3", 1.0)):
        shared.job(name, ended=ended)
    shared.job("lives-4")
    shared.job("young-5", ended=0.9 * MIN_AGE_FOR_SIZE_S / DAY)

    assert shared.keeps(KeepLimits(7 * DAY, 20 << 10)) == ["b-2", "c-3", "lives-4", "young-5"]
    assert shared.keeps(KeepLimits(7 * DAY, 0)) == ["lives-4", "young-5"]
    assert shared.keeps(KeepLimits(0.0, MUCH)) == ["lives-4"]


def test_folders_of_unknown_jobs_are_deleted_by_their_last_change(own: Folder) -> None:
    unheard = MIN_UNREPORTED_AGE_S / DAY
    for name, changed in (("old-1", unheard + 2), ("young-2", unheard - 1)):
        own.job(name, changed=changed)
        (own.area.root / name / "mark").touch()
        _at(own.area.root / name, changed)
    own.job("foreign", changed=90.0)

    assert own.keeps(KeepLimits(unheard * DAY + 3 * DAY, MUCH)) == ["foreign", "old-1", "young-2"]
    assert own.keeps(KeepLimits(1.0, MUCH)) == ["foreign", "young-2"]


def test_jobs_without_an_end_are_listed_by_their_last_change_unless_shared(
    own: Folder, shared: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeagent.ended_jobs.MAX_UNMARKED", 2)
    for days, name in enumerate(("a-1", "b-2", "c-3", "no job", "foreign-4")):
        own.job(name, changed=days)
        if name != "foreign-4":
            (own.area.root / name / "mark").touch()
        _at(own.area.root / name, days)
    own.job("done-5", ended=1.0)

    assert own.area.unmarked() == ["a-1", "b-2"]
    assert own.area.marked() == ["done-5"]
    shared.job("old-1")
    for nothing in (shared.area, Leftovers(tmp_path / "none")):
        assert (nothing.unmarked(), nothing.marked()) == ([], [])


def test_a_job_without_a_folder_has_no_mark(shared: Folder) -> None:
    shared.area.note(JobId("elsewhere-1"), ended=True)
    assert not (shared.area.root / MARKS).exists()
    shared.job("gone-1", ended=1.0)
    shutil.rmtree(shared.area.root / "gone-1")

    assert shared.keeps(WEEK) == []
    assert shared.marked == []


def test_nothing_is_deleted_behind_a_link(shared: Folder, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (shared.area.root / "linked-1").symlink_to(precious)
    shared.area.note(JobId("linked-1"), ended=True)
    shared.job("old-2", ended=8.0)
    (shared.area.root / "old-2" / "link").symlink_to(precious)

    assert shared.keeps(KeepLimits(0.0, 0)) == ["linked-1"]
    assert (precious / "file").exists()


def test_files_are_measured_once(shared: Folder) -> None:
    shared.job("a-1", ended=1.0)
    sizes: dict[str, object] = {}
    shared.area.delete(WEEK, NONE, NOW, sizes)  # type: ignore[arg-type]
    (shared.area.root / "a-1" / "late").write_bytes(bytes(1 << 20))

    gone = shared.area.delete(KeepLimits(7 * DAY, 100 << 10), NONE, NOW, sizes)  # type: ignore[arg-type]

    assert (gone, list(sizes)) == ([], ["a-1"])


def test_files_of_a_job_with_the_same_name_in_another_journal_are_not_used(
    shared: Folder,
) -> None:
    job = JobId("digits-1")
    shared.area.claim(job, "alice", "cafe")
    shared.area.claim(job, "bob", "beef")  # without files, the name is free
    shared.job(job)

    with pytest.raises(StartError, match="has files of another cluster's job digits-1"):
        shared.area.claim(job, "alice", "cafe")
    shared.area.claim(job, "bob", "beef")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Path], None]:
    """Function that sets the free bytes of the file system before the first deletion below it."""

    def use(begin: int, root: Path) -> None:
        def left(_: Path) -> int:
            return begin - sum(8192 for path in root.iterdir() if not path.name.startswith("."))

        monkeypatch.setattr("nodeagent.ended_jobs.free_bytes", left)

    return use


def test_on_a_full_disk_files_of_the_largest_user_go_first(
    shared: Folder, free: Callable[[int, Path], None]
) -> None:
    for name, user, days in (
        ("a-1", "ann", 6.0),
        ("b-2", "bob", 5.0),
        ("b-3", "bob", 4.0),
        ("b-4", "bob", 3.0),
        ("c-5", "ann", 2.0),
    ):
        shared.area.claim(JobId(name), user, "cafe")
        shared.job(name, ended=days)
    shared.job("lives-6")
    free(64 << 10, shared.area.root)  # 16 KiB with six jobs

    assert shared.keeps(WEEK._replace(reserve=16 << 10)) == sorted(
        ("a-1", "b-2", "b-3", "b-4", "c-5", "lives-6")
    )
    assert shared.keeps(WEEK._replace(reserve=17 << 10)) == ["b-4", "c-5", "lives-6"]
    assert shared.keeps(WEEK._replace(reserve=1 << 20)) == ["lives-6"]
    assert list((shared.area.root / OWNERS).iterdir()) == []


def test_on_a_disk_without_room_for_a_mark_the_files_of_an_ended_job_go(
    shared: Folder, free: Callable[[int, Path], None]
) -> None:
    for name in ("a-1", "lives-2"):
        shared.job(name)
    free(16 << 10, shared.area.root)

    shared.area.delete(WEEK._replace(reserve=16 << 10), NONE, NOW, {}, {"a-1"})

    assert shared.left == ["lives-2"]


def test_old_files_without_a_mark_stay_until_the_active_jobs_are_known(tmp_path: Path) -> None:
    own = Folder(Leftovers(tmp_path / "work"))
    own.job("old-1", changed=30.0)
    own.job("ended-2", ended=30.0)

    own.area.delete(WEEK, NONE, NOW, {}, None)

    assert own.left == ["old-1"]
    assert own.keeps(WEEK) == []


@pytest.mark.slow
def test_files_deeper_than_a_path_can_say_are_measured(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open("large", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(bytes(1 << 20))
    os.close(here)

    assert bytes_below(tmp_path) >= 1 << 20
    remove_tree(tmp_path)


@pytest.mark.parametrize("place", ["work", "states", "checkpoints"])
def test_a_running_job_with_more_files_than_its_limit_is_stopped(
    tmp_path: Path, place: str
) -> None:
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    folders.make()
    job, other = JobId("a-1"), JobId("b-2")
    folder = {
        "work": folders.job,
        "states": folders.states,
        "checkpoints": lambda name: folders.checkpoints / name,
    }[place](job)
    limits = DiskLimits(folders, lambda: 1 << 20, list, lambda *_: None)
    tree(folder, {"small": "x"})
    assert limits.exceeded(job) == 0

    (folder / "large").write_bytes(bytes(2 << 20))

    assert (limits.exceeded(job), limits.exceeded(other)) == (1 << 20, 0)


def test_without_a_setting_a_job_may_use_half_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    folders.make()
    tree(folders.job(DONE), {"file": "x" * 8192})
    disk = os.statvfs_result((4096, 4096, 3, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    limits = DiskLimits(folders, lambda: 0, list, lambda *_: None)

    assert limits.exceeded(DONE) == 3 * 4096 // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "uids", "exceeded"),
    [
        ("shared/open", [os.getuid()], 1 << 20),
        ("shared/open", [], 0),
        ("shared/work/b-2", [os.getuid()], 0),
        ("elsewhere", [os.getuid()], 0),
    ],
)
def test_files_of_a_jobs_uid_in_folders_of_all_users_count_for_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, uids: list[int], exceeded: int
) -> None:
    shared, job, uid = tmp_path / "shared", JobId("a-1"), os.getuid()
    folders = NodeFolders(tmp_path / "run", shared / "work", tmp_path / "checkpoints")
    folders.make()
    tree(folders.job(job), {"small": "x"})
    monkeypatch.setattr(ended_jobs, "SHARED_FOLDERS", (shared, tmp_path / "missing"))
    monkeypatch.setattr(ended_jobs, "owner_of", lambda _: Owner(uid, uid))
    limits = DiskLimits(folders, lambda: 1 << 20, list, lambda *_: None, uids.__contains__)
    assert limits.exceeded(job) == 0

    tree(tmp_path / name, {"large": "x" * (2 << 20)})
    (shared / "link").symlink_to(tmp_path)

    assert limits.exceeded(job) == exceeded


# --- all folders of a node


DONE = JobId("done-1")


class Node:
    """Folders of a node with the files of an ended job."""

    def __init__(self, base: Path, **keep: float) -> None:
        self.folders = NodeFolders(base / "run", base / "work", base / "checkpoints")
        self.folders.make()
        self.settings = AgentSettings(node="n1", **keep)
        self.busy: set[JobId] = set()
        self.ended = EndedJobs(self.folders, lambda: self.settings, lambda: self.busy)
        self.all = (
            self.folders.job(DONE),
            self.folders.states(DONE),
            self.folders.checkpoints / DONE,
        )
        for folder in self.all:
            tree(folder, {"train.py": "x", MARK: ""})

    async def turn(self, *, look: bool = True) -> list[bool]:
        """Delete what is due; which of work, states and checkpoints exist then."""
        for keeper in self.ended._keepers:
            await keeper.turn(keeper._keep(), look=look)
        return [folder.exists() for folder in self.all]

    def age(self, seconds: float) -> None:
        """Let the end of the job be so long ago."""
        for folder in self.all:
            mark = folder.parent / ".ended" / DONE
            os.utime(mark, (time.time() - seconds,) * 2)


ZERO: Final = {"keep_work_s": 0.0, "keep_checkpoints_s": 0.0}


@pytest.mark.parametrize(
    ("keep", "ended_s_ago", "left"),
    [
        ({}, 3600.0, [True, True, True]),
        ({}, 8 * DAY, [False, False, True]),
        ({}, 31 * DAY, [False, False, False]),
        (ZERO, None, [True, True, True]),
        (ZERO, 3000.0, [False, True, False]),
        (ZERO, NOW, [False, False, False]),
    ],
)
async def test_files_are_kept_after_the_end_of_their_job_as_configured(
    tmp_path: Path, keep: dict[str, float], ended_s_ago: float | None, left: list[bool]
) -> None:
    node = Node(tmp_path, **keep)
    if ended_s_ago is not None:
        node.ended.note(DONE, ended=True)
    assert await node.turn(look=False) == [True, True, True]
    if ended_s_ago is not None:
        node.age(ended_s_ago)

    assert await node.turn() == left

    node.ended.note(DONE, ended=False)
    await node.turn()
    assert not any((folder.parent / ".ended" / DONE).exists() for folder in node.all)


async def test_a_job_that_starts_after_its_end_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, **ZERO)
    node.ended.note(DONE, ended=True)
    await node.turn(look=False)
    node.age(9e9)

    node.ended.note(DONE, ended=False)

    assert await node.turn() == [True, True, True]


async def test_the_last_note_about_a_job_counts(tmp_path: Path) -> None:
    node = Node(tmp_path)

    node.ended.note(DONE, ended=True)
    node.ended.note(DONE, ended=False)
    await node.turn()

    assert not any((folder.parent / ".ended" / DONE).exists() for folder in node.all)


async def test_a_mark_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    node = Node(tmp_path)
    marks = node.folders.checkpoints / ".ended"
    marks.touch()
    node.ended.note(DONE, ended=True)
    await node.turn()
    assert marks.read_bytes() == b""
    marks.unlink()

    await node.turn()

    assert (marks / DONE).exists()


async def test_a_hello_names_jobs_with_files_from_before_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.busy = {JobId("here-2")}

    assert await node.ended.find() == []
    assert node.ended.unended == (DONE, "here-2")
    node.ended.note(DONE, ended=True)
    await node.turn(look=False)

    assert node.ended.unended == ("here-2",)
    again = EndedJobs(node.folders, lambda: node.settings, set)
    assert await again.find() == [DONE]
    assert (again.unended, again.highest) == ((), 1)


async def test_changed_settings_apply_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.ended.note(DONE, ended=True)
    await node.turn()
    node.age(7200.0)

    node.settings = AgentSettings(node="n1", keep_work_s=1.0, keep_checkpoints_bytes=0)

    assert await node.turn() == [False, False, False]


def test_an_environment_is_kept_while_workers_use_it_and_a_week_after_that(tmp_path: Path) -> None:
    root = tmp_path / ".environments"
    for name in ("agent-used", "agent-old", "agent-again"):
        (root / name).mkdir(parents=True)
        mark_used(root, name)
        _at(root / MARKS / name, 8.0)
    mark_used(root, "agent-again")
    _at(root / MARKS / "agent-again", 6.0)

    Leftovers(root).delete(WEEK, {"agent-used"}, NOW, {})

    left = sorted(path.name for path in root.iterdir() if path.name != MARKS)
    assert left == ["agent-again", "agent-used"]
