"""Slots over time: allocations from feed events, drawn as text and PNG."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from controlplane.cli import timeline
from controlplane.cli.timeline import png, shown_window, terminal
from controlplane.client.allocations import (
    PALETTE,
    Allocation,
    JobHistory,
    Span,
    Window,
    all_slots,
    allocations_from,
    clipped,
    job_colour,
    job_histories,
)
from controlplane.sim.analysis.plot_style import is_dark
from controlplane.sim.cluster import ResultsError
from schemas.errors import install_hint
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.wire.feed import FeedEvent
from tests.support.builders import N1, S0, S1, T0, A, B, C, news


def joined(node: NodeId, slots: int, at: float = 0.0) -> FeedEvent:
    return news("node.joined", node, at=at, slots=slots).event


def started(job: JobId, slot: SlotId, at: float, version: int = 1, rank: int = 0) -> FeedEvent:
    detail: dict[str, Any] = {"rank": rank, "slot": slot, "version": version, "pid": 7}
    return news("worker.started", job, at=at, **detail).event


def exited(job: JobId, slot: SlotId, at: float, version: int = 1, rank: int = 0) -> FeedEvent:
    detail: dict[str, Any] = {"rank": rank, "slot": slot, "version": version, "code": 0}
    return news("worker.exited", job, at=at, **detail, signal=None).event


def told(event: str, job: JobId, at: float) -> FeedEvent:
    return news(event, job, at=at).event


def allocation(slot: SlotId, job: JobId, begin: float, end: float) -> Allocation:
    return Allocation(slot, job, Seconds(begin), Seconds(end))


def plain(text: Text, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(text)
    return [line.rstrip() for line in capture.get().splitlines()]


# --- allocations

STARTS = news("job.starting", A, at=1.0, slots=f"{S0}, {S1}").event


@pytest.mark.parametrize(
    ("events", "until", "allocations"),
    [
        pytest.param(
            [joined(N1, 2), started(A, S0, 1.0), told("job.running", A, 2.0), exited(A, S0, 5.0)],
            9.0, [(S0, A, 1.0, 5.0)], id="from the start of a worker to its exit",
        ),
        pytest.param(
            [STARTS, started(A, S0, 3.0), exited(A, S0, 5.0), started(A, S0, 6.0, version=2)],
            9.0, [(S0, A, 1.0, 5.0), (S0, A, 6.0, 9.0)], id="from the order to start, until now",
        ),
        pytest.param(
            [started(A, S0, 1.0), exited(A, S0, 5.0), started(B, S0, 6.0)],
            3.0, [(S0, A, 1.0, 3.0)], id="later events are ignored",
        ),
        pytest.param(
            [started(A, S0, 1.0), started(B, S0, 4.0, 2, 1), exited(A, S0, 6.0),
             exited(B, S0, 8.0, 2, 1)],
            9.0, [(S0, A, 1.0, 6.0), (S0, B, 6.0, 8.0)], id="a newcomer follows the owner",
        ),
        pytest.param(
            [started(A, S0, 1.0), started(B, S0, 4.0), exited(B, S0, 5.0), exited(A, S0, 6.0)],
            9.0, [(S0, A, 1.0, 6.0)], id="a newcomer that exits before the owner has no slot",
        ),
        pytest.param(
            [started(A, S0, 1.0), started(A, S1, 2.0, 2, 1), exited(A, S1, 3.0, 2, 1),
             started(A, S1, 4.0, 4, 1), exited(A, S0, 6.0)],
            9.0, [(S0, A, 1.0, 6.0), (S1, A, 2.0, 3.0), (S1, A, 4.0, 9.0)],
            id="workers differ by version and rank",
        ),
        pytest.param(
            [started(A, S0, 1.0), started(B, T0, 1.0), told("job.failed", A, 4.0)],
            9.0, [(S0, A, 1.0, 4.0), (T0, B, 1.0, 9.0)], id="without an exit, until the job ends",
        ),
        pytest.param(
            [started(A, S0, 1.0), told("job.cancelled", A, 4.0), exited(A, S0, 6.0)],
            9.0, [(S0, A, 1.0, 6.0)], id="an exit after the end of the job",
        ),
    ],
)  # fmt: skip
def test_a_worker_has_its_slot(
    events: list[FeedEvent], until: float, allocations: list[tuple[SlotId, JobId, float, float]]
) -> None:
    assert allocations_from(events, until) == tuple(allocation(*one) for one in allocations)


LIFE = (  # of a job that grows, rests and goes on
    told("job.submitted", A, 0.0),
    news("job.starting", A, at=2.0, slots=S0).event,
    started(A, S0, 3.0),
    told("job.running", A, 4.0),
    news("job.epoch", A, at=5.0, global_batch=32, samples_per_s=100.0).event,
    told("job.rescaling", A, 6.0),
    news("job.running", A, at=7.0, batch=64).event,
    news("job.epoch", A, at=8.0, global_batch=64, samples_per_s=180.0).event,
    told("job.paused", A, 9.0),
    news("job.starting", A, at=11.0, slots=S0).event,
    told("job.running", A, 12.0),
    told("job.succeeded", A, 14.0),
)


def test_the_history_of_a_job_has_its_states_batches_and_rates() -> None:
    assert job_histories(LIFE, 20.0) == {
        A: JobHistory(
            spans=(
                Span("queued", 0.0, 2.0), Span("starting", 2.0, 4.0), Span("running", 4.0, 9.0),
                Span("paused", 9.0, 11.0), Span("starting", 11.0, 12.0),
                Span("running", 12.0, 14.0),
            ),
            batches=((4.0, 32), (7.0, 64)), rates=((5.0, 100.0), (8.0, 180.0)),
        )
    }  # fmt: skip
    assert job_histories(LIFE, 3.0)[A].spans[-1] == Span("starting", 2.0, 3.0)
    assert job_histories(LIFE[2:], 20.0) == {}  # its submission is not kept any more


def test_slots_are_those_of_joined_nodes_sorted_by_number() -> None:
    ten, two = NodeId("node-10"), NodeId("node-2")
    events = [joined(ten, 1), joined(two, 2), started(A, SlotId("node-2/11"), 1.0)]

    assert all_slots(events) == ("node-2/0", "node-2/1", "node-2/11", "node-10/0")


def test_allocations_are_clipped_to_a_window() -> None:
    stays = [(S0, A, 0.0, 2.0), (S0, B, 2.0, 6.0), (S1, C, 7.0, 9.0)]

    assert clipped([allocation(*one) for one in stays], Window(3.0, 8.0)) == (
        allocation(S0, B, 3.0, 6.0),
        allocation(S1, C, 7.0, 8.0),
    )


ALIVE = [joined(N1, 1, at=1.0), started(A, S0, 2.0)]
UPS = [news("node.up", N1, seq=seq, at=seq * 10.0).event for seq in (1, 2, 3)]
OVER = [started(A, S0, 100.0), exited(A, S0, 160.0)]


@pytest.mark.parametrize(
    ("events", "first", "now", "length", "window"),
    [
        (ALIVE, 0, 50.0, math.inf, Window(1.0, 50.0)),  # a worker is left
        ([*ALIVE, exited(A, S0, 4.0)], 0, 50.0, math.inf, Window(1.0, 4.0)),
        (UPS, 2, 50.0, math.inf, Window(20.0, 30.0)),
        (UPS, 4, 50.0, math.inf, Window(30.0, 30.0)),
        (OVER, 0, 1000.0, 60.0, Window(940.0, 1000.0)),  # the last minute ends now
        (OVER, 0, 1000.0, 5000.0, Window(100.0, 1000.0)),
        (OVER, 0, 1000.0, math.inf, Window(100.0, 160.0)),
    ],
)
def test_a_picture_shows_the_requested_time_or_until_the_last_worker_exits(
    events: list[FeedEvent], first: int, now: float, length: float, window: Window
) -> None:
    assert shown_window(events, first, now, length) == window


# --- drawn in a terminal


@pytest.mark.parametrize(
    ("allocations", "slots", "width", "window", "lines"),
    [
        pytest.param(
            [(S0, A, 0.0, 10.0), (S1, B, 5.0, 20.0), (S0, C, 10.0, 20.0)], (S0, S1, T0), 25, None,
            ["n1/0 aaaaaaaaaacccccccccc", "n1/1 .....bbbbbbbbbbbbbbb",
             "n2/0 ....................", "     ┬───────────────────", "     0 s",
             "a a-1   b b-2   c c-3"], id="a letter for each job",
        ),
        pytest.param(
            [(S0, A, 1010.0, 1030.0)], (S0,), 45, Window(1000.0, 1040.0),
            ["n1/0 ..........aaaaaaaaaaaaaaaaaaaa..........",
             "     ┬───────────────────┬───────────────────", "     0 s                 20 s",
             "a a-1"], id="the axis counts from the start of the window",
        ),
        pytest.param(
            [(S0, A, 0.0, 1.4), (S0, B, 1.4, 12.0)], (S0,), 17, None,
            ["n1/0 abbbbbbbbbbb", "     ┬───────────", "     0 s", "a a-1   b b-2"],
            id="a column shows the job with most of its time",
        ),
        pytest.param(
            [(S0, A, 0.0, 1.0), (S0, B, 1.0, 2.0), (S0, C, 2.0, 3.0)], (S0,), 18, None,
            ["n1/0 aaaabbbbbcccc", "     ┬────────────", "     0 s", "a a-1   b b-2", "c c-3"],
            id="a long legend is folded",
        ),
        pytest.param([], (), 14, None, [" ┬────────────", " 0 s"], id="empty"),
    ],
)  # fmt: skip
def test_slots_are_drawn_without_colours(
    allocations: list[tuple[SlotId, JobId, float, float]], slots: tuple[SlotId, ...], width: int,
    window: Window | None, lines: list[str],
) -> None:  # fmt: skip
    stays = [allocation(*one) for one in allocations]

    drawn = terminal(stays, slots, width, window=window, colour=False)

    assert [line for line in plain(drawn, 45) if line] == lines


def test_with_colours_a_block_is_pale_where_less_than_half_of_its_time_was_used() -> None:
    allocations = [allocation(S0, A, 0.0, 6.0), allocation(S0, B, 11.6, 12.0)]

    drawn = terminal(allocations, (S0,), 17)

    assert drawn.plain.splitlines()[0] == "n1/0 ██████░░░░░▒"
    assert [str(span.style) for span in drawn.spans[:3]] == [PALETTE[0], "grey35", PALETTE[1]]


def test_colours_are_repeated_only_after_three_rounds() -> None:
    rounds = 3 * len(PALETTE)

    assert len({job_colour(index) for index in range(rounds)}) == rounds
    assert job_colour(rounds) == job_colour(0) == PALETTE[0]


def test_names_are_white_on_dark_bars_only() -> None:
    assert (is_dark("#2f4964"), is_dark("#edc948")) == (True, False)


# --- drawn into a file


@pytest.mark.parametrize("nodes", [0, 1, pytest.param(64, marks=pytest.mark.slow)])
def test_a_png_is_drawn_however_many_slots_there_are(tmp_path: Path, nodes: int) -> None:
    pytest.importorskip("matplotlib")
    slots = [slot_id(NodeId(f"n{node}"), index) for node in range(nodes) for index in range(8)]
    allocations = [
        allocation(slot, JobId(f"j-{row}"), row, row + 9.0) for row, slot in enumerate(slots)
    ]

    png(allocations, slots, tmp_path / "t.png", "slots")

    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_png_has_a_panel_of_each_job_with_its_states_batch_and_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(timeline, "save", lambda figure, *_: figures.append(figure))

    png(
        allocations_from(LIFE, 14.0), (S0,), Path("unused.png"), "slots",
        window=Window(0.0, 14.0), pasts=job_histories(LIFE, 14.0),
    )  # fmt: skip

    (figure,) = figures
    _, panel, rate = figure.axes
    assert [text.get_text() for text in panel.texts] == [A]
    assert [[*zip(*line.get_data(), strict=True)] for line in panel.lines] == [
        [(4.0, 32), (7.0, 64), (9.0, 64)],
        [(12.0, 64), (14.0, 64)],
    ]
    assert [[*line.get_ydata()] for line in rate.lines] == [[100.0, 180.0], []]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "queued", "starting", "running", "paused", "batch size (left)", "samples/s (right)",
    ]  # fmt: skip
    looks = [(patch.get_facecolor(), patch.get_hatch()) for patch in panel.patches]
    assert len(set(looks)) == 4


def test_errors_of_a_png_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(ResultsError, match="No such file or directory; choose another file"):
        png((), (), tmp_path / "nowhere" / "t.png", "slots")

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResultsError) as caught:
        png((), (), tmp_path / "t.png", "slots")
    remedy = install_hint("sim")
    assert str(caught.value) == f"figures need matplotlib; {remedy}"


# --- a legend that fits


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_legend_of_four_lines_names_the_jobs_with_most_slot_time(width: int) -> None:
    jobs = [JobId(f"language-model-{n}") for n in range(60)]
    stays = [allocation(S0, job, n, n + 0.5 + n / 200) for n, job in enumerate(jobs)]

    lines = plain(terminal(stays, (S0,), width, colour=False), width)[3:]

    named = " ".join(lines).count("language-model")
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    assert lines[-1].endswith(f"and {60 - named} more")
    assert named > 0
    assert [f"language-model-{n}" in " ".join(lines) for n in (59, 0)] == [True, False]


def test_a_legend_with_room_names_every_job_and_cuts_long_names() -> None:
    stays = [allocation(S0, A, 0, 1), allocation(S0, JobId("x" * 60), 1, 2)]

    lines = plain(terminal(stays, (S0,), 40, colour=False), 40)

    assert lines[3:] == [f"a {A}", "b " + "x" * 37 + "…"]


@pytest.mark.parametrize(
    ("length", "labels"),
    [
        (0.5, ["0 s", "0.1 s", "0.2 s", "0.3 s", "0.4 s"]),
        (50, ["0 s", "10 s", "20 s", "30 s", "40 s"]),
        (100, ["0 s", "20 s", "40 s", "60 s", "80 s"]),
        (300, ["0 min", "1 min", "2 min", "3 min", "4 min"]),
        (3600, ["0 min", "10 min", "20 min", "30 min", "40 min", "50 min"]),
        (9 * 3600, ["0 h", "2 h", "4 h", "6 h", "8 h"]),
        (5 * 86_400, ["0 d", "1 d", "2 d", "3 d", "4 d"]),
        (900 * 86_400, ["0 d", "200 d", "400 d", "600 d", "800 d"]),
    ],
)
def test_the_axis_counts_in_round_units(length: float, labels: list[str]) -> None:
    window = Window(0.0, length)

    lines = plain(terminal([allocation(S0, A, 0, length)], (S0,), 80, window=window), 80)

    assert re.findall(r"[\d.]+ \w+", lines[2]) == labels
