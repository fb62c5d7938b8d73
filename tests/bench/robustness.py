"""The lead of `ones` with wrong reports and with failures.

Simulations in virtual time, on Table 2, paired by seed: the same trace, and the same jobs fail.
`SETTING_vs_POLICY` is the average completion time of `ones` over that policy's in the same setting, a geometric
mean over the seeds; `SETTING_cost_POLICY` that of a policy over its own with exact reports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

from controlplane.sim.cluster import NodeGroup
from controlplane.sim.scenario import Scenario
from tests.bench import report
from tests.bench.simulations import Bench, Pair, Way

OTHERS: Final = ("goodput", "tiresias", "fifo")
TRUTH: Final = "truth"
SETTINGS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    TRUTH: (
        "workers tell the truth, and noise scales on one slot too", {"information": "perfect"}
    ),
    "noise_0": ("no noise scale of one slot; the truth otherwise", {"noise": 0.0}),
    "noise_5": ("the default: speeds and noise scales 5% off", {"noise": 0.05}),
    "noise_10": ("10% off", {"noise": 0.1}),
    "scales_4": (
        "each job's noise scales up to 4 times too large or small", {"noise_scale_error": 4.0}
    ),
    "erratic": ("loss curves with spikes and plateaus", {"erratic": True}),
    "failures": (
        "10% of the scripts fail once, 10% are given up, a node is lost every hour",
        {"crash_share": 0.1, "cancel_share": 0.1, "node_loss_s": 3600.0},
    ),
}  # fmt: skip
THINK_S: Final = 10.0


def pairs(plain: Scenario) -> dict[str, list[Pair]]:
    here = {
        name: {policy: Way(plain, {}, policy).knowing(**changes) for policy in ("ones", *OTHERS)}
        for name, (_, changes) in SETTINGS.items()
    }
    return {
        name: [
            *(Pair(f"{name}_vs_{policy}", ways["ones"], ways[policy]) for policy in OTHERS),
            *(
                Pair(f"{name}_cost_{policy}", ways[policy], here[TRUTH][policy])
                for policy in ("ones", "goodput")
            ),
        ]
        for name, ways in here.items()
    }


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "one seed of 20 jobs",
        seeds=(report.seeds, "36-38", "of workloads and errors, as in 36-38"),
        jobs=(int, 100, "in each simulation"),
        gpus=(str, "64,16", "sizes of the cluster, multiples of 4"),
        generations=(int, 0, "of the search, a question"),
        workers=(int, 2, "simulations at a time"),
        results=(Path, None, "keep simulations here and go on from there"),
    )
    seeds = chosen.seeds[: 1 if chosen.quick else None]
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
            found = [bench.compared(pair) for pair in here]
            row: list[object] = [SETTINGS[name][0], found[0].first_s, found[0].first_moves]
            for pair, ratio in ((pair, one.ratio) for pair, one in zip(here, found, strict=True)):
                figures |= ratio.keys(f"{pair.key}_{gpus}")
                row.append(f"{ratio.mean:.3f} ({ratio.low:.2f}-{ratio.high:.2f})")
            rows.append(row)
            report.write(figures | {"elapsed_s": bench.elapsed_s}, chosen.json)
        columns = ("setting", "ones, s", "re-scales", *(f"ones / {policy}" for policy in OTHERS),
                   "ones / told all", "goodput / told all")  # fmt: skip
        title = (
            f"{gpus} GPUs, {plain.jobs} jobs, {len(seeds)} seeds; {bench.elapsed_s:.0f} s so far"
        )
        report.table(title, columns, rows)


if __name__ == "__main__":
    main()
