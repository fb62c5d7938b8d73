"""Tables of results for the terminal and as JSON.

Results are grouped by size of the cluster and policy: means over seeds, and one policy compared
with each other one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controlplane.sim.analysis.loss_series import LOSS_FIGURES, has_losses
from controlplane.sim.analysis.paired_comparison import Comparison, compare
from controlplane.sim.analysis.summary import summary
from controlplane.sim.results import SimulationResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


MEANS = (
    "avg_jct_s", "geo_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_exec_s", "avg_queue_s",
    "makespan_s", "utilisation", "rescales_per_job", "decision_ms_mean", "decision_ms_p99",
    "ftf_mean", "ftf_worst", "ftf_unfair_share", "start_error_median", "start_coverage",
    "extrapolated_share", "bound_avg_jct_s",
)  # fmt: skip


def by_size(results: Sequence[SimulationResult]) -> dict[int, dict[str, list[SimulationResult]]]:
    """Group results by size of the cluster, smallest first, then by policy and any options."""
    found: dict[int, dict[str, list[SimulationResult]]] = {}
    for size in sorted({result.slots for result in results}):
        by_policy = found[size] = {}
        for result in results:
            if result.slots == size:
                by_policy.setdefault(result.policy, []).append(result)
    return found


def means(results: Sequence[SimulationResult]) -> dict[str, float | None]:
    """Return the figures of one policy as means over seeds; None if a seed lacks a figure."""
    sums = [summary(result) for result in results]
    found: dict[str, float | None] = {}
    for name in (*MEANS, *(name for name in LOSS_FIGURES if name in sums[0])):
        values = [each[name] for each in sums if each.get(name) is not None]
        found[name] = statistics.fmean(values) if len(values) == len(sums) else None
    return found


def against_each(results: Sequence[SimulationResult], ours: str) -> dict[int, list[Comparison]]:
    """Compare policy `ours` with each other one, for each size of the cluster that has `ours`.

    Raises:
        ResultsError: if two policies have nothing in common to compare.
    """
    return {
        size: [compare(by_policy[ours], by_policy[name]) for name in by_policy if name != ours]
        for size, by_policy in by_size(results).items()
        if ours in by_policy
    }


def comparison_json(results: Sequence[SimulationResult], ours: str) -> dict[str, Any]:
    """Return means, comparisons with `ours` and figures of every simulation as JSON values."""
    return {
        "sizes": {
            str(size): {name: means(many) for name, many in by_policy.items()}
            for size, by_policy in by_size(results).items()
        },
        "against": {
            str(size): [msgspec.to_builtins(each) for each in many]
            for size, many in against_each(results, ours).items()
        },
        "results": [summary(result) for result in results],
    }


COLUMNS: Final[Mapping[str, str]] = {  # heading -> figure, of a comparison
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
LOSS_COLUMNS: Final[Mapping[str, str]] = {  # heading -> figure, where jobs have losses
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
UTILITY_FIGURES: Final = (  # figures where jobs state utilities
    "utility", "utility_share", "rejected", "promised", "promises_kept", "promises_broken",
    "lateness_s",
)  # fmt: skip
EXTRAPOLATED: Final = (
    "{share} of the training time was spent in groups of a kind that was never measured:\n"
    "their speeds are extrapolated (docs/simulator.md)."
)


def print_result(result: SimulationResult) -> None:
    """Print the table of one simulation."""
    console, figures = _console(), summary(result)
    table = _table(f"{result.policy} on {result.slots} slots, seed {result.seed}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    of_losses = [name for name in LOSS_FIGURES if name in figures]
    for name in ("jobs", *of_losses, *MEANS[:-1], "unfinished", "failed", "cancelled"):
        table.add_row(name, _cell(figures[name]))
    for name in UTILITY_FIGURES if figures["utility"] is not None else ():
        table.add_row(name, _cell(figures[name]))
    table.add_row("lower bound of avg_jct_s", _cell(figures["bound_avg_jct_s"]))
    table.add_row("times the bound", _cell(figures["vs_bound"]))
    table.add_row("events", _cell(figures["events"]))
    table.add_row("seconds it took", _cell(figures["wall_s"]))
    console.print(table)
    if figures["extrapolated_share"]:
        console.print(EXTRAPOLATED.format(share=f"{figures['extrapolated_share']:.0%}"))


def print_comparison(results: Sequence[SimulationResult], ours: str) -> None:
    """Print several policies side by side, and `ours` compared with each other one."""
    console = _console()
    for size, by_policy in by_size(results).items():
        seeds = len(next(iter(by_policy.values())))
        know = results[0].setting.get("knowledge", "")
        title = f"{size} slots, means over {seeds} seed{'s' * (seeds != 1)}, knowledge {know}"
        console.print(_side_by_side(title, by_policy, COLUMNS))
        if all(has_losses(result) for many in by_policy.values() for result in many):
            console.print(
                _side_by_side("losses, and what lower ones cost", by_policy, LOSS_COLUMNS)
            )
        shares = [means(many)["extrapolated_share"] or 0.0 for many in by_policy.values()]
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
