"""logs: what the workers of a job wrote."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.exit_codes import Exit
from controlplane.cli.job_commands import say_if_absent
from controlplane.cli.output import print_line, seconds_of
from controlplane.cli.terminal import drawn, harmless_output
from controlplane.client import BlockingClient
from controlplane.client.stream_pages import OutputLine
from schemas.errors import BadFieldError


def logs(
    job: str,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="until the job ends")] = False,
    rank: Annotated[int | None, Parameter(help="only of this worker")] = None,
    tail: Annotated[int | None, Parameter(help="only the last so many lines of now")] = None,
    since: Annotated[
        str | None, Parameter(help="only what came in the last 90s, 5m, 2h or 1d")
    ] = None,
    grep: Annotated[
        str | None, Parameter(help="only lines with a match of this regular expression")
    ] = None,
    prefix: Annotated[
        bool | None, Parameter(help="[RANK] before each line; default: if several ranks speak")
    ] = None,
    raw: Annotated[
        bool, Parameter(help="byte for byte on a terminal, too; else only colours get there")
    ] = False,
    common: Common = COMMON,
) -> int:
    """Print the output of JOB from its start, across restarts of anything."""
    if tail is not None and tail < 0:
        raise BadFieldError(f"--tail {tail} is below 0", "give a number of lines", "tail")
    first_s = time.time() - seconds_of(since, "since") if since else 0.0
    with BlockingClient(common.home) as client:
        if follow:
            say_if_absent(client)
        pages = client.output_pages(
            job, rank, follow=follow, since=first_s, last=tail, matching=grep or ""
        )
        if common.output in {"json", "jsonl"}:
            for line in (line for page in pages for line in page):
                print_line(line._asdict())
            return Exit.OK
        out = drawn(sys.stdout)
        shown = str if raw or not out.isatty() else harmless_output
        for text in prefixed(pages, prefix=prefix):
            out.write(f"{shown(text)}\n")
            if follow:
                out.flush()
    return Exit.OK


def prefixed(pages: Iterable[Sequence[OutputLine]], *, prefix: bool | None) -> Iterator[str]:
    """Lines with the rank that wrote each of them, from the page on in which a second one speaks.

    Args:
        pages: of output.
        prefix: True: from the beginning; False: never.
    """
    ranks: set[int] = set()
    for page in pages:
        ranks.update(line.rank for line in page if line.rank is not None)
        several = len(ranks) > 1 if prefix is None else prefix
        for line in page:
            yield f"[{line.rank}] {line.text}" if several and line.rank is not None else line.text
