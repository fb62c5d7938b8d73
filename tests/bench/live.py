"""Completion times of the same jobs on real local clusters, one policy after the other.

Twelve example trainings come to four slots at random times, through the client. Also shown: the speed of each
example on these slots, the simulator's completion times of the same jobs and the share that order alone gives,
and whether any job learnt worse.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from controlplane.policy.registry import entry
from schemas.errors import OnesError
from tests.bench import live_speeds, live_watch, report
from tests.bench.live_cluster import FIXED, Run, run
from tests.bench.live_jobs import TRAININGS, Arrival, arrivals, attained_limits, jobs, mean_gap_s
from tests.bench.live_tables import (
    BEST_ORDER,
    FIRST_COME,
    compared,
    ordered,
    replay,
    tell_repeat,
    tell_setting,
)

OURS: Final = "ones"
POLICIES: Final = "ones,fifo,tiresias"
QUICK_GAP_S: Final = 2.0
Options = dict[str, dict[str, Any]]
Averages = dict[str, float]  # completion times in seconds by policy


def main() -> None:
    chosen = arguments()
    figures: dict[str, float] = {}
    with report.folder(chosen.keep) as base:
        for part in watched(base, chosen) if chosen.watch else parts(base, chosen):
            figures |= part
            report.write(figures, chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures.items()))


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__ or "", "one repeat of three short jobs")
    parser.add_argument("--repeats", type=int, default=3, help="with other arrivals")
    said = f"with commas; NAME{FIXED}: NAME may order jobs, but not choose their sizes"
    parser.add_argument("--policies", type=names, default=names(POLICIES), help=said)
    parser.add_argument("--keep", type=Path, help="folder that keeps clusters, logs, jobs.jsonl")
    held = "jobs come for --minutes; print each that stays at a size it knows to be slow"
    parser.add_argument("--watch", action="store_true", help=held)
    parser.add_argument("--minutes", type=float, default=20.0, help="of --watch, for each policy")
    parser.add_argument("--seed", type=int, default=1, help="of the jobs of --watch")
    chosen = parser.parse_args()
    if not 0.0 < chosen.minutes < math.inf:
        parser.error("--minutes: give a number above 0")
    return chosen


def watched(base: Path, chosen: argparse.Namespace) -> Iterator[dict[str, float]]:
    policies = chosen.policies if chosen.policies != names(POLICIES) else [OURS]
    for policy in policies:
        yield live_watch.watch(policy, chosen.minutes, base, base / f"w-{policy}", chosen.seed)


def names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        try:
            entry(name.removesuffix(FIXED))
        except OnesError as error:
            raise argparse.ArgumentTypeError(error.message) from None
    return list(dict.fromkeys(found))


def parts(base: Path, chosen: argparse.Namespace) -> Iterator[dict[str, float]]:
    policies: list[str] = chosen.policies
    ours = OURS if OURS in policies else policies[0]
    curves = live_speeds.measure(base, TRAININGS, quick=chosen.quick)
    speeds = live_speeds.at_first_batch(curves)
    submitted = jobs(quick=chosen.quick)
    gap_s = QUICK_GAP_S if chosen.quick else mean_gap_s(submitted, speeds)
    options: Options = {"tiresias": {"limits": attained_limits(submitted, speeds)}}
    yield live_speeds.tell_speeds(curves) | {"mean_gap_s": gap_s}
    tell_setting(submitted, speeds, gap_s, options)
    runs: list[list[Run]] = []
    for repeat in range(1, (1 if chosen.quick else chosen.repeats) + 1):
        coming = arrivals(submitted, repeat, gap_s)
        runs.append(in_turn(policies, coming, base, repeat, options))
        tell_repeat(repeat, coming, runs[-1])
        yield compared(runs, ours)
    everyone = [run for repeat_runs in runs for run in repeat_runs]
    yield live_speeds.tell_quality(live_speeds.reference(submitted, base), everyone, ours)
    if FIRST_COME in policies:
        yield ordered(runs, list(replays(base, runs, options)), ours)


def replays(base: Path, runs: Sequence[Sequence[Run]], options: Options) -> Iterator[Averages]:
    others = (FIRST_COME, BEST_ORDER, "tiresias", OURS)
    for repeat, live in enumerate(runs, start=1):
        homes = [home(base, run.policy, repeat) for run in live]
        yield replay(home(base, FIRST_COME, repeat), homes, others, options)


def home(base: Path, policy: str, repeat: int) -> Path:
    return base / f"{repeat}-{policy}"


def in_turn(
    policies: Sequence[str], coming: Sequence[Arrival], base: Path, repeat: int, options: Options
) -> list[Run]:
    """Return a run of each policy; each repeat starts with another policy."""
    turn = repeat % len(policies)
    live = {
        policy: one(policy, coming, base, repeat, options)
        for policy in (*policies[turn:], *policies[:turn])
    }
    return [live[policy] for policy in policies]


def one(policy: str, coming: Sequence[Arrival], base: Path, repeat: int, options: Options) -> Run:
    given = options.get(policy, {})
    table = (
        f"{{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in given.items())} }}" if given else ""
    )
    done = run(policy, coming, base, home(base, policy, repeat), table)
    with (base / "jobs.jsonl").open("a", encoding="utf-8") as file:
        for ended in done.jobs:
            line = {"repeat": repeat, "policy": policy, **to_builtins(ended), "job": ended.job.name}
            file.write(json.dumps(line) + "\n")
    return done


if __name__ == "__main__":
    main()
