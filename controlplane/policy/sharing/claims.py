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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.placement.slot_partition import (
    backs_off,
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
    turn_s: float = TURN_S,
) -> Claims:
    """Return which claims start now, and which slots are kept or given up for the others.

    Args:
        view: the elastic jobs, and all slots.
        rigid: all active rigid jobs, in the order of their arrival.
        rules: order of the claims and guarantees; None: claims are served in order of arrival.
        places: places in use on each usable node, with the parts that they take of what the node
            sets aside for jobs without slots.
        turn_s: seconds after which an elastic job may be paused for a claim.
    """
    rules = rules or Standing(order=[job for job in rigid if job.waits])
    room, quota = _Room(view, rigid, now, turn_s, rules), rules.quota
    beside = _Places(places or {}, room)
    decided = _Decided(view.version)
    heads: list[_Reservation] = []
    behind = 0
    held = sum(len(job.holds) for job in rigid)  # slots of rigid jobs, with those kept for claims
    for job in rules.order:
        if job.ready_at > now:
            decided.reasons[job.job] = backs_off(job.ready_at, now)
            decided.wake_at(job.ready_at)
            continue
        if (refused := _refusal(job, room, quota)) is not None:
            decided.reasons[job.job] = refused
            continue
        if not job.slots:
            if (place := beside.take(job)) is not None:
                decided.serve(job, _Taken([place]), None)
                if quota is not None:
                    quota.take(job.job, job.account, 0, starts=True)
            else:
                decided.reasons[job.job] = beside.reason(job)
            continue
        share = None if job.job in rules.exempt or not held else rules.share
        if share is not None and held + job.slots > share:
            decided.reasons[job.job] = _beyond_share(job, held, share)
            continue
        ahead = [head for head in heads if head.concerns(job)]
        behind += bool(ahead)
        barred = [head for head in ahead if not head.ends_before(job, now)]
        if ahead and (behind > MAX_BACKFILL or any(head.bars_all(job) for head in barred)):
            decided.reasons[job.job] = _behind(job, ahead[0])
            continue
        if (found := room.take(job, barred, pauses=not ahead)) is not None:
            for head in barred:
                head.use(found)
            taken = len(found.slots) + len(found.empty)
            held += taken
            if quota is not None:
                quota.take(job.job, job.account, taken, starts=True)
            decided.serve(job, found, ahead[0] if ahead else None)
        elif ahead:
            decided.reasons[job.job] = _behind(job, ahead[0])
        else:
            head = room.reservation(job)
            decided.reasons[job.job] = _reserved(job, head, room.count(job), now)
            decided.wake_at(head.at)
            if head.at is not None:  # if nobody knows when, the others need not wait for it
                heads.append(head)
    return decided.claims()


def _refusal(job: RigidView, room: _Room, quota: Quota | None) -> Reason | None:
    """Return why a claim could not start now even if nobody else had any slots."""
    if (largest := room.largest(job, ever=True)) < job.slots:
        return _never_fits(job, largest)
    if room.largest(job) < job.slots:
        return _closes(job, room.closing(job))
    return None if quota is None else quota.refusal(job.job, job.account, job.slots)


@dataclass(slots=True)
class _Taken:
    """Slots for a claim, and what elastic jobs keep of theirs."""

    slots: list[SlotId]
    empty: list[SlotId] = field(default_factory=list)  # on the same nodes, for nobody
    free: bool = True  # all of them are free now
    givers: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)  # job -> what it keeps
    stopped: frozenset[JobId] = frozenset()  # rigid jobs among the givers


@dataclass(slots=True)
class _Reservation:
    """Slots that the first claim that cannot start will have."""

    job: RigidView
    at: Seconds | None  # when enough slots are free; None: unknown
    spare: int  # slots that are left over then
    node: NodeId | None  # where, if the claim needs one node
    ends: tuple[JobId, ...]  # rigid jobs that it waits for

    def concerns(self, job: RigidView) -> bool:
        """True if both claims could use the same slot."""
        fits = self.job.fits
        return fits is None or job.fits is None or not fits.isdisjoint(job.fits)

    def ends_before(self, job: RigidView, now: Seconds) -> bool:
        """True if a claim that starts now reaches its time limit before the reservation."""
        return (
            self.at is not None and job.run_limit_s is not None and now + job.run_limit_s <= self.at
        )

    def bars(self, slot: SlotId, job: RigidView) -> bool:
        """True if the slot is reserved, so that a claim would delay the reservation."""
        if self.node is not None:
            return node_of(slot) == self.node
        if self._leaves_enough(job):
            return False
        return self.job.fits is None or slot in self.job.fits

    def bars_all(self, job: RigidView) -> bool:
        """True if the claim would delay the reservation on any slot."""
        return self.node is None and self.job.fits is None and not self._leaves_enough(job)

    def _leaves_enough(self, job: RigidView) -> bool:
        return job.slots <= self.spare and not (job.shares or job.exclusive)

    def use(self, taken: _Taken) -> None:
        """Record that a claim, which does not end before, has started or keeps slots."""
        if self.node is None:
            fits = self.job.fits
            used = [*taken.slots, *taken.empty]
            self.spare -= len(used if fits is None else fits.intersection(used))


class _Places:
    """Places for jobs without slots. A job waits for earlier ones on the nodes that fit it."""

    def __init__(self, used: Mapping[NodeId, Mapping[SlotId, float]], room: _Room) -> None:
        self._used = {node: dict(places) for node, places in used.items()}
        self._room = room
        self._closed: set[NodeId] = set()

    def take(self, job: RigidView) -> SlotId | None:
        """Return a place on the emptiest node that has room for the job, or None."""
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
        return place

    def reason(self, job: RigidView) -> Reason:
        """Return why a job waits for a place."""
        if not job.shares:
            return _shape(job, 0)
        up = [node for node in job.shares if node in self._used]
        text = "waits for cores and memory beside the slots" if up else "no node that fits is up"
        return Reason("waits", text, {"nodes": float(len(up))})


class _Room:
    """Slots that claims can still have."""

    def __init__(
        self,
        view: ClusterView,
        rigid: Sequence[RigidView],
        now: Seconds,
        turn_s: float,
        rules: Standing,
    ) -> None:
        self._now = now
        self._rules = rules
        self._borrowed = Counter(rules.borrowed)
        self._without_pauses: int | None = None  # slots that claims can have without a pause
        self._ready: list[tuple[JobId, _Giver | _RigidGiver]] | None = None  # None: to be sorted
        self._holders = [job for job in rigid if job.holds]
        up = {slot.slot for slot in view.slots if slot.up}
        self._givers: dict[JobId, _Giver | _RigidGiver] = {
            job.job: _Giver(job, turn_s)
            for job in view.jobs.values()
            if job.running_on and up.issuperset(job.running_on)
        }
        self._givers |= {
            job.job: _RigidGiver(job)
            for job in self._holders
            if job.preemptible and up.issuperset(job.holds)
        }
        self._owner = {slot: name for name, one in self._givers.items() for slot in one.slots}
        held = {slot for job in view.jobs.values() for slot in job.running_on}
        held |= {slot for job in self._holders for slot in job.holds}
        self._size = Counter(slot.node for slot in view.slots)
        self._all = _grouped(slot.slot for slot in view.slots)
        self._free: dict[NodeId, list[SlotId]] = {node: [] for node in self._size}
        self._coming: dict[NodeId, list[SlotId]] = {node: [] for node in self._size}
        for slot in view.slots:
            if slot.slot not in held and (slot.usable or slot.leaving):
                (self._free if slot.usable else self._coming)[slot.node].append(slot.slot)

    def largest(self, job: RigidView, *, ever: bool = False) -> int:
        """Return how many slots the claim could have if nobody else had any.

        `ever` includes nodes on which it would now run into maintenance.
        """
        if (ever or not self._rules.closes) and job.fits is None and not job.shares:
            return max(self._size.values(), default=0) if job.one_node else self._size.total()
        return self._most(job, self._all, ever=ever)

    def is_open(self, job: RigidView, node: NodeId) -> bool:
        """True if a claim that starts now ends before the next maintenance of the node."""
        at = self._rules.closes.get(node)
        return at is None or (job.run_limit_s is not None and self._now + job.run_limit_s <= at)

    def closing(self, job: RigidView) -> list[NodeId]:
        """Return the nodes on which the claim would run into maintenance."""
        return [node for node in self._size if not self.is_open(job, node)]

    def count(self, job: RigidView) -> int:
        """Return how many slots the claim could have now, at most."""
        return self._most(job, self._by_node(job))

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

    def _choose(
        self, job: RigidView, node: NodeId, slots: Sequence[SlotId], many: int
    ) -> tuple[list[SlotId], list[SlotId]]:
        """Return `many` of a node's slots for a claim, and slots that stay empty beside them."""
        used = [slot for slot in slots if job.fits is None or slot in job.fits][:many]
        if not job.exclusive and node not in job.shares:
            return used, []
        rest = [slot for slot in slots if slot not in used]
        needs = math.ceil(many * job.shares.get(node, 1.0) - EPSILON)
        return used, rest if job.exclusive else rest[: max(0, needs - many)]

    def take(
        self, job: RigidView, barred: Sequence[_Reservation], *, pauses: bool
    ) -> _Taken | None:
        """Take the slots of a claim, on one node if possible. Return None if there are too few.

        Args:
            barred: reservations that the claim must not delay.
            pauses: jobs may have to pause for the claim.
        """
        if not pauses:
            if self._without_pauses is None:
                self._without_pauses = sum(map(len, self._by_node(None).values()))
            if self._without_pauses < job.slots:
                return None
        plain = job.fits is None and not job.shares and not job.exclusive
        if plain and (free := self._free_on_one_node(job, barred)):  # they cost least
            return self._remove(free, [])
        offers = self._by_node(job if pauses else None)
        for head in barred:
            offers = {
                node: [slot for slot in slots if not head.bars(slot, job)]
                for node, slots in offers.items()
            }
        room = {
            node: self._fitting(job, node, slots) if self.is_open(job, node) else 0
            for node, slots in offers.items()
        }
        fitting = [
            self._choose(job, node, offers[node], job.slots)
            for node, many in room.items()
            if many >= job.slots
        ]
        if fitting:
            return self._remove(*min(fitting, key=lambda one: self._cost([*one[0], *one[1]])))
        if job.one_node or sum(room.values()) < job.slots:
            return None
        if not job.shares and not job.exclusive:
            allowed = {slot for node, slots in offers.items() if room[node] for slot in slots}
            order = self._cheapest_first(job if pauses else None)
            mine = allowed if job.fits is None else allowed & job.fits
            return self._remove([slot for slot in order if slot in mine][: job.slots], [])
        used: list[SlotId] = []
        empty: list[SlotId] = []
        for node in sorted(room, key=lambda one: -room[one]):  # few nodes
            many = min(room[node], job.slots - len(used))
            chosen = self._choose(job, node, offers[node], many) if many else ([], [])
            used, empty = [*used, *chosen[0]], [*empty, *chosen[1]]
        return self._remove(used, empty)

    def _free_on_one_node(self, job: RigidView, barred: Sequence[_Reservation]) -> list[SlotId]:
        """Return free slots for a claim without requests, on the node with fewest, or none."""
        offers = [
            free
            for node, free in self._free.items()
            if len(free) >= job.slots and self.is_open(job, node)
        ]
        for head in barred:
            offers = [[slot for slot in free if not head.bars(slot, job)] for free in offers]
        offers = [free for free in offers if len(free) >= job.slots]
        return min(offers, key=len, default=[])[: job.slots]

    def _by_node(self, pausing: RigidView | None) -> dict[NodeId, list[SlotId]]:
        """Return the slots of each node that a claim on this node may have, cheapest first.

        Free slots are first, then those that are about to be free, then the surplus of elastic
        jobs, and at last the slots of jobs that have to pause for the claim `pausing`.
        """
        coming = self._coming
        found = {node: [[*free], [*coming[node]], [], []] for node, free in self._free.items()}
        pausable = set() if pausing is None else self._pausable(pausing)
        for name, giver in self._ready_givers():
            for node, here in _grouped(giver.slots).items():
                firm = max(0, len(here) - giver.surplus)
                found[node][2] += reversed(here[firm:])
                if name in pausable:
                    found[node][3] += here[:firm]
        return {node: [slot for part in parts for slot in part] for node, parts in found.items()}

    def _cheapest_first(self, pausing: RigidView | None) -> list[SlotId]:
        """Return the slots of all nodes that a claim may have, in the same order."""
        surplus: list[SlotId] = []
        firm_slots: list[SlotId] = []
        pausable = set() if pausing is None else self._pausable(pausing)
        for name, giver in self._ready_givers():
            firm = len(giver.slots) - giver.surplus
            surplus += reversed(giver.slots[firm:])
            if name in pausable:
                firm_slots += giver.slots[:firm]
        nodes = sorted(self._free, key=lambda node: -len(self._free[node]))
        free = [slot for node in nodes for slot in self._free[node]]
        coming = [slot for node in nodes for slot in self._coming[node]]
        return [*free, *coming, *surplus, *firm_slots]

    def _ready_givers(self) -> list[tuple[JobId, _Giver | _RigidGiver]]:
        """Return the jobs that can give up slots now, in the order in which they are asked."""
        if self._ready is None:
            ready = (one for one in self._givers.items() if one[1].can_change(self._now))
            self._ready = sorted(
                ready, key=lambda one: (one[1].place[0], self._rank(one[0]), one[1].place)
            )
        return self._ready

    def _rank(self, job: JobId) -> int:
        return self._rules.ranks.get(job, 0)

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
        for name, giver in self._ready_givers():
            project, its_rank = giver.account.partition("/")[0], self._rank(name)
            if its_rank > rank:
                continue
            if (preempts and its_rank < rank) or giver.may_pause_for(claim, self._now):
                found.add(name)
            elif entitled and borrowed[project] > 0:
                borrowed[project] -= giver.firm
                found.add(name)
        return found

    def _cost(self, slots: Sequence[SlotId]) -> tuple[int, int, int]:
        """Return how many jobs lose slots, how many slots are not free, and how many remain."""
        touched = len({self._owner[slot] for slot in slots if slot in self._owner})
        free = self._free[node_of(slots[0])]
        return touched, sum(slot not in free for slot in slots), len(free)

    def _remove(self, used: list[SlotId], empty: list[SlotId]) -> _Taken:
        chosen = [*used, *empty]
        free = all(slot in self._free[node_of(slot)] for slot in chosen)
        givers = {}
        stopped = set()
        for name in dict.fromkeys(self._owner[slot] for slot in chosen if slot in self._owner):
            giver = self._givers[name]
            firm = giver.firm
            givers[name] = giver.give(chosen)
            if not givers[name]:  # what it gives up beyond the claim will be free for others
                self._borrowed[giver.account.partition("/")[0]] -= firm
                stopped |= {name} if isinstance(giver, _RigidGiver) else set()
                for slot in giver.slots:
                    del self._owner[slot]
                    self._coming[node_of(slot)].append(slot)
                del self._givers[name]
        self._without_pauses = self._ready = None
        gone = set(chosen)
        for node in {node_of(slot) for slot in chosen}:
            for some in (self._free, self._coming):
                some[node] = [slot for slot in some[node] if slot not in gone]
        return _Taken(used, empty, free, givers, frozenset(stopped))

    def reservation(self, job: RigidView) -> _Reservation:
        """Return when and where the claim will have its slots, if nothing ends earlier.

        Rigid jobs end by their time limits. Elastic jobs may be paused after their turn.
        """
        offers = self._by_node(job)
        have = {node: slots for node, slots in offers.items() if self.is_open(job, node)}
        offered = {slot for slots in have.values() for slot in slots}
        events = [
            (holder.ends_at, holder.job, tuple(set(holder.holds).difference(offered)))
            for holder in self._holders
            if holder.ends_at is not None
        ]
        for giver in self._givers.values():
            if isinstance(giver, _RigidGiver) or self._rank(giver.job.job) > self._rank(job.job):
                continue
            rest = tuple(set(giver.slots).difference(offered))
            soon = giver.surplus or giver.may_pause_for(job, self._now)
            at = max(giver.job.retry_at, self._now if soon else giver.turn_ends_at)
            events.append((at, giver.job.job, rest))
        waited: list[JobId] = []
        for at, name, held in sorted(events):
            slots = [slot for slot in held if self.is_open(job, node_of(slot))]
            waited += [name] if slots else []
            for slot in slots:
                if (there := node_of(slot)) in have:
                    have[there].append(slot)
            best = self._most(job, have)
            if best >= job.slots:
                spare = 0 if job.shares or job.exclusive else best - job.slots
                where = max(have, key=lambda one: self._fitting(job, one, have[one]))
                node = where if job.one_node else None
                return _Reservation(job, at, spare, node, tuple(waited))
        return _Reservation(job, None, 0, None, ())


def _grouped(slots: Iterable[SlotId]) -> dict[NodeId, list[SlotId]]:
    found: dict[NodeId, list[SlotId]] = {}
    for slot in slots:
        found.setdefault(node_of(slot), []).append(slot)
    return found


class _Giver:
    """Running elastic job that may give up slots."""

    def __init__(self, job: JobView, turn_s: float) -> None:
        self.job = job
        self.slots = list(job.running_on)
        self.account = job.account
        self.changing = not job.movable
        self.turn_ends_at = Seconds(job.placed_at + turn_s)

    @property
    def surplus(self) -> int:
        """Number of slots above the job's minimum."""
        return max(0, len(self.slots) - self.job.least)

    @property
    def firm(self) -> int:
        """Number of slots that the job gives up only with all others."""
        return len(self.slots) - self.surplus

    @property
    def place(self) -> tuple[int, int, float]:
        """Key of the order in which jobs are asked: the largest surplus, then the latest job."""
        return 0, -self.surplus, -self.job.submitted_at

    def can_change(self, now: Seconds) -> bool:
        """True if the job may be ordered to give up slots now."""
        return not self.changing and self.job.retry_at <= now

    def may_pause_for(self, claim: RigidView, now: Seconds) -> bool:
        """True if the job may lose all its slots to the claim."""
        return self.turn_ends_at <= now or self.job.submitted_at > claim.submitted_at

    def give(self, chosen: Sequence[SlotId]) -> dict[SlotId, int]:
        """Give up slots. Return the slots that the job keeps, with their local batches.

        The job keeps its global batch if the remaining slots can process it. Below its minimum
        it keeps nothing.
        """
        job = self.job
        self.slots = [slot for slot in self.slots if slot not in chosen]
        if len(self.slots) < job.least:
            return {}
        batch = min(sum(job.running_on.values()), job.local_limit * len(self.slots))
        return split(max(batch, len(self.slots)), self.slots)


class _RigidGiver:
    """Running rigid job that may begin again. It loses all its slots or none."""

    surplus = 0

    def __init__(self, job: RigidView) -> None:
        self.account = job.account
        self.slots = list(job.holds)
        self.firm = len(job.holds)
        self.place = 1, 0, -job.began_at  # after all elastic jobs, the youngest first

    def can_change(self, _: Seconds) -> bool:
        """Return True: a program can be stopped at any time."""
        return True

    def may_pause_for(self, _claim: RigidView, _now: Seconds) -> bool:
        """Return False: only a guarantee or a class takes slots from a rigid job."""
        return False

    def give(self, chosen: Sequence[SlotId]) -> dict[SlotId, int]:
        """Give up all slots."""
        self.slots = [slot for slot in self.slots if slot not in chosen]
        return {}


@dataclass(slots=True)
class _Decided:
    """Decision while it is made."""

    version: int
    placed: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)
    why: dict[JobId, Reason] = field(default_factory=dict)
    reasons: dict[JobId, Reason] = field(default_factory=dict)
    kept: set[SlotId] = field(default_factory=set)
    next_at: Seconds | None = None

    def wake_at(self, at: Seconds | None) -> None:
        """Ask again at this time, or earlier."""
        if at is not None:
            self.next_at = at if self.next_at is None else min(at, self.next_at)

    def serve(self, job: RigidView, taken: _Taken, head: _Reservation | None) -> None:
        """Start the claim, or keep its slots until they are free."""
        needs, early = slots_in_words(job.slots), ""
        if head is not None:
            early = f" before {head.job.job}, which it does not delay"
        if taken.free:
            self.placed[job.job] = dict.fromkeys(taken.slots, 1) | dict.fromkeys(taken.empty, 0)
            code = "start" if head is None else "backfill"
            text = f"starts on {needs}{early}" if job.slots else "starts without slots"
            self.why[job.job] = Reason(code, text, {"slots_then": job.slots})
        else:
            self.kept.update((*taken.slots, *taken.empty))
            text = f"gets {needs}{early} as soon as they are free"
            if taken.givers:
                verb = "give" if len(taken.givers) > 1 else "gives"
                text = f"{text}; {', '.join(taken.givers)} {verb} them up"
            self.reasons[job.job] = Reason("promised", text, {"needs": job.slots})
        for name, keeps in taken.givers.items():
            gives = f"gives slots to {job.job}, which needs {needs}"
            self.placed[name] = keeps
            stops = "stopped" if name in taken.stopped else "paused"
            text = f"{gives}; keeps {len(keeps)}" if keeps else f"{stops}: {gives}"
            numbers = {"slots_then": float(len(keeps))}
            self.why[name] = Reason("shrink" if keeps else "pause", text, numbers)

    def claims(self) -> Claims:
        """Return the decision."""
        plan = Plan(
            based_on=self.version,
            local_batch=self.placed,
            reasons=self.why,
            wake_at=self.next_at,
        )
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


def _shape(job: RigidView, largest: int) -> Reason:
    """Return the reason of a claim that has requests, which too few slots fit."""
    if job.missing:
        return Reason("shape", job.missing, {"needs": float(job.slots), "slots": 0.0})
    where = " on one node" if job.one_node else ""
    text = f"needs {slots_in_words(job.slots)}{where}; {largest} fit its requests"
    return Reason("shape", text, {"needs": float(job.slots), "slots": float(largest)})


def _never_fits(job: RigidView, largest: int) -> Reason:
    if job.fits is not None or job.shares or job.exclusive:
        return _shape(job, largest)
    if job.one_node and largest:
        numbers = {"needs": float(job.slots), "slots": float(largest)}
        text = f"needs {job.slots} slots on one node, the largest has {largest}"
        return Reason("too_large", text, numbers)
    return too_large(job.slots, largest)


def _reserved(job: RigidView, head: _Reservation, have: int, now: Seconds) -> Reason:
    where = " on one node" if job.one_node else ""
    text = f"needs {slots_in_words(job.slots)}{where}, could have {have}"
    numbers = {"needs": float(job.slots), "could_have": float(have)}
    if head.at is None:
        return Reason("waits", f"{text}; what holds the others has no time limit", numbers)
    wait_s = max(0.0, head.at - now)
    when = f"within {_duration(wait_s)}" if wait_s else "at once"
    text = f"{text}; has them {when}, after {', '.join(head.ends)}"
    return Reason("reserved", text, {**numbers, "wait_s": wait_s})


def _closes(job: RigidView, nodes: Sequence[NodeId]) -> Reason:
    names = ", ".join(nodes[:MAX_NAMED]) + ", ..." * (len(nodes) > MAX_NAMED)
    text = f"would run into the maintenance of {names}, and waits for its end"
    if job.run_limit_s is None:
        text += "; a smaller max_run_s would let it start before"
    return Reason("maintenance", text, {"needs": float(job.slots)})


def _beyond_share(job: RigidView, held: int, share: int) -> Reason:
    text = f"needs {slots_in_words(job.slots)}; programs have {held}, and {share} are their share"
    numbers = {"needs": float(job.slots), "held": float(held), "share": float(share)}
    return Reason("share", f"{text} while elastic jobs wait", numbers)


def _behind(job: RigidView, head: _Reservation) -> Reason:
    text = f"waits for {slots_in_words(job.slots)} behind {head.job.job}, which it would delay"
    return Reason("turn", text, {"needs": float(job.slots)})


def _duration(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE_S:.0f} min" if seconds < HOUR_S else f"{seconds / HOUR_S:.1f} h"
