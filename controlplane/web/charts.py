"""Charts of the web page, as Bokeh figures.

A chart is made anew for each request. An open page asks for the columns of its data sources only,
and keeps its zoom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from bokeh.embed import json_item
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    DatetimeTickFormatter,
    HoverTool,
    LayoutDOM,
    Range1d,
)
from bokeh.plotting import figure
from bokeh.themes import Theme, built_in_themes

from controlplane.client.allocations import (
    Allocation,
    Window,
    all_slots,
    allocations_from,
    clipped,
    colour_indices,
    job_colour,
)
from controlplane.client.formats import second, span
from schemas.ids import JobId, node_of
from schemas.wire.client import JobDetail, SweepDetail
from schemas.wire.feed import FeedEvent

MAX_BARS: Final = 20_000  # allocations that are drawn
ROW_HEIGHT: Final = 22  # pixels of a slot, if there are few
MIN_HEIGHT, MAX_HEIGHT = 160, 620  # pixels
NAMED_FROM: Final = 0.06  # share of the window from which a bar shows the name of its job
NAMED_SLOTS: Final = 64  # slots up to which bars show names
PANEL_HEIGHT: Final = 120  # pixels
LINE: Final = "#4e79a7"
OF_GROUPS: Final = frozenset({"slots", "batch size"})  # curves with steps
DASHES: Final = ("solid", "dashed", "dotted")
MAX_CURVES: Final = 200  # trials that are drawn
MARK: Final = "#e15759"
_AXIS: Final = {"axis_line_color", "major_tick_line_color", "minor_tick_line_color"}
DARK: Final = Theme(  # colours of style.css
    json={
        "attrs": {
            "Plot": {
                "background_fill_color": "#15181e", "border_fill_color": "#15181e",
                "outline_line_color": "#353d4b",
            },
            "Grid": {"grid_line_color": "#353d4b"},
            "Axis": dict.fromkeys(_AXIS, "#353d4b")
            | {"major_label_text_color": "#a3adbd", "axis_label_text_color": "#a3adbd"},
            "Legend": {
                "background_fill_color": "#1e232c", "border_line_alpha": 0.0,
                "label_text_color": "#e6e9ef",
            },
        }
    }
)  # fmt: skip
TICKS: Final[Mapping[str, Any]] = {  # formats by the distance of ticks
    "milliseconds": "%H:%M:%S.%3N", "seconds": "%H:%M:%S", "minsec": "%H:%M:%S",
    "minutes": "%H:%M", "hourmin": "%H:%M", "hours": "%d %b %H:%M", "days": "%d %b",
}  # fmt: skip
TOOLS: Final = "xpan,xwheel_zoom,xbox_zoom,reset,save"


def document(chart: LayoutDOM, *, dark: bool) -> dict[str, Any]:
    """Return a chart as JSON for `Bokeh.embed.embed_item`."""
    theme = DARK if dark else built_in_themes["light_minimal"]
    return dict(json_item(chart, theme=theme))


def columns(chart: LayoutDOM) -> dict[str, Any]:
    """Return the columns of each named data source of a chart, and its range of time."""
    found: dict[str, Any] = {}
    for model in chart.references():
        if isinstance(model, ColumnDataSource) and model.name:
            found[model.name] = {name: list(values) for name, values in model.data.items()}
        elif isinstance(model, Range1d) and model.name:
            found[model.name] = {"start": model.start, "end": model.end}
    return found


# --- slots over time


def gantt(events: Iterable[FeedEvent], window: Window, until: float | None = None) -> Any:
    """Draw which job had which slot; re-scales are marked. Times are in UTC.

    `until` is the end of what the events tell, if it is before the end of the window.
    """
    seen = list(events)
    whole = allocations_from(seen, window.end if until is None else until)
    colours = {job: job_colour(index) for job, index in colour_indices(whole).items()}
    shown = clipped(whole, window)[-MAX_BARS:]
    slots = all_slots(seen)
    rows = {slot: len(slots) - 1 - index for index, slot in enumerate(slots)}
    height = min(max(ROW_HEIGHT * len(slots) + 60, MIN_HEIGHT), MAX_HEIGHT)
    plot = _timed(height, window, tools="pan,wheel_zoom,box_zoom,reset,save")
    dates = dict.fromkeys(TICKS, "%d %b %Y")
    plot.xaxis.formatter.context = DatetimeTickFormatter(**cast("Any", dates))
    plot.xaxis.formatter.context_which, plot.xaxis.formatter.hide_repeats = "start", True
    plot.y_range = Range1d(start=-0.5, end=max(len(slots), 1) - 0.5)
    ticks = _node_ticks(slots, rows)
    plot.yaxis.ticker = list(ticks)
    plot.yaxis.major_label_overrides = ticks
    plot.ygrid.visible = False
    bars = plot.quad(
        left="begin", right="end", top="top", bottom="bottom", fill_color="colour",
        line_color="colour", source=ColumnDataSource(_bars(shown, rows, colours), name="bars"),
    )  # fmt: skip
    if len(slots) <= NAMED_SLOTS:
        names = ColumnDataSource(_names(shown, rows, window), name="names")
        plot.text(
            "begin", "row", "job", source=names, text_font_size="11px", text_baseline="middle",
            x_offset=4, text_color="white",
        )  # fmt: skip
    marks = plot.scatter(
        "at", "row", marker="triangle", size=8, color="black", line_color="white",
        source=ColumnDataSource(_rescales(seen, shown, rows, window), name="rescales"),
    )  # fmt: skip
    about = [("job", "@job"), ("slot", "@slot"), ("from", "@since"), ("for", "@length")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=about))
    plot.add_tools(HoverTool(renderers=[marks], tooltips=[("job", "@job"), ("", "@why")]))
    return plot


def _node_ticks(slots: Sequence[str], rows: Mapping[Any, int]) -> dict[float, str]:
    """Return the label of each slot, or of each node if there are many slots."""
    if len(slots) <= MAX_HEIGHT // ROW_HEIGHT:
        return {float(rows[slot]): slot for slot in slots}
    nodes: dict[str, list[int]] = {}
    for slot in slots:
        nodes.setdefault(str(node_of(slot)), []).append(rows[slot])  # type: ignore[arg-type]
    step = max(len(nodes) // 40, 1)
    return {sum(at) / len(at): node for node, at in list(nodes.items())[::step]}


def _bars(
    shown: Sequence[Allocation], rows: Mapping[Any, int], colours: Mapping[JobId, str]
) -> dict[str, list[Any]]:
    return {
        "begin": [one.begin * 1000 for one in shown],
        "end": [one.end * 1000 for one in shown],
        "top": [rows[one.slot] + 0.42 for one in shown],
        "bottom": [rows[one.slot] - 0.42 for one in shown],
        "colour": [colours[one.job] for one in shown],
        "job": [one.job for one in shown],
        "slot": [one.slot for one in shown],
        "since": [second(one.begin) for one in shown],
        "length": [span(one.end - one.begin) for one in shown],
    }


def _names(
    shown: Sequence[Allocation], rows: Mapping[Any, int], window: Window
) -> dict[str, list[Any]]:
    wide = [one for one in shown if one.end - one.begin >= NAMED_FROM * window.length]
    return {
        "begin": [one.begin * 1000 for one in wide],
        "row": [rows[one.slot] for one in wide],
        "job": [one.job for one in wide],
    }


def _rescales(
    events: Sequence[FeedEvent], shown: Sequence[Allocation], rows: Mapping[Any, int],
    window: Window,
) -> dict[str, list[Any]]:  # fmt: skip
    """Return a mark on the lowest slot of a job for each of its re-scales."""
    found: dict[str, list[Any]] = {"at": [], "row": [], "job": [], "why": []}
    held: dict[JobId, list[Allocation]] = {}
    for one in shown:
        held.setdefault(one.job, []).append(one)
    for event in events:
        rescaled = event.event == "job.rescaling" and window.begin <= event.time <= window.end
        if not rescaled or event.job is None:
            continue
        here = [
            rows[one.slot] for one in held.get(event.job, ()) if one.begin <= event.time <= one.end
        ]
        if here:
            found["at"].append(event.time * 1000)
            found["row"].append(max(here) + 0.42)
            found["job"].append(event.job)
            found["why"].append(str(event.detail.get("reason", "")))
    return found


# --- one job over time


Points = Sequence[tuple[float, float | None]]  # (seconds since the epoch, value)


def job_chart(detail: JobDetail, until: float) -> LayoutDOM:
    """Draw batch size, learning rate, loss, metrics, speed and slots on one axis of time.

    Of a program, only slots are drawn.
    """
    summary = detail.summary
    end = max(summary.ended_at or until, summary.submitted_at + 1.0)
    window = Window(summary.submitted_at, end)
    panels: list[Any] = []
    for name, points in _curves(detail, end).items():
        panel = _timed(PANEL_HEIGHT, window, share=panels[0].x_range if panels else None)
        panel.yaxis.axis_label = name
        panel.yaxis.ticker.desired_num_ticks = 3
        known = [abs(value) for _, value in points if value]
        panel.y_range.default_span = max(known, default=1.0)  # around a constant
        panel.y_range.range_padding = 0.2
        panel.min_border_top = panel.min_border_bottom = 8  # half a label
        panel.toolbar_location = None if panels else "right"
        source = ColumnDataSource(
            {"at": [at * 1000 for at, _ in points], "value": [value for _, value in points]},
            name=name,
        )
        if name in OF_GROUPS:
            panel.y_range.start, panel.yaxis.ticker.min_interval = 0, 1
            panel.step("at", "value", source=source, mode="after", line_width=2, color=LINE)
        else:
            panel.line("at", "value", source=source, line_width=2, color=LINE)
            panel.scatter("at", "value", source=source, size=4, color=LINE)
        panel.add_tools(HoverTool(tooltips=[(name, "@value")], mode="vline"))
        panel.vspan(
            x="at", source=ColumnDataSource(_group_marks(detail), name=f"groups beside {name}"),
            color=MARK, line_dash="dotted", alpha=0.7,
        )  # fmt: skip
        panels.append(panel)
    for panel in panels[:-1]:
        panel.xaxis.visible = False
    return column(*panels, sizing_mode="stretch_width")


def _curves(detail: JobDetail, end: float) -> dict[str, Points]:
    """Return the curves of a job, in the order in which they are drawn."""
    epochs, groups = detail.epochs, [group for group in detail.versions if group.time]
    slots: list[tuple[float, float | None]] = [(one.time, len(one.slots)) for one in groups]
    batches: list[tuple[float, float | None]] = [(one.time, one.global_batch) for one in groups]
    metrics = sorted({name for epoch in epochs for name in epoch.metrics})
    of_slots = [*slots, *((end, value) for _, value in slots[-1:])]
    if detail.spec.rigid:
        return {"slots": of_slots}
    return {
        "slots": of_slots,
        "batch size": [*batches, *((end, value) for _, value in batches[-1:])],
        "learning rate": [(epoch.time, epoch.lr) for epoch in epochs],
        "loss": [(epoch.time, epoch.train_loss) for epoch in epochs],
        **{
            name: [(one.time, one.metrics[name]) for one in epochs if name in one.metrics]
            for name in metrics
        },
        "samples/s": [(epoch.time, epoch.samples_per_s) for epoch in epochs],
    }


def _group_marks(detail: JobDetail) -> dict[str, list[Any]]:
    later = detail.versions[1:]
    return {"at": [one.time * 1000 for one in later], "kind": [one.kind for one in later]}


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """Draw several curves over time, each with its own colour and a legend."""
    times = [at for points in series.values() for at, _ in points]
    window = Window(min(times, default=0.0), max(times, default=1.0))
    plot = _timed(PANEL_HEIGHT * 2, window)
    plot.yaxis.axis_label = title
    for index, (name, points) in enumerate(series.items()):
        data = {"at": [at * 1000 for at, _ in points], "value": [value for _, value in points]}
        plot.line(
            "at", "value", source=ColumnDataSource(data, name=name), color=job_colour(index),
            line_width=2, legend_label=name, line_dash=DASHES[index % 3],
        )  # fmt: skip
    return plot


def shares(series: Mapping[str, Sequence[float]], title: str) -> Any:
    """Draw for each series which share of its values is at most x, on a logarithmic axis."""
    plot: Any = figure(
        height=PANEL_HEIGHT * 3, sizing_mode="stretch_width", tools=TOOLS, x_axis_type="log",
        output_backend="canvas",
    )  # fmt: skip
    plot.xaxis.axis_label, plot.yaxis.axis_label = title, "share of the jobs"
    plot.toolbar.logo = None
    for index, (name, values) in enumerate(series.items()):
        ordered = sorted(value for value in values if value > 0)
        count = len(ordered)
        plot.step(
            ordered, [(place + 1) / count for place in range(count)], mode="after",
            legend_label=name, color=job_colour(index), line_width=2, line_dash=DASHES[index % 3],
        )  # fmt: skip
    if series:
        plot.legend.location = "bottom_right"
    return plot


def trials(detail: SweepDetail) -> Any:
    """Draw the metric of each trial by epoch; the best trial is drawn last and wider."""
    metric = detail.spec.search.metric
    plot: Any = figure(
        height=PANEL_HEIGHT * 3, sizing_mode="stretch_width", tools="pan,wheel_zoom,reset,save",
        output_backend="canvas", active_scroll=None,
    )  # fmt: skip
    plot.xaxis.axis_label, plot.yaxis.axis_label = "epoch", metric
    plot.toolbar.logo = None
    ordered = sorted(detail.trials, key=lambda trial: trial.number == detail.best)
    for trial in ordered[-MAX_CURVES:]:
        points = [
            (trial.first_epoch + place, values[metric])
            for place, values in enumerate(trial.metrics)
            if metric in values
        ]
        best = trial.number == detail.best
        at, values = [at for at, _ in points], [value for _, value in points]
        width, look = (
            3 if best else 1,
            {"color": MARK if best else LINE, "alpha": 1.0 if best else 0.6},
        )
        if len(points) == 1:
            curve = plot.scatter(at, values, size=4 * width, **look)
        else:
            curve = plot.line(at, values, line_width=width, **look)
        said = f"trial {trial.number}{' (best)' if best else ''}"
        plot.add_tools(HoverTool(renderers=[curve], tooltips=[(said, "@y"), ("epoch", "@x")]))
    return plot


OF_PLANS: Final = {  # curves of the scheduler's charts, from the events of plans
    "fitness": {
        "best": "best_fitness",
        "upper quarter": "upper_fitness",
        "mean": "mean_fitness",
        "lower quarter": "lower_fitness",
    },
    "decision": {"decision time, ms": "decision_ms"},
}


def plans(events: Iterable[FeedEvent], chart: str) -> Any:
    """Draw a chart in `OF_PLANS`."""
    seen = [event for event in events if event.event == "policy.plan"]
    curves = {
        said: [
            (event.time, float(value))
            for event in seen
            if (value := event.detail.get(field)) is not None
        ]
        for said, field in OF_PLANS[chart].items()
    }
    return lines(chart, curves)


def _timed(height: int, window: Window, share: Any = None, tools: str = TOOLS) -> Any:
    plot: Any = figure(
        height=height, sizing_mode="stretch_width", tools=tools, active_scroll=None,
        output_backend="canvas", x_axis_type="datetime",
        x_range=share or Range1d(start=window.begin * 1000, end=window.end * 1000, name="time"),
    )  # fmt: skip
    plot.xaxis.formatter = DatetimeTickFormatter(**TICKS)
    plot.toolbar.logo = None
    plot.xaxis.ticker.desired_num_ticks = 4
    plot.grid.grid_line_alpha = 0.3
    plot.min_border_left = 90
    return plot
