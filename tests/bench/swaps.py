"""Two jobs on a full cluster trade places repeatedly: the pause of a step.

Three settings: each job has all slots of its own (one must pause), each keeps one of its two slots (one continues
with it), and one more slot is free (one goes there meanwhile). The cost of a swap is a job's longest gap between
two steps until both have moved, for the job that yields and for the other. Baseline: both are paused, and resumed
on each other's slots. Also counted: epochs with a missed or repeated sample, and workers that had a slot's device
before the former worker had exited.
"""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from controlplane.client import BlockingClient
from schemas.jobs import JobSpec, StopRule
from schemas.wire.feed import FeedEvent
from tests.bench import report
from tests.bench.live_cluster import cluster, inexact_epochs
from tests.bench.live_jobs import TRAININGS, Job, spec_of

LIMIT_S: Final = 60.0  # for one swap
LOOK_S: Final = 0.05
WARM_S: Final = 2.0
STAMPS: Final = "STEP_TIMES"
STAMP: Final = f"""
import os, time
from torch.optim.optimizer import register_optimizer_step_post_hook
_times = open(f"{{os.environ['{STAMPS}']}}.{{os.getpid()}}", "a", buffering=1)
register_optimizer_step_post_hook(lambda *_: _times.write(f"{{time.monotonic()}}\\n") and None)
"""
Places = tuple[tuple[int, ...], tuple[int, ...]]  # indices of slots


@dataclass(frozen=True)
class Setting:
    name: str
    slots: int  # of the cluster
    here: Places
    there: Places
    swaps: int


@dataclass(frozen=True)
class Swap:
    began: float
    ended: float  # both train where they should


@dataclass(frozen=True)
class Measured:
    aside: list[float]  # of each swap, the longest gap of the job that stepped aside, seconds
    others: list[float]  # of the one that took its place; of two that pause, of the second one
    whole: list[float]  # until both trained where they should, seconds
    inexact: int  # finished epochs in which not every sample was taken once
    two_owners: int  # times that a worker had a slot's device before the former one had exited


def settings(share: float) -> list[Setting]:
    one, two = (0,), (1,)
    keep = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    return [
        Setting("a pause", 2, (one, two), (two, one), round(100 * share)),
        Setting("fewer slots", 4, *keep, round(30 * share)),
        Setting("a free slot", 3, (one, two), (two, one), round(30 * share)),
    ]


def main() -> None:
    chosen = report.arguments(__doc__, "a twentieth of the swaps")
    figures: dict[str, float] = {}
    rows: list[list[object]] = []
    with report.folder() as folder:
        for setting in settings(0.05 if chosen.quick else 1.0):
            base = folder / setting.name.replace(" ", "-")
            mine, key = measured(setting, base, trading=True), setting.name.replace(" ", "_")
            told(rows, figures, setting.name, key, mine)
            if setting.name == "a pause":
                short = replace(setting, swaps=max(2, setting.swaps // 10))
                theirs = measured(short, base / "stopped", trading=False)
                told(rows, figures, "both pause", "both_pause", theirs)
                both = statistics.median([*mine.aside, *mine.others])
                stopped = statistics.median([*theirs.aside, *theirs.others])
                figures["still_vs_both_pause"] = both / stopped
                figures["aside_vs_both_pause"] = statistics.median(mine.aside) / stopped
    heads = ["", "swaps", "job that", "still, s: median", "p99", "most", "whole, s: median",
             "epochs wrong", "two owners"]  # fmt: skip
    report.table("longest gap between two steps of a job, in each swap", heads, rows)
    report.write(figures, chosen.json)


def told(
    rows: list[list[object]], figures: dict[str, float], name: str, key: str, found: Measured
) -> None:
    whole = statistics.median(found.whole)
    figures |= {f"{key}_swaps": len(found.whole), f"{key}_whole_s_median": whole}
    figures |= {f"{key}_wrong": found.inexact, f"{key}_two_owners": found.two_owners}
    for side, gaps in (("steps aside", found.aside), ("follows", found.others)):
        middle, late = statistics.median(gaps), report.quantile(gaps, 0.99)
        rows.append(
            [name, len(found.whole), side, middle, late, max(gaps), whole, found.inexact,
             found.two_owners]
        )  # fmt: skip
        short = side.replace(" ", "_")
        figures |= {f"{key}_{short}_s_median": middle, f"{key}_{short}_s_p99": late}


def measured(setting: Setting, base: Path, *, trading: bool) -> Measured:
    base.mkdir(parents=True)
    with cluster(base / "cluster", "fifo", slots=setting.slots) as (_, client):
        jobs = [submitted(client, number, setting, base) for number in range(2)]
        order(client, jobs, setting.here)
        arrived(client, jobs, setting.here)
        time.sleep(WARM_S)
        swaps: list[Swap] = []
        turns = itertools.cycle([setting.there, setting.here])
        what = setting.name if trading else "both pause"
        for places in report.counted(f"{what}: swap", turns, setting.swaps):
            began = time.monotonic()
            if not trading:
                stop(client, jobs)
            order(client, jobs, places)
            if not trading:
                for job in jobs:
                    client.resume(job)
            arrived(client, jobs, places)
            swaps.append(Swap(began, time.monotonic()))
            time.sleep(WARM_S / 4)
        inexact = sum(inexact_epochs(client, job, TRAININGS[0].samples) for job in jobs)
        events = list(client.events())
        for job in jobs:
            client.cancel(job)
    steps = [stamps(base, number) for number in range(2)]
    gaps = [[longest_gap(each, swap) for each in steps] for swap in swaps]
    sides = [(one, other) for one, other in gaps]
    if trading:
        who = who_stepped_aside(events, jobs)
        sides = [(gap[at], gap[1 - at]) for gap, at in zip(gaps, who, strict=True)]
    return Measured(
        aside=[first for first, _ in sides],
        others=[second for _, second in sides],
        whole=[swap.ended - swap.began for swap in swaps],
        inexact=inexact,
        two_owners=two_owners(events),
    )


def who_stepped_aside(events: Sequence[FeedEvent], jobs: Sequence[str]) -> list[int]:
    how = [str(event.detail["how"]) for event in events if event.event == "policy.swap"]
    return [next(at for at, job in enumerate(jobs) if words.startswith(job)) for words in how]


def two_owners(events: Sequence[FeedEvent]) -> int:
    there: dict[object, object] = {}  # slot -> who is ready or trains there
    found = 0
    for event in events:
        slot, version, rank = (event.detail.get(name) for name in ("slot", "version", "rank"))
        who = event.job, version, rank
        if event.event == "worker.ready":
            found += slot in there
            there[slot] = who
        elif event.event == "worker.exited" and there.get(slot) == who:
            del there[slot]
    return found


def submitted(client: BlockingClient, number: int, setting: Setting, base: Path) -> str:
    job = Job(TRAININGS[0], 100_000, number)
    spec: JobSpec = spec_of(job, base / "scripts")
    script = Path(spec.workdir) / spec.script
    script.write_text(STAMP + script.read_text(encoding="utf-8"), encoding="utf-8")
    size = len(setting.here[number])
    env = {**spec.env, STAMPS: str(base / f"times-{number}")}
    stop = StopRule(epochs=job.epochs)
    return client.submit(msgspec.structs.replace(spec, slots=(1, size), stop=stop, env=env))


def order(client: BlockingClient, jobs: Sequence[str], places: Places) -> None:
    for job, on in zip(jobs, named(client, places), strict=True):
        client.resize(job, on=on)


def named(client: BlockingClient, places: Places) -> list[list[str]]:
    (node,) = client.nodes()
    return [[f"{node.node}/{index}" for index in on] for on in places]


def stop(client: BlockingClient, jobs: Sequence[str]) -> None:
    for job in jobs:
        client.pause(job)
    report.until(
        lambda: all(client.job(job).summary.state == "paused" for job in jobs),
        LIMIT_S, LOOK_S, lambda: [client.job(job).summary for job in jobs],
    )  # fmt: skip


def arrived(client: BlockingClient, jobs: Sequence[str], places: Places) -> None:
    def there(job: str, on: list[str]) -> bool:
        detail = client.job(job)
        here = {worker.slot for worker in detail.workers if worker.phase == "member"}
        return detail.summary.state == "running" and here == set(on)

    for job, on in zip(jobs, named(client, places), strict=True):
        report.until(partial(there, job, on), LIMIT_S, LOOK_S, partial(client.job, job))


def stamps(base: Path, number: int) -> list[float]:
    """Return the times of steps of a job's workers, on the host's clock."""
    files = base.glob(f"times-{number}.*")
    return sorted(float(line) for file in files for line in file.read_text().splitlines() if line)


def longest_gap(steps: Sequence[float], swap: Swap) -> float:
    """Return the longest gap between steps that began before a swap was over."""
    first = max(0, bisect_left(steps, swap.began) - 1)
    last = bisect_right(steps, swap.ended) + 1
    return max(later - one for one, later in itertools.pairwise(steps[first:last]))


if __name__ == "__main__":
    main()
