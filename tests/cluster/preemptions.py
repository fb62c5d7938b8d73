"""Programs that give back borrowed slots many times, and what they lose; see `bin/soak`.

On 8 slots, programs of one project use its 4 guaranteed slots and borrow the other 4. Programs of 1
to 4 slots of another project, which has a guarantee of 4, take them back at random times.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from tests.cluster.test_shared_cluster import user_of
from tests.support.cluster import running

RULES: Final = """
[sharing.projects.vision]
guaranteed = 4
[sharing.projects.nlp]
guaranteed = 4
"""
BORROWERS: Final = 8  # one slot each
GRACE_S: Final = 5
SAVES: Final = """
import os, pathlib, random, signal, sys, time

def count(path):
    return int(path.read_text() or 0) if path.exists() else 0

own = pathlib.Path(os.environ["COUNTS"], os.environ["ONES_JOB"])
saved, reached = own.with_suffix(".saved"), own.with_suffix(".reached")
done = count(saved)
with own.with_suffix(".starts").open("a") as file:
    file.write(f"{count(reached) - done}\\n")

def save(*_):
    time.sleep(random.uniform(0.0, 0.5))
    saved.write_text(str(done))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
while True:
    time.sleep(0.01)
    done += 1
    reached.write_text(str(done))
"""


def lost_by(counts: Path) -> list[int]:
    """Return the steps that each restart of a program repeats."""
    found = []
    for path in counts.glob("*.starts"):
        _first, *again = map(int, path.read_text().split())
        found += again
    return found


def preemptions(wanted: int, seed: int) -> int:
    """Pre-empt programs so many times; return 1 if more than 5 % of them lost work."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    began, rounds, waits = time.monotonic(), 0, list[float]()
    with tempfile.TemporaryDirectory(prefix="ones-") as base:
        folder, counts = Path(base, "files"), Path(base, "counts")
        folder.mkdir()
        counts.mkdir()
        (folder / "saves.py").write_text(SAVES)
        with running(Path(base), RULES, agents=2, slots=4) as cluster:
            lender = user_of(cluster, Path(base), "lender", "nlp")
            borrower = user_of(cluster, Path(base), "borrower", "vision")
            options = ("--detach", "--grace-s", str(GRACE_S), "--env", f"COUNTS={counts}")
            for _ in range(BORROWERS):
                done = borrower.ones("run", *options, "--", "torchrun", "saves.py", cwd=folder)
                assert done.code == 0, done.err
            while len(lost_by(counts)) < wanted:
                time.sleep(rng.uniform(0.5, 2.0))
                lasts_s, slots = rng.uniform(0.1, 1.0), str(rng.randint(1, 4))
                command = ("--slots", slots, "--", "sleep", f"{lasts_s:.2f}")
                asked = time.monotonic()
                done = lender.ones("run", *command, cwd=folder)
                waits.append(time.monotonic() - asked - lasts_s)
                assert done.code == 0, done.err
                rounds += 1
                if rounds % 20 == 0:
                    sys.stdout.write(f"{rounds} programs, {len(lost_by(counts))} pre-emptions\n")
                    sys.stdout.flush()
            lost = lost_by(counts)
    kept = sum(steps <= 0 for steps in lost) / len(lost)
    sys.stdout.write(
        f"{len(lost)} pre-emptions for {rounds} programs in {time.monotonic() - began:.0f} s: "
        f"{100 * kept:.1f} % lost no step, at most {max(lost)} steps of 10 ms lost; programs "
        f"waited {median(waits):.1f} s (median), {max(waits):.1f} s at most, with their start\n"
    )
    return int(kept < 0.95)
