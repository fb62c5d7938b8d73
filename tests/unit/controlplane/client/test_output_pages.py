"""Output of workers as it is followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest

from controlplane.cli.job_output import CLEAR, draw_lines, with_ranks, with_times, write_lines
from controlplane.client import streams
from controlplane.client.streams import NO_WORKER, OutputLine, StreamPages
from schemas.errors import BadFieldError
from schemas.ids import Rank, Version
from schemas.wire.client import JobState
from schemas.wire.feed import LOG, SAMPLES, LogPage, LogPiece
from tests.support.builders import A

R0, R1 = (1, 0), (1, 1)


class Job(StreamPages):
    """A job whose output is laid out, page by page; an empty one: that is all there is so far."""

    def __init__(self, *pages: Sequence[tuple[tuple[int, int], str]]) -> None:
        self._said = pages

    async def piece_pages(  # type: ignore[override]
        self, *_: object, **__: object
    ) -> AsyncIterator[tuple[LogPiece, ...]]:
        for page in self._said:
            yield tuple(
                LogPiece(version=Version(version), rank=Rank(rank), offset=0, data=text.encode())
                for (version, rank), text in page
            )


async def followed(job: Job, last: int | None, matching: str = "") -> list[list[str]]:
    pages = job.output_pages("a-1", follow=True, last=last, matching=matching)
    return [[line.text for line in page] async for page in pages]


JOB = Job(
    [(R0, "1\n2\n")], [(R0, "3\n"), (R1, "4\n")], [], [(R0, "5\n")], [], [(R0, "6\n")]
)  # fmt: skip


@pytest.mark.parametrize(
    ("last", "matching", "pages"),
    [
        (3, "", [["2", "3", "4"], ["5"], [], ["6"]]),
        (0, "", [[], ["5"], [], ["6"]]),
        (1, "[136]", [["3"], [], [], ["6"]]),  # counted among the lines that match
    ],
)
async def test_the_last_lines_come_before_new_lines(
    last: int, matching: str, pages: list[list[str]]
) -> None:
    assert await followed(JOB, last, matching) == pages


async def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(BadFieldError, match=r"'\(' is not a regular expression: missing \)"):
        await followed(JOB, None, "(")


async def test_a_remark_of_the_client_has_no_rank() -> None:
    job = Job([(NO_WORKER, "[ones] ends early\n"), (R1, "x\n")])

    pages = job.output_pages("a-1", follow=True)

    assert [page async for page in pages] == [
        [OutputLine(None, "[ones] ends early"), OutputLine(1, "x")]
    ]


@pytest.mark.parametrize(
    ("prefix", "lines"),
    [
        (None, ["a", "[0] b", "[1] c", "note", "[0] d"]),
        (True, ["[0] a", "[0] b", "[1] c", "note", "[0] d"]),
        (False, ["a", "b", "c", "note", "d"]),
    ],
)
def test_ranks_are_named_from_the_page_with_a_second_rank_on(
    *, prefix: bool | None, lines: list[str]
) -> None:
    pages = [
        [OutputLine(0, "a")],
        [OutputLine(0, "b"), OutputLine(1, "c"), OutputLine(None, "note")],
        [OutputLine(0, "d")],
    ]

    named = with_ranks(pages, prefix=prefix)

    assert [line.text for page in named for line in page] == lines


def test_a_time_is_before_each_line_that_has_one() -> None:
    page = [OutputLine(0, "a", 0.25, "n1"), OutputLine(None, "note")]

    assert [line.text for line in with_times(page)] == ["1970-01-01T00:00:00.250+00:00 a", "note"]


# --- progress bars: lines with carriage returns

BAR = Job(
    [(R0, "go\n\r1%")], [(R0, "\r2%\r3%"), (R1, "loaded")], [(R0, "\r4%\r"), (R1, " all\r\n")],
    [(R0, "\n\r      \r"), (R0, "done\n")], [(R1, "\r7%\r")],
)  # fmt: skip


async def test_a_finished_bar_keeps_its_last_state() -> None:
    assert await followed(BAR, None) == [["go"], ["loaded all"], ["4%", "done"], ["7%"]]


async def test_a_bar_and_half_a_line_are_shown_while_they_grow() -> None:
    pages = BAR.output_pages("a-1", follow=True, unfinished=True)

    assert [[(line.rank, line.text, line.end) for line in page] async for page in pages] == [
        [(0, "go", "\n"), (0, "1%", "\r")], [(0, "3%", "\r"), (1, "loaded", "")],
        [(1, "loaded all", "\n"), (0, "4%", "\r")], [(0, "4%", "\n"), (0, "done", "\n")],
        [(1, "7%", "\r")], [(1, "7%", "\n")],
    ]  # fmt: skip


async def test_raw_output_is_unchanged() -> None:
    pages = BAR.output_pages("a-1", follow=True, raw=True)
    lines = [line async for page in pages for line in page]

    assert "".join(line.text + line.end for line in lines if line.rank == 0) == (
        "go\n\r1%\r2%\r3%\r4%\r\n\r      \rdone\n"
    )


async def test_a_bar_of_many_states_takes_the_memory_of_one() -> None:
    job = Job(*([(R0, "\r" + "#" * 100)] for _ in range(100)))
    pages = job.line_pages("a-1", "log", None, follow=True, unfinished=True)

    assert {len(line.data) async for page in pages for line in page} == {101}


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (draw_lines, f"go\n1%{CLEAR}loaded{CLEAR}loaded all\n4%{CLEAR}4%\ndone\n7%{CLEAR}7%\n"),
        (write_lines, "go\n1%\n3%\nloaded all\n4%\ndone\n7%\n"),
    ],
)
async def test_a_terminal_has_the_bar_below_the_lines_and_a_pipe_each_state_once(
    draw: Callable[[list[list[OutputLine]], StringIO], None], text: str
) -> None:
    out = StringIO()

    draw([page async for page in BAR.output_pages("a-1", follow=True, unfinished=True)], out)

    assert out.getvalue() == text


def test_a_bar_with_tabs_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = StringIO()

    draw_lines([[OutputLine(0, "a\tb\tcdefgh", None, None, "\r")]], screen)

    assert screen.getvalue() == "a       b       cd…"


class EndedJob(StreamPages):
    """An ended job whose last output is at the controller only after some polls."""

    def __init__(self, *pages: LogPage) -> None:
        self._replies = iter(pages)

    async def state(self, *_: object) -> JobState:  # type: ignore[override]
        return cast("JobState", SimpleNamespace(state="succeeded"))

    async def _bulk_call(self, *_: object) -> LogPage:  # type: ignore[override]
        return next(self._replies)


async def test_the_last_output_of_an_ended_job_is_awaited() -> None:
    piece = LogPiece(version=Version(1), rank=Rank(0), offset=0, data=b"x")
    nothing_yet = LogPage(job=A, pieces=(), cursor=0, ended=False, missing=("a-1.v1.r0 on n1",))
    last = LogPage(job=A, pieces=(piece,), cursor=1, ended=False)
    job = EndedJob(nothing_yet, nothing_yet, last, LogPage(job=A, pieces=(), cursor=1, ended=True))

    pages = [page async for page in job.piece_pages(A, SAMPLES, None, follow=False)]

    assert pages == [(), (), (piece,)]


async def test_output_of_an_ended_job_that_does_not_come_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "LATE_S", 0.0)
    missing = LogPage(job=A, pieces=(), cursor=0, ended=False, missing=("a-1.v1.r0 on n1",))

    pages = [page async for page in EndedJob(missing).piece_pages(A, LOG, None, follow=False)]

    remark = b"[ones] output of a-1.v1.r0 on n1 is incomplete: its end did not arrive\n"
    assert [[piece.data for piece in page] for page in pages] == [[], [remark]]
