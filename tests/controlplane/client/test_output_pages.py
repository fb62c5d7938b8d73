"""Output as it is followed: which lines, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from controlplane.cli.job_output import prefixed
from controlplane.client.stream_pages import NOBODY, OutputLine, StreamPages, Who
from schemas.errors import BadFieldError

R0, R1 = (1, 0), (1, 1)
Page = list[tuple[Who, bytes]]


class Job(StreamPages):
    """A job whose output is laid out, page by page; an empty one: that is all there is so far."""

    def __init__(self, *pages: Sequence[tuple[tuple[int, int], str]]) -> None:
        self._said = pages

    async def line_pages(self, *_: object, **__: object) -> AsyncIterator[Page]:  # type: ignore[override]
        for page in self._said:
            yield [(who, line.encode()) for who, line in page]  # type: ignore[misc]


async def followed(job: Job, last: int | None, matching: str = "") -> list[list[str]]:
    pages = job.output_pages("a-1", follow=True, last=last, matching=matching)
    return [[line.text for line in page] async for page in pages]


JOB = Job([(R0, "1"), (R0, "2")], [(R0, "3"), (R1, "4")], [], [(R0, "5")], [], [(R0, "6")])


async def test_the_last_lines_of_now_come_first_and_then_all_that_follows() -> None:
    assert await followed(JOB, 3) == [["2", "3", "4"], ["5"], [], ["6"]]


async def test_of_the_last_none_only_what_follows_is_left() -> None:
    assert await followed(JOB, 0) == [[], ["5"], [], ["6"]]


async def test_the_last_lines_are_counted_among_those_that_match() -> None:
    assert await followed(JOB, 1, "[136]") == [["3"], [], [], ["6"]]


async def test_a_pattern_that_is_none_says_where() -> None:
    with pytest.raises(BadFieldError, match=r"'\(' is no regular expression: missing \)"):
        await followed(JOB, None, "(")


async def test_a_remark_of_the_client_is_of_no_rank() -> None:
    pages = Job([(NOBODY, "[ones] ends early"), (R1, "x")]).output_pages("a-1", follow=True)

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
def test_ranks_are_named_from_the_page_on_in_which_a_second_one_speaks(
    *, prefix: bool | None, lines: list[str]
) -> None:
    pages = [
        [OutputLine(0, "a")],
        [OutputLine(0, "b"), OutputLine(1, "c"), OutputLine(None, "note")],
        [OutputLine(0, "d")],
    ]

    assert list(prefixed(pages, prefix=prefix)) == lines
