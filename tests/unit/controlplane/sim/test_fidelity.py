"""Against numbers that others published: the results of Pollux' own simulator (OSDI 2021).

The measured tables, workloads and results are no part of this repository; `ONES_PROFILES` names
the folder that has `traces/`, `workloads/` and `results/`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario

FOLDER = Path(os.environ.get("ONES_PROFILES") or "/nonexistent")
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="set ONES_PROFILES to the folder of the measured tables"
)


@cache
def published(policy: str) -> Any:
    return json.loads((FOLDER / "results" / f"{policy}.json").read_text())["jcts"]


def simulated(policy: str, workload: int) -> dict[str, float | None]:
    scenario = Scenario(
        physics="profiles", profiles=str(FOLDER),
        workload=str(FOLDER / "workloads" / f"workload-{workload}.csv"), warm_up=0.0, round_s=60.0,
        stall_s=30.0, information="perfect",
    )  # fmt: skip
    return {ended.job: ended.jct_s for ended in simulate(policy, scenario, 1).jobs}


@pytest.mark.parametrize("workload", [1, 2, 3, 6])
def test_tiresias_completes_every_job_at_the_published_second(workload: int) -> None:
    theirs = published("tiresias")[f"workload-{workload}"]

    ours = simulated("tiresias", workload)

    assert len(theirs) == 160
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("workload", [6])
def test_optimus_agrees_job_by_job_and_on_average(workload: int) -> None:
    theirs = published("optimus")[f"workload-{workload}"]

    ours = simulated("optimus", workload)

    assert ours.keys() == theirs.keys()
    pairs = np.array([(ours[name], theirs[name]) for name in theirs], dtype=np.float64)
    assert pairs[:, 0].mean() == pytest.approx(pairs[:, 1].mean(), rel=0.001)
    assert np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1] > 0.999


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workload", [3])
def test_pollux_agrees_on_average_and_in_the_order_of_jobs(workload: int) -> None:
    """Both searches draw at random, so that single jobs differ."""
    theirs = published("pollux")[f"workload-{workload}"]

    ours = simulated("pollux", workload)

    assert ours.keys() == theirs.keys()
    pairs = np.array([(ours[name], theirs[name]) for name in theirs], dtype=np.float64)
    assert pairs[:, 0].mean() == pytest.approx(pairs[:, 1].mean(), rel=0.02)
    assert spearmanr(*pairs.T).statistic > 0.95
