"""The lead of `ones` with wrong reports and with failures.

Simulations in virtual time, on Table 2, paired by seed: the same trace, and the same jobs fail.
`SETTING_vs_POLICY` is the average completion time of `ones` over that policy's in the same setting, a geometric
mean over the seeds; `SETTING_cost_POLICY` that of a policy over its own with exact reports.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

from controlplane.sim.cluster import NodeGroup
from controlplane.sim.scenario import Scenario
from tests.bench import report
from tests.bench.evolution_cells import Bench, Pair, Ratio, Way

OTHERS: Final = ("goodput", "tiresias", "fifo")
TRUTH: Final = "truth"
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    TRUTH: {"information": "perfect"},
    "noise_0": {"noise": 0.0},
    "noise_5": {"noise": 0.05},
    "noise_10": {"noise": 0.1},
    "scales_4": {"noise_scale_error": 4.0},
    "erratic": {"erratic": True},
    "failures": {"crash_share": 0.1, "cancel_share": 0.1, "node_loss_s": 3600.0},
}
SAID: Final[Mapping[str, str]] = {
    TRUTH: "workers tell the truth, and noise scales on one slot too",
    "noise_0": "no noise scale of one slot; the truth otherwise",
    "noise_5": "the default: speeds and noise scales 5% off",
    "noise_10": "10% off",
    "scales_4": "each job's noise scales up to 4 times too large or small",
    "erratic": "loss curves with spikes and plateaus",
    "failures": "10% of the scripts fail once, 10% are given up, a node is lost every hour",
}
THINK_S: Final = 10.0


def pairs(plain: Scenario) -> dict[str, list[Pair]]:
    found = {}
    truth = {
        policy: Way(plain, {}, policy).knowing(**SETTINGS[TRUTH]) for policy in ("ones", *OTHERS)
    }
    for name, changes in SETTINGS.items():
        here = {policy: Way(plain, {}, policy).knowing(**changes) for policy in truth}
        found[name] = [
            *(Pair(f"{name}_vs_{policy}", here["ones"], here[policy]) for policy in OTHERS),
            *(
                Pair(f"{name}_cost_{policy}", here[policy], truth[policy])
                for policy in ("ones", "goodput")
            ),
        ]
    return found


def main() -> None:
    chosen = _arguments()
    seeds = report.seeds(chosen.seeds)[: 1 if chosen.quick else None]
    bench, figures = Bench(seeds, chosen.workers, chosen.results), dict[str, float]()
    for gpus in (int(part) for part in chosen.gpus.split(",")):
        plain = Scenario(
            jobs=20 if chosen.quick else chosen.jobs,
            generations=chosen.generations,
            think_s=THINK_S,
            nodes=(NodeGroup(count=gpus // 4, slots=4),),
        )
        rows: list[list[object]] = []
        for name, here in pairs(plain).items():
            bench.do([way for pair in here for way in (pair.first, pair.second)])
            ratios = [bench.ratio(pair) for pair in here]
            for pair, ratio in zip(here, ratios, strict=True):
                figures |= _keys(f"{pair.key}_{gpus}", ratio)
            rows.append(
                [SAID[name], ratios[0].first_s, ratios[0].first_moves]
                + [f"{ratio.mean:.3f} ({ratio.low:.2f}-{ratio.high:.2f})" for ratio in ratios]
            )
            report.write(figures | {"elapsed_s": bench.elapsed_s}, chosen.json)
        columns = ("setting", "ones, s", "re-scales", *(f"ones / {policy}" for policy in OTHERS),
                   "ones / told all", "goodput / told all")  # fmt: skip
        title = (
            f"{gpus} GPUs, {plain.jobs} jobs, {len(seeds)} seeds; {bench.elapsed_s:.0f} s so far"
        )
        report.table(title, columns, rows)


def _keys(key: str, ratio: Ratio) -> dict[str, float]:
    return {key: ratio.mean, f"{key}_low": ratio.low, f"{key}_high": ratio.high}


def _arguments() -> argparse.Namespace:
    parser = report.parser(__doc__ or "", "one seed of 20 jobs")
    parser.add_argument("--seeds", default="36-38", help="of workloads and errors, as in 36-38")
    parser.add_argument("--jobs", type=int, default=100, help="in each simulation")
    parser.add_argument("--gpus", default="64,16", help="sizes of the cluster, multiples of 4")
    parser.add_argument("--generations", type=int, default=0, help="of the search, a question")
    parser.add_argument("--workers", type=int, default=2, help="simulations at a time")
    parser.add_argument("--results", type=Path, help="keep simulations here and go on from there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
