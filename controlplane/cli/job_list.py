"""ps: jobs, a line each, once or again and again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, TextIO

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.exit_codes import Exit
from controlplane.cli.job_lines import cut, job_lines
from controlplane.cli.output import COLOURS, print_data
from controlplane.cli.terminal import drawn, width_of
from controlplane.client import BlockingClient
from schemas.errors import BadFieldError, UnavailableError, UnreachableError
from schemas.messages.client import Jobs

EVERY_S: Final = 1.0
PATIENCE_S: Final = 2.0  # with a controller that is away, before that is said
AWAY: Final = "no controller answers, trying again"
HOME: Final = "\x1b[H"  # the cursor to the corner
CLEAR_LINE: Final = "\x1b[K"
CLEAR_BELOW: Final = "\x1b[J"


@Parameter(name="*")
@dataclass(frozen=True)
class Choice:
    """Which jobs."""

    all_: Annotated[bool, Parameter(name=["--all", "-a"], help="ended jobs too")] = False
    state: Annotated[str | None, Parameter(help="only those in STATE[,STATE...], ended or not")] = (
        None
    )
    user: Annotated[str | None, Parameter(help="only this user's")] = None
    name: Annotated[str | None, Parameter(help="only NAME, NAME-N or a pattern: 'lr-*'")] = None

    def ask(self, client: BlockingClient) -> Jobs:
        """The jobs now."""
        states = [state.strip() for state in (self.state or "").split(",") if state.strip()]
        return client.find_jobs(
            ended=self.all_, states=states, user=self.user or "", name=self.name or ""
        )


def ps(
    *,
    choice: Choice = Choice(),
    watch: Annotated[bool, Parameter(name=["--watch", "-w"], help="until Ctrl-C")] = False,
    common: Common = COMMON,
) -> int:
    """List jobs, oldest first, one line each; what was cut is in `ones show`."""
    if watch and (common.output != "table" or not sys.stdout.isatty()):
        raise BadFieldError("--watch draws on a terminal", "leave out -w or -o", "watch")
    with BlockingClient(common.home, PATIENCE_S if watch else None) as client:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                redraw(lambda: choice.ask(client), drawn(sys.stdout), time.sleep)
            return Exit.OK
        found = choice.ask(client)
    if common.output in {"json", "jsonl"}:
        print_data(found.jobs, common.output)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{job.job}\n" for job in found.jobs)
    else:
        lines = table(found, width_of(sys.stdout))  # harmless, and with colours of ours
        drawn(sys.stdout).writelines(f"{line}\n" for line in lines)
    if not found.jobs:
        sys.stderr.write(f"ones: {none_found(choice)}\n")
    return Exit.OK


def table(found: Jobs, width: int | None, *, coloured: bool | None = None) -> list[str]:
    """What `ps` prints: the head, a rule, and a line for each job; nothing without jobs.

    Args:
        width: columns; None: any.
        coloured: None: on a terminal, unless NO_COLOR is set.
    """
    if not found.jobs:
        return []
    if coloured is None:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    head, rows = job_lines(found.jobs, width, _coloured if coloured else str)
    return [head, "─" * (len(head) if width is None else width), *rows]


def none_found(choice: Choice) -> str:
    """Says that there are no such jobs."""
    if choice.state or choice.user or choice.name:
        return (
            "no such job" if choice.all_ or choice.state else "no such job; -a looks at ended ones"
        )
    return "no job yet" if choice.all_ else "no job waits or runs; -a lists ended ones"


def screen(found: Jobs, columns: int, lines: int, note: str = "") -> list[str]:
    """What `ps --watch` shows: as many jobs as fit, and how many do not."""
    shown = table(found, columns, coloured="NO_COLOR" not in os.environ)
    waiting = sum(job.state == "queued" for job in found.jobs)
    running = sum(bool(job.slots) for job in found.jobs)
    top = cut(f"{running} on slots, {waiting} queued{note and ' - ' + note}", columns)
    room = max(lines - 2, 1)
    if len(shown) > room:
        more = len(shown) - room + 1
        shown = [*shown[: room - 1], cut(f"{more} more: --state, --user, --name", columns)]
    return [top, *shown]


def redraw(ask: Callable[[], Jobs], out: TextIO, pause: Callable[[float], None]) -> None:
    """Draw every second, for ever; a controller that is away for a while is borne.

    Args:
        pause: waits so many seconds.

    Raises:
        UnreachableError: if it does not answer the first time.
    """
    found, note = ask(), ""
    while True:
        size = shutil.get_terminal_size()
        lines = screen(found, size.columns, size.lines, note)
        below = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
        out.write(f"{HOME}{below}{CLEAR_BELOW}")
        out.flush()
        pause(EVERY_S)
        try:
            found, note = ask(), ""
        except (UnreachableError, UnavailableError):
            note = AWAY


def _coloured(state: str) -> str:
    return f"\x1b[{COLOURS[state]}m{state}\x1b[0m" if state in COLOURS else state
