"""Many changes and losses of jobs; see `bin/soak`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.cluster.preemptions import preemptions
from tests.training.groups import Slots
from tests.training.matrix import CHANGES, cells, wrong
from tests.training.mixed_trainings import MODELS
from tests.training.random_changes import Outcome, Plan, carried_through, plan

CHANGES_PER_JOB: Final = 25


@contextlib.contextmanager
def slots_of(device: str) -> Iterator[None]:
    """Train on the CPU, or on the simulated device in a mode of NCCL's double."""
    before = Slots.prelude, Slots.environment
    if device != "cpu":
        Slots.prelude = "import tests.support.simgpu.worker\n"
        Slots.environment = {"NCCL_DOUBLE": device, "SIMGPU_LATE_US": "300,0"}
    try:
        yield
    finally:
        Slots.prelude, Slots.environment = before


@contextlib.contextmanager
def place(device: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as home, slots_of(device):
        yield Path(home)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def changes(seed: int, count: int, device: str, only: int | None, model: str) -> int:
    jobs = [only] if only is not None else range(-(-count // CHANGES_PER_JOB))
    plans = [plan(seed, job, CHANGES_PER_JOB, model) for job in jobs]
    say(f"plan {hashlib.sha256(repr(plans).encode()).hexdigest()[:16]}")
    outcomes: list[Outcome] = []
    began, bad = time.monotonic(), 0
    for job, the in zip(jobs, plans, strict=True):
        with place(device) as home:
            try:
                outcomes.append(carried_through(the, home))
            except AssertionError as error:
                say(f"job {job}: FAILED {the.training}\n{error}")
                bad += 1
                continue
        say(described(job, the, outcomes[-1]))
    summarise(outcomes, time.monotonic() - began)
    return bad + sum(not outcome.exact for outcome in outcomes)


def described(job: int, the: Plan, outcome: Outcome) -> str:
    return (
        f"job {job}: {'exact' if outcome.exact else 'WRONG'} ({the.training.described}):"
        f" {outcome.changes} changes, {outcome.deaths} deaths, {outcome.recoveries} recoveries,"
        f" {outcome.resumed} resumed, {outcome.epochs} epochs, {outcome.steps} steps, lost"
        f" {outcome.lost}, repeated {outcome.repeated}, unequal {outcome.unequal}, apart"
        f" {outcome.apart:.1e}" + "".join(f"\n{where}" for where in outcome.where)
    )


def summarise(outcomes: Sequence[Outcome], seconds: float) -> None:
    def totals(*names: str) -> str:
        return ", ".join(f"{sum(getattr(o, name) for o in outcomes)} {name}" for name in names)

    counted = totals("changes", "deaths", "recoveries", "resumed", "epochs", "steps", "samples")
    say(f"{counted} in {seconds:.0f} s")
    furthest = max((outcome.apart for outcome in outcomes), default=0.0)
    say(f"{totals('lost', 'repeated', 'unequal')}, apart {furthest:.1e}")


def matrix(device: str, part: str) -> int:
    first, of = map(int, part.split("/"))
    jobs, bad, began = cells()[first::of], 0, time.monotonic()
    for training in jobs:
        with place(device) as home:
            try:
                found, furthest = wrong(training, home)
            except AssertionError as error:
                found, furthest = {"job": str(error)}, 0.0
        bad += bool(found)
        say(f"{training.described}: {found or f'as one process, {furthest:.1e}'}")
    seconds = time.monotonic() - began
    say(f"{len(jobs)} jobs, {len(CHANGES)} changes each: {bad} wrong, {seconds:.0f} s")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/soak", description=__doc__)
    parser.add_argument("what", choices=("changes", "matrix", "preemptions"))
    parser.add_argument("--device", choices=("cpu", "ordinary", "worst"), default="cpu")
    parser.add_argument("--changes", type=int, default=1000, help="at random, 25 a job")
    parser.add_argument("--seed", type=int, default=1, help="of the changes or pre-emptions")
    parser.add_argument("--preemptions", type=int, default=200)
    parser.add_argument("--job", type=int, help="of the changes: only this one")
    parser.add_argument("--model", default="", choices=MODELS, help="of the changes; default: any")
    parser.add_argument("--part", default="0/1", help="of the matrix: every N-th job, as K/N")
    words = parser.parse_args()
    if words.what == "changes":
        return int(changes(words.seed, words.changes, words.device, words.job, words.model) > 0)
    if words.what == "preemptions":
        return preemptions(words.preemptions, words.seed)
    return int(matrix(words.device, words.part) > 0)


if __name__ == "__main__":
    sys.exit(main())
