"""Who asks for events that are no longer kept is told so, once, and gets the others."""

from __future__ import annotations

import pytest

from controlplane.cli.jobs import report_gaps
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent


def events(*numbers: int) -> list[FeedEvent]:
    return [
        FeedEvent(seq=seq, time=Seconds(0.0), event="job.epoch", job=None, node=None, detail={})
        for seq in numbers
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (1, "ones: events 1 to 7 are no longer kept (keep_events_s, keep_bytes)\n"),
        (0, "ones: events 1 to 7 are no longer kept (keep_events_s, keep_bytes)\n"),
        (7, "ones: events 7 to 7 are no longer kept (keep_events_s, keep_bytes)\n"),
        (8, ""),
    ],
)
def test_the_gap_before_the_first_event_is_told_of(
    asked: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = events(8, 9, 10)

    assert list(report_gaps(kept, asked)) == kept
    assert capsys.readouterr().err == said
