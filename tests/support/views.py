"""Views of clusters for policies, and a cluster in which changes take no time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    JobEnded,
    JobView,
    Plan,
    PlanTaken,
    Policy,
    PolicyEvent,
    Reason,
    SlotView,
    StepsSeen,
)
from controlplane.policy.ones.greedy import repaired
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.problem import Problem
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.options import OnesOptions
from controlplane.policy.registry import make
from controlplane.policy.sharing import claim_order, claims
from controlplane.policy.sharing.division import Divided, Division
from controlplane.policy.sharing.turns import at_once
from controlplane.prediction import IntArray
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.jobs import Utility
from tests.support.builders import changed_job, job_view, slot_view

NOW = Seconds(100.0)


def standing(*args: Any) -> claim_order.Standing:
    """Order and rights of claims, without a pause."""
    return at_once(claim_order.standing(*args))


def decide(*args: Any, **fields: Any) -> claims.Claims:
    """Decision about claims, without a pause."""
    return at_once(claims.decide(*args, **fields))


def divide(division: Division, *args: Any) -> Divided:
    """Division among accounts, without a pause."""
    return at_once(division.divide(*args))


FAMILIES = ("", "f", "g")
UTILITIES = (
    Utility(value=0.0),
    Utility(value=3.0, deadline_s=200.0, decay=0.1),
    Utility(value=50.0, deadline_s=5.0, decay=20.0),
)
IN_FOUR = st.sampled_from([True, False, False, False])


def row_of(*nodes: int, models: Sequence[str] = (), cores: int = 0) -> list[SlotView]:
    """The usable slots of nodes n1, n2, ... with so many each, of these models of GPU if given.

    With `cores`: CPU slots of nodes with so many.
    """
    each = models or [""] * len(nodes)
    return [
        slot_view(slot_id(NodeId(f"n{number}"), index), model=model, cores=cores)
        for number, (many, model) in enumerate(zip(nodes, each, strict=True), 1)
        for index in range(many)
    ]


def taken_slots(slots: Iterable[SlotView], jobs: Iterable[JobView]) -> list[SlotView]:
    """`slots`, of which those of `jobs` are in use."""
    taken = {slot for job in jobs for slot in job.running_on}
    return [
        msgspec.structs.replace(slot, usable=slot.usable and slot.slot not in taken)
        for slot in slots
    ]


def view_of(slots: Sequence[SlotView], *jobs: JobView, version: int = 1) -> ClusterView:
    """A view of `slots`, of which those of `jobs` are in use."""
    return ClusterView(
        version=version, slots=tuple(taken_slots(slots, jobs)), jobs={job.job: job for job in jobs}
    )


def builder_of(
    *, events: Sequence[tuple[float, PolicyEvent]] = (), options: OnesOptions | None = None
) -> tuple[Estimates, ProblemBuilder]:
    """What a search has learnt from `events`, and the builder that works with it."""
    options = options or OnesOptions()
    estimates = Estimates(options)
    for at, event in events:
        estimates.observe(event, Seconds(at))
    return estimates, ProblemBuilder(estimates, options)


def problem_of(
    view: ClusterView,
    *,
    events: Sequence[tuple[float, PolicyEvent]] = (),
    options: OnesOptions | None = None,
    now: Seconds = NOW,
) -> Problem:
    """What a search that knows `events` makes of `view`."""
    return builder_of(events=events, options=options)[1].build(view, now)


def pace(family: str, *speeds: float, batch: int = 64) -> list[tuple[float, PolicyEvent]]:
    """That jobs of a family were measured on 1, 2, ... slots of one node; samples/s."""
    return [
        (1.0, EpochSeen(job=JobId("old-9"), family=family, slots=slots, nodes=1,
                        global_batch=batch, samples_per_s=speed, whole=True))
        for slots, speed in enumerate(speeds, 1)
    ]  # fmt: skip


LINEAR = pace("f", 100.0, 200.0, 300.0, 400.0)  # speeds are proportional to slots


def warm_job(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """A warm job of family f, of 1 to 4 slots, with a batch of 64."""
    held = dict.fromkeys(on, 64 // len(on)) if on else {}
    view = job_view(job, slots=(1, 4), family="f", epoch=1, start_s=0.0, running_on=held)
    return changed_job(view, **changes)


def epoch_seen(job: JobId, **changes: Any) -> EpochSeen:
    """A whole epoch of a job on one slot, at 100 samples/s."""
    usual = {"family": "", "slots": 1, "nodes": 1, "global_batch": 64, "samples_per_s": 100.0}
    return EpochSeen(job=job, **{"whole": True, **usual, **changes})


def steps_seen(job: JobId, **changes: Any) -> StepsSeen:
    """Telemetry of a job on one slot, at 100 samples/s."""
    usual = {"family": "", "slots": 1, "nodes": 1, "global_batch": 64, "samples_per_s": 100.0}
    return StepsSeen(job=job, **{"group": 1, "step": 1, "samples_done": 64, **usual, **changes})


def surrounded(
    problem: Problem,
    *,
    types: Sequence[int] = (),
    slow: Sequence[Sequence[float]] = (),
) -> Problem:
    """`problem` if it were known that GPU types matter.

    Args:
        problem: as it is without.
        types: of each node's GPUs, by number.
        slow: shape (J, types), times that a step of each job takes.
    """
    cluster = problem.cluster
    if types:
        names = tuple(f"type {number}" for number in range(max(types) + 1))
        cluster = replace(
            cluster, types=names, type_of=np.array(types, dtype=np.int64)[cluster.node_of]
        )
    return replace(
        problem,
        cluster=cluster,
        slow=np.array(slow, dtype=np.float64) if slow else None,
        stretch={},
    )


def planned(
    policy: str,
    view: ClusterView,
    events: Sequence[PolicyEvent] = (),
    *,
    generations: int = 2,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """What a new policy of that name answers after `events` and so much thinking."""
    asked = make(policy, options)
    for event in events:
        asked.observe(event, NOW)
    asked.improve(view, Budget(generations=generations), default_rng(0), NOW)
    return asked.plan(view, NOW)


# --- whatever could be


@st.composite
def a_job(draw: st.DrawFn, number: int, free: list[SlotId]) -> JobView:
    """One job; if it runs, on some of `free`, which it takes out of there."""
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 6))
    batch = draw(st.integers(least, least + 2) | st.integers(least, 100))
    limit = batch + draw(st.sampled_from([0, 50, 400]))
    name = draw(st.sampled_from("abc"))
    size = draw(st.integers(1 if draw(IN_FOUR) else least, most))  # it may have lost members
    running: list[SlotId] = []
    if size <= min(len(free), limit) and draw(st.booleans()):
        running, free[:] = free[:size], free[size:]
    held = draw(st.integers(max(batch // 2, size), limit)) if running else 0
    share, rest = divmod(held, size)
    local = max(batch, share + 1)
    epoch = draw(st.integers(0, 3))
    return JobView(
        job=JobId(f"{name}-{number}"), submitted_at=Seconds(draw(st.integers(0, 4))),
        batch_size=batch, batch_limit=limit, local_limit=local + draw(st.sampled_from([0, 50])),
        least=least, most=most, wanted=draw(st.integers(least, min(most, max(batch, least)))),
        family=draw(st.sampled_from(FAMILIES)),
        running_on={slot: share + (place < rest) for place, slot in enumerate(running)},
        movable=not draw(IN_FOUR),
        ready_at=Seconds(0.0 if running else draw(st.sampled_from([0, 0, 0, 101, 110]))),
        retry_at=Seconds(draw(st.sampled_from([0, 0, 0, 105, 120]))),
        moved_at=Seconds(draw(st.sampled_from([0, 50, 80, 99]))), epoch=epoch,
        epoch_at=Seconds(draw(st.sampled_from([0, 60, 90]))), epoch_samples=1000,
        samples_done=epoch * 1000, stop_samples=draw(st.sampled_from([None, None, 2000, 50_000])),
        noise_scale=draw(st.sampled_from([None, 0.5, 64.0, 5000.0])),
        ran_s=draw(st.sampled_from([0.0, 30.0, 900.0])), start_s=draw(st.sampled_from([None, 3.0])),
        utility=draw(st.sampled_from([None, *UTILITIES])),
        promised_at=draw(st.sampled_from([None, None, Seconds(90.0), Seconds(4000.0)])),
    )  # fmt: skip


@st.composite
def views(
    draw: st.DrawFn, most_jobs: int = 6, nodes: Sequence[int] | None = None, version: int = 1
) -> ClusterView:
    """Clusters of up to 12 slots and 6 jobs, of which some run, change, back off or were lost."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3)) if nodes is None else nodes
    slots = [slot.slot for slot in row_of(*sizes)]
    free = list(draw(st.permutations(slots)))
    jobs = [draw(a_job(number, free)) for number in range(1, 1 + draw(st.integers(0, most_jobs)))]
    shown = [
        SlotView(slot=slot, node=NodeId(slot[:2]), kind="cpu", usable=how == "usable",
                 leaving=how == "leaving")
        for slot in slots
        for how in [draw(st.sampled_from(["usable", "usable", "usable", "leaving", "closed"]))
                    if slot in free else "taken"]
    ]  # fmt: skip
    return ClusterView(version=version, slots=tuple(shown), jobs={job.job: job for job in jobs})


@st.composite
def events_of(draw: st.DrawFn, view: ClusterView, at_most: int = 6) -> list[PolicyEvent]:
    """What a policy may have observed of the jobs of `view`, and of others."""
    names = [*view.jobs, JobId("old-99")]
    return [draw(_one_of(draw(st.sampled_from(names)), view)) for _ in range(
        draw(st.integers(0, at_most)))]  # fmt: skip


def _one_of(job: JobId, view: ClusterView) -> st.SearchStrategy[PolicyEvent]:
    family = view.jobs[job].family if job in view.jobs else "f"
    slots = st.integers(1, 6)
    batch = st.integers(6, 400)
    waiting = tuple(name for name, job in view.jobs.items() if not job.running_on)
    ended = JobEnded(job=JobId("old-98"), family=family, samples_done=3000, succeeded=True)
    return st.one_of(
        st.builds(
            EpochSeen, job=st.just(job), family=st.just(family), slots=slots,
            nodes=st.integers(1, 2), global_batch=batch, samples_per_s=st.floats(0.1, 1e4),
            whole=st.booleans(),
        ),
        st.builds(
            StepsSeen, job=st.just(job), family=st.just(family), group=st.integers(1, 2),
            slots=slots, nodes=st.integers(1, 2), global_batch=batch, step=st.integers(0, 30),
            samples_done=st.integers(0, 5000),
        ),
        st.sampled_from([ended, PlanTaken(waiting=waiting)]),
    )  # fmt: skip


views_and_events = views().flatmap(lambda view: st.tuples(st.just(view), events_of(view)))


@st.composite
def problems(draw: st.DrawFn, nodes: Sequence[int] | None = None) -> Problem:
    """What a search that observed something makes of any view; often, places matter."""
    view = draw(views(nodes=nodes))
    problem = problem_of(view, events=[(1.0, event) for event in draw(events_of(view))])
    jobs, many = len(problem.job_rows), len(problem.slots_on)
    slow = st.sampled_from([(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
    types: list[int] = []
    if many and draw(st.booleans()):
        types = [0, *draw(st.lists(st.integers(0, 1), min_size=many - 1, max_size=many - 1))]
    return surrounded(
        problem,
        types=types,
        slow=draw(st.lists(slow, min_size=jobs, max_size=jobs)) if types else (),
    )


def any_levels(problem: Problem, seed: int) -> IntArray:
    """A level for each job, whether it is allowed or not, and whether they fit or not."""
    rng = default_rng(seed)
    return rng.integers(0, problem.sizes.shape[1], len(problem.job_rows))


def some_levels(problem: Problem, seed: int) -> IntArray:
    """A level for each job, allowed and within what there is."""
    order = default_rng(seed).permutation(len(problem.job_rows))
    return repaired(problem, any_levels(problem, seed), order)


ENOUGH = 20  # questions at one moment


class ToldOracle:
    """An oracle: jobs last as long as it was told, and n slots make them n times as fast."""

    def __init__(self, steps: Mapping[JobId, float] | None = None, default: float = 100.0) -> None:
        self.steps = dict(steps or {})
        self._default = default

    def remaining_steps(self, job: JobView) -> float:
        return self.steps.get(job.job, self._default)

    def step_s(self, job: JobView, slots: int) -> float:
        return 1.0 / slots

    def remaining_s(self, job: JobView, slots: int) -> float:
        return self.remaining_steps(job) * self.step_s(job, slots)

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        return 1.0


@dataclass
class InstantCluster:
    """Follows a policy's plans as the core does: stops first, then starts on what is free."""

    policy: Policy
    slots: Sequence[SlotView]
    jobs: dict[JobId, JobView] = field(default_factory=dict)
    now: Seconds = Seconds(0.0)
    plans: list[Plan] = field(default_factory=list)
    rejected: dict[JobId, Reason] = field(default_factory=dict)

    def view(self) -> ClusterView:
        return ClusterView(
            version=len(self.plans),
            slots=tuple(taken_slots(self.slots, self.jobs.values())),
            jobs=dict(self.jobs),
        )

    def submit(self, *jobs: JobView) -> None:
        for job in jobs:
            self.jobs[job.job] = changed_job(job, moved_at=self.now)

    def end(self, *names: JobId) -> None:
        for name in names:
            del self.jobs[name]

    def settle(self) -> dict[JobId, list[SlotId]]:
        """Ask and follow until nothing changes; who has what then."""
        for _ in range(ENOUGH):
            view = self.view()
            self.policy.improve(view, Budget(generations=1), default_rng(0), self.now)
            plan = self.policy.plan(view, self.now)
            self.plans.append(plan)
            if not self._follow(plan):
                return {
                    name: list(job.running_on) for name, job in self.jobs.items() if job.running_on
                }
        raise AssertionError("the policy does not come to rest")

    def at(self, now: float) -> dict[JobId, list[SlotId]]:
        """The same, later."""
        self.now = Seconds(now)
        return self.settle()

    def sizes(self, now: float) -> dict[JobId, int]:
        """Number of slots of each job that has any, later."""
        return {name: len(slots) for name, slots in self.at(now).items()}

    def _follow(self, plan: Plan) -> bool:
        before = dict(self.jobs)
        held = {slot for job in before.values() for slot in job.running_on}
        for name, job in before.items():
            target = plan.local_batch.get(name, {})
            stops = name in plan.restart and target.keys() != job.running_on.keys()
            if job.running_on:
                self._set(name, {} if stops else target)
            elif not target.keys() & held:
                self._set(name, target)
        for name in plan.rejected:
            self.rejected[name] = plan.rejected[name]
            del self.jobs[name]
        for name, end in plan.promised.items():
            job = self.jobs[name]
            first = end if job.promised_at is None else job.promised_at
            self.jobs[name] = msgspec.structs.replace(job, promised_at=first, expected_at=end)
        owned = [slot for job in self.jobs.values() for slot in job.running_on]
        assert len(owned) == len(set(owned))
        return self.jobs != before

    def _set(self, name: JobId, placed: Mapping[SlotId, int]) -> None:
        job = self.jobs[name]
        if dict(placed) != dict(job.running_on):
            passed = self.now - job.moved_at
            runs = bool(job.running_on)
            self.jobs[name] = msgspec.structs.replace(
                job,
                running_on=dict(placed),
                slot_s=job.served(self.now),
                ran_s=job.ran_s + passed * runs,
                waited_s=job.waited_s + passed * (not runs),
                moved_at=self.now,
                placed_at=job.placed_at if placed.keys() == job.running_on.keys() else self.now,
            )
