"""The drawing of a re-scale: times of a change, and the page that shows them."""

from __future__ import annotations

import re

from tests.bench.figures import DOCS
from tests.bench.rescale import DRAWING, PAGE, Rescale, drawn, rescale_of, table
from tests.bench.steps import Step

EVENTS = [
    {"type": "job.rescaling", "time": 1.0},
    {"type": "worker.ready", "time": 2.0},
    {"type": "job.rescaling", "time": 10.0},
    {"type": "worker.started", "time": 10.25},
    {"type": "worker.ready", "time": 10.5},
    {"type": "job.running", "time": 11.5, "pause_ms": 8.0},
    {"type": "job.epoch", "time": 12.0},
]
OLD = [Step(9.5, 1, 0, 2, 0.0), Step(10.0, 2, 0, 2, 0.0), Step(10.75, 3, 0, 2, 0.0)]
NEW = [Step(11.5, 4, 0, 4, 0.0)]
CHANGE = Rescale(
    started=(250.0,),
    ready=(500.0,),
    formed=1500.0,
    pause_ms=8.0,
    steps={
        0: ((-500.0, 2), (0.0, 2), (750.0, 2), (1500.0, 4)),
        2: ((1500.0, 4),),
    },
)  # fmt: skip


def test_times_count_from_the_last_order() -> None:
    steps = {"job.v1.r0": OLD + NEW, "job.v2.r2": [Step(11.5, 4, 2, 4, 0.0)], "lost": []}

    found = rescale_of(EVENTS, steps)

    assert found == CHANGE
    assert (found.switch, found.boundary, found.usual_ms, found.during) == (500, 750, 625, 1)


def test_the_table_and_the_drawing_have_the_measured_times() -> None:
    assert "| the last step of the two old workers ends | 750 ms |" in table(CHANGE)
    assert "<desc>Order at 0 ms. Newcomers start after 250 ms and are ready after 500 ms." in drawn(
        CHANGE
    )


def test_the_page_and_its_drawing_are_of_one_run() -> None:
    drawing = (DOCS / DRAWING).read_text(encoding="utf-8")
    page = (DOCS / PAGE).read_text(encoding="utf-8")

    shown = re.search(
        r"ready \| (\d+) ms .*? ends \| (\d+) ms .*? reported \| (\d+) ms .*? pause \| (\d+) ms",
        page,
        re.DOTALL,
    )

    assert shown is not None
    ready, boundary, formed, pause = shown.groups()
    assert (
        f"are ready after {ready} ms. The old group trains until the boundary at {boundary} ms. The pause "
        f"is {pause} ms. The new group is reported after {formed} ms." in drawing
    )
