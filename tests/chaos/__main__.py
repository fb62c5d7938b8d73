"""bin/chaos: a real cluster on hosts of its own, through a seeded schedule of faults."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.laboratory import Outcome, run
from tests.chaos.schedule import draw


def main() -> int:
    """Run the seeds; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(prog="bin/chaos", description=__doc__)
    parser.add_argument("--seed", default="1", help="one, or several as in 1-10")
    parser.add_argument("--minutes", type=float, default=0.5, help="of faults; jobs end after it")
    parser.add_argument(
        "--software", action="store_true", help="also upgrades between builds, and restores"
    )
    parser.add_argument("--show", action="store_true", help="only say what would happen")
    parser.add_argument(
        "--keep", type=Path, help="folder for what hosts had on their disks, if something was wrong"
    )
    parser.add_argument("--json", type=Path, help="file for the outcome, a JSON document a line")
    chosen = parser.parse_args()
    if os.geteuid() != 0 and not chosen.show:
        parser.error("namespaces and disks need root; --show needs none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and disks are unmade
    first, _, last = chosen.seed.partition("-")
    wrong = 0
    for seed in range(int(first), int(last or first) + 1):
        schedule = draw(seed, 60.0 * chosen.minutes, software=chosen.software)
        print(
            f"seed {seed}: policy {schedule.policy}, {len(schedule.jobs)} jobs, "
            f"{len(schedule.faults)} faults{', uids of their own' * schedule.own_uids}",
            flush=True,
        )
        if chosen.show:
            print("\n".join(f"  {item}" for item in (*schedule.jobs, *schedule.faults)))
            continue
        with tempfile.TemporaryDirectory(prefix="lab-") as folder:
            kept = chosen.keep / f"seed-{seed}" if chosen.keep else None
            outcome = run(schedule, Path(folder), kept)
        wrong += bool(outcome.problems)
        _tell(outcome)
        if chosen.json:
            _write(chosen.json, seed, outcome)
    if not chosen.show:
        print(f"{wrong} seeds with something not as promised")
    return min(1, wrong)


def _tell(outcome: Outcome) -> None:
    lines = [f"  {fault}: {met or 'nothing there'}" for fault, met in outcome.faults]
    lines += [
        f"  jobs: {outcome.jobs}",
        f"  {outcome.epochs} epochs, {outcome.groups} groups, {outcome.inputs} inputs, {outcome.took_s:.0f} s",
        *(f"  WRONG: {problem}" for problem in outcome.problems),
    ]
    print("\n".join(lines), flush=True)


def _write(path: Path, seed: int, outcome: Outcome) -> None:
    with path.open("a", encoding="utf-8") as file:
        line = {
            "seed": seed,
            "problems": outcome.problems,
            "faults": sum(bool(met) for _, met in outcome.faults),
            "jobs": outcome.jobs,
            "took_s": round(outcome.took_s, 1),
        }
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
