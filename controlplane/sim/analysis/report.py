"""Tables and figures of outcomes, for people and as JSON."""

from __future__ import annotations

import statistics as stats
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from controlplane.sim.analysis import gantt, plots
from controlplane.sim.analysis.paired_comparison import Comparison, compare
from controlplane.sim.analysis.simulation_summary import summary
from controlplane.sim.simulation_result import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MEANS = (
    "avg_jct_s", "geo_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_exec_s", "avg_queue_s",
    "makespan_s", "utilisation", "rescales_per_job", "decision_ms_mean", "decision_ms_p99",
    "bound_avg_jct_s",
)  # fmt: skip


def groups(outcomes: Sequence[Outcome]) -> dict[int, dict[str, list[Outcome]]]:
    """Outcomes by size of the cluster, smallest first, and by policy."""
    found: dict[int, dict[str, list[Outcome]]] = {}
    for size in sorted({outcome.slots for outcome in outcomes}):
        here = found[size] = {}
        for outcome in outcomes:
            if outcome.slots == size:
                here.setdefault(outcome.policy, []).append(outcome)
    return found


def means(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Figures of one policy, means over seeds; None where a seed has none."""
    sums = [summary(outcome) for outcome in outcomes]
    found: dict[str, float | None] = {}
    for name in MEANS:
        values = [each[name] for each in sums]
        found[name] = None if any(v is None for v in values) else stats.fmean(values)
    return found


def against(outcomes: Sequence[Outcome], ours: str) -> dict[int, list[Comparison]]:
    """Our policy against each other one, for each size of the cluster."""
    return {
        size: [compare(here[ours], here[name]) for name in here if name != ours]
        for size, here in groups(outcomes).items()
        if ours in here
    }


def comparison(outcomes: Sequence[Outcome], ours: str) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    return {
        "sizes": {
            str(size): {name: means(many) for name, many in here.items()}
            for size, here in groups(outcomes).items()
        },
        "against": {
            str(size): [msgspec.to_builtins(each) for each in many]
            for size, many in against(outcomes, ours).items()
        },
        "results": [summary(outcome) for outcome in outcomes],
    }


# --- tables


def tell_one(outcome: Outcome) -> None:
    """One simulation, for people."""
    console, told = _console(), summary(outcome)
    table = _table(f"{outcome.policy} on {outcome.slots} slots, seed {outcome.seed}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name in ("jobs", *MEANS[:-1], "unfinished", "failed", "cancelled"):
        table.add_row(name, _cell(told[name]))
    table.add_row("lower bound of avg_jct_s", _cell(told["bound_avg_jct_s"]))
    table.add_row("times the bound", _cell(told["vs_bound"]))
    table.add_row("events", _cell(told["events"]))
    table.add_row("seconds it took", _cell(told["wall_s"]))
    console.print(table)


def tell_all(outcomes: Sequence[Outcome], ours: str) -> None:
    """Several policies side by side, and ours against each other one."""
    console = _console()
    for size, here in groups(outcomes).items():
        seeds = len(next(iter(here.values())))
        know = outcomes[0].setting.get("knowledge", "")
        title = f"{size} slots, means over {seeds} seed{'s' * (seeds != 1)}, knowledge {know}"
        table = _table(title)
        for name in ("policy", "avg JCT s", "geo", "p50", "p90", "p99", "exec", "queue",
                     "makespan", "busy", "re-scales", "ms/decision", "x bound"):  # fmt: skip
            table.add_column(name, justify="left" if name == "policy" else "right")
        for name, many in here.items():
            mean = means(many)
            bound = mean["bound_avg_jct_s"]
            ratio = mean["avg_jct_s"] / bound if mean["avg_jct_s"] and bound else None
            table.add_row(name, *(_cell(mean[key]) for key in MEANS[:5]), *(
                _cell(mean[key]) for key in ("avg_exec_s", "avg_queue_s", "makespan_s",
                "utilisation", "rescales_per_job", "decision_ms_mean")), _cell(ratio),
            )  # fmt: skip
        console.print(table)
    for size, pairs in against(outcomes, ours).items():
        table = _table(f"{ours} against each, {size} slots, paired by job")
        for name in ("policy", "pairs", "JCT ratio", "95% interval", "difference s",
                     "Wilcoxon two-sided p", "p (ours smaller)"):  # fmt: skip
            table.add_column(name, justify="left" if name == "policy" else "right")
        for each in pairs:
            table.add_row(
                each.second,
                str(each.jobs),
                f"{each.ratio:.3f}",
                f"{each.ratio_ci.low:.3f} to {each.ratio_ci.high:.3f}",
                f"{each.difference_s:.1f}",
                f"{each.two_sided_p:.3g}",
                f"{each.less_p:.3g}",
            )
        console.print(table)


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is slow to import and seldom needed
    from rich.table import Table  # noqa: PLC0415

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=160, highlight=False)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


# --- figures


def draw(outcomes: Sequence[Outcome], folder: Path, ours: str = "ones") -> list[Path]:
    """All figures that these outcomes can fill; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    by_size = groups(outcomes)
    for size, here in by_size.items():
        mine = [outcome for many in here.values() for outcome in many]
        for name, plot in (("boxes", plots.box_plots), ("cdf", plots.cumulative),
                           ("averages", plots.averages)):  # fmt: skip
            file = folder / f"{name}-{size}.png"
            plot(mine, file)
            drawn.append(file)
    if len(by_size) > 1:
        plots.scaling(outcomes, folder / "scaling.png", ours)
        drawn.append(folder / "scaling.png")
    for outcome in outcomes:
        if any(job.stays for job in outcome.jobs):
            file = folder / f"slots-{outcome.policy}-{outcome.slots}-{outcome.seed}.png"
            gantt.gantt(outcome, file)
            gantt.utilisation([outcome], file.with_name(f"utilisation-{file.stem[6:]}.png"))
            drawn.append(file)
    return drawn
