"""When a node hears of a job's end, what lies there is marked; settings say how long it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nodeagent.ended_jobs import EndedJobs
from nodeagent.folders import NodeFolders
from nodeagent.job_folders import MARK
from nodeagent.settings import AgentSettings
from schemas.ids import JobId
from tests.support.file_trees import tree

DONE = JobId("done-1")


class House:
    """A node's folders with what one job left, and what keeps them."""

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
        """Which of the job's folders are there behind it: work, states, checkpoints."""
        for keeper in self.ended._keepers:
            await keeper.turn(keeper._keep(), look=look)
        return [folder.exists() for folder in self.all]

    def age(self, seconds: float) -> None:
        """So long ago the job has ended."""
        for folder in self.all:
            mark = folder.parent / ".ended" / DONE
            os.utime(mark, (time.time() - seconds,) * 2)


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (3600.0, [True, True, True]),
        (8 * 86400.0, [False, False, True]),
        (31 * 86400.0, [False, False, False]),
    ],
)
async def test_what_a_job_left_goes_after_a_week_and_its_checkpoints_after_a_month(
    tmp_path: Path, seconds: float, left: list[bool]
) -> None:
    house = House(tmp_path)
    house.ended.note(DONE, ended=True)
    assert await house.turn() == [True, True, True]

    house.age(seconds)

    assert await house.turn() == left


async def test_nothing_of_a_job_goes_whose_end_was_not_heard_of(tmp_path: Path) -> None:
    house = House(tmp_path, keep_work_s=0.0, keep_checkpoints_s=0.0)

    assert await house.turn() == [True, True, True]


async def test_a_second_of_nothing_deletes_at_once_but_states_that_graduates_begin_with(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, keep_work_s=0.0, keep_checkpoints_s=0.0)
    house.ended.note(DONE, ended=True)
    await house.turn(look=False)
    house.age(3000.0)
    assert await house.turn() == [False, True, False]

    os.utime(house.folders.all_states / ".ended" / DONE, (1, 1))

    assert await house.turn() == [False, False, False]


async def test_a_job_that_begins_behind_its_end_stays(tmp_path: Path) -> None:
    house = House(tmp_path, keep_work_s=0.0, keep_checkpoints_s=0.0)
    house.ended.note(DONE, ended=True)
    await house.turn(look=False)
    house.age(9e9)

    house.ended.note(DONE, ended=False)

    assert await house.turn() == [True, True, True]


async def test_of_two_words_about_a_job_the_last_one_counts(tmp_path: Path) -> None:
    house = House(tmp_path)

    house.ended.note(DONE, ended=True)
    house.ended.note(DONE, ended=False)
    await house.turn()

    assert not any((folder.parent / ".ended" / DONE).exists() for folder in house.all)


async def test_a_mark_that_the_disk_does_not_take_is_made_later_and_holds_up_no_deletion(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    marks = house.folders.checkpoints / ".ended"
    marks.touch()
    house.ended.note(DONE, ended=True)
    await house.turn()
    assert marks.read_bytes() == b""
    marks.unlink()

    await house.turn()

    assert (marks / DONE).exists()


async def test_the_controller_is_asked_about_jobs_that_left_something_before_this_life(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    house.busy = {JobId("here-2")}

    assert await house.ended.find() == []
    assert house.ended.unended == (DONE, "here-2")
    house.ended.note(DONE, ended=True)
    await house.turn(look=False)

    assert house.ended.unended == ("here-2",)
    again = EndedJobs(house.folders, lambda: house.settings, set)
    assert await again.find() == [DONE]
    assert again.unended == ()


async def test_what_the_settings_say_later_holds_from_then_on(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.ended.note(DONE, ended=True)
    await house.turn()
    house.age(7200.0)

    house.settings = AgentSettings(node="n1", keep_work_s=1.0, keep_checkpoints_bytes=0)

    assert await house.turn() == [False, False, False]
