"""Predicted starts (`ones submit --dry-run --when`) of every job of a simulated week, against the real ones.

At each submission, a second core that has handled the same inputs is asked for the start, as a live controller
would be: it knows the running and waiting jobs, the rules, and the lengths of jobs that have ended. A prediction
counts as "now" if it says so; the error and the coverage of the 80% interval are over the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from controlplane.core.commands import Command
from controlplane.core.inputs import Input, JobSubmitted
from controlplane.core.plan_cycle import PlanCycle
from controlplane.core.reactor import Reactor
from controlplane.policy.registry import entry
from controlplane.policy.sharing.start_times import expected_start
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import JobResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds
from schemas.wire.client import ExpectedStart
from tests.bench import report

DAY_S: Final = 86_400.0
SOON_S: Final = 30.0  # a start within this time is "now"


@dataclass(frozen=True, slots=True)
class Told:
    at: Seconds
    start: ExpectedStart
    took_ms: float


class Asked:
    """A second core, which is asked for the start of each job just before it is submitted."""

    def __init__(self, *, gangs: bool) -> None:
        self.core = Reactor()
        self.cycle = PlanCycle(lambda: self.core, gangs=gangs)
        self.told: dict[str, Told] = {}

    def record(self, now: Seconds, event: Input, _: Sequence[Command]) -> None:
        if isinstance(event, JobSubmitted):
            began = time.perf_counter()
            present = self.cycle.present_with(event.spec, event.user, event.project, now)
            start = expected_start(present, Random(len(self.told)))  # noqa: S311 - no secret
            self.told[event.key] = Told(now, start, (time.perf_counter() - began) * 1000.0)
        self.core.handle(event, now)


def figures_of(told: dict[str, Told], jobs: Sequence[JobResult]) -> dict[str, float]:
    waits = [(told[j.job], j.started_at - told[j.job].at) for j in jobs if j.started_at is not None]
    now = [wait for one, wait in waits if one.start.starts == "now"]
    later = [
        (one, wait)
        for one, wait in waits
        if one.start.at is not None and one.start.starts == "later"
    ]
    errors = [abs(one.start.at - one.at - wait) for one, wait in later if one.start.at is not None]
    inside = [
        (one.start.earliest or 0.0) - SOON_S
        <= one.at + wait
        <= (one.start.latest or np.inf) + SOON_S
        for one, wait in later
    ]
    return {
        "now": len(now),
        "now_right": float(np.mean([wait <= SOON_S for wait in now])) if now else np.nan,
        "later": len(later),
        "unknown": sum(one.start.starts == "unknown" for one, _ in waits),
        "wait_s": float(np.median([wait for _, wait in later])) if later else np.nan,
        "error_s": float(np.median(errors)) if errors else np.nan,
        "relative": float(np.median([e / max(w, SOON_S) for e, (_, w) in zip(errors, later, strict=True)])) if errors else np.nan,
        "early": float(np.mean([one.at + wait < (one.start.earliest or 0.0) - SOON_S for one, wait in later])),
        "late": float(np.mean([one.at + wait > (one.start.latest or np.inf) + SOON_S for one, wait in later])),
        "coverage_80": float(np.mean(inside)) if inside else np.nan,
        "p99_ms": float(np.quantile([one.took_ms for one in told.values()], 0.99)),
    }  # fmt: skip


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "half a day",
        policy=(str, "fair", "policy of the elastic jobs"),
        seed=(int, 1, "seed of the trace"),
        interval=(float, 150.0, "mean seconds between submissions"),
        gpus=(int, 16, "slots"),
        days=(float, 7.0, "length of the trace"),
    )
    span_s = (0.5 if chosen.quick else chosen.days) * DAY_S
    scenario = Scenario(
        jobs=int(span_s / chosen.interval), interval_s=chosen.interval, arrivals="poisson",
        nodes=(NodeGroup(count=chosen.gpus // 4, slots=4),), rigid=0.3, users=6, projects=3, generations=1, warm_up=0.0,
    )  # fmt: skip
    asked = Asked(gangs=entry(chosen.policy).gangs)
    report.now(f"{scenario.jobs} jobs, {chosen.policy}")
    result = simulate(chosen.policy, scenario, chosen.seed, record=asked.record)
    rows, figures = [], {}
    for kind in ("torchrun", "elastic"):
        found = figures_of(asked.told, [job for job in result.jobs if job.kind == kind])
        rows.append([kind, *found.values()])
        figures |= {f"{name}_{kind}": value for name, value in found.items()}
    report.table(f"starts as predicted at submission, {chosen.policy}", ("", *found), rows)
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
