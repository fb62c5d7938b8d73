"""Comparison of policies, paired by job, with intervals and tests, as tables and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from controlplane.prediction import FloatArray
from controlplane.sim.analysis.summary import LOSS_FIGURES, finished, has_losses, summary
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


RESAMPLES: Final = 5_000
MAX_DRAWS: Final = 2_000_000  # random numbers per draw, limited to save memory
INTERVAL_QUANTILES: Final = (0.025, 0.975)  # limits of a 95% interval


class Interval(msgspec.Struct, frozen=True):
    """The limits of a 95% confidence interval."""

    low: float
    high: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two policies by the completion times of the same jobs."""

    first: str
    second: str
    jobs: int  # number of pairs
    simulations: int  # number of pairs of results with such jobs: seeds times settings
    left_out: int  # number of counted jobs that did not finish under both policies
    first_mean_s: float
    second_mean_s: float
    difference_s: float  # first minus second; below 0: the first is faster
    difference_ci_s: Interval
    ratio: float  # first over second; below 1: the first is faster
    ratio_ci: Interval
    changed: int  # number of pairs that differ, which the Wilcoxon tests use
    two_sided_p: float  # small: the policies are not equivalent
    less_p: float  # small: the first is faster
    greater_p: float  # small: the first is slower; near 1 in ONES table 4


def compare(first: Sequence[SimulationResult], second: Sequence[SimulationResult]) -> Comparison:
    """Compare two policies on all simulations that both have with equal setting and seed.

    Means are over all pairs of jobs. The bootstrap for the intervals first draws simulations and
    then jobs within each simulation, because jobs of one simulation depend on each other. With a
    single simulation the interval does not cover other traces. Wilcoxon's signed-rank tests treat
    pairs of jobs as independent, as in table 4 of ONES, so the p values are smaller than repeated
    simulations would justify. `ResultsError` is raised if the policies have no simulation or no
    finished job in common, or if a simulation occurs twice.
    """
    left, right = _by_simulation(first), _by_simulation(second)
    shared = [simulation for simulation in left if simulation in right]
    pairs = [_paired_times(left[simulation], right[simulation]) for simulation in shared]
    times = [pair for pair in pairs if len(pair)]
    if not times:
        problem = "the two policies have no finished job of the same setting and seed in common"
        raise ResultsError(problem, "simulate both on the same traces and seeds")
    every = np.concatenate(times)
    counted = sum(_counted(left[simulation], right[simulation]) for simulation in shared)
    return Comparison(
        first=first[0].policy,
        second=second[0].policy,
        jobs=len(every),
        simulations=len(times),
        left_out=counted - len(every),
        first_mean_s=float(every[:, 0].mean()),
        second_mean_s=float(every[:, 1].mean()),
        difference_s=float((every[:, 0] - every[:, 1]).mean()),
        ratio=_ratio(every[:, 0].mean(), every[:, 1].mean()),
        **_intervals(times, np.random.default_rng(0)),
        **_wilcoxon(every[:, 0] - every[:, 1]),
    )


def mean_interval(values: Sequence[float]) -> Interval:
    """Return a bootstrap interval of the mean; for a single value both limits are this value."""
    given = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(len(given), size=(RESAMPLES, len(given)))
    return _interval(given[drawn].mean(axis=1))


def _by_simulation(results: Sequence[SimulationResult]) -> dict[str, SimulationResult]:
    found: dict[str, SimulationResult] = {}
    for result in results:
        parts = (result.setting, result.seed)
        simulation = msgspec.json.encode(parts, order="deterministic").decode()
        if simulation in found:
            problem = f"{result.policy} has two results of seed {result.seed} in the same setting"
            raise ResultsError(problem, "compare one policy with one set of options at a time")
        found[simulation] = result
    return found


def _paired_times(first: SimulationResult, second: SimulationResult) -> FloatArray:
    """Return completion times of jobs that finished under both policies, shape (J, 2), seconds."""
    theirs = {job.job: job.jct_s for job in finished(second)}
    both = [(job.jct_s, theirs[job.job]) for job in finished(first) if job.job in theirs]
    return np.array(both, dtype=float).reshape(-1, 2)


def _counted(first: SimulationResult, second: SimulationResult) -> int:
    return len({job.job for result in (first, second) for job in result.jobs if job.counted})


def _intervals(times: Sequence[FloatArray], rng: np.random.Generator) -> dict[str, Any]:
    largest = max(len(pair) for pair in times)
    step = max(1, MAX_DRAWS // (largest * len(times)))
    sums = np.zeros((RESAMPLES, 2))
    counts = np.zeros(RESAMPLES)
    for begin in range(0, RESAMPLES, step):
        rows = np.arange(begin, min(begin + step, RESAMPLES))
        drawn = rng.integers(len(times), size=(len(rows), len(times)))
        for index, pair in enumerate(times):
            taken = np.repeat(rows, (drawn == index).sum(axis=1))
            jobs = rng.integers(len(pair), size=(len(taken), len(pair)))
            np.add.at(sums, taken, pair[jobs].sum(axis=1))
            np.add.at(counts, taken, len(pair))
    means = sums / counts[:, None]
    ratios = np.array([_ratio(mine, other) for mine, other in means])
    difference = means[:, 0] - means[:, 1]
    return {"difference_ci_s": _interval(difference), "ratio_ci": _interval(ratios)}


def _interval(values: FloatArray) -> Interval:
    low, high = np.quantile(values, INTERVAL_QUANTILES)
    return Interval(float(low), float(high))


def _ratio(mine: float, other: float) -> float:
    """Return `mine` / `other`; the ratio is 1 if both are 0, and infinite if only `other` is 0."""
    if other == 0.0:
        return 1.0 if mine == 0.0 else float("inf")
    return float(mine / other)


def _wilcoxon(differences: FloatArray) -> dict[str, Any]:
    """Run signed-rank tests; pairs with a difference of 0 are excluded (Wilcoxon 1945)."""
    from scipy import stats  # noqa: PLC0415 - the import takes a second

    changed = differences[differences != 0.0]
    sides = {"two_sided_p": "two-sided", "less_p": "less", "greater_p": "greater"}
    if not len(changed):
        return {"changed": 0, **dict.fromkeys(sides, 1.0)}
    tests = {name: stats.wilcoxon(changed, alternative=side) for name, side in sides.items()}
    return {"changed": len(changed)} | {name: float(t.pvalue) for name, t in tests.items()}


MEANS = (
    "avg_jct_s", "geo_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_exec_s", "avg_queue_s",
    "makespan_s", "utilisation", "rescales_per_job", "decision_ms_mean", "decision_ms_p99",
    "ftf_mean", "ftf_worst", "ftf_unfair_share", "start_error_median", "start_coverage",
    "extrapolated_share", "bound_avg_jct_s",
)  # fmt: skip


def by_size(results: Sequence[SimulationResult]) -> dict[int, dict[str, list[SimulationResult]]]:
    """Group results by the number of slots of the cluster, smallest first, then by policy."""
    found: dict[int, dict[str, list[SimulationResult]]] = {}
    for result in sorted(results, key=lambda one: one.slots):
        found.setdefault(result.slots, {}).setdefault(result.policy, []).append(result)
    return found


def means(results: Sequence[SimulationResult]) -> dict[str, float | None]:
    """Return the mean of each figure of a policy over seeds, or None if a seed lacks the figure."""
    sums = [summary(result) for result in results]
    found: dict[str, float | None] = {}
    for name in (*MEANS, *(name for name in LOSS_FIGURES if name in sums[0])):
        values = [each[name] for each in sums if each.get(name) is not None]
        found[name] = statistics.fmean(values) if len(values) == len(sums) else None
    return found


def against_each(results: Sequence[SimulationResult], ours: str) -> dict[int, list[Comparison]]:
    """Compare policy `ours` with each other policy, for each cluster size that has `ours`."""
    return {
        size: [compare(by_policy[ours], by_policy[name]) for name in by_policy if name != ours]
        for size, by_policy in by_size(results).items()
        if ours in by_policy
    }


def comparison_json(results: Sequence[SimulationResult], ours: str) -> dict[str, Any]:
    """Return means, comparisons with `ours` and the summary of every simulation as JSON values."""
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


COLUMNS: Final[Mapping[str, str]] = {  # heading -> figure
    "avg JCT s": "avg_jct_s", "geo": "geo_jct_s", "p50": "p50_jct_s", "p90": "p90_jct_s",
    "p99": "p99_jct_s", "exec": "avg_exec_s", "queue": "avg_queue_s", "makespan": "makespan_s",
    "rho": "ftf_mean", "worst": "ftf_worst", "unfair": "ftf_unfair_share", "busy": "utilisation",
    "re-scales": "rescales_per_job", "ms/decision": "decision_ms_mean",
    "extrapolated": "extrapolated_share",
}  # fmt: skip
LOSS_COLUMNS: Final[Mapping[str, str]] = {  # heading -> figure, if jobs have losses
    "t90 s": "t90_s", "t95 s": "t95_s", "mean loss": "mean_loss", "loss area s": "loss_area_s",
    "cores high": "cores_high", "medium": "cores_medium", "low": "cores_low",
    "avg JCT s": "avg_jct_s", "p99": "p99_jct_s", "makespan": "makespan_s",
}  # fmt: skip
UTILITY_FIGURES: Final = (  # figures that exist if jobs state utilities
    "utility", "utility_share", "rejected", "promised", "promises_kept", "promises_broken",
    "lateness_s",
)  # fmt: skip
LAST_ROWS: Final = {
    "lower bound of avg_jct_s": "bound_avg_jct_s", "times the bound": "vs_bound",
    "events": "events", "seconds it took": "wall_s",
}  # fmt: skip
EXTRAPOLATED: Final = (
    "{share} of the training time was spent in groups of a kind that was never measured:\n"
    "their speeds are extrapolated (docs/simulator/recorded.md)."
)


def print_result(result: SimulationResult) -> None:
    """Print a table with the figures of one simulation."""
    console, figures = _console(), summary(result)
    title = f"{result.policy} on {result.slots} slots, seed {result.seed}"
    table = _table(title, "measure", "value")
    of_losses = [name for name in LOSS_FIGURES if name in figures]
    for name in ("jobs", *of_losses, *MEANS[:-1], "unfinished", "failed", "cancelled"):
        table.add_row(name, _cell(figures[name]))
    for name in UTILITY_FIGURES if figures["utility"] is not None else ():
        table.add_row(name, _cell(figures[name]))
    for text, name in LAST_ROWS.items():
        table.add_row(text, _cell(figures[name]))
    console.print(table)
    if figures["extrapolated_share"]:
        console.print(EXTRAPOLATED.format(share=f"{figures['extrapolated_share']:.0%}"))


def print_comparison(results: Sequence[SimulationResult], ours: str) -> None:
    """Print tables with the figures of each policy, and comparisons of `ours` with each policy."""
    console = _console()
    for size, by_policy in by_size(results).items():
        seeds = len(next(iter(by_policy.values())))
        know = results[0].setting.get("knowledge", "")
        title = f"{size} slots, means over {seeds} seed{'s' * (seeds != 1)}, knowledge {know}"
        console.print(_side_by_side(title, by_policy, COLUMNS))
        if all(has_losses(result) for many in by_policy.values() for result in many):
            title = "losses, and what lower ones cost"
            console.print(_side_by_side(title, by_policy, LOSS_COLUMNS))
        shares = [means(many)["extrapolated_share"] or 0.0 for many in by_policy.values()]
        if max(shares) > 0.0:
            console.print(EXTRAPOLATED.format(share=f"Up to {max(shares):.0%}"))
    for size, pairs in against_each(results, ours).items():
        console.print(_paired(f"{ours} against each, {size} slots, paired by job", pairs))


def _side_by_side(
    title: str, results: Mapping[str, Sequence[SimulationResult]], columns: Mapping[str, str]
) -> Table:
    table = _table(title, "policy", *columns, "x bound")
    for policy, many in results.items():
        mean = means(many)
        average, bound = mean["avg_jct_s"], mean["bound_avg_jct_s"]
        ratio = average / bound if average and bound else None
        table.add_row(policy, *(_cell(mean[key]) for key in columns.values()), _cell(ratio))
    return table


def _paired(title: str, comparisons: Sequence[Comparison]) -> Table:
    table = _table(
        title, "policy", "pairs", "JCT ratio", "95% interval", "difference s",
        "Wilcoxon two-sided p", "p (ours smaller)",
    )  # fmt: skip
    for each in comparisons:
        interval = f"{each.ratio_ci.low:.3f} to {each.ratio_ci.high:.3f}"
        table.add_row(
            each.second, str(each.jobs), f"{each.ratio:.3f}", interval, f"{each.difference_s:.1f}",
            f"{each.two_sided_p:.3g}", f"{each.less_p:.3g}",
        )  # fmt: skip
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is slow to import and seldom needed
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


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
