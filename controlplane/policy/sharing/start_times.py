"""Predicted start of a job that is not submitted yet, from the present state of a cluster.

Each draw gives every job a length, and rolls the rules of sharing forward without a policy. Claims
of rigid jobs are served in their order, with backfill. Elastic jobs start if their account's budget
and the minimums of other jobs leave room, and share the slots that rigid jobs leave. Slots are
counted, not placed, and jobs that are submitted later are unknown.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.random import Generator

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.sharing.caps import Ledger, useful_slots
from controlplane.policy.sharing.claim_order import Standing, standing
from controlplane.policy.sharing.claims import TURN_S, decide
from controlplane.policy.sharing.division import Division
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.prediction import FloatArray
from controlplane.prediction.lengths import drawn_left
from schemas.ids import JobId, Seconds
from schemas.sharing import Sharing
from schemas.wire.client import ExpectedStart

DRAWS: Final = 64
QUANTILES: Final = (0.1, 0.5, 0.9)
MIN_RUNS: Final = 3  # of a program, before its own lengths replace those of all programs
STATED_ERROR: Final = 0.1  # relative error of stated samples over the speed of the last epoch


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """Length of a job that has ended."""

    samples: int
    slot_s: float
    run_s: float  # with slots
    share: float | None = None  # of its time limit; None: it had none


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a prediction, which no later input of the core changes."""

    job: JobId
    view: ClusterView  # with the job, if it is elastic
    rigid: Sequence[RigidView]  # with the job, if it is rigid
    sharing: Sharing | None
    ledger: Ledger
    past: Mapping[str, Sequence[PastRun]]  # by family; `elastic` and `rigid`: of all such jobs
    now: Seconds
    gangs: bool = False  # the policy gives a job exactly its wanted slots or none


@dataclass(slots=True, eq=False)
class _Job:
    name: JobId
    account: str
    slots: int  # of a rigid job; else the least with which the job starts
    work: Sequence[float]  # of each draw: seconds of a rigid job, else slot seconds; inf: unknown
    rigid: bool
    held: int  # slots now
    since: float  # when an elastic job got these slots
    ready_at: float
    useful: int = 0  # most slots that an elastic job can use
    limit_s: float = math.inf  # of a rigid job
    ends_by: float = math.inf  # time limit of a rigid job that runs


def expected_start(present: Present, rng: Generator) -> Iterator[ExpectedStart | None]:
    """Yield None after each draw, so that the caller can give way, and at last the prediction."""
    sharing = present.sharing or Sharing(fair_share=False)
    rules = standing(present.view, present.rigid, sharing, present.ledger, present.now)
    division = Division(gangs=present.gangs)
    divided = division.divide(present.view, sharing, present.ledger, present.now)
    known = _by_rules(present, rules, divided.waiting)
    if known is not None:
        yield known
        return
    line = _Line(present, rules, divided.budgets, rng)
    starts = []
    for draw in range(DRAWS):
        starts.append(_Roll(line, draw).start())
        yield None
    yield _summary(line, starts)


def _by_rules(
    present: Present, rules: Standing, waiting: frozenset[JobId]
) -> ExpectedStart | None:
    """Return the start of a job that starts at once, or that can never start as things are."""
    view, now, job = present.view, present.now, present.view.jobs.get(present.job)
    at_once = ExpectedStart(starts="now", at=now, earliest=now, latest=now)
    if job is None:
        decided = decide(view, present.rigid, now, rules=rules)
        reason = decided.reasons.get(present.job)
        if reason is not None and reason.code in {"too_large", "limit"}:
            return ExpectedStart(reason=reason.text)
        served = present.job in decided.plan.local_batch
        return at_once if served or (reason and reason.code == "promised") else None
    if job.least > len(view.slots):
        return ExpectedStart(reason=f"needs {job.least} slots, the cluster has {len(view.slots)}")
    accounts = {one.account for one in view.jobs.values()} | {*present.ledger.outside}
    divided = present.sharing is not None and len(accounts) > 1
    return at_once if divided and job.job not in waiting and job.ready_at <= now else None


def _summary(line: _Line, starts: Sequence[tuple[float, JobId | None]]) -> ExpectedStart:
    times = np.array([at for at, _ in starts])
    low, middle, high = np.quantile(times, QUANTILES, method="nearest").tolist()
    if math.isinf(middle):
        names = [job.name for job in line.running if math.isinf(job.work[0])]
        who = f"{names[0]} has" if names else "jobs before it have"
        reason = f"{who} no time limit, and no ended job tells how long it may run"
        return ExpectedStart(ahead=line.ahead, reason=reason)
    after = Counter(cause for at, cause in starts if math.isfinite(at)).most_common(1)[0][0]
    ends = [at for at, cause in starts if cause == after and math.isfinite(at)]
    return ExpectedStart(
        starts="now" if high <= line.now else "later",
        at=Seconds(middle),
        earliest=Seconds(low),
        latest=None if math.isinf(high) else Seconds(high),
        ahead=line.ahead,
        after=after,
        after_ends_at=None if after is None else Seconds(float(np.median(ends))),
    )


class _Line:
    """Running and waiting jobs with drawn lengths, and the rules that hold in all draws."""

    def __init__(
        self, present: Present, rules: Standing, budgets: Mapping[str, int], rng: Generator
    ) -> None:
        self._present, self._rng = present, rng
        view = present.view
        self.now, self.gangs, self.budgets = present.now, present.gangs, budgets
        self.capacity = sum(slot.up for slot in view.slots)
        self.exempt = rules.exempt
        elastic = {name: self._elastic(job) for name, job in view.jobs.items()}
        rigid = {job.job: self._rigid(job) for job in present.rigid}
        self.job = (elastic | rigid)[present.job]
        self.jobs = [*rigid.values(), *elastic.values()]
        self.running = sorted((job for job in self.jobs if job.held), key=lambda job: job.since)
        self.divided = present.sharing is not None
        self.claims = [rigid[job.job] for job in rules.order]
        self.queues: dict[str, list[_Job]] = {}  # waiting elastic jobs of each account
        for job in elastic.values():
            if not job.held:
                account = job.account if self.divided else ""
                self.queues.setdefault(account, []).append(job)
        queue = next((each for each in self.queues.values() if self.job in each), self.claims)
        self.ahead = queue.index(self.job)

    def _elastic(self, job: JobView) -> _Job:
        now, held = self.now, len(job.running_on)
        useful = useful_slots(job, self.capacity, gangs=self.gangs)
        return _Job(
            job.job, job.account, useful if self.gangs else job.least, self._work(job),
            rigid=False, held=held, since=job.placed_at, useful=useful,
            ready_at=now if held else job.ready_at,
        )  # fmt: skip

    def _work(self, job: JobView) -> Sequence[float]:
        """Return the slot seconds that an elastic job still needs."""
        past, now = self._present.past, self.now
        known = past.get(job.family, ())
        if job.running_on and job.samples_per_s > 0.0 and (job.stop_samples or known):
            done = job.samples_done + job.samples_per_s * max(0.0, now - job.epoch_at)
            if job.stop_samples is not None:
                error = np.exp(STATED_ERROR * self._rng.standard_normal(DRAWS))
                left = max(0.0, job.stop_samples - done) * error
            else:
                left = drawn_left(done, [run.samples for run in known], DRAWS, self._rng)
            return (left / job.samples_per_s * len(job.running_on)).tolist()
        totals = [run.slot_s for run in known or past.get("elastic", ())]
        return drawn_left(job.served(now), totals, DRAWS, self._rng).tolist()

    def _rigid(self, job: RigidView) -> _Job:
        now, held = self.now, len(job.holds)
        limit_s = math.inf if job.run_limit_s is None else job.run_limit_s
        return _Job(
            job.job, job.account, job.slots, self._seconds(job, limit_s).tolist(), rigid=True,
            held=held, since=now, ready_at=job.ready_at, limit_s=limit_s,
            ends_by=math.inf if job.ends_at is None else job.ends_at,
        )  # fmt: skip

    def _seconds(self, job: RigidView, limit_s: float) -> FloatArray:
        """Return the seconds that a rigid job still runs, at most until its limit."""
        past, ran_s = self._present.past, 0.0 if job.waits else self.now - job.began_at
        known, others = past.get(job.family, ()), past.get("rigid", ())
        totals = [run.run_s for run in (known if len(known) >= MIN_RUNS else others)]
        if len(known) < MIN_RUNS and math.isfinite(limit_s):
            totals = [limit_s * run.share for run in others if run.share is not None]
        left_s = limit_s - ran_s
        if math.isfinite(left_s) and not any(total > ran_s for total in totals):
            return self._rng.uniform(0.0, max(0.0, left_s), DRAWS)
        return np.minimum(drawn_left(ran_s, totals, DRAWS, self._rng), left_s)


@dataclass(slots=True, eq=False)
class _Run:
    """Running job in a draw."""

    job: _Job
    at: float  # when a rigid job ends, or an elastic one by the common clock
    size: int  # slots by which the clock counts
    turn_at: float  # when an elastic job may be paused for a claim; time limit of a rigid job
    paused: bool = False


class _Roll:
    """One draw.

    Elastic jobs progress on a common clock of seconds at the sizes with which they were entered.
    It is slower while they have fewer slots, so their ends keep their order.
    """

    def __init__(self, line: _Line, draw: int) -> None:
        self._line, self._now, self._clock = line, float(line.now), 0.0
        self._left = {job.name: job.work[draw] for job in line.jobs}
        self._held = self._firm = self._size = self._useful = 0  # slots: rigid, then elastic jobs
        self._used = Counter[str]()  # slots of accounts that are not surplus
        self._demand = Counter[str]()
        self._ends: list[tuple[float, int, _Run]] = []  # rigid jobs
        self._finishes: list[tuple[float, int, _Run]] = []  # elastic jobs, by the clock
        self._turns: deque[_Run] = deque()  # elastic jobs, by the ends of their turns
        self._rested: list[_Run] = []  # those that may be paused for a claim
        self._rested_slots = self._count = 0
        self._programs = sum(job.slots for job in line.jobs if job.rigid)
        self._trainings = sum(job.slots for job in line.jobs if not job.rigid)
        for job in line.jobs:
            self._demand[job.account] += 0 if job.rigid else job.useful
        self._claims = line.claims
        self._queues = {account: deque(queue) for account, queue in line.queues.items()}
        for job in line.running:
            self._enter(job, job.held, job.since)
        self._usual = self._level() or 1.0

    def start(self) -> tuple[float, JobId | None]:
        """Return when the job starts, infinity if never, and the job whose end gave it slots."""
        cause: JobId | None = None
        ready_at = self._line.job.ready_at
        while not (self._serve_claims() or self._serve_elastic()):
            rate = self._level() / self._usual
            end = self._ends[0][0] if self._ends else math.inf
            left = self._finishes[0][0] - self._clock if self._finishes else math.inf
            finish = self._now + left / rate if rate > 0.0 else math.inf
            turn = self._turns[0].turn_at if self._turns and self._claims else math.inf
            at = min(end, finish, turn, ready_at if ready_at > self._now else math.inf)
            if math.isinf(at):
                return math.inf, None
            self._clock += max(0.0, at - self._now) * rate
            self._now = max(at, self._now)
            cause = None
            if at in (end, finish):
                ended = heapq.heappop(self._ends if at == end else self._finishes)[2]
                cause = ended.job.name
                if not ended.paused:
                    self._leave(ended)
                    self._programs -= ended.job.slots if ended.job.rigid else 0
                    self._trainings -= 0 if ended.job.rigid else ended.job.slots
                    self._demand[ended.job.account] -= 0 if ended.job.rigid else ended.job.useful
            self._rest()
        return self._now, cause

    def _level(self) -> float:
        """Return the slots of elastic jobs, over the sizes by which the clock counts."""
        if self._line.gangs or not self._size:
            return 1.0
        return max(0, min(self._useful, self._line.capacity - self._held)) / self._size

    def _enter(self, job: _Job, size: int, since: float) -> None:
        self._used[job.account] += job.slots
        self._count += 1
        if job.rigid:
            run = _Run(job, self._now + self._left[job.name], 1, min(job.ends_by, since + job.limit_s))
            self._held += job.slots
            self._demand[job.account] += job.slots
            heapq.heappush(self._ends, (run.at, self._count, run))
            return
        run = _Run(job, self._clock + self._left[job.name] / size, size, since + TURN_S)
        self._firm, self._size = self._firm + job.slots, self._size + size
        self._useful += job.useful
        heapq.heappush(self._finishes, (run.at, self._count, run))
        self._turns.append(run)

    def _leave(self, run: _Run) -> None:
        job = run.job
        self._used[job.account] -= job.slots
        if job.rigid:
            self._held -= job.slots
            self._demand[job.account] -= job.slots
            return
        self._firm, self._size = self._firm - job.slots, self._size - run.size
        self._useful -= job.useful
        run.paused = True
        if run.turn_at <= self._now:
            self._rested_slots -= job.slots

    def _rest(self) -> None:
        """Note the elastic jobs whose turns are over."""
        while self._turns and (self._turns[0].paused or self._turns[0].turn_at <= self._now):
            run = self._turns.popleft()
            if not run.paused:
                self._rested.append(run)
                self._rested_slots += run.job.slots

    def _pause(self, slots: int) -> None:
        """Pause elastic jobs until so many slots are free."""
        while self._line.capacity - self._held - self._firm < slots:
            run = self._rested.pop()
            if not run.paused:
                self._left[run.job.name] = max(0.0, run.at - self._clock) * run.size
                self._leave(run)
                account = run.job.account if self._line.divided else ""
                self._queues.setdefault(account, deque()).append(run.job)

    def _serve_claims(self) -> bool:
        """Start the claims that can start, as `claims.decide` does. True: the job is one of them."""
        line, left, head, spare = self._line, [], math.inf, 0
        first = True
        for job in self._claims:
            free = line.capacity - self._held - self._firm
            room = free + (self._rested_slots if first else 0)
            if job.ready_at > self._now or self._beyond_share(job):
                left.append(job)
            elif job.slots > room:
                left.append(job)
                if first:
                    head, spare = self._reservation(job.slots - room)
                    first = math.isinf(head)  # nobody waits behind a claim of unknown turn
            elif not first and self._now + job.limit_s > head and job.slots > spare:
                left.append(job)
            elif job is line.job:
                return True
            else:
                spare -= 0 if first or self._now + job.limit_s <= head else job.slots
                self._pause(job.slots)
                self._enter(job, 1, self._now)
        self._claims = left
        return False

    def _beyond_share(self, job: _Job) -> bool:
        """True if rigid jobs would have more than their share of the demand."""
        demand, capacity = self._programs + self._trainings, self._line.capacity
        if not self._trainings or demand <= capacity or job.name in self._line.exempt:
            return False
        return 0 < self._held and self._held + job.slots > capacity * self._programs // demand

    def _reservation(self, lacks: int) -> tuple[float, int]:
        """Return when so many more slots are free at the latest, and how many are left over."""
        runs = [run for _, _, run in self._ends] + [run for run in self._turns if not run.paused]
        for run in sorted(runs, key=lambda run: run.turn_at):
            lacks -= run.job.slots
            if lacks <= 0:
                return run.turn_at, -lacks
        return math.inf, 0

    def _serve_elastic(self) -> bool:
        """Start waiting elastic jobs, those of the account with least first. True: the job starts."""
        line = self._line
        while True:
            room = line.capacity - self._held - self._firm
            found: deque[_Job] | None = None
            least = math.inf
            for account, queue in self._queues.items():
                if not queue or queue[0].ready_at > self._now:
                    continue
                weight = (self._used[account] + 0.5) / max(1, line.budgets.get(account, line.capacity))
                if queue[0].slots <= min(room, self._room_of(account)) and weight < least:
                    found, least = queue, weight
            if found is None:
                return False
            job = found.popleft()
            if job is line.job:
                return True
            fair = (line.capacity - self._held) // (len(self._finishes) + 1)
            size = job.slots if line.gangs else max(1, job.slots, min(fair, job.useful))
            self._enter(job, size, self._now)

    def _room_of(self, account: str) -> float:
        """Return the slots that an account may still have. What others cannot use is added."""
        budget = self._line.budgets.get(account)
        if budget is None:
            return math.inf
        others = self._demand.total() - self._demand[account]
        return max(budget, self._line.capacity - others) - self._used[account]
