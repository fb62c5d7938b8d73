"""`ones sweep top`: a live dashboard of one sweep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli.output import (
    ABSENT_AFTER_S,
    ABSENT_NOTE,
    COMMON,
    DEFAULT_WIDTH,
    REFRESH_S,
    STYLES,
    Common,
    Exit,
    JobName,
    byte_count,
    print_data,
    with_all_keys,
)
from controlplane.cli.sweep.tables import GAP, TRAINING, summary_lines, trial_table
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from controlplane.client.sweeps.tables import ranked, trial_row
from schemas.errors import UnavailableError, UnreachableError
from schemas.jobs import ENDED
from schemas.wire.client import SweepDetail, TrialInfo

EDGE: Final = 4  # lines of the table besides trials


def top(
    job: JobName,
    *,
    once: Annotated[bool, Parameter(help="print once instead of continuously")] = False,
    common: Common = COMMON,
) -> int:
    """Show sweep JOB while it trains, every second until it ends or Ctrl-C."""
    live = common.output == "table" and not once and sys.stdout.isatty()
    try:
        with BlockingClient(common.home, ABSENT_AFTER_S if live else None) as client:
            if common.output in {"json", "jsonl"}:
                detail = client.sweep(job)
                rows = with_all_keys([trial_row(one) for one in in_order(detail)])
                print_data({"sweep": detail.summary, "trials": rows}, common.output)
            elif live:
                console = terminal_console()
                follow(lambda: client.sweep(job), console, time.sleep, time.time)
            else:
                console = terminal_console(width_of(sys.stdout) or DEFAULT_WIDTH)
                console.print(dashboard(client.sweep(job), console.width, time.time()))
    except KeyboardInterrupt:
        if not live:
            raise
    return Exit.OK


def follow(
    read: Callable[[], SweepDetail],
    console: Console,
    pause: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Draw every second until the sweep has ended; an absent controller is tolerated.

    Raises:
        UnreachableError: if the controller does not reply the first time.
    """
    detail, note = read(), ""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            most = max(console.height - len(summary_lines(detail, 0.0)) - EDGE - 2, 1)
            drawn = dashboard(detail, console.width, clock(), note, most)
            live.update(drawn, refresh=True)
            if detail.summary.state in ENDED:
                return
            pause(REFRESH_S)
            try:
                detail, note = read(), ""
            except (UnreachableError, UnavailableError):
                note = ABSENT_NOTE


def dashboard(
    detail: SweepDetail, width: int, now: float, note: str = "", most: int | None = None
) -> Group:
    """Return the state of a sweep, a bar of its units, and `most` trials, training ones first.

    `note` is appended to the first line.
    """
    first, *others = summary_lines(detail, now)
    head = Text(first, no_wrap=True, overflow="ellipsis")
    head.stylize(STYLES.get(detail.summary.state, ""), 0, 0)
    if note:
        head.append(f"   {note}", style="bold red")
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in others]
    trials = in_order(detail)
    shown = trials if most is None or len(trials) <= most else trials[: max(1, most - 1)]
    rest = Text(f"and {len(trials) - len(shown)} more" if len(shown) < len(trials) else "")
    table = trial_table(detail, shown, width)
    return Group(head, *lines, _bar(detail, width), table, *([rest] if rest else []))


def _bar(detail: SweepDetail, width: int) -> Table:
    """Return a bar of finished units, and the cost of moving states."""
    everything = detail.units_done + detail.units_left
    share = detail.units_done / everything if everything else 0.0
    spent = detail.waited_s + detail.trained_s
    waits = f", {detail.waited_s / spent:.1%} of the time" if spent else ""
    hopped = f"{byte_count(detail.moved_bytes)} hopped{waits}" if detail.moved_bytes else ""
    row = Table.grid(padding=(0, GAP))
    bar = ProgressBar(1.0, share, max(10, min(60, width // 3)), style="grey35")
    row.add_row(bar, f"{share:.0%}", hopped)
    return row


def in_order(detail: SweepDetail) -> list[TrialInfo]:
    """Return the trials, training ones first, then by score."""
    return sorted(ranked(detail), key=lambda trial: trial.state != TRAINING)
