"""Adapter by which every policy keeps the budgets of accounts.

A policy sees a view in which the jobs of an account together cannot get more than its budget: jobs
have a smaller maximum, or are not ready to start. A running job that has to give up slots is shown
as it will be. So the policy decides about everything that the budgets leave open.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import repeat
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from controlplane.policy.placement.slot_partition import slots_in_words, split
from controlplane.policy.sharing.budgets import Claim, account_budgets
from controlplane.policy.sharing.caps import (
    Ledger,
    deal_caps,
    is_in_turn,
    turn_end,
    turn_order,
    useful_slots,
    words,
)
from controlplane.policy.sharing.limits import Limited, Quota, limited_jobs
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.sharing import Sharing

NEVER: Final = Seconds(1e12)  # `ready_at` of a job beyond the budget; constant, so views stay equal
MINUTE_S: Final = 60.0
MARGIN_S: Final = 1e-3  # around the end of a turn, where rounding decides, nothing is kept
NAMED: Final = 3  # accounts that a reason names


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """View for a policy, and what the policy's plan does not tell about it."""

    view: ClusterView
    budgets: Mapping[str, int] = {}  # of the accounts that want more than their budget
    waiting: frozenset[JobId] = frozenset()  # jobs that must not have slots
    reasons: Mapping[JobId, Reason] = {}  # for jobs that wait or give up slots
    wake_at: Seconds | None = None  # when a turn ends or a job can be changed


class Division:
    """Division of a cluster among accounts.

    It keeps the usage at the begin of a turn, because budgets that follow the usage at every moment
    would move slots to and fro. It also keeps the order, caps and shown views of an account's jobs
    until one of the jobs changes, because most jobs are the same from one view to the next.

    Args:
        gangs: True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(self, *, gangs: bool = False) -> None:
        self._gangs = gangs
        self._usage: Mapping[str, float] = {}  # at `_usage_at`
        self._usage_at = Seconds(0.0)
        self._usage_for: tuple[Sharing, frozenset[str]] | None = None
        self._known: dict[str, _Account] = {}  # accounts of the last view
        self._capacity = 0  # slots of the last view
        self._up: frozenset[SlotId] = frozenset()

    def divide(
        self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds
    ) -> Turns[Divided]:
        """Find the view that a policy should see: `view` itself if nothing is divided.

        Do not start another division before this one has ended.
        """
        self._capacity = yield from _capacity(view)
        limited = yield from self._limited(view, sharing, ledger, now)
        known = yield from self._update(view, sharing, ledger, now, limited)
        accounts = yield from self._accounts(known, sharing, ledger, now)
        bound = {name: one for name, one in accounts.items() if one.caps is not None}
        if bound or limited.caps:
            yield
            up = frozenset(slot.slot for slot in view.slots if slot.up)
            self._up = self._up if up == self._up else up
        fair = sharing.fair_share and len(accounts) > 1
        for name, account in known.items():
            yield
            account.show(limited.caps, self._up, now, prioritised=fair and name in accounts)
        yield
        shown = {name: job for one in known.values() for name, job in one.shown.items()}
        if not (bound or limited.caps):
            return Divided(view=_view_with(view, shown, set()))
        yield
        given_up = {slot for one in known.values() for slot in one.given_up()}
        wake_ats = [Seconds(self._usage_at + sharing.turn_s)]
        wake_ats += [one.wake_at(now) for one in known.values()]
        yield
        return Divided(
            view=_view_with(view, shown, given_up),
            budgets={name: account.budget for name, account in bound.items()},
            waiting=frozenset(name for one in known.values() for name in one.must_wait()),
            reasons=_reasons(known, accounts, limited, sharing.turn_s),
            wake_at=min((at for at in wake_ats if now < at < NEVER), default=None),
        )

    def merge(self, divided: Divided, plan: Plan) -> Plan:
        """Return the plan with the reasons of the division, without slots for jobs that must wait.

        The plan may be based on an older view.
        """
        if not divided.reasons and divided.wake_at is None:
            return plan
        times = [at for at in (plan.wake_at, divided.wake_at) if at is not None and at < NEVER]
        waiting = divided.waiting
        return msgspec.structs.replace(
            plan,
            local_batch={job: on for job, on in plan.local_batch.items() if job not in waiting},
            reasons={**plan.reasons, **divided.reasons},
            starts={job: at for job, at in plan.starts.items() if job not in waiting},
            wake_at=min(times, default=None),
        )

    def _limited(
        self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds
    ) -> Turns[Limited]:
        """Find the jobs that limits of users and classes bound."""
        quota = Quota(sharing, ledger, ledger.holders, projects=False)
        if not quota.bounds_elastic_jobs:
            return Limited()
        jobs = list(view.jobs.values())
        yield
        useful = {job.job: useful_slots(job, self._capacity, gangs=self._gangs) for job in jobs}
        yield
        order = turn_order(jobs, ledger, now, sharing.turn_s)
        return (yield from limited_jobs(order, useful, quota, gangs=self._gangs))

    def _update(
        self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds, limited: Limited
    ) -> Turns[dict[str, _Account]]:
        """Update all accounts that have jobs, in the order of arrival, then those of `outside`."""
        by_account: dict[str, list[JobView]] = defaultdict(list)
        for job in view.jobs.values():
            by_account[job.account].append(job)
        by_account |= {name: [] for name in sorted(ledger.outside) if name not in by_account}
        before = self._known
        self._known = {name: before.get(name) or _Account(gangs=self._gangs) for name in by_account}
        for name, account in self._known.items():
            yield
            account.outside, account.caps = ledger.outside.get(name, 0), None
            account.update(
                by_account[name],
                ledger,
                limited,
                capacity=self._capacity,
                turn_s=sharing.turn_s,
                now=now,
            )
        return self._known

    def _accounts(
        self,
        known: Mapping[str, _Account],
        sharing: Sharing,
        ledger: Ledger,
        now: Seconds,
    ) -> Turns[dict[str, _Account]]:
        """Set budget and caps of each account that can have slots, and return these accounts."""
        accounts = {name: one for name, one in known.items() if one.order or one.outside}
        if len(accounts) < 2 and not sharing.projects:  # noqa: PLR2004
            return {}
        capacity, usage = self._capacity, self._usage_of(frozenset(accounts), sharing, ledger, now)
        claims = {
            name: Claim(
                demand=one.demand,
                floor=one.outside + one.floor,
                usage=usage.get(name, 0.0),
                order=place,
            )
            for place, (name, one) in enumerate(accounts.items())
        }
        budgets = account_budgets(claims, sharing, capacity)
        overdue = _overdue(accounts, claims, budgets, capacity, before=now - sharing.turn_s)
        for name, least in overdue.items():
            floor = accounts[name].outside + least
            claims[name] = msgspec.structs.replace(claims[name], floor=floor)
        if overdue:
            budgets = account_budgets(claims, sharing, capacity)
        while True:
            unused: dict[str, int] = {}  # account without room for another job -> slots it uses
            for name, account in accounts.items():
                yield
                account.budget, account.caps = budgets[name], None
                if account.budget < min(account.demand, capacity):
                    used = account.deal()
                    unused |= {name: used} if used < account.budget else {}
            if not unused:
                return accounts
            # One at a time: of two jobs that need the whole cluster, one should get it.
            last = max(unused, key=lambda name: (claims[name].usage, claims[name].order))
            claims[last] = msgspec.structs.replace(claims[last], demand=unused[last])
            budgets = account_budgets(claims, sharing, capacity)

    def _usage_of(
        self, accounts: frozenset[str], sharing: Sharing, ledger: Ledger, now: Seconds
    ) -> Mapping[str, float]:
        """Return the usage that counts now. It is renewed each turn, and when accounts change."""
        same = self._usage_for == (sharing, accounts)
        if not same or not 0.0 <= now - self._usage_at < sharing.turn_s:
            self._usage, self._usage_at = dict(ledger.usage), now
            self._usage_for = (sharing, accounts)
        return self._usage


class _Account:
    """Account with its jobs in the view, and its slots.

    The order of the jobs, and what depends on it, is computed again when a job changes or the turn
    of a job ends.

    Args:
        gangs: True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(self, *, gangs: bool) -> None:
        self._gangs = gangs
        self.outside = 0  # slots of jobs that the view omits
        self.budget = 0
        self.caps: Mapping[JobId, int] | None = None  # most slots of each job; None: not bounded
        self.order: Sequence[JobView] = ()  # jobs that may have slots, in turn order
        self.useful: Mapping[JobId, int] = {}  # most slots that each of these jobs can use
        self.floor = 0  # minimum of the first job whose turn is not over
        self.shown: dict[JobId, JobView] = {}  # views of jobs that differ from the real ones
        self.waiting: list[JobId] = []  # jobs without slots that must wait for the budget
        self.giving: list[JobView] = []  # jobs with slots that give some up for the budget
        self.limited: list[tuple[JobView, int]] = []  # jobs that a limit bounds, with their caps
        self._jobs: list[JobView] = []
        self._for: tuple[object, ...] = ()  # rules and turns from which `order` was computed
        self._updated_at = self._order_until = -math.inf  # `order` is valid between these times
        self._inside = (0, 0)  # slots that the jobs have, and most that they can use
        self._turn_ends: list[float] = []  # end of each job's turn
        self._dealt: dict[int, tuple[dict[JobId, int], int]] = {}  # caps and their sum, by slots
        # Jobs that no plan can change, for these `up` slots, between these times.
        self._stuck: tuple[frozenset[SlotId], float, float, set[JobId]] | None = None
        self._wake = (-math.inf, -math.inf)  # next time to wake, and time of its computation
        self._shown_for: tuple[Mapping[JobId, int], bool] | None = None
        # By job: as seen, its cap and its priority, then as shown.
        self._views: dict[JobId, tuple[JobView, int | None, float, JobView]] = {}

    @property
    def held(self) -> int:
        """Slots that it has now."""
        return self.outside + self._inside[0]

    @property
    def demand(self) -> int:
        """Most slots that it can use."""
        return self.outside + self._inside[1]

    def update(
        self,
        jobs: list[JobView],
        ledger: Ledger,
        limited: Limited,
        *,
        capacity: int,
        turn_s: float,
        now: Seconds,
    ) -> None:
        """Compute again what depends on the jobs, if they, the rules or their turns changed.

        Equal views of a job have their slots in the same order.
        """
        names, caps = [job.job for job in jobs], limited.caps
        bounds = [*map(caps.get, names)] if caps else []
        ranks = [*map(ledger.ranks.get, names)] if ledger.ranks else []
        began = [*map(ledger.began_at.get, names, repeat(-math.inf))]
        rules = capacity, turn_s, bounds, ranks, began
        same = rules == self._for and self._updated_at <= now < self._order_until
        if same and jobs == self._jobs:
            return
        self._jobs, self._for, self._updated_at = jobs, rules, now
        usable = [job for job in jobs if caps.get(job.job) != 0] if caps else jobs
        useful = {job.job: useful_slots(job, capacity, gangs=self._gangs) for job in usable}
        self.useful = {job: min(most, caps.get(job, most)) for job, most in useful.items()}
        self.order = turn_order(usable, ledger, now, turn_s)
        in_turn = (job for job in self.order if is_in_turn(job, ledger, now, turn_s))
        first = next(in_turn, None)
        self.floor = 0 if first is None else min(first.least, self.useful[first.job])
        self._inside = sum(len(job.running_on) for job in usable), sum(self.useful.values())
        self._turn_ends = [turn_end(job, ledger, turn_s) for job in jobs]
        self._order_until = min(
            (at for at in self._turn_ends if at > now - MARGIN_S), default=1e300
        )
        self._dealt, self._stuck, self._shown_for = {}, None, None
        self._wake = (-math.inf, -math.inf)

    def deal(self) -> int:
        """Divide the budget among the jobs. Return how many slots they use, with `outside`."""
        room = max(0, self.budget - self.outside)
        if room not in self._dealt:
            caps = deal_caps(self.order, room, self.useful, gangs=self._gangs)
            useful = {job: cap for job, cap in caps.items() if self.useful[job]}
            self._dealt = {room: (useful, sum(caps.values()))}
        self.caps, used = self._dealt[room]
        return self.outside + used

    def show(
        self,
        limits: Mapping[JobId, int],
        up: frozenset[SlotId],
        now: Seconds,
        *,
        prioritised: bool,
    ) -> None:
        """Compute what a policy should see of the jobs.

        Args:
            limits: most slots of the jobs, of any account, that limits of users or classes bound.
            up: slots whose node is up.
            prioritised: True if the mean priority of the account's jobs should be 1.
        """
        caps = (
            {job.job: limits[job.job] for job in self._jobs if job.job in limits} if limits else {}
        )
        caps |= self.caps or {}
        if caps:
            stuck = self._unchangeable(up, now)
            caps = {name: cap for name, cap in caps.items() if name not in stuck}
        if self._shown_for == (caps, prioritised):
            return
        self._shown_for = caps, prioritised
        self.shown, self.waiting, self.giving, self.limited = {}, [], [], []
        before, self._views = self._views, {}
        mean = math.fsum(job.priority for job in self.order) / max(1, len(self.order)) or 1.0
        for job in self._jobs if prioritised else [j for j in self._jobs if j.job in caps]:
            name, cap = job.job, caps.get(job.job)
            priority = job.priority / mean if prioritised else job.priority
            known = before.get(name)
            if known is None or known[0] is not job or known[1:3] != (cap, priority):
                known = job, cap, priority, _shown(job, cap, priority)
            self._views[name], seen = known, known[3]
            if seen is not job:
                self.shown[name] = seen
            if cap is None or (cap and len(seen.running_on) == len(job.running_on)):
                continue
            if limits.get(name) == cap:
                self.limited.append((job, cap))
            elif job.running_on:
                self.giving.append(job)
            else:
                self.waiting.append(name)

    def _unchangeable(self, up: frozenset[SlotId], now: Seconds) -> set[JobId]:
        """Return the jobs that a plan cannot change now, as `plan_check` and the nodes allow."""
        known = self._stuck
        if known is None or known[0] is not up or not known[1] <= now < known[2]:
            names = {
                job.job
                for job in self._jobs
                if not job.movable
                or (job.running_on and (job.retry_at > now or not up.issuperset(job.running_on)))
            }
            until = min(
                (job.retry_at for job in self._jobs if job.retry_at > now), default=math.inf
            )
            known = self._stuck = up, now, until, names
        return known[3]

    def given_up(self) -> Iterator[SlotId]:
        """Yield the slots that the jobs give up."""
        for job in (*self.giving, *(job for job, _ in self.limited)):
            kept = self.shown[job.job].running_on
            yield from (slot for slot in job.running_on if slot not in kept)

    def must_wait(self) -> Iterator[JobId]:
        """Yield the jobs that must not have slots."""
        yield from self.waiting
        yield from (job.job for job in self.giving if not self.shown[job.job].running_on)
        yield from (job.job for job, cap in self.limited if not cap)

    def wake_at(self, now: Seconds) -> Seconds:
        """Return when the next turn ends, or when a job can be changed again."""
        if not self._wake[1] <= now < self._wake[0]:
            times = [*self._turn_ends, *(job.retry_at for job in self._jobs)]
            self._wake = min((at for at in times if at > now), default=math.inf), now
        return Seconds(self._wake[0])


def _reasons(
    known: Mapping[str, _Account], shared: Mapping[str, _Account], limited: Limited, turn_s: float
) -> dict[JobId, Reason]:
    """Return why jobs wait or give up slots. Only `shared` accounts have budgets."""
    reasons: dict[JobId, Reason] = {}
    why = _Reasons(shared, turn_s)
    for name, account in known.items():
        if account.waiting:
            reasons |= dict.fromkeys(account.waiting, why.waits(name))
        for job in account.giving:
            reasons[job.job] = why.gives_back(job, len(account.shown[job.job].running_on))
        for job, cap in account.limited:
            reasons[job.job] = limited.reason(job, cap)
    return reasons


def _overdue(
    accounts: Mapping[str, _Account],
    claims: Mapping[str, Claim],
    budgets: Mapping[str, int],
    capacity: int,
    *,
    before: float,
) -> dict[str, int]:
    """Return the slots that accounts get in their turn although they exceed the budget.

    Such an account has no slots, its budget is too small for all its jobs, and its first job has
    waited since `before`. Without this exception, a job of large minimum would never start.
    """
    found: dict[str, int] = {}
    room = capacity - sum(claim.floor for claim in claims.values())
    for name in sorted(accounts, key=lambda name: (claims[name].usage, claims[name].order)):
        account = accounts[name]
        jobs = [job for job in account.order if account.useful[job.job]]
        if account.held > account.outside or not jobs:
            continue
        small = min(job.least for job in jobs) <= budgets[name] - account.outside
        if jobs[0].moved_at <= before and not small and jobs[0].least <= room:
            found[name] = jobs[0].least
            room -= jobs[0].least
    return found


def _capacity(view: ClusterView) -> Turns[int]:
    lost = {slot.slot for slot in view.slots if not slot.up}
    yield
    if lost:  # those that a job still holds count
        lost -= {slot for job in view.jobs.values() for slot in job.running_on}
    return len(view.slots) - len(lost)


def _view_with(
    view: ClusterView, shown: Mapping[JobId, JobView], given_up: AbstractSet[SlotId]
) -> ClusterView:
    """Return the view with changed jobs, in which the slots that they give up are leaving."""
    if not shown:
        return view
    slots = view.slots
    if given_up:
        slots = tuple(_leaving(slot) if slot.slot in given_up else slot for slot in slots)
    return ClusterView(version=view.version, slots=slots, jobs={**view.jobs, **shown})


@lru_cache(maxsize=1 << 14)  # so that unchanged views stay the same objects
def _leaving(slot: SlotView) -> SlotView:
    return msgspec.structs.replace(slot, usable=False, leaving=True)


def _shown(job: JobView, cap: int | None, priority: float) -> JobView:
    changed = job if cap is None else _capped(job, cap)
    if priority != job.priority:
        changed = msgspec.structs.replace(changed, priority=priority)
    return changed


def _capped(job: JobView, cap: int) -> JobView:
    """Return the view of a job that may have at most `cap` slots; 0: it has to wait."""
    if not cap:
        return msgspec.structs.replace(job, running_on={}, ready_at=NEVER, retry_at=Seconds(0.0))
    held = len(job.running_on)
    if cap >= job.most and held <= cap:
        return job
    wanted = min(job.wanted, cap)
    if held <= cap:
        return msgspec.structs.replace(job, most=min(job.most, cap), wanted=wanted)
    on_node: dict[NodeId, list[SlotId]] = defaultdict(list)
    for slot in job.running_on:
        on_node[node_of(slot)].append(slot)
    fullest = sorted(on_node.values(), key=len, reverse=True)
    first = set([slot for slots in fullest for slot in slots][:cap])
    kept = [slot for slot in job.running_on if slot in first]
    batch = max(cap, min(sum(job.running_on.values()), job.local_limit * cap))
    return msgspec.structs.replace(
        job, most=cap, wanted=wanted, running_on=split(batch, kept), movable=False
    )


class _Reasons:
    """Reasons for jobs that wait (code `budget`) or give up slots (`gave_back`).

    `turn_s` is the length of a turn in seconds.
    """

    def __init__(self, accounts: Mapping[str, _Account], turn_s: float) -> None:
        self._accounts, self._turn_s = accounts, turn_s
        names = list(accounts)
        greedy = [name for name in names if accounts[name].demand > accounts[name].budget]
        self._want = greedy if len(greedy) > 1 else [n for n in names if accounts[n].budget]
        lacks = {name: one.budget - one.held for name, one in accounts.items()}
        self._lack = sorted((n for n in names if lacks[n] > 0), key=lambda name: -lacks[name])

    def gives_back(self, job: JobView, after: int) -> Reason:
        """Return the reason for a job that will have fewer slots, which are `after`."""
        name, account, before = job.account, self._accounts[job.account], len(job.running_on)
        text = f"{'' if after else 'paused: '}gives back {slots_in_words(before - after)}"
        takers = _listed(self._lack, name)
        text += f" to {takers}" if takers else ""
        if account.held > account.budget:
            text += f": {words(name)} has {account.held} slots and may have {account.budget}"
        elif not takers:
            minutes = self._turn_s / MINUTE_S
            text += f" to another job of {words(name)} after a turn of {minutes:.0f} min"
        return Reason("gave_back", text, _numbers(account, before, after))

    def waits(self, name: str) -> Reason:
        """Return the reason for the jobs of an account that wait for its budget."""
        account = self._accounts[name]
        text = f"waits: {words(name)} has {account.held} of its {slots_in_words(account.budget)}"
        if others := _listed(self._want, name):
            one = len(self._want) - (name in self._want) == 1
            text += f"; {others} want{'s' * one} the rest"
        return Reason("budget", text, _numbers(account, 0, 0))


def _numbers(account: _Account, before: int, after: int) -> dict[str, float]:
    return {
        "account_slots": float(account.held),
        "account_budget": float(account.budget),
        "slots_now": float(before),
        "slots_then": float(after),
    }


def _listed(accounts: Sequence[str], but: str) -> str:
    """Return the first accounts in words, except one."""
    named = [words(name) for name in accounts[: NAMED + 1] if name != but][:NAMED]
    more = len(accounts) - (but in accounts) - len(named)
    if more > 0:
        named.append(f"{more} more")
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
