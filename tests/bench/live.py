"""Completion times of the same jobs on real local clusters, one policy after the other.

Twelve example trainings come to four slots at random times, through the client. Also shown: the speed of each
example on these slots, the simulator's completion times of the same jobs and the share that order alone gives,
and whether any job learnt worse.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import fields, replace

from controlplane.policy.registry import POLICIES as REGISTRY
from controlplane.sim.models.recording import (
    ChangeTimes,
    Recording,
    read_recording,
    write_recording,
)
from controlplane.sim.traces.journal_recording import recording_from_journal
from tests.bench import live_speeds, live_watch, report
from tests.bench.live_cluster import FIXED, JOURNAL, MEASURES, Run, job_figures, run
from tests.bench.live_jobs import (
    LOAD,
    SLOTS,
    TRAININGS,
    Arrival,
    Job,
    Speeds,
    arrivals,
    attained_limits,
    jobs,
    mean_gap_s,
)
from tests.support.cluster import Cluster

OURS: Final = "ones"
FIRST_COME: Final = "fifo"
BEST_ORDER: Final = "srtf"  # fixed sizes in the best order that is known; needs an oracle
POLICIES: Final = "ones,fifo,tiresias"
QUICK_GAP_S: Final = 2.0
GENERATIONS: Final = 20  # of a search at each question; a live one has all the time in between
Options = Mapping[str, Mapping[str, Any]]
Averages = Mapping[str, float]  # completion times in seconds by policy


names: Final = report.some_of([*REGISTRY, *(f"{name}{FIXED}" for name in REGISTRY)])


def duration(text: str) -> float:
    if not 0.0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError("give a number above 0")
    return float(text)


REPEATS: Final = (int, None, "with other arrivals; default: 3, quick: 1")
KEEP: Final = (Path, None, "folder that keeps clusters and logs")
GAP: Final = "mean seconds between jobs"


def repeats(chosen: argparse.Namespace) -> range:
    return range(1, (chosen.repeats or (1 if chosen.quick else 3)) + 1)


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "one repeat of three short jobs",
        repeats=REPEATS,
        policies=(
            names, POLICIES,
            f"with commas; NAME{FIXED}: NAME may order jobs, but not choose their sizes",
        ),
        keep=KEEP,
        watch=(
            bool, False,
            "jobs come for --minutes; print each that stays at a size it knows to be slow",
        ),
        minutes=(duration, 20.0, "of --watch, for each policy"),
        seed=(int, 1, "of the jobs of --watch"),
    )  # fmt: skip
    figures: dict[str, float] = {}
    with report.folder(chosen.keep) as base:
        for part in watched(base, chosen) if chosen.watch else parts(base, chosen):
            figures |= part
            report.write(figures, chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures.items()))


def watched(base: Path, chosen: argparse.Namespace) -> Iterator[dict[str, float]]:
    policies = chosen.policies if chosen.policies != names(POLICIES) else [OURS]
    for policy in policies:
        yield live_watch.watch(policy, chosen.minutes, base, base / f"w-{policy}", chosen.seed)


def parts(base: Path, chosen: argparse.Namespace) -> Iterator[dict[str, float]]:
    policies: list[str] = chosen.policies
    ours = OURS if OURS in policies else policies[0]
    curves = live_speeds.measure(base, TRAININGS, quick=chosen.quick)
    speeds = live_speeds.at_first_batch(curves)
    submitted = jobs(lambda example: example.quick if chosen.quick else example.epochs)
    gap_s = QUICK_GAP_S if chosen.quick else mean_gap_s(submitted, speeds)
    options: Options = {"tiresias": {"limits": attained_limits(submitted, speeds)}}
    yield live_speeds.tell_speeds(curves) | {"mean_gap_s": gap_s}
    tell_setting(submitted, speeds, gap_s, options)
    runs: list[list[Run]] = []
    for repeat in repeats(chosen):
        coming = arrivals(submitted, repeat, gap_s)
        runs.append(in_turn(policies, coming, base, repeat, options))
        tell_repeat(repeat, coming, runs[-1])
        yield compared(runs, ours)
    everyone = [run for repeat_runs in runs for run in repeat_runs]
    yield live_speeds.tell_quality(live_speeds.reference(submitted, base), everyone, ours)
    if FIRST_COME in policies:
        others = (FIRST_COME, BEST_ORDER, "tiresias", OURS)
        simulated = [
            {
                policy: float(found["avg_jct_s"])
                for policy, found in replay(
                    home(base, FIRST_COME, at), others, options, [home(base, one, at) for one in policies]
                ).items()
            }
            for at in repeats(chosen)
        ]  # fmt: skip
        yield ordered(runs, simulated, ours)


# --- runs


def home(base: Path, policy: str, repeat: int) -> Path:
    return base / f"{repeat}-{policy}"


def in_turn(
    policies: Sequence[str], coming: Sequence[Arrival], base: Path, repeat: int, options: Options
) -> list[Run]:
    """Return a run of each policy; each repeat starts with another policy."""
    turn = repeat % len(policies)
    live = {}
    for policy in (*policies[turn:], *policies[:turn]):
        given = ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.get(policy, {}).items())
        table = f"{{ {given} }}" if given else ""
        live[policy] = run(policy, coming, base, home(base, policy, repeat), table)
    return [live[policy] for policy in policies]


# --- the same jobs, simulated


def replay(
    home: Path, policies: Sequence[str], options: Options, others: Sequence[Path] = ()
) -> dict[str, dict[str, Any]]:
    """Return the results of `ones sim run` by policy for the jobs in a cluster's journal.

    The costs of changes that this cluster did not make are those in the journals of `others`.
    Policies know the work that users stated, as they do live.
    """
    tool, file = Cluster(home, home), home / "jobs.rec"
    imported = tool.ones("sim", "import", str(home / JOURNAL), str(file), "--layout", "journal")
    assert imported.code == 0, imported.err
    recording = _with_changes(
        read_recording(file), [recording_from_journal(other / JOURNAL) for other in others]
    )
    write_recording(recording, file)
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
            "--generations", str(GENERATIONS), "--think-every", "1", "-o", "json", *given,
        )  # fmt: skip
        assert simulated.code == 0, simulated.err
        found[policy] = simulated.json
    return found


def _with_changes(recording: Recording, others: Sequence[Recording]) -> Recording:
    """Complete the change times of `recording` by the median of the others."""
    told: dict[str, float] = {}
    for field in fields(ChangeTimes):
        known = [getattr(other.took, field.name) for other in others]
        seconds = [value for value in known if value is not None]
        if getattr(recording.took, field.name) is None and seconds:
            told[field.name] = statistics.median(seconds)
    return replace(recording, took=replace(recording.took, **told))


# --- tables and figures


def tell_setting(
    submitted: Sequence[Job],
    speeds: Mapping[str, Speeds],
    gap_s: float,
    options: Options,
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
        [one.job.name, f"{one.at:.1f}", one.wanted, *(f"{e.jct_s:.1f} ({e.rescales})" for e in ended)]
        for one, *ended in zip(coming, *(run.jobs for run in live), strict=True)
    ]  # fmt: skip
    heads = ["", "comes at s", "wants", *(run.policy for run in live)]
    report.table(f"repeat {repeat}: completion times, s (slots changes)", heads, rows)
    rows = [[run.policy, *(told(run) for told in MEASURES.values())] for run in live]
    report.table(f"repeat {repeat}", ["", *MEASURES], rows)


def compared(runs: Sequence[Sequence[Run]], ours: str) -> dict[str, float]:
    """Print ours against each other policy by repeat; figures over all repeats.

    Returns:
        Means over repeats in seconds and shares; `vs_*` are geometric means over repeats of the
        ratio of average completion times, below 1 where ours is faster; `*_N` of repeat N.
    """
    figures: dict[str, float] = {}
    columns = {column[0].policy: column for column in zip(*runs, strict=True)}
    for policy, column in columns.items():
        ended = [job for run in column for job in run.jobs]
        figures |= {
            f"{name}_{policy}": statistics.fmean(getattr(run, field) for run in column)
            for name, field in (
                ("avg_jct_s", "average_s"), ("p90_jct_s", "p90_s"), ("makespan_s", "makespan_s"),
                ("full", "full"), ("load", "load"),
            )
        }  # fmt: skip
        figures[f"queue_s_{policy}"] = statistics.fmean(job.queued_s for job in ended)
        figures |= job_figures(policy, ended)
    rows = []
    for other in (policy for policy in columns if policy != ours):
        found = report.ratios(
            f"vs_{other}",
            *([run.average_s for run in columns[policy]] for policy in (ours, other)),
        )
        figures |= found
        mean, *each = found.values()
        cells = [f"{ratio:.3f}" for ratio in (*each, mean)]
        rows.append([f"{ours} / {other}", *cells, f"{1.0 - mean:.0%} lower"])
    heads = ["", *(f"repeat {n}" for n in range(1, len(runs) + 1)), "geometric mean", ""]
    report.table("average completion times, live", heads, rows)
    return figures


ORDERING: Final = f"""\
Simulated on the journal of each repeat's live {FIRST_COME} run. `{BEST_ORDER}` gives users' sizes in the best
order that is known, with an oracle for lengths: {BEST_ORDER} / {FIRST_COME} is what order alone could give, the
rest of a gain is sizes and batches. Changes take what they took in the other live runs. In the
simulator a speed does not depend on who else trains, while {SLOTS} workers share {os.cpu_count()} cores here; and a
simulated job takes more samples at a larger batch, while a live one stops after its epochs."""


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
    order = geometric(simulated, BEST_ORDER, FIRST_COME)
    figures["ordering_vs_fifo"] = order
    for other in (FIRST_COME, "tiresias"):
        figures[f"sim_vs_{other}"] = geometric(simulated, "ones", other)
    heads = [f"{kind} {n}" for n in range(1, len(runs) + 1) for kind in ("live", "simulated")]
    report.table("average completion times, s, by repeat", ["", *heads], rows)
    report.say(ORDERING)
    gain = 1.0 - geometric(by_name, ours, FIRST_COME)
    report.say(
        f"order alone, simulated: {1.0 - order:.0%} lower than {FIRST_COME}; {ours}, live: {gain:.0%} "
        f"lower; simulated: {1.0 - figures[f'sim_vs_{FIRST_COME}']:.0%}"
    )
    for policy in by_name[0]:
        if policy.endswith(FIXED):
            fixed = geometric(by_name, policy, FIRST_COME)
            report.say(f"order alone, live ({policy}): {1.0 - fixed:.0%} lower than {FIRST_COME}")
    return figures


def geometric(averages: Sequence[Averages], ours: str, other: str) -> float:
    return statistics.geometric_mean(each[ours] / each[other] for each in averages)


if __name__ == "__main__":
    main()
