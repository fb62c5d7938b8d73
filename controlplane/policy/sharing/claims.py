"""Starts of rigid jobs, and the slots that elastic jobs give up for them.

A waiting rigid job is a *claim* on a fixed number of slots. Claims are served in order. A claim can
have free slots, the surplus of running elastic jobs (slots above their minimum, which they give up
between two steps), and all slots of elastic jobs that were submitted after it or that have run for
`TURN_S`. It starts when enough of these are free. Until then, the slots are kept for it.
A claim of a class that preempts can also have the slots of all jobs of lower rank that may begin
again. No claim has firm slots of a job of higher rank, so no two jobs stop each other in turn.

The first claim that cannot start gets a reservation: the time at which enough rigid jobs reach
their time limits (EASY backfill: Lifka, JSSPP '95). A later claim starts before it only if it ends
before that time, or uses slots that are left over then or that do not fit the first claim. Elastic
jobs may use all slots meanwhile. Of claims that fit no common slot, each has its own reservation.
After the first claim that waits, only `MAX_BACKFILL` more claims with the same fitting slots are
tried.

A claim may take more of a node than its slots: the shares of others, or the whole node. Then it
keeps slots there empty. A claim of 0 slots takes a part of what its node sets aside, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, Plan, Reason
from controlplane.policy.placement.slot_partition import backs_off, slots_in_words, too_large
from controlplane.policy.sharing.claim_order import Standing
from controlplane.policy.sharing.claim_room import EPSILON, Head, Room, Taken, ends_at
from controlplane.policy.sharing.limits import Quota
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id

MAX_BACKFILL: Final = 256  # claims that are tried after the first one that waits
MAX_NAMED: Final = 3  # nodes or jobs that a reason names
MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """Decision about the claims of a moment."""

    plan: Plan  # starts of rigid jobs, and elastic jobs that give up slots for them
    kept: frozenset[SlotId] = frozenset()  # slots that no other job may start on
    reasons: Mapping[JobId, Reason] = {}  # of claims that wait
    takers: Mapping[JobId, Sequence[JobId]] = {}  # claims for which a job gives up slots


NO_CLAIMS: Final = Claims(plan=Plan(based_on=0))


def decide(
    view: ClusterView,
    rigid: Sequence[RigidView],
    now: Seconds,
    *,
    rules: Standing | None = None,
    places: Mapping[NodeId, Mapping[SlotId, float]] | None = None,
) -> Turns[Claims]:
    """Decide which claims start now, and which slots are kept or given up for the others.

    Args:
        view: the elastic jobs, and all slots.
        rigid: all active rigid jobs, in the order of their arrival.
        rules: order of the claims and guarantees; None: claims are served in order of arrival.
        places: places in use on each usable node, with the parts that they take of what the node
            sets aside for jobs without slots.
    """
    rules = rules or Standing(order=[job for job in rigid if job.waits])
    room = yield from Room.of(view, rigid, now, rules)
    beside = _Places(places or {}, room)
    decided, quota = _Decided(), rules.quota
    heads: list[Head] = []
    first: dict[int, JobId] = {}  # the first claim that waits, by the slots that fit it
    behind = Counter[int]()  # claims after that one, likewise
    held = sum(len(job.holds) for job in rigid)  # slots of rigid jobs, with those kept for claims
    for job in rules.order:
        yield
        if job.ready_at > now:
            decided.back_off(job, now)
            continue
        share = None if job.job in rules.exempt or not held else rules.share
        refused = _refusal(job, room, quota, now) or _beyond_share(job, held, share)
        if refused is not None:
            decided.reasons[job.job] = refused
            continue
        fits = id(job.fits)  # one object for all jobs with the same requests
        behind[fits] += job.slots > 0 and fits in first
        if behind[fits] > MAX_BACKFILL and job.slots:
            decided.reasons[job.job] = _far_behind(first[fits])
            continue
        ahead = [head for head in heads if job.slots and room.overlaps(head.job, job)]
        barred = [head for head in ahead if ends_at(job, now) > head.at]
        if not job.slots:
            found = beside.take(job)
        elif any(head.bars_all(job) for head in barred):
            found = None
        else:
            found = room.take(job, barred, pauses=not ahead)
        if found is not None:
            taken = len(found.all) if job.slots else 0
            held += taken
            for head in barred:
                head.start(found)
            if quota is not None:
                quota.take(job.job, job.account, taken, starts=True)
            decided.serve(job, found, ahead[0] if ahead else None)
        elif not job.slots:
            decided.reasons[job.job] = beside.reason(job)
        elif ahead:
            first.setdefault(fits, job.job)
            decided.reasons[job.job] = _behind(job, ahead[0])
        else:
            first.setdefault(fits, job.job)
            head = room.head(job)
            decided.reasons[job.job] = _reserved(head, now)
            if math.isfinite(head.at):  # if nobody knows when, the others need not wait for it
                decided.times.append(Seconds(head.at))
                heads.append(head)
    return decided.claims(view.version)


def _refusal(job: RigidView, room: Room, quota: Quota | None, now: Seconds) -> Reason | None:
    """Return why a claim could not start now even if nobody else had any slots."""
    if job.slots and (largest := room.largest(job, ever=True)) < job.slots:
        return _never_fits(job, largest)
    if job.slots and job.closes and room.largest(job) < job.slots:
        code, text = _closes(job, room, now)
        return _reason(code, job, text)
    return None if quota is None else quota.refusal(job.job, job.account, job.slots)


class _Places:
    """Places for jobs without slots. A job waits for earlier ones on the nodes that fit it."""

    def __init__(self, used: Mapping[NodeId, Mapping[SlotId, float]], room: Room) -> None:
        self._used = {node: dict(places) for node, places in used.items()}
        self._room = room
        self._closed: set[NodeId] = set()

    def take(self, job: RigidView) -> Taken | None:
        """Take a place on the emptiest node that has room for the job."""
        room = {
            node: 1.0 - sum(self._used[node].values()) - part
            for node, part in job.shares.items()
            if node in self._used and node not in self._closed and self._room.is_open(job, node)
        }
        node = max(room, key=lambda one: room[one], default=None)
        if node is None or room[node] < -EPSILON:
            self._closed |= job.shares.keys()
            return None
        used = self._used[node]
        place = next(name for k in count(1) if (name := slot_id(node, -k)) not in used)
        used[place] = job.shares[node]
        return Taken([place])

    def reason(self, job: RigidView) -> Reason:
        """Return why a job waits for a place."""
        if not job.shares:
            return _never_fits(job, 0)
        up = [node for node in job.shares if node in self._used]
        text = "waits for cores and memory beside the slots" if up else "no node that fits is up"
        return Reason("waits", text, {"nodes": float(len(up))})


@dataclass(slots=True)
class _Decided:
    """Decision while it is made."""

    placed: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)
    why: dict[JobId, Reason] = field(default_factory=dict)
    reasons: dict[JobId, Reason] = field(default_factory=dict)
    kept: set[SlotId] = field(default_factory=set)
    times: list[Seconds] = field(default_factory=list)  # to decide again
    takers: dict[JobId, list[JobId]] = field(default_factory=dict)

    def back_off(self, job: RigidView, now: Seconds) -> None:
        """Let the claim wait for its next start."""
        self.reasons[job.job] = backs_off(job.ready_at, now)
        self.times.append(job.ready_at)

    def serve(self, job: RigidView, taken: Taken, head: Head | None) -> None:
        """Start the claim, or keep its slots until they are free."""
        needs = slots_in_words(job.slots)
        early = f" before {head.job.job}, which it does not delay" if head is not None else ""
        if taken.free:
            self.placed[job.job] = dict.fromkeys(taken.slots, 1) | dict.fromkeys(taken.empty, 0)
            code = "start" if head is None else "backfill"
            text = f"starts on {needs}{early}" if job.slots else "starts without slots"
            self.why[job.job] = Reason(code, text, {"slots_then": job.slots})
        else:
            self.kept.update(taken.all)
            text = f"gets {needs}{early} as soon as they are free"
            if taken.givers:
                verb = "give" if len(taken.givers) > 1 else "gives"
                text = f"{text}; {_listed(list(taken.givers))} {verb} them up"
            self.reasons[job.job] = _reason("promised", job, text)
        for name, keeps in taken.givers.items():
            gives = f"gives slots to {job.job}, which needs {needs}"
            self.placed[name] = keeps
            self.takers.setdefault(name, []).append(job.job)
            stops = "stopped" if name in taken.stopped else "paused"
            text = f"{gives}; keeps {len(keeps)}" if keeps else f"{stops}: {gives}"
            numbers = {"slots_then": float(len(keeps))}
            self.why[name] = Reason("shrink" if keeps else "pause", text, numbers)

    def claims(self, version: int) -> Claims:
        """Return the decision for a version of the view."""
        wake_at = min(self.times, default=None)
        plan = Plan(based_on=version, local_batch=self.placed, reasons=self.why, wake_at=wake_at)
        return Claims(
            plan=plan, kept=frozenset(self.kept), reasons=self.reasons, takers=self.takers
        )


def mask(view: ClusterView, kept: frozenset[SlotId]) -> ClusterView:
    """Return the view for a policy, in which slots that are kept for claims cannot be used."""
    if not kept:
        return view
    slots = tuple(
        msgspec.structs.replace(slot, usable=False, leaving=False)
        if slot.slot in kept and (slot.usable or slot.leaving)
        else slot
        for slot in view.slots
    )
    return msgspec.structs.replace(view, slots=slots)


def without_kept(plan: Plan, view: ClusterView, kept: frozenset[SlotId]) -> Plan:
    """Return a plan, made for an older view, in which no job takes a slot that is kept.

    Such a job keeps what it has. The next plan decides about it.
    """
    if not kept:
        return plan
    placed = dict(plan.local_batch)
    for name, slots in plan.local_batch.items():
        job = view.jobs.get(name)
        has = job.running_on if job is not None else {}
        if any(slot in kept and slot not in has for slot in slots):
            placed[name] = has
    return msgspec.structs.replace(plan, local_batch=placed)


# --- reasons of claims that wait


def _reason(code: str, job: RigidView, text: str, **numbers: float) -> Reason:
    return Reason(code, text, {"needs": float(job.slots), **numbers})


def _needs(job: RigidView) -> str:
    return f"needs {slots_in_words(job.slots)}{' on one node' if job.one_node else ''}"


def _never_fits(job: RigidView, largest: int) -> Reason:
    if job.fits is not None or job.shares or job.exclusive or job.missing:
        text = job.missing or f"{_needs(job)}; {largest} fit its requests"
        return _reason("shape", job, text, slots=0.0 if job.missing else largest)
    if job.one_node and largest:
        text = f"{_needs(job)}, the largest has {largest}"
        return _reason("too_large", job, text, slots=float(largest))
    return too_large(job.slots, largest)


def _reserved(head: Head, now: Seconds) -> Reason:
    text, could_have = f"{_needs(head.job)}, could have {head.could_have}", float(head.could_have)
    if math.isinf(head.at):
        text += "; what holds the others has no time limit"
        return _reason("waits", head.job, text, could_have=could_have)
    wait_s = max(0.0, head.at - now)
    when = f"within {_duration(wait_s)}" if wait_s else "at once"
    text = f"{text}; has them {when}, after {_listed(head.ends)}"
    return _reason("reserved", head.job, text, could_have=could_have, wait_s=wait_s)


def _listed(jobs: Sequence[JobId]) -> str:
    named = ", ".join(jobs[:MAX_NAMED])
    return f"{named} and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else named


def _closes(job: RigidView, room: Room, now: Seconds) -> tuple[str, str]:
    """Return code and text of the reason for a claim that would run into reservations."""
    closed, limited = room.closed(job), job.run_limit_s is not None
    key = id(job.closes), closed, limited
    if (known := room.closed_texts.get(key)) is not None:
        return known
    by_purpose: dict[str, list[NodeId]] = {}
    for node in filter(closed.__contains__, room.nodes):
        by_purpose.setdefault(job.closes[node][1], []).append(node)
    each = [
        f"the {what} of {', '.join(some[:MAX_NAMED])}{', ...' * (len(some) > MAX_NAMED)}"
        for what, some in by_purpose.items()
    ]
    text = f"would run into {' and '.join(each)}, and waits for its end"
    if not limited and any(job.closes[node][0] > now for node in closed):
        text += "; a smaller max_run_s would let it start before"
    code = "maintenance" if [*by_purpose] == ["maintenance"] else "reservation"
    room.closed_texts[key] = code, text
    return code, text


def _beyond_share(job: RigidView, held: int, share: int | None) -> Reason | None:
    if not job.slots or share is None or held + job.slots <= share:
        return None
    text = f"needs {slots_in_words(job.slots)}; programs have {held}, and {share} are their share"
    text += " while elastic jobs wait"
    return _reason("share", job, text, held=float(held), share=float(share))


def _behind(job: RigidView, head: Head) -> Reason:
    text = f"waits for {slots_in_words(job.slots)} behind {head.job.job}, which it would delay"
    return _reason("turn", job, text)


@lru_cache(maxsize=64)
def _far_behind(first: JobId) -> Reason:
    text = f"waits behind {first} and at least {MAX_BACKFILL} others"
    return Reason("turn", text, {"others": float(MAX_BACKFILL)})


def _duration(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE_S:.0f} min" if seconds < HOUR_S else f"{seconds / HOUR_S:.1f} h"
