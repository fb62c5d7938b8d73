"""`ones timeline`: draw slots over time in a terminal or, with a panel for each job, as PNG."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from controlplane.cli.job_list import cut
from controlplane.cli.output import COMMON, Common, JobName, print_data, seconds_of
from controlplane.cli.progress import progress
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from controlplane.client.allocations import (
    Allocation,
    JobHistory,
    Window,
    all_slots,
    allocations_from,
    clipped,
    colour_indices,
    full_window,
    job_colour,
    job_histories,
)
from controlplane.sim.analysis.plot_style import (
    IDLE,
    NODE_LINE,
    Bar,
    draw_bars,
    name_bars,
    new_figure,
    save,
    slot_axes,
)
from schemas.errors import BadFieldError
from schemas.ids import JobId, Seconds, SlotId
from schemas.wire.feed import FeedEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STARTING: Final = "#888888"  # hatching of a starting job
RATE: Final = "#c0392b"
MAX_PANELS: Final = 12  # only the latest jobs get a panel
PANEL_HEIGHT: Final = 0.85  # inches
PANELS_TITLE: Final = "each job: its state, batch size and rate"
STATES_DRAWN: Final = ("queued", "starting", "running", "paused")
LEGEND_ROWS: Final = 30
MAX_LEGEND_JOBS: Final = 2 * LEGEND_ROWS - 2  # jobs


def png(
    allocations: Sequence[Allocation],
    slots: Sequence[SlotId],
    path: Path,
    title: str,
    *,
    window: Window | None = None,
    pasts: Mapping[JobId, JobHistory] | None = None,
) -> None:
    """Draw slots over time into a PNG file, with a panel for each of the latest jobs in `pasts`.

    `window` is the range of the axis; by default, it contains all allocations.
    """
    window = window or full_window(allocations)
    jobs: dict[str, str] = {
        job: job_colour(index) for job, index in colour_indices(allocations).items()
    }
    within = [job for job, past in (pasts or {}).items() if _is_visible(past, window)]
    panels = within[-MAX_PANELS:]
    height = min(max(1.6 + 0.3 * len(slots), 2.5), 12.0)
    figure = new_figure(13.0, height + PANEL_HEIGHT * len(panels))
    axes, *below = figure.subplots(
        1 + len(panels), 1, squeeze=False, sharex=True,
        height_ratios=[height, *[PANEL_HEIGHT] * len(panels)],
    )[:, 0]  # fmt: skip
    shown = clipped(allocations, window)
    trained = _bars(_trained(shown, pasts or {}), window)
    slot_axes(axes, slots, window.length)
    if pasts:
        draw_bars(axes, _bars(shown, window), slots, dict.fromkeys(jobs, _state_style("starting")))
    draw_bars(axes, trained, slots, {job: {"facecolor": colour} for job, colour in jobs.items()})
    name_bars(axes, trained, slots, jobs, window.length)
    for panel, job in zip(below, panels, strict=True):
        _draw_past(panel, job, (pasts or {})[job], jobs.get(job, NODE_LINE), window)
    _draw_legend(axes, jobs, started=pasts is not None)
    axes.set_title(title, loc="left")
    last = [axes, *below][-1]
    last.set_xlabel("seconds")
    if panels:
        left_out = f"; {len(within) - len(panels)} older jobs have no panel" * (within != panels)
        below[0].set_title(PANELS_TITLE + left_out, loc="left", fontsize="medium")
        _draw_states_legend(figure)
    save(figure, path, ".png")


def _bars(allocations: Iterable[Allocation], window: Window) -> list[Bar]:
    return [
        Bar(one.slot, one.job, one.begin - window.begin, one.end - window.begin)
        for one in allocations
    ]


def _trained(
    allocations: Iterable[Allocation], pasts: Mapping[JobId, JobHistory]
) -> list[Allocation]:
    found = []
    for one in allocations:
        spans = pasts[one.job].spans if one.job in pasts else ()
        starts = [s.end for s in spans if s.state == "starting" and s.begin <= one.begin < s.end]
        begin = min(max([one.begin, *starts]), one.end)
        found.append(replace(one, begin=Seconds(begin)))
    return found


def _is_visible(past: JobHistory, window: Window) -> bool:
    return any(span.end > window.begin and span.begin < window.end for span in past.spans)


def _draw_past(axes: Axes, job: JobId, past: JobHistory, colour: str, window: Window) -> None:
    """Draw a panel for one job: states behind batch size (left axis) and rate (right axis)."""
    for span in past.spans:
        begin, end = span.begin - window.begin, span.end - window.begin
        axes.axvspan(begin, end, linewidth=0, **_state_style(span.state, colour))
    axes.text(
        0.003, 0.93, job, transform=axes.transAxes, fontsize="small", va="top",
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.0},
    )  # fmt: skip
    rate = axes.twinx()
    running = [span for span in past.spans if span.state == "running"]
    for span in running:  # one line per span: the job does not train between spans
        before = [batch for at, batch in past.batches if at <= span.begin][-1:]
        changes = [(at, batch) for at, batch in past.batches if span.begin < at <= span.end]
        steps = [*((span.begin, batch) for batch in before), *changes]
        steps += [(span.end, batch) for _, batch in steps[-1:]]
        axes.step(
            [at - window.begin for at, _ in steps], [batch for _, batch in steps],
            where="post", color="black", linewidth=1.6,
        )  # fmt: skip
        within = [(at, one) for at, one in past.rates if span.begin <= at <= span.end]
        rate.plot(
            [at - window.begin for at, _ in within], [one for _, one in within],
            color=RATE, linewidth=1.2, marker=".",
        )  # fmt: skip
    batches, rates = [batch for _, batch in past.batches], [one for _, one in past.rates]
    axes.set_yticks([])
    if batches:
        ticks = sorted({min(batches), max(batches)})
        axes.set_yscale("log", base=2)
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(min(batches) / 1.5, max(batches) * 1.5)
    most = max(rates, default=0.0)
    rate.set_ylim(0.0, 1.3 * most or 1.0)
    rate.set_yticks([0.0, most] if rates else [], ["0", f"{most:.0f}"] if rates else [])
    rate.tick_params(axis="y", colors=RATE, labelsize="small")
    axes.tick_params(axis="y", labelsize="small")
    for drawn in (axes, rate):
        drawn.spines[["top", "right"]].set_visible(False)


def _state_style(state: str, colour: str = "#4e79a7") -> dict[str, Any]:
    looks: dict[str, dict[str, Any]] = {
        "queued": {"facecolor": "white", "edgecolor": "#999999", "hatch": "...."},
        "starting": {"facecolor": IDLE, "edgecolor": STARTING, "hatch": "//////"},
        "running": {"facecolor": colour, "alpha": 0.35},
        "paused": {"facecolor": "#d0d0d0"},
    }
    return looks[state]


def _draw_states_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    states = [Patch(label=state, **_state_style(state)) for state in STATES_DRAWN]
    lines = [
        Line2D([], [], color="black", linewidth=1.6, label="batch size (left)"),
        Line2D([], [], color=RATE, marker=".", label="samples/s (right)"),
    ]
    figure.legend(
        handles=[*states, *lines], loc="outside lower center", ncols=len(states) + len(lines),
        fontsize="small", frameon=False,
    )  # fmt: skip


def _draw_legend(axes: Axes, jobs: Mapping[str, str], *, started: bool) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = list(jobs.items())[:MAX_LEGEND_JOBS]
    handles = [Patch(color=colour, label=job) for job, colour in shown]
    if len(jobs) > len(shown):
        handles.append(Patch(alpha=0.0, label=f"and {len(jobs) - len(shown)} more"))
    handles.append(Patch(facecolor=IDLE, edgecolor=NODE_LINE, linewidth=0.5, label="idle"))
    if started:
        handles.append(Patch(label="starting", **_state_style("starting")))
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0,
        ncols=math.ceil(len(handles) / LEGEND_ROWS), fontsize="small", frameon=False,
    )  # fmt: skip


__all__ = ["Allocation", "Window", "all_slots", "allocations_from", "png", "terminal", "timeline"]

FREE: Final = "grey35"
PLAIN_WIDTH: Final = 120  # columns if the width is unknown
TICK_EVERY: Final = 12  # columns, the minimum distance of ticks
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
    """Return a line for each slot, a time axis, and a legend of the jobs.

    With `colour`, each job has blocks of its own colour. A block is paler if the job had the slot
    for less than half of that column's time. Without `colour`, each job has a letter.
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
    """Return the share of time that each job had each slot, for each column of the drawing."""
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
    """Return two lines: the ticks of the axis, and their labels (time since the window's start)."""
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
    """Format a time on the axis in the largest unit up to `step`, the distance of two ticks."""
    unit, size = next((entry for entry in UNITS if step >= entry[1]), ("s", 1.0))
    return f"{seconds / size:g} {unit}"


def _round_up(seconds: float) -> float:
    """Return the shortest round duration of at least `seconds`, such as 20 s, 5 min or 6 h."""
    short = seconds < ROUND_S[0]
    unit = 1.0 if short else DAY_S
    power = 10.0 ** math.floor(math.log10(seconds / unit))
    lengths = (*(() if short else ROUND_S), *(power * lead * unit for lead in (1, 2, 5, 10)))
    return next(length for length in lengths if length >= seconds * (1 - 1e-9))


def _legend(
    jobs: Mapping[JobId, int], shown: Iterable[Allocation], width: int, *, colour: bool
) -> Text:
    """Return the legend; if not all jobs fit, list those that used slots the longest."""
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
) -> None:
    """Draw which job had which slot, from the journal, or with --loss how one job converges."""
    if loss is not None:
        if from_ != 1 or last is not None:
            problem = "--from and --last do not apply to --loss"
            raise BadFieldError(problem, "omit them", "loss")
        _losses(loss, png_, common)
        return
    length = seconds_of(last, "last") if last else math.inf
    with progress(common.output, "reading events"), BlockingClient(common.home) as client:
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


def _losses(job: str, path: Path | None, common: Common) -> None:
    from controlplane.cli.losses import loss_curve, loss_png, loss_terminal  # noqa: PLC0415

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


def _say_written(path: Path, common: Common) -> None:
    if common.output == "table":
        sys.stderr.write(f"picture in {path}\n")


def shown_window(
    events: Sequence[FeedEvent], from_seq: int, now: float, length: float = math.inf
) -> Window:
    """Return the time from event `from_seq` until now, or until the last event if no worker runs.

    A finite `length` (seconds) limits the period, which then always ends now.
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
