"""`ones timeline`: slots over time, drawn in a terminal or into a file."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import ascii_letters
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from controlplane.cli.allocations import (
    Allocation,
    Window,
    all_slots,
    allocations_from,
    clipped,
    colour_indices,
    full_window,
    job_colour,
    job_histories,
)
from controlplane.cli.job_list import cut
from controlplane.cli.output import COMMON, Common, Exit, JobName, print_data, seconds_of
from controlplane.cli.plots import png
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from schemas.errors import BadFieldError
from schemas.ids import JobId, SlotId
from schemas.wire.feed import FeedEvent

__all__ = ["Allocation", "Window", "all_slots", "allocations_from", "png", "terminal", "timeline"]

FREE: Final = "grey35"
PLAIN_WIDTH: Final = 120  # columns if the width is unknown
TICK_EVERY: Final = 12  # columns, minimum
LEGEND_LINES: Final = 4
DAY_S: Final = 86_400.0
ROUND_S: Final = tuple(
    count * unit
    for unit, counts in ((1.0, (1, 2, 5, 10, 20, 30)), (60.0, (1, 2, 5, 10, 20, 30)),
                         (3600.0, (1, 2, 4, 6, 12)))
    for count in counts
)  # fmt: skip
UNITS: Final = (("d", DAY_S), ("h", 3600.0), ("min", 60.0))
GAP: Final = "   "  # between names of jobs
TITLE: Final = "which job had which slot"
LOSS_HELP: Final = "draw the losses of this job with their fit and forecast instead"
# --- in a terminal


def terminal(
    allocations: Sequence[Allocation],
    slots: Sequence[SlotId],
    width: int,
    *,
    window: Window | None = None,
    colour: bool = True,
) -> Text:
    """Draw a line for each slot, a time axis below, and a legend of the jobs.

    With `colour` each job has blocks of its colour, paler where the job had the slot for less than
    half of a column's time; else a letter.
    """
    window = window or full_window(allocations)
    jobs = colour_indices(allocations)
    indent = max((len(slot) for slot in slots), default=0) + 1
    columns = max(width - indent, TICK_EVERY)
    taken = _slot_shares(allocations, window, columns)
    text = Text(no_wrap=True, overflow="crop")
    for slot in slots:
        text.append(slot.ljust(indent))
        line = taken[slot]
        cells = (_cell(line.get(column, {}), jobs, colour=colour) for column in range(columns))
        for (glyph, style), run in groupby(cells):
            text.append(glyph * len(list(run)), style=style)
        text.append("\n")
    for line_below in _axis(window, columns):
        text.append(" " * indent + line_below + "\n", style="dim")
    here = clipped(allocations, window)
    text.append_text(_legend(jobs, here, width, colour=colour))
    text.rstrip()
    return text


def _slot_shares(
    allocations: Iterable[Allocation], window: Window, columns: int
) -> Mapping[SlotId, dict[int, dict[JobId, float]]]:
    """Return the share of each column's time in which each job had each slot."""
    scale = columns / window.length
    taken: defaultdict[SlotId, dict[int, dict[JobId, float]]] = defaultdict(dict)
    for allocation in clipped(allocations, window):
        begin, end = ((at - window.begin) * scale for at in (allocation.begin, allocation.end))
        for column in range(int(begin), min(math.ceil(end), columns)):
            shares = taken[allocation.slot].setdefault(column, {})
            share = min(end, column + 1) - max(begin, column)
            shares[allocation.job] = shares.get(allocation.job, 0.0) + share
    return taken


def _cell(
    shares: Mapping[JobId, float], jobs: Mapping[JobId, int], *, colour: bool
) -> tuple[str, str]:
    if not shares:
        return ("░" if colour else "."), FREE
    index = jobs[max(shares, key=lambda job: shares[job])]
    if not colour:
        return ascii_letters[index % len(ascii_letters)], ""
    return ("█" if sum(shares.values()) >= 0.5 else "▒"), job_colour(index)  # noqa: PLR2004


def _axis(window: Window, columns: int) -> tuple[str, str]:
    """Return the marks of the axis and their labels, durations since the start of the window."""
    step = _round_up(window.length * TICK_EVERY / columns)
    marks, labels = ["─"] * columns, ""
    for tick in range(math.ceil(window.length / step)):
        column = min(round(tick * step / window.length * columns), columns - 1)
        label = _duration(tick * step, step)
        marks[column] = "┬"
        if column + len(label) <= columns:
            labels = labels.ljust(column) + label
    return "".join(marks), labels


def _duration(seconds: float, step: float) -> str:
    """Format a time on the axis in the largest unit not above the distance of marks."""
    unit, size = next((entry for entry in UNITS if step >= entry[1]), ("s", 1.0))
    return f"{seconds / size:g} {unit}"


def _round_up(seconds: float) -> float:
    """Return the next round duration, such as 20 s, 5 min or 6 h."""
    for length in ROUND_S:
        if length >= seconds * (1 - 1e-9) >= ROUND_S[0] / 2:
            return length
    unit = 1.0 if seconds < 1.0 else DAY_S
    power = 10.0 ** math.floor(math.log10(seconds / unit))
    return next(
        power * lead * unit for lead in (1, 2, 5, 10) if power * lead * unit >= seconds * (1 - 1e-9)
    )


def _legend(
    jobs: Mapping[JobId, int], shown: Iterable[Allocation], width: int, *, colour: bool
) -> Text:
    """Return the legend; if not all jobs fit, those that had slots for longest."""
    held: defaultdict[JobId, float] = defaultdict(float)
    for allocation in shown:
        held[allocation.job] += allocation.end - allocation.begin
    entries = {}
    for job, index in jobs.items():
        mark = "██" if colour else ascii_letters[index % len(ascii_letters)]
        name = cut(job, width - len(mark) - 1)
        entries[job] = Text.assemble((mark, job_colour(index) if colour else ""), f" {name}")
    longest = sorted(held, key=lambda job: -held[job])[: LEGEND_LINES * width // len(GAP)]
    lines: list[Text] = []
    for named in range(len(longest), -1, -1):
        left_out, chosen = len(held) - named, set(longest[:named])
        rest = [Text(f"and {left_out} more", style="dim")] if left_out else []
        lines = _lines([*(entries[job] for job in jobs if job in chosen), *rest], width)
        if len(lines) <= LEGEND_LINES:
            break
    return Text("\n").join(lines)


def _lines(entries: Iterable[Text], width: int) -> list[Text]:
    """Arrange entries in lines, as many as fit on each."""
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(GAP) + len(entry) <= width:
            lines[-1].append(GAP).append_text(entry)
        else:
            lines.append(entry.copy())
    return lines


# --- the command


def timeline(
    *,
    png_: Annotated[
        Path | None, Parameter(name="--png", help="also draw into this PNG file")
    ] = None,
    from_: Annotated[int, Parameter(name="--from", help="start at the event of this number")] = 1,
    last: Annotated[str | None, Parameter(help="only the last 90s, 10m, 2h or 1d")] = None,
    loss: Annotated[JobName | None, Parameter(help=LOSS_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Draw which job had which slot, from the journal; with --loss, how one job converges."""
    if loss is not None:
        if from_ != 1 or last is not None:
            problem = "--from and --last do not apply to --loss"
            raise BadFieldError(problem, "omit them", "loss")
        return _losses(loss, png_, common)
    length = seconds_of(last, "last") if last else math.inf
    with BlockingClient(common.home) as client:
        events = tuple(client.events())
    window = shown_window(events, from_, time.time(), length)
    allocations = clipped(allocations_from(events, window.end), window)
    slots = all_slots(events)
    if common.in_json:
        print_data(allocations, common.output)
    elif common.output == "table":
        _print(allocations, slots, window)
    if png_ is not None:
        pasts = job_histories(events, window.end)
        png(allocations, slots, png_, TITLE, window=window, pasts=pasts)
        _say_written(png_, common)
    return Exit.OK


def _losses(job: str, path: Path | None, common: Common) -> int:
    """Draw the losses of one job."""
    from controlplane.cli.losses import (  # noqa: PLC0415
        loss_curve,
        loss_png,
        loss_terminal,
    )

    with BlockingClient(common.home) as client:
        curve = loss_curve(client.job(job))
    if common.in_json:
        print_data(curve, common.output)
    elif common.output == "table":
        console = _console()
        console.print(loss_terminal(curve, console.width))
    if path is not None:
        loss_png(curve, path)
        _say_written(path, common)
    return Exit.OK


def _say_written(path: Path, common: Common) -> None:
    if common.output == "table":
        sys.stderr.write(f"picture in {path}\n")


def shown_window(
    events: Sequence[FeedEvent], from_seq: int, now: float, length: float = math.inf
) -> Window:
    """Return the time from event `from_seq` until now, or the last event if no worker is left.

    With a finite `length` (seconds, maximum) the window always ends now.
    """
    last = events[-1].time if events else now
    alive = any(allocation.end == math.inf for allocation in allocations_from(events, math.inf))
    end = max(now, last) if alive or length < math.inf else last
    begin = next((event.time for event in events if event.seq >= from_seq), end)
    return Window(max(begin, end - length), end)


def _print(allocations: Sequence[Allocation], slots: Sequence[SlotId], window: Window) -> None:
    console = _console()
    few = console.color_system in {None, "standard"}  # too few colours to distinguish jobs
    colour = not few and not console.no_color
    console.print(terminal(allocations, slots, console.width, window=window, colour=colour))


def _console() -> Console:
    return terminal_console(width_of(sys.stdout) or PLAIN_WIDTH)
