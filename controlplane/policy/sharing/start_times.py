"""Predicted start of a job that is not submitted yet, from the present state of a cluster.

Each draw gives every job a length, and serves those before the job in their order, without a
policy: claims with backfill as in `claims`, elastic jobs within the budget of their account, which
is taken to stay. An elastic job waits only if its account's jobs are at their minimum, so these
keep their speed. Slots are counted, not placed. Jobs that are submitted later are unknown.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.placement.slot_partition import Reservation, reserve
from controlplane.policy.sharing.caps import Ledger, turn_order
from controlplane.policy.sharing.claim_order import standing
from controlplane.policy.sharing.claim_room import TURN_S
from controlplane.policy.sharing.claims import decide
from controlplane.policy.sharing.division import Division
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import at_once
from schemas.ids import JobId, Seconds
from schemas.sharing import Sharing
from schemas.wire.client import ExpectedStart

if TYPE_CHECKING:
    from random import Random

DRAWS: Final = 64
NORMALS: Final = 1024  # of which each job takes a part
MIN_SLACK: Final = 1e-3
QUANTILES: Final = (0.1, 0.5, 0.9)
MIN_RUNS: Final = 3  # of a program, before its own lengths replace those of all programs
MODEL_ERROR: Final = 4.0  # largest factor by which all of a draw is wrong; as `start_forecast`
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
    name: JobId | None
    slots: float  # that it needs or gives back
    left_s: Sequence[float]  # of each draw; infinity: unknown
    limit_s: float = 0.0  # of a waiting rigid job; 0: elastic jobs may overtake
    ends_by: float = math.inf  # of a running job
    rigid: bool = True


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs with drawn lengths that decide about the start of the last one in `waiting`."""

    now: Seconds
    ready_at: Seconds
    free: float  # slots that nobody has
    share: float  # slots that rigid jobs may still have beside elastic ones
    running: Sequence[_Job]
    waiting: Sequence[_Job]


def expected_start(
    present: Present, rng: Random, go_on: Callable[[], bool] = lambda: True
) -> ExpectedStart:
    """Return the predicted start.

    Args:
        present: state of the cluster, with the job.
        rng: source of the draws.
        go_on: called after each draw, in which a caller can give way; False: no more draws.
    """
    lengths, elastic = _Lengths(present, rng), present.job in present.view.jobs
    line = _line_of_elastic(present, lengths) if elastic else _line_of_rigid(present, lengths)
    if isinstance(line, ExpectedStart):
        return line
    starts = []
    for draw in range(DRAWS):
        at, cause = _start(line, draw)
        error = MODEL_ERROR ** rng.uniform(-1.0, 1.0)
        starts.append((max(line.ready_at, line.now + (at - line.now) * error), cause))
        if not go_on():
            break
    return _summary(line, starts)


def _at_once(now: Seconds) -> ExpectedStart:
    return ExpectedStart(starts="now", at=now, earliest=now, latest=now)


def _capacity(present: Present) -> int:
    """Return the slots of nodes that are up, without those of jobs under a manual override."""
    held = {slot for job in present.view.jobs.values() for slot in job.running_on}
    held |= {slot for job in present.rigid for slot in job.holds}
    return sum(
        slot.up and (slot.usable or slot.leaving or slot.slot in held)
        for slot in present.view.slots
    )


def _line_of_rigid(present: Present, lengths: _Lengths) -> _Line | ExpectedStart:
    """Return the claims up to the job, or the start that `decide` gives it now.

    Elastic jobs keep their minimum until their turn is over.
    """
    view, rigid, now = present.view, present.rigid, present.now
    sharing = present.sharing or Sharing(fair_share=False)
    rules = at_once(standing(view, rigid, sharing, present.ledger, now))
    decided = at_once(decide(view, rigid, now, rules=rules))
    reason = decided.reasons.get(present.job)
    if reason is not None and reason.code in {"too_large", "limit"}:
        return ExpectedStart(reason=reason.text)
    if reason is None or reason.code == "promised":
        return _at_once(now)
    running = [lengths.rigid(job) for job in rigid if job.holds]
    held = sum(job.slots for job in running)
    for one in view.jobs.values():
        if one.running_on:
            turn_at = one.placed_at + TURN_S
            left = [min(left_s, max(0.0, turn_at - now)) for left_s in lengths.elastic(one).left_s]
            kept = min(one.least, len(one.running_on))
            running.append(_Job(one.job, kept, left, ends_by=turn_at, rigid=False))
    place = [job.job for job in rules.order].index(present.job)
    share = math.inf
    if rules.share is not None and present.job not in rules.exempt:
        share = max(rules.share, rules.order[place].slots) - held
    return _Line(
        now=now,
        ready_at=rules.order[place].ready_at,
        free=_capacity(present) - sum(job.slots for job in running),
        share=share,
        running=running,
        waiting=[lengths.rigid(job) for job in rules.order[: place + 1]],
    )


def _line_of_elastic(present: Present, lengths: _Lengths) -> _Line | ExpectedStart:
    """Return the elastic jobs of the account, or the start that its budget gives the job now.

    If slots are not divided, the line has the jobs of all accounts.
    """
    view, ledger, now = present.view, present.ledger, present.now
    job = view.jobs[present.job]
    sharing, divided = present.sharing or Sharing(fair_share=False), present.sharing is not None
    found = at_once(Division(gangs=present.gangs).divide(view, sharing, ledger, now))
    if job.least > len(view.slots):
        return ExpectedStart(reason=f"needs {job.least} slots, the cluster has {len(view.slots)}")
    accounts = {one.account for one in view.jobs.values()} | {*ledger.outside}
    shares = divided and len(accounts) > 1
    if shares and job.job not in found.waiting and job.ready_at <= now:
        return _at_once(now)
    capacity, budgets = _capacity(present), found.budgets
    room = budgets.get(job.account, capacity) if divided else capacity
    mine = [one for one in view.jobs.values() if not divided or one.account == job.account]
    order = turn_order(mine, ledger, now, sharing.turn_s)
    running = [lengths.elastic(one) for one in order if one.running_on]
    others: list[tuple[str, _Job]] = []  # jobs of other accounts
    for claim in present.rigid:
        drawn = lengths.rigid(claim)
        if divided and claim.account != job.account:
            others.append((claim.account, drawn))
        elif claim.holds:
            running.append(drawn)
    if divided:
        elastic = (one for one in view.jobs.values() if one.account != job.account)
        others += [(one.account, lengths.elastic(one)) for one in elastic]
    free = room - sum(one.slots for one in running)
    for account in dict.fromkeys(account for account, _ in others):
        jobs = [one for name, one in others if name == account]
        backlog = [sum(one.left_s[draw] * one.slots for one in jobs) for draw in range(DRAWS)]
        has = budgets.get(account, ledger.outside.get(account, 0))
        gain = has * room / max(1, capacity - has)
        each = zip(backlog, lengths.slack, strict=True)
        running.append(_Job(None, gain, [left_s / max(1, has) / slack for left_s, slack in each]))
    trained = [one for one in mine if one.running_on]
    lacks = order[0].least - free - sum(lengths.size(one) for one in trained)
    if lacks > 0:  # the budget is too small for a job, but accounts take turns
        turn_at = now if trained else order[0].moved_at + sharing.turn_s
        running.append(_Job(None, lacks, [max(0.0, turn_at - now)] * DRAWS))
    return _Line(
        now=now,
        ready_at=job.ready_at,
        free=free,
        share=math.inf,
        running=running,
        waiting=[lengths.elastic(one) for one in order if not one.running_on],
    )


def _start(line: _Line, draw: int) -> tuple[float, JobId | None]:
    """Return when the last waiting job starts, infinity if never, and whose end gave it slots."""
    now, free, share, left = float(line.now), line.free, line.share, line.waiting
    ends = [(now + job.left_s[draw], place, job) for place, job in enumerate(line.running)]
    heapq.heapify(ends)
    count, cause = len(ends), None
    while True:
        head, kept = Reservation(), []  # of the first job that cannot start
        for job in left:
            in_time = now + job.limit_s <= head.at
            if job.slots <= min(free, share) and (in_time or job.slots <= head.spare):
                if job is line.waiting[-1]:
                    return now, cause
                head.spare -= 0 if in_time else job.slots
                free, share, count = free - job.slots, share - job.slots, count + 1
                run = replace(job, ends_by=now + job.limit_s)
                heapq.heappush(ends, (now + job.left_s[draw], count, run))
            else:
                if math.isinf(head.at) and job.slots <= share and job is not line.waiting[-1]:
                    by_limit = sorted((one for _, _, one in ends), key=lambda one: one.ends_by)
                    head = reserve(((one.ends_by, one.slots) for one in by_limit), job.slots - free)
                kept.append(job)
        left = kept
        if not ends or math.isinf(ends[0][0]):
            return math.inf, None
        now, _, ended = heapq.heappop(ends)
        free += ended.slots
        share += ended.slots if ended.rigid else 0
        cause = ended.name


class _Lengths:
    """Drawn lengths of jobs, from what they report and from jobs that have ended."""

    def __init__(self, present: Present, rng: Random) -> None:
        self._present, self._rng = present, rng
        # 1 - load that other accounts add meanwhile
        self.slack = [rng.uniform(MIN_SLACK, 1.0) for _ in range(DRAWS)]
        self._normal = [rng.gauss(0.0, 1.0) for _ in range(NORMALS)]

    def size(self, job: JobView) -> int:
        """Return the slots with which an elastic job starts, or to which it shrinks for others."""
        if self._present.gangs:
            return len(job.running_on) or max(job.least, job.wanted)
        return job.least

    def elastic(self, job: JobView) -> _Job:
        """Return a job with the seconds that it still needs on its slots, or on its minimum."""
        past, now, held = self._present.past, self._present.now, len(job.running_on)
        known, size = past.get(job.family, ()), self.size(job)
        if held and job.samples_per_s > 0.0 and (job.stop_samples or known):
            done = job.samples_done + job.samples_per_s * max(0.0, now - job.epoch_at)
            if job.stop_samples is not None:
                samples = max(0.0, job.stop_samples - done)
                left = [samples * error for error in self._errors(STATED_ERROR)]
            else:
                left = self._left(done, [run.samples for run in known])
            return _Job(job.job, size, [samples / job.samples_per_s for samples in left])
        totals = [run.slot_s for run in known or past.get("elastic", ())]
        left = self._left(job.served(now), totals)
        return _Job(job.job, size, [slot_s / (held or size) for slot_s in left])

    def rigid(self, job: RigidView) -> _Job:
        """Return a job with the seconds that it still runs, at most until its limit."""
        past, ran_s = self._present.past, 0.0 if job.waits else self._present.now - job.began_at
        limit_s = math.inf if job.run_limit_s is None else job.run_limit_s
        known, others = past.get(job.family, ()), past.get("rigid", ())
        if len(known) >= MIN_RUNS or math.isinf(limit_s):
            totals = [run.run_s for run in (known or others)]
        else:
            totals = [limit_s * run.share for run in others if run.share is not None]
        left_s = max(0.0, limit_s - ran_s)
        if math.isfinite(left_s) and not any(total > ran_s for total in totals):
            left = [self._rng.uniform(0.0, left_s) for _ in range(DRAWS)]
        else:
            left = [min(one, left_s) for one in self._left(ran_s, totals)]
        ends_by = math.inf if job.ends_at is None else job.ends_at
        return _Job(job.job, job.slots, left, limit_s, ends_by)

    def _left(self, done: float, totals: Sequence[float]) -> list[float]:
        """Return draws of what a job still needs beyond `done`; infinity if `totals` is empty.

        A draw is a total of an ended job that is above `done`, with an error that is the larger the
        fewer they are. If there is none, the job is expected to reach the larger of 2 `done` and
        all totals, as in `remaining_samples`.
        """
        if not totals:
            return [math.inf] * DRAWS
        longer = [total for total in totals if total > done] or [max(2.0 * done, *totals)]
        drawn = self._rng.choices(longer, k=DRAWS)
        each = zip(drawn, self._errors((len(longer) + 1) ** -0.5), strict=True)
        return [max(0.0, total * error - done) for total, error in each]

    def _errors(self, deviation: float) -> list[float]:
        """Return log-normal factors of the deviation, cut from a longer list of draws."""
        begin = self._rng.randrange(NORMALS - DRAWS)
        return [math.exp(deviation * one) for one in self._normal[begin : begin + DRAWS]]


def _summary(line: _Line, starts: Sequence[tuple[float, JobId | None]]) -> ExpectedStart:
    low, middle, high = (_quantile([at for at, _ in starts], share) for share in QUANTILES)
    ahead = len(line.waiting) - 1
    if math.isinf(middle):
        unknown = [job for job in (*line.running, *line.waiting[:-1]) if math.isinf(job.left_s[0])]
        names = [job.name for job in unknown if job.name is not None]
        reason = "the slots that it needs do not become free"
        if names:
            reason = f"nothing tells how long {names[0]} runs: no time limit, and no ended job"
        return ExpectedStart(ahead=ahead, reason=reason)
    after = Counter(cause for at, cause in starts if math.isfinite(at)).most_common(1)[0][0]
    ends = [at for at, cause in starts if cause == after and math.isfinite(at)]
    return ExpectedStart(
        starts="now" if high <= line.now else "later",
        at=Seconds(middle),
        earliest=Seconds(low),
        latest=None if math.isinf(high) else Seconds(high),
        ahead=ahead,
        after=after,
        after_ends_at=None if after is None else Seconds(_quantile(ends, 0.5)),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]
