"""Tables of results, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from controlplane.sim.analysis.loss_series import LOSS_FIGURES, has_losses
from controlplane.sim.analysis.paired_comparison import Comparison
from controlplane.sim.analysis.results_by_policy import MEANS, against_each, by_size, means
from controlplane.sim.analysis.simulation_summary import summary
from controlplane.sim.simulation_result import SimulationResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS: Final[Mapping[str, str]] = {  # of a comparison: heading and figure
    "avg JCT s": "avg_jct_s",
    "geo": "geo_jct_s",
    "p50": "p50_jct_s",
    "p90": "p90_jct_s",
    "p99": "p99_jct_s",
    "exec": "avg_exec_s",
    "queue": "avg_queue_s",
    "makespan": "makespan_s",
    "rho": "ftf_mean",
    "worst": "ftf_worst",
    "unfair": "ftf_unfair_share",
    "busy": "utilisation",
    "re-scales": "rescales_per_job",
    "ms/decision": "decision_ms_mean",
    "extrapolated": "extrapolated_share",
}
OF_LOSSES: Final[Mapping[str, str]] = {  # where jobs have losses
    "t90 s": "t90_s",
    "t95 s": "t95_s",
    "mean loss": "mean_loss",
    "loss area s": "loss_area_s",
    "cores high": "cores_high",
    "medium": "cores_medium",
    "low": "cores_low",
    "avg JCT s": "avg_jct_s",
    "p99": "p99_jct_s",
    "makespan": "makespan_s",
}
ENDS: Final = (  # where jobs state utilities
    "utility", "utility_share", "rejected", "promised", "promises_kept", "promises_broken",
    "lateness_s",
)  # fmt: skip
EXTRAPOLATED: Final = (
    "{share} of the training time went by in groups like which none was ever measured:\n"
    "their speeds are extrapolated, see docs/simulator.md."
)


def print_result(result: SimulationResult) -> None:
    """One simulation, for people."""
    console, figures = _console(), summary(result)
    table = _table(f"{result.policy} on {result.slots} slots, seed {result.seed}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    of_losses = [name for name in LOSS_FIGURES if name in figures]
    for name in ("jobs", *of_losses, *MEANS[:-1], "unfinished", "failed", "cancelled"):
        table.add_row(name, _cell(figures[name]))
    for name in ENDS if figures["utility"] is not None else ():
        table.add_row(name, _cell(figures[name]))
    table.add_row("lower bound of avg_jct_s", _cell(figures["bound_avg_jct_s"]))
    table.add_row("times the bound", _cell(figures["vs_bound"]))
    table.add_row("events", _cell(figures["events"]))
    table.add_row("seconds it took", _cell(figures["wall_s"]))
    console.print(table)
    if figures["extrapolated_share"]:
        console.print(EXTRAPOLATED.format(share=f"{figures['extrapolated_share']:.0%}"))


def print_comparison(results: Sequence[SimulationResult], ours: str) -> None:
    """Several policies side by side, and `ours` against each other one.

    Args:
        ours: name of one of their policies.
    """
    console = _console()
    for size, here in by_size(results).items():
        seeds = len(next(iter(here.values())))
        know = results[0].setting.get("knowledge", "")
        title = f"{size} slots, means over {seeds} seed{'s' * (seeds != 1)}, knowledge {know}"
        console.print(_side_by_side(title, here, COLUMNS))
        if all(has_losses(result) for many in here.values() for result in many):
            console.print(_side_by_side("losses, and what lower ones cost", here, OF_LOSSES))
        shares = [means(many)["extrapolated_share"] or 0.0 for many in here.values()]
        if max(shares) > 0.0:
            console.print(EXTRAPOLATED.format(share=f"Up to {max(shares):.0%}"))
    for size, pairs in against_each(results, ours).items():
        console.print(_paired(f"{ours} against each, {size} slots, paired by job", pairs))


def _side_by_side(
    title: str, results: Mapping[str, Sequence[SimulationResult]], columns: Mapping[str, str]
) -> Table:
    table = _table(title)
    table.add_column("policy")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("x bound", justify="right")
    for policy, many in results.items():
        mean = means(many)
        average, bound = mean["avg_jct_s"], mean["bound_avg_jct_s"]
        ratio = average / bound if average and bound else None
        table.add_row(policy, *(_cell(mean[key]) for key in columns.values()), _cell(ratio))
    return table


def _paired(title: str, comparisons: Sequence[Comparison]) -> Table:
    table = _table(title)
    table.add_column("policy")
    for name in ("pairs", "JCT ratio", "95% interval", "difference s",
                 "Wilcoxon two-sided p", "p (ours smaller)"):  # fmt: skip
        table.add_column(name, justify="right")
    for each in comparisons:
        table.add_row(
            each.second,
            str(each.jobs),
            f"{each.ratio:.3f}",
            f"{each.ratio_ci.low:.3f} to {each.ratio_ci.high:.3f}",
            f"{each.difference_s:.1f}",
            f"{each.two_sided_p:.3g}",
            f"{each.less_p:.3g}",
        )
    return table


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
