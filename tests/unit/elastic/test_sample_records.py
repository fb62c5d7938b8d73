"""Which samples were taken, written down by those who are left."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from elastic.reporting import SampleRecords
from elastic.sample_stream import (
    SampleStream,
    Schedule,
    ScheduleRow,
    TrainingPosition,
    rest_of_epoch,
)
from schemas.ids import WorkerId

A, B, C = (WorkerId(name) for name in "abc")


def test_survivors_write_what_the_lost_took_of_a_step_that_was_dealt_anew(tmp_path: Path) -> None:
    stream = SampleStream(seed=1, size=12, min_samples=2)
    schedule = Schedule(ScheduleRow(1, (2, 1, 1), 1))
    first = next(rest_of_epoch(TrainingPosition(), stream, schedule, bound=4))
    records = SampleRecords(deque())
    records.set_stream(stream)
    records.open(tmp_path / "samples")
    records.add(first, (A, B, C))
    records.write()
    records.write_for_lost(frozenset({B}))

    written = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    order = stream.order(1)
    assert [(entry["rank"], entry["ids"]) for entry in written] == [(1, order[2:4]), (0, order[:2])]
