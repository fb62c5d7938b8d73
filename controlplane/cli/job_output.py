"""`ones logs`: output of the workers of a job."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, TextIO

from cyclopts import Parameter

from controlplane.cli.job_list import cut
from controlplane.cli.jobs import warn_if_absent
from controlplane.cli.output import COMMON, Common, Exit, JobName, moment, print_data, seconds_of
from controlplane.cli.terminal import COLOUR, drawn, harmless, harmless_output
from controlplane.client import BlockingClient
from controlplane.client.streams import OutputLine, line_pattern
from schemas.errors import BadFieldError

SILENT_STATES: Final = frozenset({"queued", "starting", "paused"})  # states without output
CLEAR: Final = "\r\x1b[K"  # clears the line of the cursor


def logs(
    job: JobName,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="continue until the job ends")
    ] = False,
    rank: Annotated[int | None, Parameter(help="only output of this worker")] = None,
    tail: Annotated[int | None, Parameter(help="start with this many of the last lines")] = None,
    since: Annotated[
        str | None, Parameter(help="only output of the last 90s, 5m, 2h or 1d")
    ] = None,
    grep: Annotated[
        str | None, Parameter(help="only lines with a match of this regular expression")
    ] = None,
    prefix: Annotated[
        bool | None,
        Parameter(
            help="prefix lines with [RANK] (default: if several ranks write)",
            negative="--no-prefix",
        ),
    ] = None,
    timestamps: Annotated[
        bool,
        Parameter(name=["--timestamps", "-t"], help="prefix each line with its arrival time (UTC)"),
    ] = False,
    raw: Annotated[
        bool,
        Parameter(help="output unchanged, with all states of progress bars and control characters"),
    ] = False,
    common: Common = COMMON,
) -> int:
    """Print the output of JOB from its start, across restarts of the controller and of workers."""
    if tail is not None and tail < 0:
        raise BadFieldError(f"--tail {tail} is below 0", "give a number of lines", "tail")
    line_pattern(grep or "")  # fails before any request
    first_s = time.time() - seconds_of(since, "since") if since else 0.0
    with BlockingClient(common.home) as client:
        if follow:
            warn_if_absent(client)
        now = client.state(job)
        waits = now.state in SILENT_STATES
        if waits:
            sys.stderr.write(f"ones: {job} is {now.state}: {now.reason}\n")
        pages = client.output_pages(
            job,
            rank,
            follow=follow,
            since=first_s,
            last=tail,
            matching=grep or "",
            unfinished=follow and common.output == "table" and not grep,
            raw=raw,
        )
        if not (waits or grep or since or tail == 0):
            source = job if rank is None else f"rank {rank} of {job}"
            silent = f"{source} has no output; `ones show {job}` prints its state"
            pages = warn_if_empty(pages, silent)
        if common.output in {"json", "jsonl"}:
            print_data(
                (
                    {"time": line.time, "node": line.node, "rank": line.rank, "text": line.text}
                    for page in pages
                    for line in page
                ),
                common.output,
            )
            return Exit.OK
        pages = with_ranks(pages, prefix=prefix)
        if timestamps:
            pages = map(with_times, pages)
        out = drawn(sys.stdout)
        if raw:
            for line in (line for page in pages for line in page):
                out.write(line.text + line.end)
                out.flush()
        else:
            draw = draw_lines if out.isatty() else write_lines
            draw(pages, out)
    return Exit.OK


def draw_lines(pages: Iterable[Sequence[OutputLine]], out: TextIO) -> None:
    """Print finished lines; keep the unfinished one at the bottom."""
    going: dict[int | None, str] = {}  # by rank
    for page in filter(None, pages):
        text = CLEAR if going else ""
        for line in page:
            going.pop(line.rank, None)
            if line.end == "\n":
                text += f"{harmless_output(line.text)}\n"
            elif line.text.strip():
                going[line.rank] = harmless(COLOUR.sub("", line.text))
        if going:
            last = [*going.values()][-1].expandtabs()
            text += cut(last, shutil.get_terminal_size().columns - 1)
        out.write(text)
        out.flush()


def write_lines(pages: Iterable[Sequence[OutputLine]], out: TextIO) -> None:
    """Write finished lines, and the newest state of each progress bar once per page."""
    bars: dict[int | None, str] = {}  # by rank: the state that was written last
    for page in pages:
        for line in page:
            if line.end == "\n" and bars.pop(line.rank, None) != line.text:
                out.write(f"{line.text}\n")
            elif line.end == "\r" and line.text.strip() and bars.get(line.rank) != line.text:
                bars[line.rank] = line.text
                out.write(f"{line.text}\n")
        out.flush()


def warn_if_empty(pages: Iterable[list[OutputLine]], silent: str) -> Iterator[list[OutputLine]]:
    """Yield the pages; print `silent` to stderr at the end if no line came."""
    came = False
    for page in pages:
        came = came or bool(page)
        yield page
    if not came:
        sys.stderr.write(f"ones: {silent}\n")


def with_times(page: Sequence[OutputLine]) -> list[OutputLine]:
    """Prefix each line with the time at which the controller received it."""
    return [
        line._replace(text=f"{moment(line.time)} {line.text}") if line.time else line
        for line in page
    ]


def with_ranks(
    pages: Iterable[Sequence[OutputLine]], *, prefix: bool | None
) -> Iterator[list[OutputLine]]:
    """Prefix lines with their rank; with None, from the page on in which a second rank occurs."""
    ranks: set[int] = set()
    for page in pages:
        ranks.update(line.rank for line in page if line.rank is not None)
        several = len(ranks) > 1 if prefix is None else prefix
        yield [
            line._replace(text=f"[{line.rank}] {line.text}")
            if several and line.rank is not None
            else line
            for line in page
        ]
