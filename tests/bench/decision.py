"""Time of a decision: from the request to the plan, while the search runs at full speed.

The real search process receives a cluster over its pipes as from the controller. After each event (an epoch,
an end with an arrival, a lost and returned node) the difference of the view and a request are sent, and the
time to the plan is measured. Between requests the search evolves without pause. Also measured: the same
process at rest, and `fifo` in this process.

With `--shared`, each decision is measured once more on a cluster that is shared: users in projects have budgets, a
tenth of the slots is held by programs, and programs wait. Then a decision includes their claims and the division.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, EpochSeen, JobView, PolicyEvent, SlotView
from controlplane.policy.registry import make
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.claim_order import standing
from controlplane.policy.sharing.claims import decide, mask
from controlplane.policy.sharing.division import Divided, Division
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import at_once
from controlplane.service.pipes import FrameDecoder, encode_frame
from controlplane.service.planner.search_messages import (
    FROM_SEARCH,
    EventObserved,
    FindPlan,
    FullView,
    PlanFound,
    StartSearch,
    ToSearch,
    ViewDelta,
    view_delta,
)
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.sharing import Project, Sharing
from tests.bench import report

PER_NODE: Final = 4
FAMILIES: Final = 40
SIZES: Final = ((64, 100), (512, 800), (4096, 4000), (16384, 4000))  # GPUs, jobs
READ: Final = 1 << 20
JOBS_PER_USER: Final = 20
USERS_PER_PROJECT: Final = 5
CLAIMS: Final = 50  # programs that wait
GOALS_MS: Final = {64: 5.0, 512: 18.0, 4096: 100.0, 16384: 150.0}


class Search:
    def __init__(self, *, patience: int, history: list[tuple[Seconds, PolicyEvent]]) -> None:
        command = [sys.executable, "-P", "-m", "controlplane.service.planner.search_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.frames, self.number = FrameDecoder(), 0
        self.sent: ClusterView | None = None
        options = {"patience": patience, "search": "evolution" if patience else "auto"}
        self.say(StartSearch(policy="ones", options=options, seed=0, history=history))

    def say(self, message: ToSearch) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_frame(message))
        self.process.stdin.flush()

    def ask(self, view: ClusterView, now: Seconds) -> tuple[PlanFound, float]:
        """Return the plan, and the seconds since the difference of the views."""
        began = time.perf_counter()
        told: ViewDelta | None = view_delta(self.sent, view) if self.sent is not None else None
        self.say(told if told is not None else FullView(view=view))
        self.sent = view
        self.number += 1
        self.say(FindPlan(number=self.number, now=now))
        while True:
            assert self.process.stdout is not None
            data = os.read(self.process.stdout.fileno(), READ)
            assert data, "the search process ended"
            for body in self.frames.feed(data):
                message = FROM_SEARCH.decode(body)
                if isinstance(message, PlanFound) and message.number == self.number:
                    return message, time.perf_counter() - began

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


@dataclass
class World:
    gpus: int
    jobs_wanted: int
    rng: random.Random
    shared: bool = False
    now: float = 10_000.0
    version: int = 0
    jobs: dict[JobId, JobView] = field(default_factory=dict)
    lost: set[NodeId] = field(default_factory=set)
    born: int = 0
    rigid: dict[JobId, RigidView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [
            (
                NodeId(f"n{slot // PER_NODE}"),
                slot_id(NodeId(f"n{slot // PER_NODE}"), slot % PER_NODE),
            )
            for slot in range(self.gpus)
        ]
        free = [slot for _, slot in self.slots]
        if self.shared:
            held, free = free[: self.gpus // 10], free[self.gpus // 10 :]
            for number, slot in enumerate(held):
                self.claim(f"p-{number}", 1, slot)
            for number in range(CLAIMS):
                self.claim(f"w-{number}", self.rng.choice([8, 16]))
        for _ in range(self.jobs_wanted):
            job = self.arrive()
            size = min(self.rng.choice([1, 1, 2, 4]), len(free))
            if size:
                place, free = free[:size], free[size:]
                self.run(job, dict.fromkeys(place, max(1, job.batch_size // size)))

    def claim(self, name: str, slots: int, *holds: SlotId) -> None:
        at = Seconds(self.now)
        self.rigid[JobId(name)] = RigidView(
            job=JobId(name), account=self.account(), submitted_at=at, slots=slots, waits=not holds, holds=holds,
            began_at=at, run_limit_s=3600.0, ends_at=Seconds(at + self.rng.uniform(60.0, 3600.0)) if holds else None,
        )  # fmt: skip

    def account(self) -> str:
        if not self.shared:
            return ""
        user = self.rng.randrange(max(3, self.jobs_wanted // JOBS_PER_USER))
        return f"project-{user // USERS_PER_PROJECT}/user-{user}"

    def arrive(self) -> JobView:
        self.born += 1
        family = self.rng.randrange(FAMILIES)
        job = JobView(
            job=JobId(f"j-{self.born}"), submitted_at=Seconds(self.now), family=f"f{family}",
            batch_size=64, batch_limit=2048, local_limit=512, least=1, most=16, wanted=1,
            stop_samples=self.rng.choice([5, 20, 80]) * 50_000, account=self.account(),
        )  # fmt: skip
        self.jobs[job.job] = job
        return job

    def run(self, job: JobView, placed: dict[SlotId, int]) -> None:
        if dict(job.running_on) == placed:
            return
        at = Seconds(self.now)
        self.jobs[job.job] = msgspec.structs.replace(
            job, running_on=placed, moved_at=at, placed_at=at
        )

    def follow(self, answer: PlanFound) -> None:
        for job in list(self.jobs.values()):
            self.run(job, answer.plan.local_batch.get(job.job, {}))

    def serve(self, placed: Mapping[JobId, Mapping[SlotId, int]]) -> None:
        """Start programs, and take slots of other jobs for them."""
        for name, slots in placed.items():
            if name in self.jobs:
                self.run(self.jobs[name], dict(slots))
            else:
                at = Seconds(self.now)
                self.rigid[name] = msgspec.structs.replace(
                    self.rigid[name],
                    waits=False,
                    holds=tuple(slots),
                    began_at=at,
                    ends_at=Seconds(at + 3600.0),
                )

    def outside(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for job in self.rigid.values():
            found[job.account] += len(job.holds)
        return found

    def usage(self) -> dict[str, float]:
        names = {job.account for job in (*self.jobs.values(), *self.rigid.values())}
        return {name: 1000.0 * len(name) for name in sorted(names)}

    def seen(self, job: JobView) -> EpochSeen:
        slots, batch = len(job.running_on), sum(job.running_on.values())
        nodes = len({slot.rpartition("/")[0] for slot in job.running_on})
        family = int(job.family[1:])
        step = (
            0.02 + batch / slots * (1 + family) / 40_000 + 0.004 * (slots - 1) + 0.01 * (nodes - 1)
        )
        return EpochSeen(
            job=job.job, family=job.family, slots=slots, nodes=nodes, global_batch=batch,
            samples_per_s=batch / step * self.rng.uniform(0.97, 1.03), whole=True,
        )  # fmt: skip

    def event(self, number: int) -> list[PolicyEvent]:
        self.now += 1.0
        running = [job for job in self.jobs.values() if job.running_on]
        match number % 4:
            case 0:  # one ends and another arrives
                del self.jobs[self.rng.choice(running).job]
                self.arrive()
            case 1 if number % 8 == 1:
                self.lose(self.rng.choice(running))
            case 1:
                self.lost.clear()
            case _:
                job = self.rng.choice(running)
                at = Seconds(self.now)
                self.jobs[job.job] = msgspec.structs.replace(
                    job, epoch=job.epoch + 1, epoch_at=at, samples_done=job.samples_done + 50_000,
                    epoch_samples=50_000,
                )  # fmt: skip
                return [self.seen(self.jobs[job.job])]
        return []

    def lose(self, job: JobView) -> None:
        node = NodeId(next(iter(job.running_on)).rpartition("/")[0])
        self.lost = {node}
        for other in list(self.jobs.values()):
            left = {s: b for s, b in other.running_on.items() if not s.startswith(f"{node}/")}
            self.run(other, left)

    def view(self) -> ClusterView:
        self.version += 1
        taken = {slot for job in self.jobs.values() for slot in job.running_on}
        taken |= {slot for job in self.rigid.values() for slot in job.holds}
        slots = tuple(
            SlotView(
                slot=slot, node=node, kind="gpu", usable=slot not in taken and node not in self.lost
            )
            for node, slot in self.slots
        )
        return ClusterView(version=self.version, slots=slots, jobs=dict(self.jobs))


class Cycle:
    """What `core.plan_cycle` does around a policy; without sharing nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.division = Division()
        self.divided: Divided | None = None
        self.took_ms: list[float] = []  # of this part alone
        projects = {
            f"project-{number}": Project(weight=1.0 + number % 3) for number in range(0, 100, 2)
        }
        self.sharing = Sharing(projects=projects)

    def view(self) -> ClusterView:
        """Return the view that the policy sees, after the claims are served."""
        world, view, now = self.world, self.world.view(), Seconds(self.world.now)
        if not world.shared:
            return view
        began = time.perf_counter()
        ledger = Ledger(usage=world.usage(), outside=world.outside())
        rigid = list(world.rigid.values())
        rules = at_once(standing(view, rigid, self.sharing, ledger, now))
        decided = at_once(decide(view, rigid, now, rules=rules))
        if decided.plan.local_batch:
            world.serve(decided.plan.local_batch)
            view = world.view()
        self.divided = at_once(
            self.division.divide(mask(view, decided.kept), self.sharing, ledger, now)
        )
        self.took_ms.append((time.perf_counter() - began) * 1000.0)
        return self.divided.view

    def merged(self, found: PlanFound) -> PlanFound:
        if self.divided is None:
            return found
        began = time.perf_counter()
        plan = self.division.merge(self.divided, found.plan)
        self.took_ms[-1] += (time.perf_counter() - began) * 1000.0
        return msgspec.structs.replace(found, plan=plan)


def measure(
    gpus: int, jobs: int, events: int, *, patience: int, shared: bool = False
) -> tuple[list[float], float, int, list[float]]:
    world = World(gpus, jobs, random.Random(7), shared)  # noqa: S311 - a workload, no secret
    cycle = Cycle(world)
    history: list[tuple[Seconds, PolicyEvent]] = [
        (Seconds(world.now), world.seen(job)) for job in world.jobs.values() if job.running_on
    ]
    search = Search(patience=patience, history=history)
    try:
        answer, first_s = search.ask(cycle.view(), Seconds(world.now))
        world.follow(cycle.merged(answer))
        took: list[float] = []
        for number in range(events):
            for event in world.event(number):
                search.say(EventObserved(event=event, at=Seconds(world.now)))
            view = cycle.view()
            answer, seconds = search.ask(view, Seconds(world.now))
            world.follow(cycle.merged(answer))
            took.append(seconds * 1000.0 + (cycle.took_ms[-1] if shared else 0.0))
            time.sleep(0.05)  # it thinks on
        return took, first_s * 1000.0, answer.stats.generations, cycle.took_ms[1:]
    finally:
        search.close()


def first_come(gpus: int, jobs: int, events: int) -> list[float]:
    world, policy = World(gpus, jobs, random.Random(7)), make("fifo")  # noqa: S311
    took = []
    for number in range(events):
        world.event(number)
        view, began = world.view(), time.perf_counter()
        plan = policy.plan(view, Seconds(world.now))
        took.append((time.perf_counter() - began) * 1000.0)
        for job in list(world.jobs.values()):
            world.run(job, plan.local_batch.get(job.job, {}))
    return took


def simulated(jobs: int) -> tuple[float, float, float]:
    """Return the simulator's events per second: with these jobs, ten times as many, and tiresias.

    The second is ten times as long on a cluster as large: the cost of an event should not grow.
    """
    short, long = Scenario(jobs=jobs), Scenario(jobs=10 * jobs)
    found = []
    for policy, scenario in (("fifo", short), ("fifo", long), ("tiresias", short)):
        report.now(f"simulator: {scenario.jobs} jobs, {policy}")
        outcome = simulate(policy, scenario, seed=7)
        found.append(outcome.events / outcome.wall_s)
    return found[0], found[1], found[2]


def main() -> None:
    chosen = report.arguments(
        __doc__, "few events, and a short simulation",
        shared=(bool, False, "also with users, budgets and waiting programs, and no simulations"),
        largest=(int, SIZES[-1][0], "GPUs of the largest cluster"),
    )  # fmt: skip
    figures: dict[str, float] = {}
    rows: list[list[object]] = []
    rows_shared: list[list[object]] = []
    sizes = [size for size in SIZES if size[0] <= chosen.largest]
    for gpus, jobs in report.counted("size", sizes, len(sizes)):
        events = (8 if chosen.quick else 40) if gpus <= 512 else (4 if chosen.quick else 12)
        busy, cold, generations, _ = measure(gpus, jobs, events, patience=1_000_000)
        rest, _, _, _ = measure(gpus, jobs, events, patience=0)
        if chosen.shared:
            whole, _, _, parts = measure(gpus, jobs, events, patience=1_000_000, shared=True)
            ratio = median(whole) / median(busy)
            figures |= {f"ms_{gpus}_shared": median(whole), f"shared_over_plain_{gpus}": ratio}
            rows_shared.append(
                [f"{gpus} GPUs, {jobs} jobs", median(busy), median(whole), max(whole), ratio, median(parts), GOALS_MS[gpus]]
            )  # fmt: skip
        fifo = first_come(gpus, jobs, events)
        figures[f"ms_{gpus}"] = median(busy)
        figures[f"ms_{gpus}_max"] = max(busy)
        rows.append(
            [f"{gpus} GPUs, {jobs} jobs", median(busy), max(busy), median(rest), max(rest), cold,
             median(fifo), generations]
        )  # fmt: skip
    columns = ("", "busy, median", "max", "at rest, median", "max", "first", "fifo", "generations")
    report.table("a decision of `ones`, ms from the question to the answer", columns, rows)
    if chosen.shared:
        columns = (
            "",
            "not shared, median",
            "shared, median",
            "max",
            "ratio",
            "of it claims, division",
            "goal",
        )
        report.table("a decision of `ones` on a shared cluster, busy, ms", columns, rows_shared)
        report.write(figures, chosen.json)
        return
    many = 100 if chosen.quick else 400
    short, long, tiresias = simulated(many)
    figures["events_per_s_sim"] = short
    figures["events_per_s_sim_ten_times_as_long"] = long
    columns = ("", f"fifo, {many} jobs", f"fifo, {10 * many} jobs", f"tiresias, {many} jobs")
    simulator = ["events/s", short, long, tiresias]
    report.table("the simulator: Table 2 on 64 GPUs, whole run", columns, [simulator])
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
