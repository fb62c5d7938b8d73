"""One re-scale from two to four slots, step by step: the drawing and the table of docs/rescale.md.

A real cluster on this host. Steps sleep, as on a device of their own. In the second change a newcomer is
killed when it is ready. `--into docs` writes the drawing and the table into the documentation.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from tests.bench import report
from tests.bench.figures import replaced, rows
from tests.bench.steps import Step, steps_of, submit
from tests.support.cluster import Cluster, resize

BEFORE, AFTER = 2, 4  # slots
STEPS: Final = 20  # before the change, and after it
PAGE, DRAWING = "rescale.md", Path("figures") / "rescale.svg"


@dataclass(frozen=True)
class Rescale:
    """Times of one change, in milliseconds after its order."""

    started: tuple[float, ...]  # process of each newcomer
    ready: tuple[float, ...]  # each newcomer has built the model, and waits for the boundary
    formed: float  # all have reported the new group
    pause_ms: float
    steps: Mapping[
        int, tuple[tuple[float, int], ...]
    ]  # by rank: end of each step, and its group's size

    @property
    def switch(self) -> float:
        """When the last newcomer was ready, and all members were ordered to switch."""
        return max(self.ready)

    @property
    def boundary(self) -> float:
        """End of the last step of the old group."""
        return max(at for at, size in self.steps[0] if size == BEFORE)

    @property
    def usual_ms(self) -> float:
        """Median step of the old group."""
        ends = [at for at, size in self.steps[0] if size == BEFORE]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    @property
    def during(self) -> int:
        """Number of steps of the old group between the order and the boundary."""
        return sum(0 < at <= self.boundary for at, size in self.steps[0])


def rescale_of(events: Sequence[Mapping[str, Any]], steps: Mapping[str, Sequence[Step]]) -> Rescale:
    """Return the last change among the events of a job."""
    at = max(place for place, event in enumerate(events) if event["type"] == "job.rescaling")
    order, change = events[at]["time"], events[at:]

    def times(kind: str) -> tuple[float, ...]:
        return tuple((one["time"] - order) * 1e3 for one in change if one["type"] == kind)

    formed = next(event for event in change if event["type"] == "job.running")
    return Rescale(
        started=times("worker.started"),
        ready=times("worker.ready"),
        formed=(formed["time"] - order) * 1e3,
        pause_ms=formed["pause_ms"],
        steps={
            found[-1].rank: tuple(((step.at - order) * 1e3, step.size) for step in found)
            for found in steps.values()
            if found
        },
    )


def measured(cluster: Cluster, folder: Path) -> Rescale:
    job = submit(cluster, folder)
    cluster.until(job, lambda shown: shown["state"] == "running")
    for slots in (BEFORE, AFTER):
        resize(cluster, job, slots)
        enough = len(_steps_of_size(folder, slots)) + STEPS
        report.until(lambda: len(_steps_of_size(folder, slots)) >= enough, 60.0, 0.1)  # noqa: B023
    found = rescale_of(cluster.events(job), steps_of(folder))
    assert cluster.ones("cancel", job).code == 0
    return found


def _steps_of_size(folder: Path, size: int) -> list[Step]:
    return [one for steps in steps_of(folder).values() for one in steps if one.size == size]


# --- the drawing: dark on light in both schemes of the site, because a picture does not know the scheme

WIDTH, LEFT, TOP, ROW = 880, 120, 52, 34
BEGIN, END = -150.0, 560.0  # ms
FILLS: Final = {"old": "#9ecae1", "new": "#2171b5", "starts": "#fdae6b", "waits": "#e3e3e3"}
STYLE: Final = 'role="img" font-family="sans-serif" font-size="13" fill="#222"'
HEADS: Final = (
    "controller",
    "rank 0, slot 0",
    "rank 1, slot 1",
    "rank 2, slot 2",
    "rank 3, slot 3",
)


def drawn(found: Rescale) -> str:
    """Return an SVG of a change: a row for the controller, and one for each worker."""
    height = TOP + ROW * len(HEADS) + 78
    about = (
        f"Order at 0 ms. Newcomers start after {found.started[0]:.0f} ms and are ready after "
        f"{found.switch:.0f} ms. The old group trains until the boundary at {found.boundary:.0f} ms. "
        f"The pause is {found.pause_ms:.0f} ms. The new group is reported after {found.formed:.0f} ms."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {STYLE}>',
        f"<title>A job grows from {BEFORE} to {AFTER} slots</title>",
        f"<desc>{escape(about)}</desc>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
        *_phases(found),
        *_workers(found),
        *_marks(found),
        *_legend(height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(ms: float) -> float:
    inside = min(max(ms, BEGIN), END)
    return round(LEFT + (inside - BEGIN) / (END - BEGIN) * (WIDTH - LEFT - 20), 1)


def _y(row: int) -> int:
    return TOP + ROW * row


def _bar(row: int, begin: float, end: float, kind: str, text: str = "") -> Iterator[str]:
    if (width := round(_x(end) - _x(begin), 1)) <= 0:
        return
    yield (
        f'<rect x="{_x(begin)}" y="{_y(row) + 4}" width="{width}" height="{ROW - 10}" '
        f'fill="{FILLS[kind]}" stroke="#fff"/>'
    )
    if text:
        yield _text(_x((begin + end) / 2), _y(row) + 21, text, "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _phases(found: Rescale) -> Iterator[str]:
    for row, head in enumerate(HEADS):
        yield _text(12, _y(row) + 21, head)
    yield from _bar(0, 0.0, found.switch, "waits", "prepare")
    yield from _bar(0, found.switch, found.boundary, "waits", "switch")
    yield from _bar(0, found.boundary, found.formed, "waits", "state")


def _workers(found: Rescale) -> Iterator[str]:
    for rank, own in sorted(found.steps.items()):
        row, steps = rank + 1, own
        if rank >= BEFORE:
            place = rank - BEFORE
            started, ready = found.started[place], found.ready[place]
            yield from _bar(row, started, ready, "starts")
            yield from _bar(row, ready, found.boundary, "waits", "ready")
            steps = ((found.boundary, AFTER), *own)
        for (begin, _), (end, size) in itertools.pairwise(steps):
            yield from _bar(row, begin, end, "old" if size == BEFORE else "new")


def _marks(found: Rescale) -> Iterator[str]:
    bottom = _y(len(HEADS)) + 4
    for place, (at, text) in enumerate((
        (0.0, "order"),
        (found.switch, f"all ready, {found.switch:.0f} ms"),
        (found.boundary, f"boundary, {found.boundary:.0f} ms"),
        (found.formed, f"settled, {found.formed:.0f} ms"),
    )):  # fmt: skip
        x, line = _x(at), TOP - 30 + 18 * (place % 2)  # two lines, so that no text covers another
        yield f'<path d="M{x} {line - 10}V{bottom}" stroke="#222" stroke-dasharray="3 3"/>'
        yield _text(x + 4, line, text)
    for ms in range(-100, int(END), 100):
        yield _text(_x(ms), bottom + 16, f"{ms} ms", "middle")


def _legend(height: int) -> Iterator[str]:
    words = {
        "old": f"step of {BEFORE} workers", "new": f"step of {AFTER} workers",
        "starts": "builds the model", "waits": "waits, or a phase",
    }  # fmt: skip
    for place, (kind, text) in enumerate(words.items()):
        x = LEFT + place * 180
        yield f'<rect x="{x}" y="{height - 30}" width="14" height="14" fill="{FILLS[kind]}"/>'
        yield _text(x + 20, height - 18, text)


def table(found: Rescale) -> str:
    """Return the table of the page."""
    lines = [
        ("the newcomers' processes exist", f"{max(found.started):.0f} ms"),
        ("all newcomers are ready", f"{found.switch:.0f} ms"),
        ("the last step of the two old workers ends", f"{found.boundary:.0f} ms"),
        ("the new group is reported", f"{found.formed:.0f} ms"),
        ("steps of the old group after the order", str(found.during)),
        ("usual step", f"{found.usual_ms:.0f} ms"),
        ("pause", f"{found.pause_ms:.0f} ms"),
    ]
    return rows(["", "measured"], lines)


def main() -> None:
    chosen = report.arguments(
        __doc__, "nothing: it takes seconds",
        into=(Path, None, "folder of the documentation, whose page and drawing are written"),
    )  # fmt: skip
    with report.folder() as base:
        cluster = Cluster(base / "home", base / "jobs")
        with report.running(cluster):
            report.now("a job grows from two to four slots")
            found = measured(cluster, base / "steps")
    if chosen.into is not None:
        (chosen.into / DRAWING).write_text(drawn(found), encoding="utf-8")
        page = chosen.into / PAGE
        text = page.read_text(encoding="utf-8")
        page.write_text(replaced(text, "rescale", table(found)), encoding="utf-8")
    figures = {
        "ready_ms": found.switch, "boundary_ms": found.boundary, "formed_ms": found.formed,
        "pause_ms": found.pause_ms, "step_ms": found.usual_ms, "steps_during": found.during,
    }  # fmt: skip
    report.finish(figures, chosen.json)


if __name__ == "__main__":
    main()
