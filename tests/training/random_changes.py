"""Random changes of running jobs, with losses of every kind, on real processes.

A plan is a pure function of its seed. A job grows, shrinks, gets other batches, is paused and
resumed, and loses members at named points, at any moment, or all at once. In the end every sample
of every epoch was taken once, all ranks had equal parameters, and one plain process has the same
parameters. `bin/soak changes` does it to many jobs.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from schemas.nodes import ResumePoint
from schemas.wire.agent import EpochReported, Suspended, WorkerReady
from tests.training.groups import Crew, Worker, furthest
from tests.training.mixed_trainings import BASE_BATCH, Shares, Training, any_training, replayed

STRIDE: Final = 20  # versions that one change may need, with all that goes wrong in it
MOST: Final = 4  # workers
POINTS: Final = (
    "ready", "build", "built", "announce", "boundary", "swapped", "handover.send",
    "handover.receive", "handed_over", "reduce", "reduce", "reduced", "reduced", "report",
)  # fmt: skip
LATER: Final = ("reduce.later", "reduced.later") * 4  # with several optimizers
EXACT: Final = 1e-9


# --- the plan


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a job's group, and what goes wrong in it."""

    number: int
    shares: tuple[int, ...]
    kind: str = "resize"  # or pause, or die: all processes at once
    fault: str = ""  # a member dies at a named point
    killed: int | None = None  # this one dies, by place among all processes, whenever it is
    moment_s: float = 0.0  # after the order
    epochs: int = 0  # that are waited for afterwards

    @property
    def version(self) -> int:
        return STRIDE * self.number


@dataclass(frozen=True, slots=True)
class Plan:
    training: Training
    first: tuple[int, ...]  # shares at the start
    changes: tuple[Change, ...]

    @property
    def faults(self) -> str:
        return ";".join(change.fault for change in self.changes if change.fault)


def plan(seed: int, job: int, changes: int, model: str = "") -> Plan:
    draw = random.Random(f"{seed}/{job}")  # noqa: S311 - a plan, no secret
    training = any_training(draw, model)
    first = _shares(draw, BASE_BATCH)
    points = POINTS + LATER if training.loop == "turns" else POINTS
    return Plan(training, first, tuple(_change(draw, n + 1, points) for n in range(changes)))


def _shares(draw: random.Random, batch: int) -> tuple[int, ...]:
    count = draw.randint(1, MOST)
    each, rest = divmod(batch, count)
    return tuple(each + (rank < rest) for rank in range(count))


def _change(draw: random.Random, number: int, points: Sequence[str]) -> Change:
    batch = draw.choice((BASE_BATCH, BASE_BATCH, draw.randint(8, 30)))
    shares = _shares(draw, batch)
    fate, epochs = draw.random(), draw.choice((0, 0, 1, 2))
    if fate < 0.08:
        dies = draw.choice(("", "", "suspend", "suspended"))
        fault = f"{dies}:rank=0:version={STRIDE * number}=kill" if dies else ""
        return Change(number, shares, "pause", fault, epochs=epochs)
    if fate < 0.12:
        return Change(number, shares, kind="die", epochs=epochs)
    fault, killed, moment = "", None, 0.0
    if fate < 0.37:
        point, rank = draw.choice(points), draw.randrange(MOST)
        fault = f"{point}:rank={rank}:version={STRIDE * number}=kill"
    elif fate < 0.52:
        killed, moment = draw.randrange(MOST), draw.uniform(0.0, 0.3)
    return Change(number, shares, "resize", fault, killed, moment, epochs)


# --- a job that is carried through it


@dataclass(slots=True)
class Outcome:
    changes: int = 0
    deaths: int = 0
    recoveries: int = 0
    resumed: int = 0  # from a checkpoint, after all had died
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    lost: int = 0  # samples of an epoch that nobody took
    repeated: int = 0  # samples that were taken twice
    unequal: int = 0  # epochs at whose end ranks differed
    apart: float = 0.0  # from one plain process, the largest difference of a parameter
    where: list[str] = field(default_factory=list)  # samples are missing

    @property
    def exact(self) -> bool:
        return not (self.lost or self.repeated or self.unequal) and self.apart < EXACT


class StormyCrew(Crew):
    def __init__(self, home: Path, training: Training, faults: str) -> None:
        super().__init__(home, training.script(), faults=faults, bound=training.bound)
        self.outcome = Outcome()
        self._tolerant = True
        self._shares: Sequence[int] = ()
        self._kills: tuple[float, int] | None = None  # when, and which of the processes

    def carry_out(self, change: Change) -> None:
        self.until(lambda: self._kills is None, "whoever is to die is dead")
        self.version = max(self.version, change.version - 1)
        self._shares = change.shares
        if change.kind == "die":
            self._die()
            self.nobody_has_the_state()
        elif self.broken():
            self.recover()
        elif change.kind == "pause":
            self._pause(change)
        else:
            if change.killed is not None:
                self._kills = (time.monotonic() + change.moment_s, change.killed)
            self.change_if_it_can(*change.shares)
        if change.epochs:
            self._trains(change.epochs)
        self.outcome.changes += 1

    def _pause(self, change: Change) -> None:
        self.begin_suspend()
        paused = self.version
        self.until(lambda: self.suspended() or self.broken(), "the job is suspended or broken")
        if self.suspended() and self.version == paused:
            self.until(lambda: self.broken() or not self._alive(), "they left or one died")
            for worker in self._alive():  # who misses the one that died
                worker.process.kill()
            self.start(*change.shares, resume=self.finish_suspend())
        else:
            self.recover()

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._members() if worker.alive]

    def deaths(self) -> int:
        return sum(bool(worker.process.exitcode) for worker in self.workers.values())

    def _trains(self, epochs: int) -> None:
        wanted = len(self.epochs()) + epochs
        while True:
            self.until(
                lambda: self.broken() or len(self.epochs()) >= wanted, f"{wanted} epochs are over"
            )
            if not self.broken():
                return
            self.recover()

    def _hear(self) -> None:
        super()._hear()
        if self._kills is not None and time.monotonic() >= self._kills[0]:
            alive = [worker for worker in self.workers.values() if worker.alive]
            if alive:
                alive[self._kills[1] % len(alive)].process.kill()
            self._kills = None

    def _die(self) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        self.until(lambda: not any(w.alive for w in self.workers.values()), "all are dead")

    def nobody_has_the_state(self) -> None:
        """Resume from the last durable point, since all holders of the state are lost."""
        self._kills = None
        self._die()
        points = [
            (step, ResumePoint(epoch=one.epoch, version=one.group))
            for one in (*self.reported(EpochReported), *self.reported(Suspended))
            for step in [one.facts.step if isinstance(one, EpochReported) else one.step]
        ]
        step, point = max(points, default=(0, None), key=lambda found: found[0])
        lost = list(self.workers.values())
        self.start(*self._shares, resume=point)
        ready = [r for w in self._members() for r in w.reports if isinstance(r, WorkerReady)]
        said = (self._members()[0].folder / "log").read_text()
        if resumed := re.search(r"resumes after epoch \d+, step (\d+)", said):
            step = int(resumed[1])  # a new rank 0's checkpoint may be of a later step
        self._forget(lost, step, ready[0].resumed_epoch)
        self.outcome.resumed += 1

    def _forget(self, lost: Sequence[Worker], step: int, epoch: int) -> None:
        """Drop the records of what was trained after the resume point."""
        names = {worker.name for worker in lost}
        for worker in lost:
            _keep(worker.folder / "samples", lambda e: e["epoch"] <= epoch or e["step"] <= step)
        _keep(self.home / "said", lambda e: e["epoch"] <= epoch or e["worker"] not in names)

    def recorded(self) -> dict[int, dict[int, Shares]]:
        found: dict[int, dict[int, dict[int, list[int]]]] = {}
        for entry in self.records():
            step = found.setdefault(entry["epoch"], {}).setdefault(entry["step"], {})
            known = step.setdefault(entry["rank"], entry["ids"])
            if known != entry["ids"]:
                self.outcome.repeated += len(entry["ids"])
        return {
            epoch: {step: dict(sorted(shares.items())) for step, shares in steps.items()}
            for epoch, steps in found.items()
        }


def _keep(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines if stays(json.loads(line))))


def carried_through(the: Plan, home: Path) -> Outcome:
    crew = StormyCrew(home, the.training, the.faults)
    with contextlib.closing(crew):
        crew.start(*the.first)
        for change in the.changes:
            crew.carry_out(change)
        epochs = crew.finish()
        outcome, recorded = crew.outcome, crew.recorded()
        outcome.deaths, outcome.recoveries = crew.deaths(), crew.recoveries
        outcome.epochs, outcome.steps = epochs[-1].epoch, epochs[-1].facts.step
        for epoch in range(1, outcome.epochs + 1):
            steps = recorded.get(epoch, {}).values()
            ids = [i for shares in steps for share in shares.values() for i in share]
            outcome.samples += len(ids)
            if missing := set(range(the.training.size)) - set(ids):
                outcome.lost += len(missing)
                outcome.where.append(f"epoch {epoch}, steps {sorted(recorded[epoch])}: {missing}")
            outcome.repeated += len(ids) - len(set(ids))
        outcome.unequal += sum(len(seen) != 1 for seen in crew.digests().values())
        final = crew.final()
        again = replayed(the.training, recorded)
        outcome.apart = furthest({name: final[name] for name in again}, again)
        return outcome
