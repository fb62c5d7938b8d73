"""Tables and figures of `bin/bench live`, and the simulation of a live run from its journal."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.structs import fields, replace

from controlplane.sim.models.recording import (
    ChangeTimes,
    Recording,
    read_recording,
    write_recording,
)
from controlplane.sim.traces.journal_recording import recording_from_journal
from tests.bench import report
from tests.bench.live_cluster import FIXED, JOURNAL, Run
from tests.bench.live_jobs import LOAD, SLOTS, Arrival, Job, Speeds
from tests.support.cluster import Cluster

BEST_ORDER: Final = "srtf"  # fixed sizes in the best order that is known; needs an oracle
GENERATIONS: Final = 20  # of a search at each question; a live one has all the time in between
STANDS_S: Final = 0.3  # that nobody trains in a change of a group; journals do not tell


def replay(
    home: Path,
    others: Sequence[Path],
    policies: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Average completion times of the jobs in a cluster's journal under other policies, simulated.

    Speeds by size, lengths, arrivals and the time of starts are those that the journal has; how
    long changes take that this cluster never made, other clusters tell. Policies know the work
    that users stated, as they do live.

    Returns:
        Seconds by policy.
    """
    tool, file = Cluster(home, home), home / "jobs.rec"
    imported = tool.ones("sim", "import", str(home / JOURNAL), str(file), "--layout", "journal")
    assert imported.code == 0, imported.err
    recording = _with_changes(
        read_recording(file), [recording_from_journal(other / JOURNAL) for other in others]
    )
    write_recording(recording, file)
    start_s = recording.took.start_s or 0.0
    found = {}
    for policy in report.counted("simulated policy", policies, len(policies)):
        given = [
            word
            for name, value in options.get(policy, {}).items()
            for word in ("--option", f"{name}={json.dumps(value)}")
        ]
        simulated = tool.ones(
            "sim", "run", "--policy", policy, "--physics", "recorded", "--workload", str(file),
            "--nodes", "1", "--gpus-per-node", str(SLOTS), "--knowledge", "L3",
            "--stall", str(STANDS_S), "--first-stall", str(start_s),
            "--generations", str(GENERATIONS), "--think-every", "1", "-o", "json", *given,
        )  # fmt: skip
        assert simulated.code == 0, simulated.err
        found[policy] = float(simulated.json["avg_jct_s"])
    return found


def _with_changes(recording: Recording, others: Sequence[Recording]) -> Recording:
    """Complete the change times of `recording` by the median of the others."""
    told: dict[str, float] = {}
    for field in fields(ChangeTimes):
        known = [getattr(other.took, field.name) for other in others]
        seconds = [value for value in known if value is not None]
        if getattr(recording.took, field.name) is None and seconds:
            told[field.name] = median(seconds)
    return replace(recording, took=replace(recording.took, **told))


FIRST_COME: Final = "fifo"
ORDERING: Final = f"""\
Simulated on the journal of each repeat's live {FIRST_COME} run. `{BEST_ORDER}` gives users' sizes in the best
order that is known, with an oracle for lengths: {BEST_ORDER} / {FIRST_COME} is what order alone could give, the
rest of a gain is sizes and batches. Changes take what they took in the other live runs. In the
simulator a speed does not depend on who else trains, while {SLOTS} workers share {os.cpu_count()} cores here; and a
simulated job takes more samples at a larger batch, while a live one stops after its epochs."""


def tell_setting(
    submitted: Sequence[Job],
    speeds: Mapping[str, Speeds],
    gap_s: float,
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    alone = sorted(job.alone_s(speeds, 1) for job in submitted)
    limits = " and ".join(f"{limit:g}" for limit in options["tiresias"]["limits"])
    report.say(
        f"{len(submitted)} jobs of {alone[0]:.1f} to {alone[-1]:.1f} s on a slot of their own, "
        f"{sum(alone):.0f} s in all, {gap_s:.1f} s apart on average "
        f"(a full bench: {LOAD:g} times what the cores can do)\n"
        f"tiresias has limits of {limits} slot seconds, a third and two thirds of what these jobs "
        "need;\nwith its defaults, made for jobs of hours, it would be fifo"
    )


def tell_repeat(repeat: int, coming: Sequence[Arrival], live: Sequence[Run]) -> None:
    rows: list[list[object]] = [
        [
            arrival.job.name,
            f"{arrival.at:.1f}",
            arrival.wanted,
            *(_completion(run, place) for run in live),
        ]
        for place, arrival in enumerate(coming)
    ]
    heads = ["", "comes at s", "wants", *(run.policy for run in live)]
    report.table(f"repeat {repeat}: completion times, s (slots changes)", heads, rows)
    report.table(
        f"repeat {repeat}",
        ["", "avg JCT s", "p90", "queue", "ran", "makespan", "all slots taken",
         "re-scales/job", "batch changes/job", "not exact", "failed", "load"],
        [_line(run) for run in live],
    )  # fmt: skip


def _completion(run: Run, place: int) -> str:
    ended = run.jobs[place]
    return f"{ended.jct_s:.1f} ({ended.rescales})"


def _line(run: Run) -> list[object]:
    mean = statistics.fmean
    return [
        run.policy, f"{run.average_s:.1f}", f"{run.p90_s:.1f}",
        f"{mean(e.queued_s for e in run.jobs):.1f}", f"{mean(e.ran_s for e in run.jobs):.1f}",
        f"{run.makespan_s:.1f}", f"{run.full:.0%}", f"{mean(e.rescales for e in run.jobs):.1f}",
        f"{mean(e.batch_changes for e in run.jobs):.1f}", sum(not e.exact for e in run.jobs),
        sum(e.state != "succeeded" for e in run.jobs), f"{run.load:.1f}",
    ]  # fmt: skip


def compared(runs: Sequence[Sequence[Run]], ours: str) -> dict[str, float]:
    """Print ours against each other policy by repeat; figures over all repeats.

    Returns:
        Means over repeats in seconds and shares; `vs_*` are geometric means over repeats of the
        ratio of average completion times, below 1 where ours is faster; `*_N` of repeat N.
    """
    figures: dict[str, float] = {}
    for place, policy in enumerate(run.policy for run in runs[0]):
        column = [repeat[place] for repeat in runs]
        everyone = [ended for run in column for ended in run.jobs]
        figures |= {
            f"avg_jct_s_{policy}": statistics.fmean(run.average_s for run in column),
            f"p90_jct_s_{policy}": statistics.fmean(run.p90_s for run in column),
            f"queue_s_{policy}": statistics.fmean(e.queued_s for e in everyone),
            f"makespan_s_{policy}": statistics.fmean(run.makespan_s for run in column),
            f"full_{policy}": statistics.fmean(run.full for run in column),
            f"rescales_per_job_{policy}": statistics.fmean(e.rescales for e in everyone),
            f"not_exact_{policy}": sum(not e.exact for e in everyone),
            f"failed_{policy}": sum(e.state != "succeeded" for e in everyone),
            f"load_{policy}": statistics.fmean(run.load for run in column),
        }
    rows = []
    for other in (run.policy for run in runs[0] if run.policy != ours):
        ratios = [_average(repeat, ours) / _average(repeat, other) for repeat in runs]
        figures[f"vs_{other}"] = statistics.geometric_mean(ratios)
        figures |= {f"vs_{other}_{n}": ratio for n, ratio in enumerate(ratios, start=1)}
        gain = f"{1.0 - figures[f'vs_{other}']:.0%} lower"
        each = [f"{ratio:.3f}" for ratio in ratios]
        rows.append([f"{ours} / {other}", *each, f"{figures[f'vs_{other}']:.3f}", gain])
    heads = ["", *(f"repeat {n}" for n in range(1, len(runs) + 1)), "geometric mean", ""]
    report.table("average completion times, live", heads, rows)
    return figures


def ordered(
    runs: Sequence[Sequence[Run]], simulated: Sequence[Mapping[str, float]], ours: str
) -> dict[str, float]:
    """Print the simulator's prediction beside the live averages; how much of a gain is order.

    Returns:
        `sim_avg_jct_s_*`, `sim_vs_*` (ratios as in `compared`); `ordering_vs_fifo`, the ratio of
        the best order of users' sizes to `fifo`.
    """
    figures: dict[str, float] = {}
    rows = []
    by_name = [{run.policy: run.average_s for run in repeat} for repeat in runs]
    for policy in (*simulated[0], *(name for name in by_name[0] if name not in simulated[0])):
        cells = []
        for live, predicted in zip(by_name, simulated, strict=True):
            cells.append(f"{live[policy]:.1f}" if policy in live else "")
            cells.append(f"{predicted[policy]:.1f}" if policy in predicted else "")
        rows.append([policy, *cells])
    for policy in simulated[0]:
        figures[f"sim_avg_jct_s_{policy}"] = statistics.fmean(p[policy] for p in simulated)
    order = _ratio(simulated, BEST_ORDER, FIRST_COME)
    figures["ordering_vs_fifo"] = order
    for other in (FIRST_COME, "tiresias"):
        figures[f"sim_vs_{other}"] = _ratio(simulated, "ones", other)
    heads = [f"{kind} {n}" for n in range(1, len(runs) + 1) for kind in ("live", "simulated")]
    report.table("average completion times, s, by repeat", ["", *heads], rows)
    report.say(ORDERING)
    gain = 1.0 - _ratio(by_name, ours, FIRST_COME)
    report.say(
        f"order alone, simulated: {1.0 - order:.0%} lower than {FIRST_COME}; {ours}, live: {gain:.0%} "
        f"lower; simulated: {1.0 - figures[f'sim_vs_{FIRST_COME}']:.0%}"
    )
    for policy in by_name[0]:
        if policy.endswith(FIXED):
            fixed = _ratio(by_name, policy, FIRST_COME)
            report.say(f"order alone, live ({policy}): {1.0 - fixed:.0%} lower than {FIRST_COME}")
    return figures


def _average(repeat: Sequence[Run], policy: str) -> float:
    return next(run.average_s for run in repeat if run.policy == policy)


def _ratio(averages: Sequence[Mapping[str, float]], ours: str, other: str) -> float:
    return statistics.geometric_mean(each[ours] / each[other] for each in averages)
