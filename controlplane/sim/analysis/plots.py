"""Figures of results: distributions, averages, scaling with the cluster, losses, slots over time.

`draw` draws all figures for which the results have data. Every function that draws raises
`ResultsError` if there is nothing to draw, matplotlib is missing, or a file cannot be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from scipy.ndimage import uniform_filter1d

from controlplane.prediction import FloatArray
from controlplane.sim.analysis.comparison import by_size, mean_interval
from controlplane.sim.analysis.plot_style import (
    DASHES,
    GRID,
    HATCHES,
    Bar,
    Style,
    caption,
    draw_bars,
    grouped,
    name_bars,
    new_figure,
    policy_legend,
    save,
    slot_axes,
    styles,
    tidy,
    time_unit,
)
from controlplane.sim.analysis.summary import (
    GRID_S,
    GROUPS,
    LossSeries,
    finished,
    has_losses,
    loss_series,
    mean_time_to,
)
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import JobResult, SimulationResult
from schemas.ids import SlotId

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Sequence[SimulationResult]
Measure = Callable[[JobResult], float]
PANELS: Final[tuple[tuple[str, Measure], ...]] = (
    ("completion time", lambda job: job.jct_s or 0.0),
    ("execution time", lambda job: job.exec_s),
    ("queueing time", lambda job: job.queued_s),
)
BOXES: Final = (
    "box: the middle half of the jobs, line: median, diamond: mean, whiskers: 5% to 95%; "
    "lower is better"
)
MIN_DRAWN_S: Final = 1.0  # lower limit of times on a logarithmic axis
REFERENCE_POLICY: Final = "ones"
MAX_LABELS_LENGTH: Final = 28  # total length of labels that fit side by side below a panel
CURVE_OFFSET: Final = 0.03  # horizontal distance between the curves of two policies, in doublings


def draw(results: Results, folder: Path, ours: str = REFERENCE_POLICY) -> list[Path]:
    """Draw all figures for which the results have data, and return the files.

    The gains of the policy with the label `ours` are drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    sizes = by_size(results)
    for size, same_size in sizes.items():
        mine = [result for many in same_size.values() for result in many]
        figures = {"boxes": box_plots, "cdf": cumulative, "averages": averages}
        if all(has_losses(result) for result in mine):
            figures |= {
                "losses": normalised_loss, "loss-slots": slots_by_loss,
                "loss-times": times_to_reductions,
            }  # fmt: skip
        for name, plot in figures.items():
            drawn.append(folder / f"{name}-{size}.png")
            plot(mine, drawn[-1])
    if len(sizes) > 1:
        scaling(results, folder / "scaling.png", ours)
        drawn.append(folder / "scaling.png")
    for result in results:
        if any(job.allocations for job in result.jobs):
            file = folder / f"slots-{result.policy}-{result.slots}-{result.seed}.png"
            gantt(result, file)
            utilisation([result], file.with_name(f"utilisation-{file.stem[6:]}.png"))
            drawn.append(file)
    return drawn


# --- times of jobs


def box_plots(results: Results, path: Path) -> None:
    """Draw box plots of completion, execution and queueing times by policy (ONES figure 15a-c)."""
    groups = grouped(results)
    look = styles(groups)
    figure, panels = _three_panels(_panel_width(list(groups)), 3.8)
    for axes, (name, measure) in zip(panels, PANELS, strict=True):
        for place, (label, group) in enumerate(groups.items()):
            values = np.maximum(_values(group, measure), MIN_DRAWN_S)
            if len(values):
                _draw_box(axes, place, values, look[label])
        axes.set_yscale("log")
        axes.set_ylabel(f"{name} (s)")
        _name_places(axes, list(groups))
        tidy(axes)
    caption(figure, BOXES)
    save(figure, path)


def _draw_box(axes: Axes, place: int, values: np.ndarray, look: Style) -> None:
    edge = {"markeredgecolor": "black", "markerfacecolor": "white"}
    drawn = axes.boxplot(
        [values], positions=[place], widths=0.6, whis=(5, 95), showfliers=False, showmeans=True,
        patch_artist=True, medianprops={"color": "black", "linewidth": 1.4},
        meanprops={"marker": "D", "markersize": 4, **edge},
    )  # fmt: skip
    drawn["boxes"][0].set(**look.area)


def cumulative(results: Results, path: Path) -> None:
    """Draw the distribution of completion, execution and queueing times (ONES fig. 15d-i).

    Shares are shares of all counted jobs that were not cancelled. A curve ends below 1 if some of
    these jobs did not finish.
    """
    groups = grouped(results)
    look = styles(groups)
    figure, panels = _three_panels(3.4, 3.6)
    for axes, (name, measure) in zip(panels, PANELS, strict=True):
        for label, group in groups.items():
            values = np.sort(np.maximum(_values(group, measure), MIN_DRAWN_S))
            counted = sum(job.counted and job.state != "cancelled" for o in group for job in o.jobs)
            share = np.arange(1, len(values) + 1) / max(1, counted)
            axes.step(values, share, where="post", label=label, **look[label].line)
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="minor", labelsize="x-small", labelrotation=60)
        axes.set_xlabel(f"{name} (s)")
        axes.set_ylim(0.0, 1.02)
        tidy(axes, along="both")
    panels[0].set_ylabel("share of jobs")
    caption(figure, "how many of the jobs took at most so long; a curve further left is better")
    policy_legend(figure, panels[0], len(groups))
    save(figure, path)


def averages(results: Results, path: Path) -> None:
    """Draw average completion, execution and queueing times by policy, with 95% intervals."""
    groups = grouped(results)
    look = styles(groups)
    figure, panels = _three_panels(_panel_width(list(groups)), 3.6)
    for axes, (name, measure) in zip(panels, PANELS, strict=True):
        for place, (label, group) in enumerate(groups.items()):
            mean, below, above = _mean_and_error(group, measure)
            axes.bar(place, mean, 0.7, **look[label].area)
            if len(group) > 1:
                axes.errorbar(place, mean, [[below], [above]], color="black", capsize=4)
            axes.annotate(
                f"{mean:.0f}", (place, mean + above), (0, 3),
                textcoords="offset points", ha="center", fontsize="small",
            )  # fmt: skip
        axes.set_ylabel(f"average {name} (s)")
        axes.margins(y=0.12)
        axes.set_ylim(0.0, max(1.0, axes.get_ylim()[1]))
        _name_places(axes, list(groups))
        tidy(axes)
    caption(figure, "means over all jobs; black lines: 95% intervals over simulations")
    save(figure, path)


def scaling(results: Results, path: Path, ours: str = REFERENCE_POLICY) -> None:
    """Draw average completion time by cluster size (ONES fig. 17), and the gain of `ours`.

    The gain over another policy is one minus the ratio of the averages (fig. 18), over simulations
    of equal seed and cluster size. Error bars are 95% intervals over simulations.
    """
    groups = grouped(results)
    look = styles(groups)
    compared = ours in groups and len(groups) > 1
    figure = new_figure(9.6 if compared else 5.2, 3.9)
    both = figure.subplots(1, 1 + compared, squeeze=False)[0]
    sizes = sorted({result.slots for result in results})
    for place, (label, group) in enumerate(groups.items()):
        aside = 2.0 ** (CURVE_OFFSET * (place - (len(groups) - 1) / 2.0))
        _curve(both[0], _at_sizes(group, sizes), aside, label, look[label])
        if compared and label != ours:
            _curve(both[1], _gains(groups[ours], group, sizes), aside, label, look[label])
    both[0].set_ylabel("average completion time (s)")
    both[0].set_ylim(bottom=0.0)
    if compared:
        both[1].axhline(0.0, color="black", linewidth=0.8)
        both[1].set_ylabel(f"{ours} faster than the other by (%)")
    for axes in both:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("GPUs of the cluster")
        tidy(axes)
    caption(figure, "the same jobs on clusters of several sizes; bars: 95% intervals")
    policy_legend(figure, both[0], len(groups))
    save(figure, path)


Point = tuple[int, float, float, float]  # position, value, length of the error bar below and above


def _at_sizes(results: Results, sizes: Sequence[int]) -> list[Point]:
    at = {size: [r for r in results if r.slots == size and finished(r)] for size in sizes}
    return [(size, *_mean_and_error(some, PANELS[0][1])) for size, some in at.items() if some]


def _gains(ours: Results, other: Results, sizes: Sequence[int]) -> list[Point]:
    points = []
    for size in sizes:
        mine, theirs = _averages_at(ours, size), _averages_at(other, size)
        gains = [100.0 * (1.0 - mine[seed] / theirs[seed]) for seed in mine if theirs.get(seed)]
        if gains:
            points.append((size, *_with_error(gains)))
    return points


def _averages_at(results: Results, size: int) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for result in results:
        values = _values([result], PANELS[0][1])
        if result.slots == size and len(values):
            found.setdefault(result.seed, []).append(float(values.mean()))
    return {seed: float(np.mean(values)) for seed, values in found.items()}


def _curve(axes: Axes, points: Sequence[Point], aside: float, label: str, style: Style) -> None:
    """Draw points with error bars; `aside` shifts them so that policies do not overlap."""
    if not points:
        return
    places, means, below, above = zip(*points, strict=True)
    look: dict[str, Any] = {"marker": "o", "markersize": 4.5, "capsize": 3, **style.line}
    axes.errorbar([place * aside for place in places], means, [below, above], label=label, **look)


def _three_panels(width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = new_figure(3.0 * width, height)
    return figure, list(figure.subplots(1, 3))


def _panel_width(labels: Sequence[str]) -> float:
    return max(3.2, 0.42 * len(labels) + 0.6)


def _name_places(axes: Axes, labels: Sequence[str]) -> None:
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    crowded = len(" ".join(labels)) > MAX_LABELS_LENGTH
    axes.set_xticks(range(len(labels)), labels, fontsize="small", **(turned if crowded else {}))
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.tick_params(axis="x", length=0)


def _values(results: Results, measure: Measure) -> np.ndarray:
    return np.array([measure(job) for result in results for job in finished(result)])


def _mean_and_error(results: Results, measure: Measure) -> tuple[float, float, float]:
    """Return the mean of the results' averages, and its distances to the interval's limits."""
    means = [float(v.mean()) for o in results if len(v := _values([o], measure))]
    if not means:
        problem = f"no job of {results[0].policy} finished"
        raise ResultsError(problem, "simulate for longer")
    return _with_error(means)


def _with_error(values: Sequence[float]) -> tuple[float, float, float]:
    mean, interval = float(np.mean(values)), mean_interval(values)
    return mean, max(0.0, mean - interval.low), max(0.0, interval.high - mean)


# --- losses, after the SLAQ paper

REDUCTIONS: Final = (0.25, 0.50, 0.75, 0.80, 0.90, 0.95, 0.99)
GROUP_COLOURS: Final = ("#d55e00", "#e69f00", "#56b4e9")
GROUP_HATCHES: Final = ("//", "..", "")
SMOOTHING_WINDOW_S: Final = 15.0  # window of the running mean of slot shares


def normalised_loss(results: Results, path: Path) -> None:
    """Draw the mean normalised loss of active jobs within `LossSeries.window_s` (SLAQ figure 4).

    Curves show the first seed; the legend shows means over all seeds.
    """
    groups = grouped(results)
    look = styles(groups)
    figure = new_figure(7.6, 3.6)
    axes = figure.subplots()
    for place, (label, group) in enumerate(groups.items()):
        series, inside = _window(group[0])
        mean = np.mean([np.nanmean(s.mean_loss[i]) for s, i in map(_window, group)])
        jct_s = np.mean([job.jct_s or 0.0 for result in group for job in finished(result)])
        text = f"{label}: mean {mean:.3f}, completion {jct_s:.0f} s"
        times_s, loss = series.times_s[inside], series.mean_loss[inside]
        style = {**look[label].line, "linestyle": DASHES[place % len(DASHES)]}
        axes.plot(times_s, loss, label=text, **style)
    axes.set_xlabel("time since the first submission (s)")
    axes.set_ylabel("normalised loss, mean of active jobs")
    axes.set_ylim(bottom=0.0)
    tidy(axes)
    caption(figure, "how far jobs are from their lowest loss: 1 at first, 0 at the end")
    policy_legend(figure, axes, min(len(groups), 2))
    save(figure, path)


def slots_by_loss(results: Results, path: Path) -> None:
    """Draw slot shares of jobs with high, medium, low losses for the first seed (SLAQ fig. 3)."""
    groups = grouped(results)
    figure = new_figure(0.6 + 4.2 * len(groups), 3.6)
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    shares = ("highest 25%", "next 25%", "lowest 50%")
    for axes, (label, group) in zip(panels, groups.items(), strict=True):
        series, inside = _window(group[0])
        smooth = 100.0 * np.array([_smoothed(column) for column in series.cores[inside].T])
        stacks = axes.stackplot(
            series.times_s[inside], *smooth, labels=shares, colors=GROUP_COLOURS, alpha=0.9
        )
        for stack, hatch in zip(stacks, GROUP_HATCHES, strict=True):
            stack.set(hatch=hatch, edgecolor="white", linewidth=0.3)
        means = [np.mean([np.nanmean(s.cores[i, g]) for s, i in map(_window, group)])
                 for g in range(len(GROUPS))]  # fmt: skip
        mean_shares = " / ".join(f"{mean:.0%}" for mean in means)
        axes.set_title(f"{label}: {mean_shares}", fontsize="medium")
        axes.set_xlabel("time since the first submission (s)")
        axes.set_ylim(0.0, 100.0)
        axes.margins(x=0.0)
        tidy(axes)
    panels[0].set_ylabel("share of the slots in use (%)")
    caption(figure, "slots of the jobs with high, medium and low losses; titles: their mean shares")
    policy_legend(figure, panels[0], len(GROUPS))
    save(figure, path)


def times_to_reductions(results: Results, path: Path) -> None:
    """Draw the mean time from submission to each loss reduction, over all seeds (SLAQ fig. 5)."""
    groups = grouped(results)
    look = styles(groups)
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for place, (label, group) in enumerate(groups.items()):
        places = np.arange(len(REDUCTIONS)) + (place - (len(groups) - 1) / 2.0) * width
        heights = [_mean_time(group, reduction) for reduction in REDUCTIONS]
        style = {**look[label].area, "hatch": HATCHES[place % len(HATCHES)]}
        bars = axes.bar(places, heights, width * 0.92, label=label, **style)
        axes.bar_label(bars, fmt="%.0f", fontsize="small", padding=2)
    axes.set_xticks(range(len(REDUCTIONS)), [f"{100 * reduction:.0f}" for reduction in REDUCTIONS])
    axes.set_xlabel("loss reduction (%)")
    axes.set_ylabel("mean time since submission (s)")
    axes.margins(y=0.1)
    tidy(axes)
    caption(figure, "how long jobs take to so much of the fall of their loss; lower is better")
    policy_legend(figure, axes, len(groups))
    save(figure, path)


def _window(result: SimulationResult) -> tuple[LossSeries, np.ndarray]:
    """Return the loss series of a result, and a mask of the moments inside its window."""
    series = loss_series(result)
    first, last = series.window_s
    return series, (series.times_s >= first) & (series.times_s < last)


def _mean_time(results: Results, reduction: float) -> float:
    """Return the mean time to a reduction; a result in which no job reached it counts as 0."""
    return float(np.mean([mean_time_to(result, reduction) or 0.0 for result in results]))


def _smoothed(values: FloatArray) -> FloatArray:
    """Return the running mean, with the end values continued; missing shares count as 0."""
    wide = max(1, round(SMOOTHING_WINDOW_S / GRID_S))
    smooth: FloatArray = uniform_filter1d(np.nan_to_num(values), wide, mode="nearest")
    return smooth


# --- slots over time

# Neighbours in this order are easy to tell apart, also for the colour-blind (after P. Tol).
SHADES: Final = (
    "#332288", "#ddcc77", "#117733", "#cc6677", "#88ccee", "#882255",
    "#44aa99", "#eebb44", "#4477aa", "#aa4499", "#bbcc33", "#994455",
)  # fmt: skip


def gantt(result: SimulationResult, path: Path) -> None:
    """Draw the slots that each job used over time: one row per slot, one colour per job."""
    held = [(job.job, allocation) for job in result.jobs for allocation in job.allocations]
    _require_allocations(held)
    colours = dict(zip(dict.fromkeys(job for job, _ in held), cycle(SHADES), strict=False))
    unit, name = time_unit(result.ended_at)
    bars = [Bar(a.slot, job, a.since / unit, a.until / unit) for job, a in held]
    slots = _sorted_slots({bar.slot for bar in bars})
    length = max(bar.end for bar in bars)
    figure = new_figure(12.0, min(max(1.4 + 0.24 * len(slots), 2.6), 11.0))
    axes = figure.add_subplot()
    slot_axes(axes, slots, length)
    edge = {"edgecolor": GRID, "linewidths": 0.2}
    draw_bars(axes, bars, slots, {job: {"facecolor": c, **edge} for job, c in colours.items()})
    name_bars(axes, bars, slots, colours, length)
    axes.set_xlabel(name)
    title = f"which of {len(result.jobs)} jobs had which of {result.slots} slots; grey: free"
    axes.set_title(f"{result.policy}: {title}", loc="left", fontsize="medium")
    save(figure, path)


def _sorted_slots(found: set[str]) -> list[SlotId]:
    """Sort slots by node and index; numbers in names are compared as numbers."""
    parts = {slot: [(len(p), p) for p in re.findall(r"\d+|\D+", slot)] for slot in found}
    return [SlotId(slot) for slot in sorted(found, key=parts.__getitem__)]


def utilisation(results: Results, path: Path) -> None:
    """Draw the mean share of slots that jobs used over time, one curve for each policy."""
    groups = grouped(results)
    look = styles(groups)
    longest = max(result.ended_at for result in results)
    unit, name = time_unit(longest)
    edges = np.linspace(0.0, max(longest, 1e-9), 201)
    figure = new_figure(9.0, 3.4)
    axes = figure.add_subplot()
    for label, group in groups.items():
        share = np.mean([busy_share(result, edges) for result in group], axis=0)
        axes.stairs(100.0 * share, edges / unit, label=label, baseline=None, **look[label].line)
    axes.set_ylim(0.0, 104.0)
    axes.set_xlim(0.0, edges[-1] / unit)
    axes.set_ylabel("slots held (%)")
    axes.set_xlabel(name)
    tidy(axes, along="both")
    caption(figure, "share of the slots that jobs held, mean over short intervals")
    policy_legend(figure, axes, len(groups))
    save(figure, path)


def busy_share(result: SimulationResult, edges: FloatArray) -> FloatArray:
    """Return the used share of slot seconds between `edges` (N + 1 rising seconds), shape (N,)."""
    allocations = [allocation for job in result.jobs for allocation in job.allocations]
    _require_allocations(allocations)
    held = np.zeros(len(edges))
    for allocation in allocations:  # adds the slot seconds used before each edge
        held += np.clip(edges, allocation.since, allocation.until) - allocation.since
    return np.diff(held) / (np.diff(edges) * result.slots)


def _require_allocations(recorded: object) -> None:
    if not recorded:
        problem = "the result has no allocations of slots"
        raise ResultsError(problem, "repeat the simulation and record allocations")
