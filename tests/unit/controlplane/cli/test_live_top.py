"""The full-screen `ones top`, driven by keys: tables, one job, changes, and an absent controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from controlplane.cli import live_top
from controlplane.cli.live_top import JobScreen, LiveTop, Prompt, remaining_s, widths_for
from controlplane.cli.output import ABSENT_NOTE
from controlplane.client.streams import OutputLine
from schemas.errors import DeniedError, UnreachableError
from schemas.ids import JobId, Seconds
from schemas.wire.client import Decision, Explanation, JobDetail, JobSummary, Size
from tests.support.builders import A, B
from tests.support.client_examples import summary
from tests.unit.controlplane.cli.test_top import RUNNING, Controller
from tests.unit.controlplane.web.test_views import example

HOSTILE = "waits \x1b[2J for [red]1 slot"
WAITING = summary(B, reason=HOSTILE, user="bob")


class Cluster(Controller):
    """Client of a cluster with a running and a waiting job; notes what is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []
        self.gone = False

    def jobs(self, *, ended: bool) -> tuple[JobSummary, ...]:
        if self.gone:
            raise UnreachableError("the controller does not reply")
        return (RUNNING, WAITING)

    def job(self, job: JobId) -> Any:
        return example(JobDetail, summary=RUNNING, workers=())

    def explain(self, job: JobId) -> Explanation:
        decision = Decision(
            time=Seconds(1_760_000_000.0), before=Size(), to=Size(batch=64), reason="grows"
        )
        return Explanation(job=job, state="running", decisions=(decision,))

    def output_pages(self, job: JobId, **how: Any) -> Iterator[list[OutputLine]]:
        yield [OutputLine(0, "loss 0.5"), OutputLine(1, "\x1b[2J")]

    def pause(self, job: JobId) -> None:
        self.done.append(("pause", job))

    def resize(self, job: JobId, slots: int) -> None:
        self.done.append(("resize", job, slots))

    def cancel(self, job: JobId) -> None:
        raise DeniedError(f"you may not change {job}", "ask its owner")

    def close(self) -> None:
        self.done.append(("close",))


Follow = Callable[[Pilot[None]], Any]


async def driven(cluster: Cluster, follow: Follow, size: tuple[int, int] = (80, 24)) -> LiveTop:
    """Show a cluster on a screen of `size`, and use it."""
    app = LiveTop(lambda: cast("Any", cluster))
    async with app.run_test(size=size) as pilot:
        await shown(pilot, lambda: app.status is not None)
        await follow(pilot)
    return app


async def shown(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Wait until something is on the screen; a test that hangs ends by its own limit."""
    while not holds():
        await pilot.pause()


def table(pilot: Pilot[None]) -> list[str]:
    jobs = pilot.app.screen_stack[0].query_one("#jobs", DataTable)
    return [str(jobs.get_row_at(row)[0]) for row in range(jobs.row_count)]


def text(pilot: Pilot[None], name: str) -> str:
    screen = pilot.app.screen if name == "#about" else pilot.app.screen_stack[0]
    return str(screen.query_one(name, Static).content)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_top, "REFRESH_S", 0.5)


async def test_keys_filter_sort_and_choose_a_job_whose_whole_reason_is_shown() -> None:
    async def follow(pilot: Pilot[None]) -> None:
        assert table(pilot) == [A, B]
        await pilot.press("o", "o")
        assert "by user" in text(pilot, "#head")
        await pilot.press("down")
        await shown(pilot, lambda: "waits" in text(pilot, "#why"))
        assert text(pilot, "#why") == r"waits \x1b[2J for [red]1 slot"
        await pilot.press("slash", "b", "o", "b", "enter")
        await shown(pilot, lambda: table(pilot) == [B])

    app = await driven(Cluster(), follow)

    assert app.return_value is None


async def test_a_job_shows_its_curves_decisions_and_output() -> None:
    async def follow(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await shown(pilot, lambda: isinstance(pilot.app.screen, JobScreen))
        screen = pilot.app.screen
        await shown(pilot, lambda: "trains on 2 slots" in text(pilot, "#about"))
        await shown(pilot, lambda: screen.query("Sparkline"))
        assert [line.text for line in screen._lines] == ["loss 0.5", "\x1b[2J"]
        await pilot.press("escape")
        await shown(pilot, lambda: not isinstance(pilot.app.screen, JobScreen))

    await driven(Cluster(), follow)


async def test_changes_are_sent_after_their_questions() -> None:
    cluster = Cluster()

    async def follow(pilot: Pilot[None]) -> None:
        await pilot.press("p")
        await shown(pilot, lambda: cluster.done)
        await pilot.press("s")
        await shown(pilot, lambda: isinstance(pilot.app.screen, Prompt))
        await pilot.press("3", "enter")
        await shown(pilot, lambda: len(cluster.done) > 1)
        await pilot.press("c")
        await shown(pilot, lambda: isinstance(pilot.app.screen, Prompt))
        await pilot.press("n", "o", "enter")
        await shown(pilot, lambda: not isinstance(pilot.app.screen, Prompt))

    await driven(cluster, follow)

    assert cluster.done == [("pause", A), ("resize", A, 3), ("close",)]


async def test_a_refusal_is_shown() -> None:
    async def follow(pilot: Pilot[None]) -> None:
        await pilot.press("c")
        await shown(pilot, lambda: isinstance(pilot.app.screen, Prompt))
        await pilot.press("y", "e", "s", "enter")
        await shown(pilot, lambda: pilot.app._notifications)
        (note,) = pilot.app._notifications
        assert (note.severity, note.message) == (
            "error", f"you may not change {A}; ask its owner",
        )  # fmt: skip

    await driven(Cluster(), follow)


async def test_an_absent_controller_is_named_and_its_last_state_stays() -> None:
    cluster = Cluster()

    async def follow(pilot: Pilot[None]) -> None:
        cluster.gone = True
        await shown(pilot, lambda: ABSENT_NOTE in text(pilot, "#head"))
        assert table(pilot) == [A, B]
        cluster.gone = False
        await shown(pilot, lambda: ABSENT_NOTE not in text(pilot, "#head"))

    await driven(cluster, follow)


# --- columns

ROW = {name: Text("12345678") for name in live_top.COLUMNS}


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, ["job", "state", "done", "slots", "batch", "end in", "user", "uses"]),
        (60, ["job", "state", "done", "slots", "batch", "end in"]),
        (20, ["job", "state"]),
        (160, [*live_top.COLUMNS]),
    ],
)
def test_narrow_terminals_have_fewer_columns(width: int, columns: list[str]) -> None:
    found = widths_for([ROW], width)

    assert sorted(found) == sorted(columns)
    assert sum(found.values()) + 2 * len(found) <= width


@pytest.mark.parametrize(
    ("fields", "left_s"),
    [
        ({"progress": 0.25, "running_s": Seconds(10.0), "slots": 1}, 30.0),
        ({"progress": None, "slots": 1}, None),
        ({"progress": 0.5, "slots": 0}, None),
        ({"progress": 0.5, "slots": 1, "state": "failed"}, None),
    ],
    ids=str,
)
def test_the_end_is_expected_by_the_progress_so_far(
    fields: dict[str, Any], left_s: float | None
) -> None:
    assert remaining_s(summary(A, **fields)) == left_s
