"""A file says that the node will go away: once for each appearance, and in how many seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.notices import NoticeWatch
from nodeagent.settings import Notice
from schemas.wire.agent import MAX_NOTICE_S, NodeNoticed

SETTINGS = Notice(file="notice", seconds=45.0)


def seconds(told: list[NodeNoticed]) -> list[float]:
    return [one.within_s for one in told]


def test_each_appearance_of_the_file_is_one_notice(tmp_path: Path) -> None:
    told: list[NodeNoticed] = []
    watch = NoticeWatch(lambda: SETTINGS, tmp_path, told.append)
    watch.look()
    assert told == []

    for _ in range(2):
        (tmp_path / "notice").write_text("120\n")
        watch.look()
        watch.look()
        (tmp_path / "notice").unlink()
        watch.look()

    assert told == [NodeNoticed(within_s=120.0, reason="notice appeared")] * 2


@pytest.mark.parametrize(
    ("text", "within_s"),
    [
        ("", 45.0),
        ("soon", 45.0),
        ("nan", 45.0),
        ("inf", 45.0),
        ("-1", 0.0),
        ("7.5", 7.5),
        ("1e300", MAX_NOTICE_S),
    ],
)
def test_a_file_without_a_usable_number_stands_for_the_seconds_of_the_settings(
    tmp_path: Path, text: str, within_s: float
) -> None:
    told: list[NodeNoticed] = []
    (tmp_path / "notice").write_text(text)

    NoticeWatch(lambda: SETTINGS, tmp_path, told.append).look()

    assert seconds(told) == [within_s]


def test_without_a_file_in_the_settings_nothing_is_a_notice(tmp_path: Path) -> None:
    told: list[NodeNoticed] = []

    NoticeWatch(Notice, tmp_path, told.append).look()

    assert told == []
