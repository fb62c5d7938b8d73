"""Every policy on a real cluster: eight jobs come to four slots, one policy after the other.

The steps of the jobs sleep, so that the cores of this host matter little. Shown with the completion times: the
changes that each policy made, how long slots were idle while a job waited that would have fitted, and the
completion times and re-scales of the same journal, simulated under the same policy.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from controlplane.client import BlockingClient
from controlplane.client.allocations import Allocation, allocations_from
from controlplane.policy.registry import POLICIES
from schemas.ids import JobId
from schemas.jobs import JobSpec, Utility
from schemas.wire.client import Decision, Explanation, JobDetail
from tests.bench import report
from tests.bench.live import GAP, KEEP, names, replay
from tests.bench.live_cluster import cluster, submitted
from tests.bench.live_jobs import SLOTS
from tests.bench.live_sleepers import Sleeper, sleepers, spec_of

GAP_S: Final = 4.0
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {  # as an operator would set them for such jobs
    "tiresias": {"limits": [10.0, 40.0]},  # slot seconds of jobs of half a minute
    "gittins": {"quantum": 10.0},
    "oasis": {"interval_s": 5.0, "start_stall_s": 5.0},
}
QUICK: Final = ("fifo", "tiresias", "ones")
PATIENT: Final = Utility(value=3.0)
WAITING: Final = frozenset({"queued", "paused"})


@dataclass(frozen=True)
class Outcome:
    policy: str
    jct_s: tuple[float, ...]
    queued_s: float  # mean
    idle_s: float  # a job waited while a slot was free
    starts: int  # first ones and others
    changes: Counter[str]  # decisions that were carried out, by their codes
    migrations: int  # changes that went to slots which the job did not have, and gave up others
    failed: int
    rescales: float  # changes of membership per job
    load: float  # of the host at the end, processes that want a core
    replayed: Mapping[str, Any] = field(default_factory=dict)  # simulated on the same journal

    @property
    def average_s(self) -> float:
        return statistics.fmean(self.jct_s)


def main() -> None:
    every = ",".join(name for name, one in POLICIES.items() if one.oracle != "must")
    chosen = report.arguments(
        __doc__,
        f"four short jobs under {', '.join(QUICK)}",
        seeds=(int, 1, "with other arrivals"),
        policies=(names, None, "with commas; default: all"),
        gap=(float, GAP_S, GAP),
        keep=KEEP,
    )
    policies = chosen.policies or (QUICK if chosen.quick else names(every))
    found: list[Outcome] = []
    with report.folder(chosen.keep) as base:
        for seed, policy in itertools.product(range(1, chosen.seeds + 1), policies):
            coming = sleepers(seed, chosen.gap, many=4 if chosen.quick else 8)
            if chosen.quick:
                coming = [replace(job, epochs=-(-job.epochs // 4)) for job in coming]
            found.append(run(policy, coming, base, base / f"{seed}-{policy}"))
            tell(f"seed {seed}", found[-1:])
            report.write(figures(found), chosen.json)  # what comes later may fail
    tell("all", found)


def run(policy: str, coming: Sequence[Sleeper], base: Path, home: Path) -> Outcome:
    def spec(job: Sleeper) -> JobSpec:
        return spec_of(job, base / "sleepers", utility=PATIENT)

    options = ", ".join(f"{k} = {json.dumps(v)}" for k, v in OPTIONS.get(policy, {}).items())
    with cluster(home, policy, options=f"{{ {options} }}" if options else "") as (made, client):
        found = outcome(policy, client, submitted(made, client, coming, spec))
    return replace(found, replayed=replay(home, [policy], OPTIONS)[policy])


def outcome(policy: str, client: BlockingClient, jobs: Sequence[JobId]) -> Outcome:
    details = [client.job(name) for name in jobs]
    told = [client.explain(name) for name in jobs]
    last = max(detail.history[-1].time for detail in details)
    placed = allocations_from(client.events(), until=last)
    taken = [(one.begin, one.end) for one in placed]
    taken += [stretch for each in told for stretch in promised(each, placed)]
    waits = [stretch for detail in details for stretch in waiting(detail)]
    orders = [one for each in told for one in carried_out(each)]
    return Outcome(
        policy=policy,
        jct_s=tuple(d.history[-1].time - d.summary.submitted_at for d in details),
        queued_s=statistics.fmean(detail.summary.queued_s for detail in details),
        idle_s=idle_while_waiting(taken, waits, SLOTS),
        starts=sum(bool(one.to.slots and not one.before.slots) for one in orders),
        changes=Counter(one.code for one in orders),
        migrations=sum(map(is_migration, orders)),
        failed=sum(detail.summary.state not in {"succeeded", "rejected"} for detail in details),
        rescales=statistics.fmean(detail.summary.rescales for detail in details),
        load=os.getloadavg()[0],
    )


def carried_out(told: Explanation) -> list[Decision]:
    return [one for one in told.decisions if one.outcome not in {"abandoned", "failed", ""}]


def promised(told: Explanation, placed: Sequence[Allocation]) -> list[tuple[float, float]]:
    begins: dict[str, list[float]] = {}
    for one in placed:
        if one.job == told.job:
            begins.setdefault(one.slot, []).append(one.begin)
    found = []
    for order in carried_out(told):
        for slot in set(order.to.slots) - set(order.before.slots):
            later = [begin for begin in begins.get(slot, []) if begin >= order.time]
            found += [(order.time, min(later))] if later else []
    return found


def is_migration(one: Decision) -> bool:
    """Whether a job that had slots gets others for some of them."""
    was, to = set(one.before.slots), set(one.to.slots)
    return bool(was and to - was and was - to)


def waiting(detail: JobDetail) -> list[tuple[float, float]]:
    times = [(change.time, change.to_state) for change in detail.history]
    times.insert(0, (detail.summary.submitted_at, "queued"))
    return [
        (since, until)
        for (since, state), (until, _) in itertools.pairwise(times)
        if state in WAITING and until > since
    ]


def idle_while_waiting(
    taken: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]], slots: int
) -> float:
    edges = sorted({edge for stretch in (*taken, *waits) for edge in stretch})
    idle_s = 0.0
    for low, high in itertools.pairwise(edges):
        middle = (low + high) / 2
        busy = sum(begin <= middle < end for begin, end in taken)
        if busy < slots and any(begin <= middle < end for begin, end in waits):
            idle_s += high - low
    return idle_s


COLUMNS: Final[Mapping[str, Callable[[Outcome], object]]] = {
    "avg JCT s": lambda one: f"{one.average_s:.1f}",
    "p90": lambda one: f"{statistics.quantiles(one.jct_s, n=10, method='inclusive')[-1]:.1f}",
    "queue": lambda one: f"{one.queued_s:.1f}",
    "idle while one waits": lambda one: f"{one.idle_s:.1f}",
    "starts": lambda one: one.starts,
    "grows": lambda one: one.changes["grow"],
    "shrinks": lambda one: one.changes["shrink"],
    "batches": lambda one: one.changes["batch"],
    "pauses": lambda one: one.changes["pause"],
    "restarts": lambda one: one.changes["restart"],
    "moves": lambda one: one.changes["pack"] + one.changes["move"],
    "migrations": lambda one: one.migrations,
    "failed": lambda one: one.failed,
    "re-scales": lambda one: f"{one.rescales:.1f}",
    "replayed": lambda one: f"{one.replayed['rescales_per_job']:.1f}",
    "avg JCT s, replayed": lambda one: f"{one.replayed['avg_jct_s']:.1f}",
    "load": lambda one: f"{one.load:.1f}",
}


def tell(title: str, found: Sequence[Outcome]) -> None:
    rows = [[one.policy, *(told(one) for told in COLUMNS.values())] for one in found]
    report.table(title, ["", *COLUMNS], rows)


def figures(found: Sequence[Outcome]) -> dict[str, float]:
    told: dict[str, float] = {}
    for policy in dict.fromkeys(one.policy for one in found):
        mine = [one for one in found if one.policy == policy]
        counts = sum((one.changes for one in mine), Counter[str]())
        jobs = sum(len(one.jct_s) for one in mine)
        changed = sum(counts[code] for code in ("grow", "shrink", "pack", "move", "restart"))
        told |= {
            f"avg_jct_s_{policy}": statistics.fmean(one.average_s for one in mine),
            f"idle_while_waiting_s_{policy}": statistics.fmean(one.idle_s for one in mine),
            f"rescales_per_job_{policy}": changed / jobs,
            f"pauses_per_job_{policy}": counts["pause"] / jobs,
            f"failed_{policy}": sum(one.failed for one in mine),
            f"replayed_over_live_{policy}": statistics.geometric_mean(
                one.replayed["avg_jct_s"] / one.average_s for one in mine
            ),
        }
    return told


if __name__ == "__main__":
    main()
