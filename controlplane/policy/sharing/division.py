"""Adapter by which every policy keeps the budgets of accounts.

A policy sees a view in which the jobs of an account together cannot get more than its budget: jobs
have a smaller maximum, or are not ready to start. A running job that has to give up slots is shown
as it will be. So the policy decides about everything that the budgets leave open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from controlplane.policy.placement.slot_partition import split
from controlplane.policy.sharing.budgets import Claim, account_budgets
from controlplane.policy.sharing.caps import (
    Account,
    Ledger,
    deal_caps,
    is_in_turn,
    turn_end,
    turn_order,
    useful_slots,
)
from controlplane.policy.sharing.limits import Limited, Quota, limited_jobs
from controlplane.policy.sharing.reasons import Reasons
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.sharing import Sharing

NEVER: Final = Seconds(1e12)  # `ready_at` of a job beyond the budget; constant, so views stay equal


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
    would move slots to and fro. It also caches changed views of jobs, so that unchanged ones stay
    the same objects.

    Args:
        gangs: True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(self, *, gangs: bool = False) -> None:
        self._gangs = gangs
        self._usage: Mapping[str, float] = {}  # at `_usage_at`
        self._usage_at = Seconds(0.0)
        self._usage_for: tuple[Sharing, frozenset[str]] | None = None
        self._capped: dict[JobId, tuple[JobView, int, JobView]] = {}  # seen, cap, then as capped
        self._shown: dict[JobId, tuple[JobView, JobView]] = {}  # seen -> shown
        self._slots: dict[SlotId, tuple[SlotView, SlotView]] = {}  # seen -> leaving

    def divide(self, view: ClusterView, sharing: Sharing, ledger: Ledger, now: Seconds) -> Divided:
        """Return the view that a policy should see: `view` itself if nothing is divided."""
        limited = self._limited(view, sharing, ledger, now)
        accounts = self._accounts(view, sharing, ledger, now, limited)
        bound = {name: one for name, one in accounts.items() if one.caps is not None}
        shown: dict[JobId, JobView] = {}
        reasons: dict[JobId, Reason] = {}
        waiting: set[JobId] = set()
        why = Reasons(accounts, sharing.turn_s)
        caps = dict(limited.caps)
        for account in bound.values():
            caps |= {job: cap for job, cap in (account.caps or {}).items() if account.useful[job]}
        up = {slot.slot for slot in view.slots if slot.up} if caps else set()
        capped: dict[JobId, tuple[JobView, int, JobView]] = {}
        for job, cap in ((view.jobs[name], cap) for name, cap in caps.items()):
            if not _can_change(job, up, now):
                continue
            known = self._capped.get(job.job)
            if known is None or known[0] is not job or known[1] != cap:
                known = (job, cap, _capped(job, cap))
            capped[job.job] = known
            changed = known[2]
            if changed is not job:
                shown[job.job] = changed
            if not cap:
                waiting.add(job.job)
            if len(changed.running_on) < len(job.running_on) or not cap:
                over = limited.caps.get(job.job) == cap
                reasons[job.job] = (
                    limited.reason(job, cap) if over else why.of(job.account, job, changed)
                )
        self._capped = capped
        if sharing.fair_share and len(accounts) > 1:
            for name, priority in _priorities(accounts).items():
                job = shown.get(name, view.jobs[name])
                shown[name] = msgspec.structs.replace(job, priority=priority)
        return Divided(
            view=self._view_with(view, shown) if shown else view,
            budgets={name: account.budget for name, account in bound.items()},
            waiting=frozenset(waiting),
            reasons=reasons,
            wake_at=self._wake_at(view, sharing, ledger, now) if caps else None,
        )

    def merge(self, divided: Divided, plan: Plan) -> Plan:
        """Return the plan with the reasons of the division, without slots for jobs that must wait.

        The plan may be based on an older view.
        """
        if not divided.reasons and divided.wake_at is None:
            return plan
        placed = {job: on for job, on in plan.local_batch.items() if job not in divided.waiting}
        reasons = {**plan.reasons, **divided.reasons}
        times = [at for at in (plan.wake_at, divided.wake_at) if at is not None and at < NEVER]
        return msgspec.structs.replace(
            plan,
            local_batch=placed,
            reasons=reasons,
            starts={job: at for job, at in plan.starts.items() if job not in divided.waiting},
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
        self,
        view: ClusterView,
        sharing: Sharing,
        ledger: Ledger,
        now: Seconds,
        limited: Limited,
    ) -> dict[str, Account]:
        """Return all accounts that have jobs, with their budgets, in the order of arrival."""
        by_account: dict[str, list[JobView]] = defaultdict(list)
        capacity = _capacity(view)
        for job in view.jobs.values():
            if limited.caps.get(job.job) != 0:
                by_account[job.account].append(job)
        for name in sorted(ledger.outside):
            by_account[name] = by_account.get(name, [])
        if len(by_account) < 2 and not sharing.projects:  # noqa: PLR2004
            return {}
        accounts = {
            name: self._account(jobs, capacity, ledger.outside.get(name, 0), limited.caps)
            for name, jobs in by_account.items()
        }
        for name, one in accounts.items():
            order = turn_order(one.jobs, ledger, now, sharing.turn_s)
            in_turn = (job for job in order if is_in_turn(job, ledger, now, sharing.turn_s))
            floor = one.outside + next((min(j.least, one.useful[j.job]) for j in in_turn), 0)
            accounts[name] = msgspec.structs.replace(one, order=order, floor=floor)
        usage = self._usage_of(frozenset(by_account), sharing, ledger, now)
        claims = {
            name: Claim(demand=one.demand, floor=one.floor, usage=usage.get(name, 0.0), order=order)
            for order, (name, one) in enumerate(accounts.items())
        }
        budgets = account_budgets(claims, sharing, capacity)
        overdue = self._overdue(
            accounts, claims, budgets, sharing=sharing, capacity=capacity, now=now
        )
        for name, least in overdue.items():
            claims[name] = msgspec.structs.replace(
                claims[name], floor=accounts[name].outside + least
            )
        if overdue:
            budgets = account_budgets(claims, sharing, capacity)
        while True:
            unused: dict[str, int] = {}  # account without room for another job -> slots it uses
            for name, budget in budgets.items():
                account = self._bounded(accounts[name], budget, capacity)
                accounts[name] = account
                used = account.outside + sum((account.caps or {}).values())
                if account.caps is not None and used < budget:
                    unused[name] = used
            if not unused:
                return accounts
            # One at a time: of two jobs that need the whole cluster, one should get it.
            last = max(unused, key=lambda name: (claims[name].usage, claims[name].order))
            claims[last] = msgspec.structs.replace(claims[last], demand=unused[last])
            budgets = account_budgets(claims, sharing, capacity)

    @staticmethod
    def _overdue(
        accounts: Mapping[str, Account],
        claims: Mapping[str, Claim],
        budgets: Mapping[str, int],
        *,
        sharing: Sharing,
        capacity: int,
        now: Seconds,
    ) -> dict[str, int]:
        """Return the slots that accounts get in their turn although they exceed the budget.

        Such an account has no slots, its budget is too small for all its jobs, and its first job
        has waited for a turn. Without this exception, a job of large minimum would never start.
        """
        found: dict[str, int] = {}
        room = capacity - sum(claim.floor for claim in claims.values())
        for name in sorted(accounts, key=lambda name: (claims[name].usage, claims[name].order)):
            account = accounts[name]
            jobs = [job for job in account.order if account.useful[job.job]]
            if account.held > account.outside or not jobs:
                continue
            small = min(job.least for job in jobs) <= budgets[name] - account.outside
            late = now - jobs[0].moved_at >= sharing.turn_s
            if late and not small and jobs[0].least <= room:
                found[name] = jobs[0].least
                room -= jobs[0].least
        return found

    def _bounded(self, account: Account, budget: int, capacity: int) -> Account:
        """Return the account with its budget, and with caps if it could exceed the budget."""
        caps = None
        if budget < min(account.demand, capacity):
            room = max(0, budget - account.outside)
            caps = deal_caps(account.order, room, account.useful, gangs=self._gangs)
        return msgspec.structs.replace(account, budget=budget, caps=caps)

    def _account(
        self, jobs: Sequence[JobView], capacity: int, outside: int, caps: Mapping[JobId, int]
    ) -> Account:
        useful = {job.job: useful_slots(job, capacity, gangs=self._gangs) for job in jobs}
        useful = {name: min(most, caps.get(name, most)) for name, most in useful.items()}
        return Account(
            jobs=jobs,
            useful=useful,
            outside=outside,
            held=outside + sum(len(job.running_on) for job in jobs),
            demand=outside + sum(useful.values()),
        )

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

    def _view_with(self, view: ClusterView, shown: Mapping[JobId, JobView]) -> ClusterView:
        """Return the view with changed jobs. The slots that they give up are leaving."""
        jobs = dict(view.jobs)
        for name, changed in shown.items():
            jobs[name] = self._cached(view.jobs[name], changed)
        self._shown = {name: one for name, one in self._shown.items() if name in shown}
        given_up = {
            slot
            for name, job in shown.items()
            for slot in view.jobs[name].running_on
            if slot not in job.running_on
        }
        slots = view.slots
        if given_up:
            slots = tuple(
                self._leaving(slot) if slot.slot in given_up else slot for slot in view.slots
            )
        return ClusterView(version=view.version, slots=slots, jobs=jobs)

    def _cached(self, seen: JobView, changed: JobView) -> JobView:
        if changed is seen:
            return seen
        known = self._shown.get(seen.job)
        if known is not None and known[0] is seen and known[1] == changed:
            return known[1]
        self._shown[seen.job] = (seen, changed)
        return changed

    def _leaving(self, slot: SlotView) -> SlotView:
        known = self._slots.get(slot.slot)
        if known is None or known[0] is not slot:
            changed = msgspec.structs.replace(slot, usable=False, leaving=True)
            known = self._slots[slot.slot] = (slot, changed)
        return known[1]


def _capacity(view: ClusterView) -> int:
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    return sum(slot.up or slot.slot in held for slot in view.slots)


def _can_change(job: JobView, up: set[SlotId], now: Seconds) -> bool:
    """True if a plan can change the job now, as `plan_check` and the nodes allow."""
    if not job.running_on:
        return job.movable
    return job.movable and job.retry_at <= now and up.issuperset(job.running_on)


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
    kept = _kept_slots(job, cap)
    batch = max(cap, min(sum(job.running_on.values()), job.local_limit * cap))
    return msgspec.structs.replace(
        job, most=cap, wanted=wanted, running_on=split(batch, kept), movable=False
    )


def _kept_slots(job: JobView, count: int) -> list[SlotId]:
    """Return the slots that a job keeps, in its order, on the nodes where it has most."""
    on_node: dict[NodeId, list[SlotId]] = defaultdict(list)
    for slot in job.running_on:
        on_node[node_of(slot)].append(slot)
    fullest = sorted(on_node.values(), key=len, reverse=True)
    kept = set([slot for slots in fullest for slot in slots][:count])
    return [slot for slot in job.running_on if slot in kept]


def _priorities(accounts: Mapping[str, Account]) -> dict[JobId, float]:
    """Return the priorities that change: each is divided by the mean of its account's jobs."""
    found = {}
    for account in accounts.values():
        mean = sum(job.priority for job in account.jobs) / max(1, len(account.jobs))
        for job in account.jobs:
            priority = job.priority / mean
            if priority != job.priority:
                found[job.job] = priority
    return found
