"""The same jobs on real local clusters, one policy after the other: who completes them sooner.

Twelve example trainings come to four slots at random moments, through the client, as users submit
them. Beside the completion times: how fast each example is on these slots, what the simulator says
of the same jobs and how much of it is order alone, and whether anybody learnt worse.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from controlplane.policy.registry import entry
from schemas.errors import OnesError
from tests.bench import live_curves, live_guard, live_watch, report
from tests.bench.live_cluster import FIXED, Run, run
from tests.bench.live_jobs import TRAININGS, Arrival, arrivals, attained_limits, jobs, mean_gap_s
from tests.bench.live_replay import BEST_ORDER, replay
from tests.bench.live_tables import FIRST_COME, compared, ordered, tell_repeat, tell_setting

OURS: Final = "ones"
POLICIES: Final = "ones,fifo,tiresias"
QUICK_GAP_S: Final = 2.0
Options = dict[str, dict[str, Any]]
Averages = dict[str, float]  # completion times in seconds by policy


def main() -> None:
    """Measure, print, write."""
    chosen = arguments()
    figures: dict[str, float] = {}
    with place(chosen.keep) as base:
        for part in watched(base, chosen) if chosen.watch else parts(base, chosen):
            figures |= part
            report.write(figures, chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures.items()))


def arguments() -> argparse.Namespace:
    """The command line."""
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
    """The figures of each policy that is watched; by default ours alone."""
    policies = chosen.policies if chosen.policies != names(POLICIES) else [OURS]
    for policy in policies:
        yield live_watch.watch(policy, chosen.minutes, base, base / f"w-{policy}", chosen.seed)


def names(text: str) -> list[str]:
    """Policies that this release has."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        try:
            entry(name.removesuffix(FIXED))
        except OnesError as error:
            raise argparse.ArgumentTypeError(error.message) from None
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def place(keep: Path | None) -> Iterator[Path]:
    """Where everything is made."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as folder:
        yield Path(folder)


def parts(base: Path, chosen: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The figures of each part, when it is over; the live runs come before what explains them."""
    policies: list[str] = chosen.policies
    ours = OURS if OURS in policies else policies[0]
    curves = live_curves.measure(base, TRAININGS, quick=chosen.quick)
    speeds = live_curves.at_first_batch(curves)
    submitted = jobs(quick=chosen.quick)
    gap_s = QUICK_GAP_S if chosen.quick else mean_gap_s(submitted, speeds)
    options: Options = {"tiresias": {"limits": attained_limits(submitted, speeds)}}
    yield live_curves.tell(curves) | {"mean_gap_s": gap_s}
    tell_setting(submitted, speeds, gap_s, options)
    runs: list[list[Run]] = []
    for repeat in range(1, (1 if chosen.quick else chosen.repeats) + 1):
        coming = arrivals(submitted, repeat, gap_s)
        turn = repeat % len(policies)  # nobody is always the first
        live = {
            policy: one(policy, coming, base, repeat, options)
            for policy in (*policies[turn:], *policies[:turn])
        }
        runs.append([live[policy] for policy in policies])
        tell_repeat(repeat, coming, runs[-1])
        yield compared(runs, ours)
    everyone = [run for repeat_runs in runs for run in repeat_runs]
    yield live_guard.tell(live_guard.reference(submitted, base), everyone, ours)
    if FIRST_COME in policies:
        yield ordered(runs, list(replays(base, runs, options)), ours)


def replays(base: Path, runs: Sequence[Sequence[Run]], options: Options) -> Iterator[Averages]:
    """Simulated averages of each repeat."""
    others = (FIRST_COME, BEST_ORDER, "tiresias", OURS)
    for repeat, live in enumerate(runs, start=1):
        homes = [home(base, run.policy, repeat) for run in live]
        yield replay(home(base, FIRST_COME, repeat), homes, others, options)


def home(base: Path, policy: str, repeat: int) -> Path:
    """The folder of one run's cluster; short, because sockets are in it."""
    return base / f"{repeat}-{policy}"


def one(policy: str, coming: Sequence[Arrival], base: Path, repeat: int, options: Options) -> Run:
    """One policy's run, kept line by line."""
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
