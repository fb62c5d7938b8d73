"""Adapter by which every policy keeps the budgets of accounts.

A policy sees a view in which the jobs of an account together cannot get more than its budget: jobs
have a smaller maximum, or are not ready to start. A running job that has to give up slots is shown
as it will be. So the policy decides about everything that the budgets leave open.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
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
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.sharing import Sharing

NEVER: Final = Seconds(1e12)  # `ready_at` of a job beyond the budget; constant, so views stay equal
MINUTE_S: Final = 60.0
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
    would move slots to and fro. It also keeps changed views of jobs until the jobs change.

    Args:
        gangs: True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(self, *, gangs: bool = False) -> None:
        self._gangs = gangs
        self._usage: Mapping[str, float] = {}  # at `_usage_at`
        self._usage_at = Seconds(0.0)
        self._usage_for: tuple[Sharing, frozenset[str]] | None = None
        # By job: as seen, its cap and its priority, then as shown.
        self._shown: dict[JobId, tuple[JobView, int | None, float, JobView]] = {}

    def divide(self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds) -> Divided:
        """Return the view that a policy should see: `view` itself if nothing is divided."""
        limited = self._limited(view, sharing, ledger, now)
        accounts = self._accounts(view, sharing, ledger, now, limited)
        bound = {name: one for name, one in accounts.items() if one.caps is not None}
        caps = dict(limited.caps)
        for account in bound.values():
            caps |= {job: cap for job, cap in (account.caps or {}).items() if account.useful[job]}
        wake_at = self._wake_at(view, sharing, ledger, now) if caps else None
        up = {slot.slot for slot in view.slots if slot.up} if caps else set()
        caps = {job: cap for job, cap in caps.items() if _can_change(view.jobs[job], up, now)}
        priorities = _priorities(accounts) if sharing.fair_share and len(accounts) > 1 else {}
        shown = self._show(view, caps, priorities)
        reasons: dict[JobId, Reason] = {}
        why = _Reasons(accounts, sharing.turn_s)
        for name, cap in caps.items():
            job, after = view.jobs[name], len(shown[name].running_on)
            if after < len(job.running_on) or not cap:
                over = limited.caps.get(name) == cap
                reasons[name] = limited.reason(job, cap) if over else why.of(job, after)
        return Divided(
            view=_view_with(view, shown),
            budgets={name: account.budget for name, account in bound.items()},
            waiting=frozenset(name for name, cap in caps.items() if not cap),
            reasons=reasons,
            wake_at=wake_at,
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
    ) -> Limited:
        """Return the jobs that limits of users and classes bound."""
        quota = Quota(sharing, ledger, ledger.holders, projects=False)
        if not quota.bounds_elastic_jobs:
            return Limited()
        capacity, jobs = _capacity(view), list(view.jobs.values())
        useful = {job.job: useful_slots(job, capacity, gangs=self._gangs) for job in jobs}
        order = turn_order(jobs, ledger, now, sharing.turn_s)
        return limited_jobs(order, useful, quota, gangs=self._gangs)

    def _accounts(
        self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds, limited: Limited
    ) -> dict[str, _Account]:
        """Return all accounts that have jobs, with their budgets, in the order of arrival."""
        by_account: dict[str, list[JobView]] = defaultdict(list)
        capacity, turn_s = _capacity(view), sharing.turn_s
        for job in view.jobs.values():
            if limited.caps.get(job.job) != 0:
                by_account[job.account].append(job)
        for name in sorted(ledger.outside):
            by_account[name] = by_account.get(name, [])
        if len(by_account) < 2 and not sharing.projects:  # noqa: PLR2004
            return {}
        usage = self._usage_of(frozenset(by_account), sharing, ledger, now)
        accounts: dict[str, _Account] = {}
        claims: dict[str, Claim] = {}
        for name, jobs in by_account.items():
            useful = {job.job: useful_slots(job, capacity, gangs=self._gangs) for job in jobs}
            useful = {job: min(most, limited.caps.get(job, most)) for job, most in useful.items()}
            order = turn_order(jobs, ledger, now, turn_s)
            outside = ledger.outside.get(name, 0)
            accounts[name] = _Account(
                order=order,
                useful=useful,
                outside=outside,
                held=outside + sum(len(job.running_on) for job in jobs),
                demand=outside + sum(useful.values()),
            )
            in_turn = (job for job in order if is_in_turn(job, ledger, now, turn_s))
            claims[name] = Claim(
                demand=accounts[name].demand,
                floor=outside + next((min(job.least, useful[job.job]) for job in in_turn), 0),
                usage=usage.get(name, 0.0),
                order=len(claims),
            )
        budgets = account_budgets(claims, sharing, capacity)
        overdue = _overdue(accounts, claims, budgets, capacity, before=now - turn_s)
        for name, least in overdue.items():
            floor = accounts[name].outside + least
            claims[name] = msgspec.structs.replace(claims[name], floor=floor)
        if overdue:
            budgets = account_budgets(claims, sharing, capacity)
        while True:
            unused: dict[str, int] = {}  # account without room for another job -> slots it uses
            for name, account in accounts.items():
                account.budget, account.caps = budgets[name], None
                if account.budget < min(account.demand, capacity):
                    room = max(0, account.budget - account.outside)
                    caps = deal_caps(account.order, room, account.useful, gangs=self._gangs)
                    account.caps, used = caps, account.outside + sum(caps.values())
                    unused |= {name: used} if used < account.budget else {}
            if not unused:
                return accounts
            # One at a time: of two jobs that need the whole cluster, one should get it.
            last = max(unused, key=lambda name: (claims[name].usage, claims[name].order))
            claims[last] = msgspec.structs.replace(claims[last], demand=unused[last])
            budgets = account_budgets(claims, sharing, capacity)

    def _wake_at(
        self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds
    ) -> Seconds | None:
        """Return when the next turn ends, or when a job can be changed again."""
        times = [Seconds(self._usage_at + sharing.turn_s)]
        for job in view.jobs.values():
            times += [job.retry_at, turn_end(job, ledger, sharing.turn_s)]
        return min((at for at in times if at > now), default=None)

    def _usage_of(
        self, accounts: frozenset[str], sharing: Sharing, ledger: Ledger, now: Seconds
    ) -> Mapping[str, float]:
        """Return the usage that counts now. It is renewed each turn, and when accounts change."""
        same = self._usage_for == (sharing, accounts)
        if not same or not 0.0 <= now - self._usage_at < sharing.turn_s:
            self._usage, self._usage_at = dict(ledger.usage), now
            self._usage_for = (sharing, accounts)
        return self._usage

    def _show(
        self, view: ClusterView, caps: Mapping[JobId, int], priorities: Mapping[JobId, float]
    ) -> dict[JobId, JobView]:
        """Return the views of jobs with a cap or another priority."""
        before, self._shown = self._shown, {}
        for name in caps | priorities.keys():
            job, cap = view.jobs[name], caps.get(name)
            priority = priorities.get(name, job.priority)
            known = before.get(name)
            if known is None or known[0] is not job or known[1:3] != (cap, priority):
                changed = job if cap is None else _capped(job, cap)
                if priority != job.priority:
                    changed = msgspec.structs.replace(changed, priority=priority)
                known = job, cap, priority, changed
            self._shown[name] = known
        return {name: known[3] for name, known in self._shown.items()}


class _Account(msgspec.Struct, kw_only=True):
    """Account with its jobs in the view, and its slots."""

    order: Sequence[JobView]  # its jobs, in turn order
    useful: Mapping[JobId, int]  # most slots that each job can use
    outside: int  # slots of jobs that the view omits
    held: int  # slots that it has now
    demand: int  # most slots that it can use
    budget: int = 0
    caps: Mapping[JobId, int] | None = None  # most slots of each job; None: not bounded


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


def _capacity(view: ClusterView) -> int:
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    return sum(slot.up or slot.slot in held for slot in view.slots)


def _can_change(job: JobView, up: set[SlotId], now: Seconds) -> bool:
    """True if a plan can change the job now, as `plan_check` and the nodes allow."""
    if not job.running_on:
        return job.movable
    return job.movable and job.retry_at <= now and up.issuperset(job.running_on)


def _view_with(view: ClusterView, shown: Mapping[JobId, JobView]) -> ClusterView:
    """Return the view with changed jobs. The slots that they give up are leaving."""
    if all(job is view.jobs[name] for name, job in shown.items()):
        return view
    given_up = {
        slot
        for name, job in shown.items()
        for slot in view.jobs[name].running_on
        if slot not in job.running_on
    }
    slots = tuple(_leaving(slot) if slot.slot in given_up else slot for slot in view.slots)
    return ClusterView(version=view.version, slots=slots, jobs={**view.jobs, **shown})


@lru_cache(maxsize=1 << 14)  # so that unchanged views stay the same objects
def _leaving(slot: SlotView) -> SlotView:
    return msgspec.structs.replace(slot, usable=False, leaving=True)


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


def _priorities(accounts: Mapping[str, _Account]) -> dict[JobId, float]:
    """Return the priorities that change: each is divided by the mean of its account's jobs."""
    found = {}
    for account in accounts.values():
        mean = math.fsum(job.priority for job in account.order) / max(1, len(account.order))
        for job in account.order:
            if job.priority / mean != job.priority:
                found[job.job] = job.priority / mean
    return found


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
        self._waits: dict[str, Reason] = {}  # of the waiting jobs of an account

    def of(self, job: JobView, after: int) -> Reason:
        """Return the reason for a job that is shown with fewer slots, which are `after`."""
        name, account, before = job.account, self._accounts[job.account], len(job.running_on)
        if not before:
            if name not in self._waits:
                self._waits[name] = self._waits_of(name)
            return self._waits[name]
        text = f"{'' if after else 'paused: '}gives back {slots_in_words(before - after)}"
        takers = _listed(self._lack, name)
        text += f" to {takers}" if takers else ""
        if account.held > account.budget:
            text += f": {words(name)} has {account.held} slots and may have {account.budget}"
        elif not takers:
            minutes = self._turn_s / MINUTE_S
            text += f" to another job of {words(name)} after a turn of {minutes:.0f} min"
        return Reason("gave_back", text, _numbers(account, before, after))

    def _waits_of(self, name: str) -> Reason:
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
