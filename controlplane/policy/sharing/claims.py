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

A claim may take more of a node than its slots: the shares of others, or the whole node. Then it
keeps slots there empty. A claim of 0 slots takes a part of what its node sets aside, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.placement.slot_partition import (
    Reservation,
    backs_off,
    reserve,
    slots_in_words,
    split,
    too_large,
)
from controlplane.policy.sharing.claim_order import Standing
from controlplane.policy.sharing.limits import Quota
from controlplane.policy.sharing.rigid_view import RigidView
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of, slot_id

EPSILON: Final = 1e-6  # rounding of shares
TURN_S: Final = 1800.0  # an elastic job that has run for this long may be paused for a claim
MAX_BACKFILL: Final = 256  # claims behind the reservation that are looked at
MAX_NAMED: Final = 3  # nodes that a reason names
MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """Decision about the claims of a moment."""

    plan: Plan  # starts of rigid jobs, and elastic jobs that give up slots for them
    kept: frozenset[SlotId] = frozenset()  # slots that no other job may start on
    reasons: Mapping[JobId, Reason] = {}  # of claims that wait


NO_CLAIMS: Final = Claims(plan=Plan(based_on=0))


def decide(
    view: ClusterView,
    rigid: Sequence[RigidView],
    now: Seconds,
    *,
    rules: Standing | None = None,
    places: Mapping[NodeId, Mapping[SlotId, float]] | None = None,
) -> Claims:
    """Return which claims start now, and which slots are kept or given up for the others.

    Args:
        view: the elastic jobs, and all slots.
        rigid: all active rigid jobs, in the order of their arrival.
        rules: order of the claims and guarantees; None: claims are served in order of arrival.
        places: places in use on each usable node, with the parts that they take of what the node
            sets aside for jobs without slots.
    """
    rules = rules or Standing(order=[job for job in rigid if job.waits])
    room, quota = _Room(view, rigid, now, rules), rules.quota
    beside = _Places(places or {}, room)
    decided = _Decided()
    heads: list[_Head] = []
    behind = 0
    held = sum(len(job.holds) for job in rigid)  # slots of rigid jobs, with those kept for claims
    for job in rules.order:
        if job.ready_at > now:
            decided.reasons[job.job] = backs_off(job.ready_at, now)
            decided.times.append(job.ready_at)
            continue
        share = None if job.job in rules.exempt or not held else rules.share
        refused = _refusal(job, room, quota, now)
        if refused is None and job.slots and share is not None and held + job.slots > share:
            refused = _beyond_share(job, held, share)
        if refused is not None:
            decided.reasons[job.job] = refused
            continue
        ahead = [head for head in heads if job.slots and head.concerns(job)]
        behind += bool(ahead)
        barred = [head for head in ahead if _ends_at(job, now) > head.at]
        if not job.slots:
            found = beside.take(job)
        elif ahead and (behind > MAX_BACKFILL or any(head.bars_all(job) for head in barred)):
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
            decided.reasons[job.job] = _behind(job, ahead[0])
        else:
            head = room.head(job)
            decided.reasons[job.job] = _reserved(head, now)
            if math.isfinite(head.at):  # if nobody knows when, the others need not wait for it
                decided.times.append(Seconds(head.at))
                heads.append(head)
    return decided.claims(view.version)


def _refusal(job: RigidView, room: _Room, quota: Quota | None, now: Seconds) -> Reason | None:
    """Return why a claim could not start now even if nobody else had any slots."""
    if (largest := room.largest(job, ever=True)) < job.slots:
        return _never_fits(job, largest)
    if room.largest(job) < job.slots:
        return _closes(job, room.closing(job), now)
    return None if quota is None else quota.refusal(job.job, job.account, job.slots)


def _ends_at(job: RigidView, now: Seconds) -> float:
    """Return the latest end of a claim that starts now."""
    return math.inf if job.run_limit_s is None else now + job.run_limit_s


@dataclass(slots=True)
class _Taken:
    """Slots for a claim, and what elastic jobs keep of theirs."""

    slots: list[SlotId]
    empty: list[SlotId] = field(default_factory=list)  # on the same nodes, for nobody
    free: bool = True  # all of them are free now
    givers: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)  # job -> what it keeps
    stopped: frozenset[JobId] = frozenset()  # rigid jobs among the givers

    @property
    def all(self) -> list[SlotId]:
        """Slots that nobody else can have."""
        return [*self.slots, *self.empty]


@dataclass(slots=True)
class _Head(Reservation):
    """Reservation of a claim, on certain slots."""

    job: RigidView = field(kw_only=True)
    could_have: int = 0  # now, at most
    node: NodeId | None = None  # where, if the claim needs one node
    ends: Sequence[JobId] = ()  # jobs that it waits for

    def concerns(self, job: RigidView) -> bool:
        """True if both claims could use the same slot."""
        fits = self.job.fits
        return fits is None or job.fits is None or not fits.isdisjoint(job.fits)

    def bars_all(self, job: RigidView) -> bool:
        """True if a claim that does not end before would delay this one on any slot."""
        return self.node is None and self.job.fits is None and not self._leaves_enough(job)

    def leaves(self, job: RigidView, slots: list[SlotId]) -> list[SlotId]:
        """Return the slots that a claim, which does not end before, may use."""
        if self.node is not None:
            return [slot for slot in slots if node_of(slot) != self.node]
        fits = self.job.fits
        if fits is None or self._leaves_enough(job):
            return slots
        return [slot for slot in slots if slot not in fits]

    def start(self, taken: _Taken) -> None:
        """Record that a claim, which does not end before, has started or keeps slots."""
        if self.node is None:
            fits = self.job.fits
            self.spare -= len(taken.all if fits is None else fits.intersection(taken.all))

    def _leaves_enough(self, job: RigidView) -> bool:
        return job.slots <= self.spare and not (job.shares or job.exclusive)


class _Places:
    """Places for jobs without slots. A job waits for earlier ones on the nodes that fit it."""

    def __init__(self, used: Mapping[NodeId, Mapping[SlotId, float]], room: _Room) -> None:
        self._used = {node: dict(places) for node, places in used.items()}
        self._room = room
        self._closed: set[NodeId] = set()

    def take(self, job: RigidView) -> _Taken | None:
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
        return _Taken([place])

    def reason(self, job: RigidView) -> Reason:
        """Return why a job waits for a place."""
        if not job.shares:
            return _never_fits(job, 0)
        up = [node for node in job.shares if node in self._used]
        text = "waits for cores and memory beside the slots" if up else "no node that fits is up"
        return Reason("waits", text, {"nodes": float(len(up))})


@dataclass(slots=True, eq=False)
class _Giver:
    """Running job that may give up slots: an elastic one, or a rigid one that may begin again."""

    name: JobId
    account: str
    slots: list[SlotId]
    least: int  # with fewer slots it pauses
    rank: int
    since: float  # the latest is asked first
    elastic: JobView | None = None
    ready: bool = True  # it may be ordered to give up slots now
    turn_ends_at: float = math.inf  # when it may be paused for any claim; infinity: never

    @property
    def project(self) -> str:
        """Project of the job."""
        return self.account.partition("/")[0]

    @property
    def surplus(self) -> int:
        """Number of slots above the job's minimum."""
        return max(0, len(self.slots) - self.least)

    @property
    def firm(self) -> int:
        """Number of slots that the job gives up only with all others."""
        return len(self.slots) - self.surplus

    @property
    def place(self) -> tuple[bool, int, int, float]:
        """Key of the order in which jobs are asked: the largest surplus, then the latest job."""
        return self.elastic is None, self.rank, -self.surplus, -self.since

    def may_pause_for(self, claim: RigidView, now: Seconds) -> bool:
        """True if the job may lose all its slots to the claim without a guarantee or a class."""
        later = self.elastic is not None and self.since > claim.submitted_at
        return later or self.turn_ends_at <= now

    def give(self, chosen: Sequence[SlotId]) -> dict[SlotId, int]:
        """Give up slots. Return the slots that the job keeps, with their local batches.

        The job keeps its global batch if the remaining slots can process it. Below its minimum
        it keeps nothing.
        """
        self.slots = [slot for slot in self.slots if slot not in chosen]
        job = self.elastic
        if job is None or len(self.slots) < self.least:
            return {}
        batch = min(sum(job.running_on.values()), job.local_limit * len(self.slots))
        return split(max(batch, len(self.slots)), self.slots)


class _Room:
    """Slots that claims can still have."""

    def __init__(
        self, view: ClusterView, rigid: Sequence[RigidView], now: Seconds, rules: Standing
    ) -> None:
        self._now, self._rules = now, rules
        self._borrowed = Counter(rules.borrowed)
        self._surplus: dict[NodeId, list[SlotId]] | None = None  # offers without a pause
        self._ready: list[_Giver] | None = None  # None: to be sorted
        self._holders = [job for job in rigid if job.holds]
        up = {slot.slot for slot in view.slots if slot.up}
        givers = [
            _Giver(
                job.job, job.account, list(job.running_on), job.least, self._rank(job.job),
                job.submitted_at, job, job.movable and job.retry_at <= now, job.placed_at + TURN_S,
            )
            for job in view.jobs.values()
            if job.running_on and up.issuperset(job.running_on)
        ]  # fmt: skip
        givers += [
            _Giver(
                one.job, one.account, list(one.holds), len(one.holds), self._rank(one.job),
                one.began_at,
            )
            for one in self._holders
            if one.preemptible and up.issuperset(one.holds)
        ]  # fmt: skip
        self._givers = {giver.name: giver for giver in givers}
        self._owner = {slot: giver for giver in givers for slot in giver.slots}
        held = {slot for job in view.jobs.values() for slot in job.running_on}
        held |= {slot for job in self._holders for slot in job.holds}
        self._all = _grouped((slot.slot for slot in view.slots), ())
        self._size = {node: len(slots) for node, slots in self._all.items()}
        unheld = [slot for slot in view.slots if slot.slot not in held]
        free = (slot.slot for slot in unheld if slot.usable)
        coming = (slot.slot for slot in unheld if slot.leaving and not slot.usable)
        self._free, self._coming = _grouped(free, self._size), _grouped(coming, self._size)

    def _rank(self, job: JobId) -> int:
        return self._rules.ranks.get(job, 0)

    # --- where a claim fits

    def largest(self, job: RigidView, *, ever: bool = False) -> int:
        """Return how many slots the claim could have if nobody else had any.

        `ever` includes nodes on which it would now run into a reservation.
        """
        if (ever or not job.closes) and job.fits is None and not job.shares:
            sizes = self._size.values()
            return max(sizes, default=0) if job.one_node else sum(sizes)
        return self._most(job, self._all, ever=ever)

    def is_open(self, job: RigidView, node: NodeId) -> bool:
        """True if a claim that starts now ends before the node is reserved for others."""
        return node not in job.closes or _ends_at(job, self._now) <= job.closes[node][0]

    def closing(self, job: RigidView) -> list[NodeId]:
        """Return the nodes on which the claim would run into a reservation."""
        return [node for node in self._size if not self.is_open(job, node)]

    def _most(
        self, job: RigidView, offers: Mapping[NodeId, Sequence[SlotId]], *, ever: bool = False
    ) -> int:
        counts = [
            self._fitting(job, node, slots)
            for node, slots in offers.items()
            if ever or self.is_open(job, node)
        ]
        return max(counts, default=0) if job.one_node else sum(counts)

    def _fitting(self, job: RigidView, node: NodeId, slots: Sequence[SlotId]) -> int:
        """Return how many slots a claim can use if it may have these slots of a node."""
        fits = len(slots) if job.fits is None else len(job.fits.intersection(slots))
        if job.exclusive and len(slots) < self._size[node]:
            return 0
        return min(fits, math.floor(len(slots) / job.shares.get(node, 1.0) + EPSILON))

    # --- what claims take

    def take(self, job: RigidView, barred: Sequence[_Head], *, pauses: bool) -> _Taken | None:
        """Take the slots of a claim, on one node if possible. Return None if there are too few.

        Args:
            barred: reservations that the claim must not delay.
            pauses: jobs may have to pause for the claim.
        """
        pausing = job if pauses else None
        offers = self._by_node(pausing)
        for head in barred:
            offers = {node: head.leaves(job, slots) for node, slots in offers.items()}
        room = {
            node: self._fitting(job, node, slots)
            for node, slots in offers.items()
            if slots and self.is_open(job, node)
        }
        if fitting := [node for node, many in room.items() if many >= job.slots]:
            each = [self._choose(job, node, offers[node], job.slots) for node in fitting]
            return self._remove(min(each, key=self._cost))
        if job.one_node or sum(room.values()) < job.slots:
            return None
        found = _Taken([])
        if job.shares or job.exclusive:
            for node in sorted(room, key=lambda one: -room[one]):  # few nodes
                if many := min(room[node], job.slots - len(found.slots)):
                    chosen = self._choose(job, node, offers[node], many)
                    found.slots += chosen.slots
                    found.empty += chosen.empty
        else:
            mine = {slot for node in room for slot in offers[node]}
            mine = mine if job.fits is None else mine & job.fits
            order = self._offers(pausing, by_node=False)
            found.slots += [slot for slot in order if slot in mine][: job.slots]
        return self._remove(found) if len(found.slots) == job.slots else None

    def _choose(self, job: RigidView, node: NodeId, slots: Sequence[SlotId], many: int) -> _Taken:
        """Return `many` of a node's slots for a claim, and slots that stay empty beside them."""
        used = [slot for slot in slots if job.fits is None or slot in job.fits][:many]
        if not job.exclusive and node not in job.shares:
            return _Taken(used)
        rest = [slot for slot in slots if slot not in used]
        needs = math.ceil(many * job.shares.get(node, 1.0) - EPSILON)
        return _Taken(used, rest if job.exclusive else rest[: max(0, needs - many)])

    def _cost(self, taken: _Taken) -> tuple[int, int, int]:
        """Return how many jobs lose slots, how many slots are not free, and how many remain."""
        owners = {giver.name for slot in taken.all if (giver := self._owner.get(slot))}
        free = self._free[node_of(taken.slots[0])]
        return len(owners), sum(slot not in free for slot in taken.all), len(free)

    def _by_node(self, pausing: RigidView | None) -> dict[NodeId, list[SlotId]]:
        """Return the slots of each node that a claim on this node may have, cheapest first."""
        if pausing is not None:
            return _grouped(self._offers(pausing, by_node=True), self._size)
        if self._surplus is None:
            self._surplus = _grouped(self._offers(None, by_node=True), self._size)
        return self._surplus

    def _offers(self, pausing: RigidView | None, *, by_node: bool) -> list[SlotId]:
        """Return the slots that a claim may have, cheapest first.

        Free slots are first, then those that are about to be free, then the surplus of elastic
        jobs, and at last the slots of jobs that have to pause for the claim `pausing`. With
        `by_node`, the surplus of a job counts on each of its nodes.
        """
        surplus: list[SlotId] = []
        firm_slots: list[SlotId] = []
        pausable = set() if pausing is None else self._pausable(pausing)
        for giver in self._ready_givers():
            for slots in _grouped(giver.slots, ()).values() if by_node else [giver.slots]:
                firm = max(0, len(slots) - giver.surplus)
                surplus += reversed(slots[firm:])
                firm_slots += slots[:firm] if giver.name in pausable else []
        nodes = sorted(self._free, key=lambda node: -len(self._free[node]))
        free = [slot for node in nodes for slot in self._free[node]]
        coming = [slot for node in nodes for slot in self._coming[node]]
        return [*free, *coming, *surplus, *firm_slots]

    def _ready_givers(self) -> list[_Giver]:
        """Return the jobs that can give up slots now, in the order in which they are asked."""
        if self._ready is None:
            ready = (giver for giver in self._givers.values() if giver.ready)
            self._ready = sorted(ready, key=lambda giver: giver.place)
        return self._ready

    def _pausable(self, claim: RigidView) -> set[JobId]:
        """Return the jobs that may lose all their slots to a claim.

        An entitled claim also takes firm slots of projects above their guarantees. It never takes
        more than such a project has above its guarantee, but for the last job. A claim of a class
        that preempts takes those of lower ranks, and no claim takes those of higher ranks.
        """
        entitled, rank = claim.job in self._rules.entitled, self._rank(claim.job)
        preempts = claim.job in self._rules.preempting
        borrowed = Counter(self._borrowed)
        found = set()
        for giver in self._ready_givers():
            if giver.rank > rank:
                continue
            if (preempts and giver.rank < rank) or giver.may_pause_for(claim, self._now):
                found.add(giver.name)
            elif entitled and borrowed[giver.project] > 0:
                borrowed[giver.project] -= giver.firm
                found.add(giver.name)
        return found

    def _remove(self, taken: _Taken) -> _Taken:
        """Take these slots from the offers, and from the jobs that hold them."""
        chosen = taken.all
        taken.free = all(slot in self._free[node_of(slot)] for slot in chosen)
        owners = {giver.name: giver for slot in chosen if (giver := self._owner.get(slot))}
        for name, giver in owners.items():
            firm = giver.firm
            keeps = taken.givers[name] = giver.give(chosen)
            if not keeps:  # what it gives up beyond the claim will be free for others
                self._borrowed[giver.project] -= firm
                taken.stopped |= {name} if giver.elastic is None else set()
                for slot in giver.slots:
                    del self._owner[slot]
                    self._coming[node_of(slot)].append(slot)
                del self._givers[name]
        self._surplus = self._ready = None
        for node in {node_of(slot) for slot in chosen}:
            for some in (self._free, self._coming):
                some[node] = [slot for slot in some[node] if slot not in chosen]
        return taken

    # --- when a claim fits

    def head(self, job: RigidView) -> _Head:
        """Return when and where the claim will have its slots, if nothing ends earlier.

        Rigid jobs end by their time limits. Elastic jobs may be paused after their turn.
        """
        offers = _grouped(self._offers(job, by_node=job.one_node), self._size)
        have = {n: slots for n, slots in offers.items() if self.is_open(job, n)}
        could_have = best = self._most(job, have)
        offered = {slot for slots in have.values() for slot in slots}
        ends = [
            (one.ends_at, one.job, one.holds) for one in self._holders if one.ends_at is not None
        ]
        for giver in self._givers.values():
            if giver.elastic is not None and giver.rank <= self._rank(job.job):
                soon = giver.surplus or giver.may_pause_for(job, self._now)
                at = max(giver.elastic.retry_at, self._now if soon else giver.turn_ends_at)
                ends.append((Seconds(at), giver.name, tuple(giver.slots)))
        waits_for: list[JobId] = []

        def gains() -> Iterator[tuple[float, int]]:
            nonlocal best
            for at, name, slots in sorted(ends):
                gained = [slot for slot in slots if slot not in offered and node_of(slot) in have]
                waits_for.extend([name] if gained else [])
                for slot in gained:
                    have[node_of(slot)].append(slot)
                before, best = best, self._most(job, have)
                yield at, best - before

        found = reserve(gains(), job.slots - best)
        where = max(have, key=lambda one: self._fitting(job, one, have[one]), default=None)
        return _Head(
            found.at,
            0.0 if job.shares or job.exclusive else found.spare,
            job=job,
            could_have=could_have,
            node=where if job.one_node else None,
            ends=waits_for,
        )


def _grouped(slots: Iterable[SlotId], nodes: Iterable[NodeId]) -> dict[NodeId, list[SlotId]]:
    """Return slots by node. `nodes` come first, also without slots."""
    found: dict[NodeId, list[SlotId]] = {node: [] for node in nodes}
    for slot in slots:
        found.setdefault(node_of(slot), []).append(slot)
    return found


@dataclass(slots=True)
class _Decided:
    """Decision while it is made."""

    placed: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)
    why: dict[JobId, Reason] = field(default_factory=dict)
    reasons: dict[JobId, Reason] = field(default_factory=dict)
    kept: set[SlotId] = field(default_factory=set)
    times: list[Seconds] = field(default_factory=list)  # to decide again

    def serve(self, job: RigidView, taken: _Taken, head: _Head | None) -> None:
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
                text = f"{text}; {', '.join(taken.givers)} {verb} them up"
            self.reasons[job.job] = _reason("promised", job, text)
        for name, keeps in taken.givers.items():
            gives = f"gives slots to {job.job}, which needs {needs}"
            self.placed[name] = keeps
            stops = "stopped" if name in taken.stopped else "paused"
            text = f"{gives}; keeps {len(keeps)}" if keeps else f"{stops}: {gives}"
            numbers = {"slots_then": float(len(keeps))}
            self.why[name] = Reason("shrink" if keeps else "pause", text, numbers)

    def claims(self, version: int) -> Claims:
        """Return the decision for a version of the view."""
        wake_at = min(self.times, default=None)
        plan = Plan(based_on=version, local_batch=self.placed, reasons=self.why, wake_at=wake_at)
        return Claims(plan=plan, kept=frozenset(self.kept), reasons=self.reasons)


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


def _reserved(head: _Head, now: Seconds) -> Reason:
    text, could_have = f"{_needs(head.job)}, could have {head.could_have}", float(head.could_have)
    if math.isinf(head.at):
        text += "; what holds the others has no time limit"
        return _reason("waits", head.job, text, could_have=could_have)
    wait_s = max(0.0, head.at - now)
    when = f"within {_duration(wait_s)}" if wait_s else "at once"
    text = f"{text}; has them {when}, after {', '.join(head.ends)}"
    return _reason("reserved", head.job, text, could_have=could_have, wait_s=wait_s)


def _closes(job: RigidView, nodes: Sequence[NodeId], now: Seconds) -> Reason:
    by_purpose: dict[str, list[NodeId]] = {}
    for node in nodes:
        by_purpose.setdefault(job.closes[node][1], []).append(node)
    each = [
        f"the {what} of {', '.join(some[:MAX_NAMED])}{', ...' * (len(some) > MAX_NAMED)}"
        for what, some in by_purpose.items()
    ]
    text = f"would run into {' and '.join(each)}, and waits for its end"
    if job.run_limit_s is None and any(job.closes[node][0] > now for node in nodes):
        text += "; a smaller max_run_s would let it start before"
    return _reason("maintenance" if [*by_purpose] == ["maintenance"] else "reservation", job, text)


def _beyond_share(job: RigidView, held: int, share: int) -> Reason:
    text = f"needs {slots_in_words(job.slots)}; programs have {held}, and {share} are their share"
    text += " while elastic jobs wait"
    return _reason("share", job, text, held=float(held), share=float(share))


def _behind(job: RigidView, head: _Head) -> Reason:
    text = f"waits for {slots_in_words(job.slots)} behind {head.job.job}, which it would delay"
    return _reason("turn", job, text)


def _duration(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE_S:.0f} min" if seconds < HOUR_S else f"{seconds / HOUR_S:.1f} h"
