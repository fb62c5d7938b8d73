"""Results by size of the cluster and policy: means over seeds, and ours against each other one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from controlplane.sim.analysis.loss_series import LOSS_FIGURES
from controlplane.sim.analysis.paired_comparison import Comparison, compare
from controlplane.sim.analysis.simulation_summary import summary
from controlplane.sim.simulation_result import SimulationResult

MEANS = (
    "avg_jct_s", "geo_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_exec_s", "avg_queue_s",
    "makespan_s", "utilisation", "rescales_per_job", "decision_ms_mean", "decision_ms_p99",
    "ftf_mean", "ftf_worst", "ftf_unfair_share", "start_error_median", "start_coverage",
    "extrapolated_share", "bound_avg_jct_s",
)  # fmt: skip


def by_size(results: Sequence[SimulationResult]) -> dict[int, dict[str, list[SimulationResult]]]:
    """Results by size of the cluster, smallest first, and by policy.

    Returns:
        Slots of the cluster -> policy -> its results, in their order; the options do not count.
    """
    found: dict[int, dict[str, list[SimulationResult]]] = {}
    for size in sorted({result.slots for result in results}):
        here = found[size] = {}
        for result in results:
            if result.slots == size:
                here.setdefault(result.policy, []).append(result)
    return found


def means(results: Sequence[SimulationResult]) -> dict[str, float | None]:
    """Figures of one policy, means over seeds; None where a seed has none.

    Args:
        results: at least one.

    Returns:
        The figures `MEANS` of `summary`, in its units, and those of `LOSS_FIGURES` that it has.
    """
    sums = [summary(result) for result in results]
    found: dict[str, float | None] = {}
    for name in (*MEANS, *(name for name in LOSS_FIGURES if name in sums[0])):
        values = [each[name] for each in sums if each.get(name) is not None]
        found[name] = statistics.fmean(values) if len(values) == len(sums) else None
    return found


def against_each(results: Sequence[SimulationResult], ours: str) -> dict[int, list[Comparison]]:
    """Our policy against each other one, for each size of the cluster.

    Args:
        ours: name of one of their policies; where it is missing there is no comparison.

    Raises:
        ResultsError: if two have nothing in common that could be compared.
    """
    return {
        size: [compare(here[ours], here[name]) for name in here if name != ours]
        for size, here in by_size(results).items()
        if ours in here
    }


def comparison_json(results: Sequence[SimulationResult], ours: str) -> dict[str, Any]:
    """Means, comparisons and the figures of every simulation, as JSON can hold them.

    Args:
        ours: name of the policy that the others are compared with.
    """
    return {
        "sizes": {
            str(size): {name: means(many) for name, many in here.items()}
            for size, here in by_size(results).items()
        },
        "against": {
            str(size): [msgspec.to_builtins(each) for each in many]
            for size, many in against_each(results, ours).items()
        },
        "results": [summary(result) for result in results],
    }
