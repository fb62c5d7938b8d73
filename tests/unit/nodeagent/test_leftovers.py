"""What ended jobs left goes by age and size; what a job may still need stays."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

from nodeagent.ended_jobs import (
    MARKS,
    MIN_AGE_FOR_SIZE_S,
    MIN_UNREPORTED_AGE_S,
    KeepLimits,
    Leftovers,
)
from schemas.ids import JobId

NOW: Final = 10_000_000.0
DAY: Final = 86_400.0
MUCH: Final = 1 << 40
WEEK: Final = KeepLimits(7 * DAY, MUCH)
NOBODY: Final = frozenset[str]()


class Folder:
    """A folder of jobs' folders."""

    def __init__(self, area: Leftovers) -> None:
        self.area = area
        area.root.mkdir(parents=True)

    def job(self, name: str, *, ended: float | None = None, changed: float = 0.0) -> None:
        """One that ended so many days ago, and was changed last then; each has 8 KiB."""
        folder = self.area.root / name
        (folder / "lib").mkdir(parents=True)
        for file in ("a", "lib/b"):
            (folder / file).write_bytes(os.urandom(4096))
        _at(folder, changed)
        if ended is not None:
            self.area.note(JobId(name), ended=True)
            _at(self.area.root / MARKS / name, ended)

    def keeps(self, kept: KeepLimits, busy: frozenset[str] = NOBODY) -> list[str]:
        """Who is left."""
        self.area.delete(kept, busy, NOW, {})
        return self.left

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.area.root.iterdir() if path.name != MARKS)

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


def test_what_ended_long_ago_goes_with_its_mark_and_what_nobody_said_has_ended_stays(
    shared: Folder,
) -> None:
    shared.job("old-1", ended=8.0)
    shared.job("new-2", ended=6.0, changed=9.0)
    shared.job("paused-3", changed=90.0)

    assert shared.keeps(WEEK) == ["new-2", "paused-3"]
    assert shared.marked == ["new-2"]


def test_a_job_that_the_node_knows_stays_whatever_its_mark_says(shared: Folder) -> None:
    shared.job("old-1", ended=8.0)

    assert shared.keeps(WEEK, frozenset({"old-1"})) == ["old-1"]
    assert shared.marked == ["old-1"]


def test_a_job_that_begins_again_stays_on_every_node(shared: Folder) -> None:
    shared.job("again-1", ended=8.0)

    shared.area.note(JobId("again-1"), ended=False)
    shared.area.note(JobId("never-2"), ended=False)

    assert shared.keeps(WEEK) == ["again-1"]


def test_an_end_that_is_heard_of_again_counts_from_the_first_time(shared: Folder) -> None:
    shared.job("old-1", ended=8.0)

    shared.area.note(JobId("old-1"), ended=True)

    assert shared.keeps(WEEK) == []


def test_the_oldest_go_sooner_where_all_are_too_much(shared: Folder) -> None:
    for name, ended in (("a-1", 3.0), ("b-2", 2.0), ("c-3", 1.0)):
        shared.job(name, ended=ended)
    shared.job("lives-4")

    assert shared.keeps(KeepLimits(7 * DAY, 20 << 10)) == ["b-2", "c-3", "lives-4"]


def test_what_just_ended_goes_by_its_age_only(shared: Folder) -> None:
    shared.job("old-1", ended=1.1 * MIN_AGE_FOR_SIZE_S / DAY)
    shared.job("young-2", ended=0.9 * MIN_AGE_FOR_SIZE_S / DAY)

    assert shared.keeps(KeepLimits(7 * DAY, 0)) == ["young-2"]
    assert shared.keeps(KeepLimits(0.95 * MIN_AGE_FOR_SIZE_S, 0)) == ["young-2"]
    assert shared.keeps(KeepLimits(0.0, MUCH)) == []


def test_folders_of_unknown_jobs_go_by_their_last_change_where_no_other_node_uses_them(
    own: Folder,
) -> None:
    unheard = MIN_UNREPORTED_AGE_S / DAY
    for name, changed in (("old-1", unheard + 2), ("young-2", unheard - 1)):
        own.job(name, changed=changed)
        (own.area.root / name / "mark").touch()
        _at(own.area.root / name, changed)
    own.job("foreign", changed=90.0)

    assert own.keeps(KeepLimits(unheard * DAY + 3 * DAY, MUCH)) == ["foreign", "old-1", "young-2"]
    assert own.keeps(KeepLimits(1.0, MUCH)) == ["foreign", "young-2"]


def test_jobs_of_which_no_end_was_heard_are_told_of_those_changed_last_first(
    own: Folder, monkeypatch: pytest.MonkeyPatch
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


def test_of_a_folder_of_all_nodes_and_of_one_that_cannot_be_read_nobody_is_told_of(
    shared: Folder, tmp_path: Path
) -> None:
    shared.job("old-1")

    assert shared.area.unmarked() == []
    assert Leftovers(tmp_path / "none").unmarked() == []
    assert Leftovers(tmp_path / "none").marked() == []


def test_a_mark_goes_with_a_folder_that_somebody_else_deleted(shared: Folder) -> None:
    shared.job("gone-1", ended=1.0)
    shutil.rmtree(shared.area.root / "gone-1")

    assert shared.keeps(WEEK) == []
    assert shared.marked == []


def test_where_nothing_of_a_job_lies_it_gets_no_mark(shared: Folder) -> None:
    shared.area.note(JobId("elsewhere-1"), ended=True)

    assert not (shared.area.root / MARKS).exists()


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
    shared.area.delete(WEEK, NOBODY, NOW, sizes)  # type: ignore[arg-type]
    (shared.area.root / "a-1" / "late").write_bytes(bytes(1 << 20))

    gone = shared.area.delete(KeepLimits(7 * DAY, 100 << 10), NOBODY, NOW, sizes)  # type: ignore[arg-type]

    assert (gone, list(sizes)) == ([], ["a-1"])
