"""Slots that claims of rigid jobs can still have during a decision.

A decision looks for the slots of thousands of claims on thousands of nodes. So it counts the slots
of each node once for each kind of claim, and counts a node again only after its slots changed.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Final, NamedTuple

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.placement.slot_partition import Reservation, split
from controlplane.policy.sharing.claim_order import Standing
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

EPSILON: Final = 1e-6  # rounding of shares
TURN_S: Final = 1800.0  # an elastic job that has run for this long may be paused for a claim
NOBODY: Final = frozenset[JobId]()
NO_NODES: Final = frozenset[NodeId]()


class Cost(NamedTuple):
    """Cost of slots for a claim; smaller is better."""

    owners: int  # jobs that lose slots
    not_free: int  # slots that are not free now
    room: int  # free slots of the node


@dataclass(slots=True)
class Taken:
    """Slots for a claim, and what elastic jobs keep of theirs."""

    slots: list[SlotId]
    empty: list[SlotId] = field(default_factory=list)  # on the same nodes, for nobody
    free: bool = True  # all of them are free now
    givers: dict[JobId, dict[SlotId, int]] = field(default_factory=dict)  # job -> what it keeps
    stopped: frozenset[JobId] = NOBODY  # rigid jobs among the givers

    @property
    def all(self) -> list[SlotId]:
        """Slots that nobody else can have."""
        return [*self.slots, *self.empty]


@dataclass(slots=True)
class Head(Reservation):
    """Reservation of a claim, on certain slots."""

    job: RigidView = field(kw_only=True)
    could_have: int = 0  # now, at most
    node: NodeId | None = None  # where, if the claim needs one node
    ends: Sequence[JobId] = ()  # jobs that it waits for

    def bars_all(self, job: RigidView) -> bool:
        """True if a claim that does not end before would delay this one on any slot."""
        return self.node is None and self.job.fits is None and not self.leaves_enough(job)

    def leaves_enough(self, job: RigidView) -> bool:
        """True if a claim that runs at that time fits into the slots that are left over."""
        return job.slots <= self.spare and not (job.shares or job.exclusive)

    def start(self, taken: Taken) -> None:
        """Record that a claim, which does not end before, has started or keeps slots."""
        if self.node is None:
            fits = self.job.fits
            self.spare -= len(taken.all if fits is None else fits.intersection(taken.all))


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
    turn_ends_at: float = math.inf  # when it may be paused for any claim; infinity: never
    by_node: dict[NodeId, list[SlotId]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_node = _grouped(self.slots)

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

    def give(self, chosen: AbstractSet[SlotId]) -> dict[SlotId, int]:
        """Give up slots. Return the slots that the job keeps, with their local batches.

        The job keeps its global batch if the remaining slots can process it. Below its minimum
        it keeps nothing.
        """
        self.slots = [slot for slot in self.slots if slot not in chosen]
        self.by_node = _grouped(self.slots)
        job = self.elastic
        if job is None or len(self.slots) < self.least:
            return {}
        batch = min(sum(job.running_on.values()), job.local_limit * len(self.slots))
        return split(max(batch, len(self.slots)), self.slots)


class Room:
    """Slots that claims can still have, see `of`."""

    def __init__(self, rigid: Sequence[RigidView], now: Seconds, rules: Standing) -> None:
        self._now, self._rules = now, rules
        self._holders = [job for job in rigid if job.holds]
        self._borrowed = Counter(rules.borrowed)
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._forecasts: dict[tuple[object, ...], _Forecast] = {}
        # Keys are ids of parts of `rigid`, which outlives the room.
        self._overlaps: dict[tuple[int, int], bool] = {}
        self._begins: dict[int, list[Seconds]] = {}  # of reservations
        self._closed: dict[tuple[int, int], frozenset[NodeId]] = {}  # and number of begins
        self.closed_texts: dict[tuple[int, frozenset[NodeId], bool], tuple[str, str]] = {}
        self._elastic: dict[JobId, _Giver] = {}  # also those that are changing
        self._givers: dict[JobId, _Giver] = {}  # that can give up slots now
        self._givers_on: dict[NodeId, list[_Giver]] = defaultdict(list)
        self._owner: dict[SlotId, _Giver] = {}
        self.slots: dict[NodeId, list[SlotId]] = {}
        self.free: dict[NodeId, list[SlotId]] = {}
        self._coming: dict[NodeId, list[SlotId]] = {}  # about to be free
        self.changed: list[NodeId] = []  # nodes whose slots changed, in order

    @classmethod
    def of(
        cls, view: ClusterView, rigid: Sequence[RigidView], now: Seconds, rules: Standing
    ) -> Turns[Room]:
        """Return the slots of a view, and which jobs may give up theirs."""
        room = cls(rigid, now, rules)
        yield from room._fill(view)
        return room

    def _fill(self, view: ClusterView) -> Turns[None]:
        rules, up, held = self._rules, set[SlotId](), set[SlotId]()
        for job in view.jobs.values():
            yield
            held.update(job.running_on)
        for one in self._holders:
            yield
            held.update(one.holds)
        for slot in view.slots:
            name, node = slot.slot, slot.node
            if node not in self.slots:
                yield
                self.slots[node], self.free[node], self._coming[node] = [], [], []
            self.slots[node].append(name)
            if slot.up:
                up.add(name)
            if name in held:
                continue
            if slot.usable:
                self.free[node].append(name)
            elif slot.leaving:
                self._coming[node].append(name)
        for job in view.jobs.values():
            yield
            if job.running_on and up.issuperset(job.running_on):
                self._elastic[job.job] = giver = _Giver(
                    job.job, job.account, list(job.running_on), job.least, self._rank(job.job),
                    job.submitted_at, job, job.placed_at + TURN_S,
                )  # fmt: skip
                if job.movable and job.retry_at <= self._now:
                    self._add_giver(giver)
        for one in self._holders if rules.entitled or rules.preempting else ():
            yield
            if one.preemptible and up.issuperset(one.holds):
                giver = _Giver(
                    one.job, one.account, list(one.holds), len(one.holds), self._rank(one.job),
                    one.began_at,
                )  # fmt: skip
                self._add_giver(giver)
        yield
        self.nodes = list(self.slots)
        self.index = {node: place for place, node in enumerate(self.nodes)}
        self._free_counts = [len(self.free[node]) for node in self.nodes]
        self._free_order = sorted((-n, place) for place, n in enumerate(self._free_counts) if n)
        self._ordered = 0  # changes that these include

    def _add_giver(self, giver: _Giver) -> None:
        self._givers[giver.name] = giver
        self._owner |= dict.fromkeys(giver.slots, giver)
        for node in giver.by_node:
            self._givers_on[node].append(giver)

    def _rank(self, job: JobId) -> int:
        return self._rules.ranks.get(job, 0)

    # --- where a claim fits

    def overlaps(self, one: RigidView, other: RigidView) -> bool:
        """True if both claims could use the same slot."""
        if one.fits is None or other.fits is None or one.fits is other.fits:
            return True
        key = id(one.fits), id(other.fits)
        if key not in self._overlaps:
            self._overlaps[key] = not one.fits.isdisjoint(other.fits)
        return self._overlaps[key]

    def largest(self, job: RigidView, *, ever: bool = False) -> int:
        """Return how many slots the claim could have if nobody else had any.

        `ever` includes nodes on which it would now run into a reservation.
        """
        sizes = self.kind(job, NO_NODES if ever else self.closed(job)).sizes
        return sizes.one_node if job.one_node else sizes.all_nodes

    def is_open(self, job: RigidView, node: NodeId) -> bool:
        """True if a claim that starts now ends before the node is reserved for others."""
        return node not in job.closes or ends_at(job, self._now) <= job.closes[node][0]

    def closed(self, job: RigidView) -> frozenset[NodeId]:
        """Return the nodes on which a claim that starts now would run into a reservation."""
        if not job.closes:
            return NO_NODES
        if id(job.closes) not in self._begins:
            self._begins[id(job.closes)] = sorted(at for at, _ in job.closes.values())
        begun = bisect_left(self._begins[id(job.closes)], ends_at(job, self._now))
        key = id(job.closes), begun
        if key not in self._closed:
            closed = (node for node in job.closes if not self.is_open(job, node))
            self._closed[key] = frozenset(closed)
        return self._closed[key]

    def kind(
        self,
        job: RigidView,
        closed: frozenset[NodeId] = NO_NODES,
        without: tuple[frozenset[SlotId], ...] = (),
    ) -> Kind:
        """Return the kind of a claim that must not use these nodes and slots."""
        shares = id(job.shares) if job.shares else 0
        key = (id(job.fits), shares, job.exclusive, closed, *map(id, without))
        if key not in self._kinds:
            self._kinds[key] = Kind(self, job, closed, without)
        return self._kinds[key]

    # --- what claims take

    def take(self, job: RigidView, barred: Sequence[Head], *, pauses: bool) -> Taken | None:
        """Take the slots of a claim, on one node if possible. Return None if there are too few.

        Args:
            barred: reservations that the claim must not delay. None of them bars all slots.
            pauses: jobs may have to pause for the claim.
        """
        closed = self.closed(job) | {head.node for head in barred if head.node is not None}
        without = tuple(
            head.job.fits
            for head in barred
            if head.node is None and head.job.fits is not None and not head.leaves_enough(job)
        )
        kind, many = self.kind(job, closed, without), job.slots
        pausable: AbstractSet[JobId] = NOBODY
        best = kind.best_node(many)
        if pauses and (best is None or best[0].owners) and (pausable := self._pausable(job)):
            best = kind.best_node(many, pausable)
        if best is not None:
            return self._remove(kind.choose(self.nodes[best[1]], many, pausable))
        counts = kind.counts(pausable)
        if job.one_node or sum(counts) < many:
            return None
        found = Taken([])
        if job.shares or job.exclusive:
            for place in sorted(range(len(counts)), key=lambda one: -counts[one]):  # few nodes
                if has := min(counts[place], many - len(found.slots)):
                    chosen = kind.choose(self.nodes[place], has, pausable)
                    found.slots += chosen.slots
                    found.empty += chosen.empty
        else:
            found.slots += islice(filter(kind.admits, self._offers(pausable)), many)
        return self._remove(found) if len(found.slots) == many else None

    def cost(self, taken: Taken) -> Cost:
        """Return the cost of slots of one node."""
        owners = {giver.name for slot in taken.all if (giver := self._owner.get(slot))}
        free = self.free[node_of(taken.slots[0])]
        not_free = sum(slot not in free for slot in taken.all)
        return Cost(len(owners), not_free, len(free))

    def offers_on(self, node: NodeId, pausable: AbstractSet[JobId] = NOBODY) -> list[SlotId]:
        """Return the slots of a node that a claim on this node may have, cheapest first.

        Free slots are first, then those that are about to be free, then the surplus of elastic
        jobs, and at last the slots of jobs that have to pause for the claim. The surplus of a job
        counts on each of its nodes.
        """
        givers = self._givers_on.get(node)
        if not givers:
            return self.free[node] + self._coming[node]
        surplus: list[SlotId] = []
        firm_slots: list[SlotId] = []
        for giver in sorted(givers, key=lambda giver: giver.place):
            slots = giver.by_node[node]
            firm = max(0, len(slots) - giver.surplus)
            surplus += reversed(slots[firm:])
            firm_slots += slots[:firm] if giver.name in pausable else []
        return [*self.free[node], *self._coming[node], *surplus, *firm_slots]

    def _offers(self, pausable: AbstractSet[JobId]) -> Iterator[SlotId]:
        """Yield the slots that a claim on several nodes may have, in the same order.

        Nodes with the most free slots are first.
        """
        for _, place in self._by_free_slots():
            yield from self.free[self.nodes[place]]
        coming = [node for node in self.nodes if self._coming[node]]
        for node in sorted(coming, key=lambda node: -len(self.free[node])):
            yield from self._coming[node]
        givers = sorted(self._givers.values(), key=lambda giver: giver.place)
        for giver in givers:
            yield from reversed(giver.slots[giver.firm :])
        for giver in givers:
            if giver.name in pausable:
                yield from giver.slots[: giver.firm]

    def _by_free_slots(self) -> Sequence[tuple[int, int]]:
        """Return the nodes with free slots, those with the most first, as (-free slots, place)."""
        for node in dict.fromkeys(self.changed[self._ordered :]):
            place = self.index[node]
            if before := self._free_counts[place]:
                del self._free_order[bisect_left(self._free_order, (-before, place))]
            self._free_counts[place] = count = len(self.free[node])
            if count:
                insort(self._free_order, (-count, place))
        self._ordered = len(self.changed)
        return self._free_order

    def nodes_of(self, jobs: AbstractSet[JobId]) -> Iterable[NodeId]:
        """Return the nodes on which jobs have slots that they can give up."""
        return {node: None for name in jobs for node in self._givers[name].by_node}

    def _pausable(self, claim: RigidView) -> AbstractSet[JobId]:
        """Return the jobs that may lose all their slots to a claim.

        An entitled claim also takes firm slots of projects above their guarantees. It never takes
        more than such a project has above its guarantee, but for the last job. A claim of a class
        that preempts takes those of lower ranks, and no claim takes those of higher ranks.
        """
        entitled, preempts = self._has_rights(claim)
        if not (self._elastic or entitled or preempts):
            return NOBODY
        rank, borrowed, found = self._rank(claim.job), Counter(self._borrowed), set()
        for giver in sorted(self._givers.values(), key=lambda giver: giver.place):
            if giver.rank > rank:
                continue
            if (preempts and giver.rank < rank) or giver.may_pause_for(claim, self._now):
                found.add(giver.name)
            elif entitled and borrowed[giver.project] > 0:
                borrowed[giver.project] -= giver.firm
                found.add(giver.name)
        return found

    def _has_rights(self, claim: RigidView) -> tuple[bool, bool]:
        return claim.job in self._rules.entitled, claim.job in self._rules.preempting

    def _remove(self, taken: Taken) -> Taken:
        """Take these slots from the offers, and from the jobs that hold them."""
        chosen = set(taken.all)
        nodes = dict.fromkeys(map(node_of, taken.all))
        taken.free = all(slot in self.free[node_of(slot)] for slot in chosen)
        owners = {giver.name: giver for slot in taken.all if (giver := self._owner.get(slot))}
        for name, giver in owners.items():
            before, firm = dict.fromkeys(giver.by_node), giver.firm
            keeps = taken.givers[name] = giver.give(chosen)
            nodes |= before
            for node in before if not keeps else before.keys() - giver.by_node.keys():
                self._givers_on[node].remove(giver)
            if not keeps:  # what it gives up beyond the claim will be free for others
                self._borrowed[giver.project] -= firm
                taken.stopped |= {name} if giver.elastic is None else NOBODY
                for slot in giver.slots:
                    del self._owner[slot]
                    self._coming[node_of(slot)].append(slot)
                del self._givers[name]
                self._elastic.pop(name, None)
        for node in nodes:
            for some in (self.free, self._coming):
                some[node] = [slot for slot in some[node] if slot not in chosen]
        self.changed += nodes
        return taken

    # --- when a claim fits

    def head(self, job: RigidView) -> Head:
        """Return when and where the claim will have its slots, if nothing ends earlier.

        Rigid jobs end by their time limits. Elastic jobs may be paused after their turn.
        """
        kind = self.kind(job, self.closed(job))
        pauses = bool(self._elastic) or any(self._has_rights(job))
        # Without jobs that may pause, the forecast is the same for all claims of a kind.
        key = (kind, job.one_node, len(self.changed), job.job if pauses else None)
        if key not in self._forecasts:
            self._forecasts[key] = self._forecast(job, kind)
        forecast, many = self._forecasts[key], job.slots
        if (step := forecast.step(many)) is None:
            return Head(job=job, could_have=forecast.could_have)
        return Head(
            step.at,
            0.0 if job.shares or job.exclusive else step.slots - many,
            job=job,
            could_have=forecast.could_have,
            node=step.node if job.one_node else None,
            ends=forecast.ends[: step.ends],
        )

    def _forecast(self, job: RigidView, kind: Kind) -> _Forecast:
        pausable = self._pausable(job)
        if job.one_node:
            have = {node: self.offers_on(node, pausable) for node in self.nodes}
        else:
            have = {node: list[SlotId]() for node in self.nodes} | _grouped(self._offers(pausable))
        have = {node: slots for node, slots in have.items() if node not in kind.closed}
        offered = set(chain.from_iterable(have.values()))
        counts = {node: kind.fitting(node, slots) for node, slots in have.items()}
        where = max(counts, key=counts.__getitem__, default=None)
        total = sum(counts.values())
        could_have = total if not job.one_node else counts[where] if where is not None else 0
        ends = list[JobId]()

        def steps() -> Iterator[_Step]:
            nonlocal total, where
            for at, name, slots in sorted(self._ends(job)):
                gained = [slot for slot in slots if slot not in offered and node_of(slot) in have]
                ends.extend([name] if gained else [])
                for slot in gained:
                    have[node_of(slot)].append(slot)
                for node in {node_of(slot) for slot in gained}:
                    before, counts[node] = counts[node], kind.fitting(node, have[node])
                    total += counts[node] - before
                    if where is None or self._is_better(counts, node, where):
                        where = node
                best = total if not job.one_node else counts[where] if where is not None else 0
                yield _Step(at, best, where, len(ends))

        return _Forecast(could_have, ends, steps())

    def _is_better(self, counts: Mapping[NodeId, int], node: NodeId, than: NodeId) -> bool:
        return (counts[node], -self.index[node]) > (counts[than], -self.index[than])

    def _ends(self, job: RigidView) -> Iterator[tuple[float, JobId, tuple[SlotId, ...]]]:
        """Yield when each job may have given up its slots to the claim."""
        for one in self._holders:
            if one.ends_at is not None:
                yield one.ends_at, one.job, one.holds
        for giver in self._elastic.values():
            if giver.elastic is not None and giver.rank <= self._rank(job.job):
                soon = giver.surplus or giver.may_pause_for(job, self._now)
                at = max(giver.elastic.retry_at, self._now if soon else giver.turn_ends_at)
                yield at, giver.name, tuple(giver.slots)


class _Step(NamedTuple):
    """Slots that a claim could have after the next end of a job."""

    at: float
    slots: int
    node: NodeId | None  # that has the most
    ends: int  # jobs that have given up slots for it by then


class _Forecast:
    """Slots that claims of a kind could have, now and after each end of a job."""

    def __init__(self, could_have: int, ends: list[JobId], steps: Iterator[_Step]) -> None:
        self.could_have = could_have  # now
        self.ends = ends  # jobs that give up slots, in order
        self._coming, self._known = steps, list[_Step]()

    def step(self, many: int) -> _Step | None:
        """Return the first step with `many` slots."""
        found = next((one for one in self._known if one.slots >= many), None)
        while found is None and (step := next(self._coming, None)) is not None:
            self._known.append(step)
            found = step if step.slots >= many else None
        return found


class _Sizes(NamedTuple):
    """Most slots that claims of a kind could have if nobody else had any."""

    one_node: int
    all_nodes: int


class Kind:
    """Claims that can use the same slots, and how many of them each node has.

    Args:
        room: with all slots.
        job: one of the claims.
        closed: nodes that they must not use.
        without: further slots that they must not use.
    """

    def __init__(
        self,
        room: Room,
        job: RigidView,
        closed: frozenset[NodeId],
        without: tuple[frozenset[SlotId], ...],
    ) -> None:
        self.closed = closed
        self._room, self._job, self._without = room, job, without
        self._plain = job.fits is None and not (job.shares or job.exclusive or closed or without)
        self._counts = [self.fitting(node, room.offers_on(node)) for node in room.nodes]
        self._counted = len(room.changed)  # changes that `_counts` includes
        self._rankings: dict[int, _Ranking] = {}  # by number of slots

    @cached_property
    def sizes(self) -> _Sizes:
        """Most slots on one node and on all, if nobody else had any."""
        each = [self.fitting(node, slots) for node, slots in self._room.slots.items()]
        return _Sizes(max(each, default=0), sum(each))

    def admits(self, slot: SlotId) -> bool:
        """True if the claims may use the slot."""
        fits = self._job.fits
        return (
            (fits is None or slot in fits)
            and node_of(slot) not in self.closed
            and not any(slot in others for others in self._without)
        )

    def fitting(self, node: NodeId, slots: Sequence[SlotId]) -> int:
        """Return how many slots a claim can use if it may have these slots of a node."""
        if self._plain:
            return len(slots)
        if node in self.closed:
            return 0
        job, slots = self._job, self._allowed(slots)
        if job.exclusive and len(slots) < len(self._room.slots[node]):
            return 0
        fits = len(slots) if job.fits is None else len(job.fits.intersection(slots))
        return min(fits, math.floor(len(slots) / job.shares.get(node, 1.0) + EPSILON))

    def _allowed(self, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        for others in self._without:
            slots = [slot for slot in slots if slot not in others]
        return slots

    def counts(self, pausable: AbstractSet[JobId] = NOBODY) -> list[int]:
        """Return how many slots of each node a claim can have if these jobs may pause for it."""
        room = self._room
        for node in room.changed[self._counted :]:
            self._counts[room.index[node]] = self.fitting(node, room.offers_on(node))
        self._counted = len(room.changed)
        found = list(self._counts)
        for node in room.nodes_of(pausable):
            found[room.index[node]] = self.fitting(node, room.offers_on(node, pausable))
        return found

    def best_node(
        self, many: int, pausable: AbstractSet[JobId] = NOBODY
    ) -> tuple[Cost, int] | None:
        """Return the cost and the place of the node where `many` slots cost least, if any."""
        room = self._room
        if (ranking := self._rankings.get(many)) is None:
            counts = self.counts()
            nodes = [room.nodes[place] for place, count in enumerate(counts) if count >= many]
            ranking = self._rankings[many] = _Ranking()
        else:
            nodes = room.changed[ranking.seen :]
        ranking.seen = len(room.changed)
        for node in nodes:
            ranking.put(room.index[node], self._cost(node, many, NOBODY))
        best = ranking.first()
        for node in room.nodes_of(pausable):
            cost = self._cost(node, many, pausable)
            if cost is not None and (best is None or (cost, room.index[node]) < best):
                best = cost, room.index[node]
        return best

    def _cost(self, node: NodeId, many: int, pausable: AbstractSet[JobId]) -> Cost | None:
        free = self._room.free[node]
        if self._plain and len(free) >= many:
            return Cost(0, 0, len(free))
        if self.fitting(node, self._room.offers_on(node, pausable)) < many:
            return None
        return self._room.cost(self.choose(node, many, pausable))

    def choose(self, node: NodeId, many: int, pausable: AbstractSet[JobId]) -> Taken:
        """Return `many` of a node's slots for a claim, and slots that stay empty beside them."""
        job, slots = self._job, self._allowed(self._room.offers_on(node, pausable))
        used = [slot for slot in slots if job.fits is None or slot in job.fits][:many]
        if not job.exclusive and node not in job.shares:
            return Taken(used)
        rest = [slot for slot in slots if slot not in used]
        needs = math.ceil(many * job.shares.get(node, 1.0) - EPSILON)
        return Taken(used, rest if job.exclusive else rest[: max(0, needs - many)])


class _Ranking:
    """Nodes that have enough slots, ordered by cost, then by their index in the room."""

    def __init__(self) -> None:
        self.seen = 0  # changes of the room that it includes
        self._costs: dict[int, Cost] = {}
        self._heap: list[tuple[Cost, int]] = []  # some entries are outdated

    def put(self, place: int, cost: Cost | None) -> None:
        """Set the cost of a node. None: it has too few slots."""
        self._costs.pop(place, None)
        if cost is not None:
            self._costs[place] = cost
            heapq.heappush(self._heap, (cost, place))

    def first(self) -> tuple[Cost, int] | None:
        """Return the smallest cost and its place."""
        while self._heap and self._costs.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


def ends_at(job: RigidView, now: Seconds) -> float:
    """Return the latest end of a claim that starts now."""
    return math.inf if job.run_limit_s is None else now + job.run_limit_s


def _grouped(slots: Iterable[SlotId]) -> dict[NodeId, list[SlotId]]:
    """Return slots by node."""
    found: dict[NodeId, list[SlotId]] = {}
    for slot in slots:
        found.setdefault(node_of(slot), []).append(slot)
    return found
