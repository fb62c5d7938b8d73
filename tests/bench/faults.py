"""SIGKILL of every kind of process at every stage of a change of size: the effect on the job.

In each case a job trains on two or three slots, a change is ordered, and the victim ends where the case says.
Shown: the longest time between two ends of a step of any worker, the recovery, and whether every sample of
every epoch was trained on exactly once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench import report
from tests.bench.steps import ends, submit
from tests.support.cluster import Cluster, kill

SAMPLES: Final = 480


@dataclass(frozen=True)
class Case:
    """Victim and its fault, while a job of `start` slots is resized to `to` (None: is not resized)."""

    stage: str
    victim: str
    faults: str
    start: int = 2
    to: int | None = 3
    process: str = ""  # "agent", "controller" or "zygote": killed from outside instead


def at(point: str, rank: int, what: str = "kill", version: int = 2) -> str:
    return f"{point}:rank={rank}:version={version}={what}"


def growing(stage: str, point: str, *ranks: int) -> list[Case]:
    """Return a case for each rank that is killed at `point` of a growth from two to three."""
    victims = ("rank 0", "rank 1", "newcomer")
    return [Case(stage, victims[rank], at(point, rank)) for rank in ranks]


def reducing(rank: int, more: str = "") -> str:
    return f"reduce:rank={rank}:step=30:version=1=kill{more}"


STALLS: Final = {
    "newcomers are prepared": at("ready", 2, "stall 1.5"),
    "group is built": at("built", 1, "stall 1.5"),
}
CASES: Final = (
    *growing("newcomer builds its model", "load", 2),
    *growing("newcomer is about to be ready", "ready", 2),
    Case("newcomer never becomes ready", "newcomer", at("ready", 2, "stop")),
    *growing("group is built", "build", 2, 0, 1),
    *growing("group is there", "built", 2),
    *growing("boundary is agreed on", "announce", 0, 1),
    *growing("boundary", "boundary", 0, 1),
    *growing("swapped", "swapped", 0, 1),
    *growing("state is sent", "handover.send", 0, 1),
    *growing("state is received", "handover.receive", 2),
    *growing("state was received", "handed_over", 2),
    Case("leaver at the boundary", "rank 2", at("boundary", 2), 3, 2),
    Case("stayer at the boundary", "rank 0", at("boundary", 0), 3, 2),
    Case("stayer has swapped", "rank 1", at("swapped", 1), 3, 2),
    Case("mid all-reduce", "rank 0", reducing(0), 3, None),
    Case("mid all-reduce", "rank 2", reducing(2), 3, None),
    Case(
        "mid all-reduce, one-step skew", "rank 1",
        "reduced:rank=1:step=30:version=1=kill; reduced:rank=0:step=30:version=1=fail", 3, None,
    ),
    Case("at the epoch's report", "rank 0", at("report", 0, version=1), 3, None),
    *(
        Case(stage, "ranks 2, 1", reducing(2, f"; {at(point, 1)}"), 3, None)
        for stage, point in (
            ("survivor at rest", "quiesce"), ("survivors build a group", "recover"),
            ("survivors have a group", "recovered"),
        )
    ),
    *(
        Case(stage, process, STALLS[stage], process=process)
        for stage, processes in (
            ("newcomers are prepared", ("agent", "controller", "zygote")),
            ("group is built", ("agent", "controller")),
        )
        for process in processes
    ),
    Case("pause's checkpoint (3 s)", "rank 0", at("suspend", 0), 2, 0),
    Case("pause is written (3 s)", "rank 0", at("suspended", 0), 2, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    gap_ms: float
    usual_ms: float
    story: str
    restarts: int
    exact: bool


def run(cluster: Cluster, pids: Callable[[], dict[str, Any]], folder: Path, case: Case) -> Result:
    job = submit(
        cluster, folder, samples=SAMPLES, batch=24, slots_wanted=case.start,
        env={"IDLE_S": 0.02, "ELASTIC_FAULTS": case.faults},
    )  # fmt: skip
    cluster.until(job, lambda shown: shown["state"] == "running")
    began = time.time()
    time.sleep(0.5)
    if case.to is not None:
        cluster.ones("resize", job, "--slots", str(case.to))
    if case.process:
        time.sleep(0.6)
        kill(victim(cluster, pids(), case.process))
        cluster.up()
    goal = case.to or case.start
    time.sleep(3.0)
    if case.to == 0:
        cluster.until(job, lambda shown: shown["state"] == "paused")
        cluster.ones("resize", job, "--slots", "2")
        goal = 2
    cluster.until(job, lambda s: s["state"] in {"running", "rescaling"} and s["slots"] <= goal)
    epoch = cluster.show(job)["epoch"]
    shown = cluster.until(job, lambda s: s["epoch"] > epoch + 1)
    cluster.ones("cancel", job)
    gaps = [b - a for a, b in itertools.pairwise(at for at in ends(folder) if at > began)]
    epochs = cluster.samples(job)
    whole = [ids for number, ids in sorted(epochs.items()) if number <= shown["epoch"]]
    versions = shown["versions"]
    return Result(
        gap_ms=max(gaps) * 1e3,
        usual_ms=statistics.median(g for g in gaps if g > 0.01) * 1e3,
        story=", ".join(f"{v['kind']} {v['outcome'] or '...'}" for v in versions[1:5]),
        restarts=sum(v["kind"] == "start" for v in versions) - 1,
        exact=all(ids == list(range(SAMPLES)) for ids in whole) and bool(whole),
    )


def victim(cluster: Cluster, pids: dict[str, Any], process: str) -> int:
    if process == "agent":
        return int(pids["agents"][0])
    if process == "controller":
        return int(pids["controller"])
    sockets = f"--socket\0{cluster.home}/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_text()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if sockets in command and not _is_zygote(parent, sockets):
                return int(entry.name)
    raise AssertionError("no zygote")


def _is_zygote(pid: int, sockets: str) -> bool:
    try:
        return sockets in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def main() -> None:
    chosen = report.arguments(__doc__, "every fourth case")
    cases = CASES[::4] if chosen.quick else CASES
    rows: list[tuple[object, ...]] = []
    figures: dict[str, float] = {}
    with report.folder() as base:
        cluster = Cluster(base / "home", base / "jobs")
        with report.running(cluster):
            for number, case in enumerate(report.counted("case", cases, len(cases))):
                found = run(cluster, cluster.up, base / f"steps-{number}", case)
                exact = "yes" if found.exact else "NO"
                rows.append(
                    (case.stage, case.victim, found.gap_ms, found.usual_ms, found.story,
                     found.restarts, exact)
                )  # fmt: skip
    report.table(
        "kill -9 by stage and victim; steps of 20 ms on a device of their own",
        ["stage", "victim", "longest ms", "usual ms", "versions", "restarts", "exact"],
        rows,
    )
    figures["cases"] = len(rows)
    figures["inexact"] = sum(row[-1] != "yes" for row in rows)
    figures["longest_ms_median"] = statistics.median(float(str(row[2])) for row in rows)
    report.finish(figures, chosen.json)


if __name__ == "__main__":
    main()
