"""Placer for policies that decide only on sizes, and the free slots that it assigns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol

from controlplane.policy.api import JobView, Plan, PolicyEvent
from controlplane.policy.placement.slot_partition import Partition, Why, compose_plan, split
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

Mode = Literal["roomiest", "consolidate", "spread", "tetris", "emptiest"]


class FreeSlots(Protocol):
    """The slots that are free while one plan is made; each method removes the slots it returns."""

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return `own`, which are not free, and further free slots: `size` in all, by node."""
        ...

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return `size` free slots on few nodes; slots of `own`, which are free, win ties."""
        ...

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> None:
        """Remove exactly these free slots."""
        ...


class NodeFreeSlots:
    """The free slots by node; the number of free slots decides which node is used next.

    The view's order decides ties. There is a heap of nodes for each number of free slots. These
    numbers only fall. An entry with an outdated number is dropped at the top of its heap.
    """

    def __init__(self, partition: Partition, mode: Mode) -> None:
        self._mode = mode
        self._free = list(partition.free.values())
        self._place = {node: place for place, node in enumerate(partition.free)}
        sizes = Counter(slot.node for slot in partition.view.slots) if mode == "tetris" else {}
        self._begun = [len(slots) < sizes.get(node, 0) for node, slots in partition.free.items()]
        top = 1 + max(map(len, self._free), default=0)
        self._heaps: tuple[list[list[int]], ...] = tuple([[] for _ in range(top)] for _ in "ab")
        for place, slots in enumerate(self._free):
            self._heaps[self._begun[place]][len(slots)].append(place)  # ascending, hence a heap

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return `own` and free slots close to them."""
        taken = list(own)
        if self._mode != "spread":
            for node, _ in Counter(map(node_of, own)).most_common():
                taken += self._take(self._place[node], size - len(taken))
        taken += self._start(size - len(taken))
        return by_node(taken)

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return slots on as few nodes as possible; slots of `own` win ties."""
        taken: list[SlotId] = []
        mine = Counter(map(node_of, own))
        for node in mine:
            self._free[self._place[node]].sort(key=lambda slot: slot not in own)  # own slots first
        for node, _ in mine.most_common():
            place, need = self._place[node], size - len(taken)
            room = len(self._free[place])
            if room and need and (room >= need or room >= len(self._free[self._roomiest()])):
                taken += self._take(place, need)
        return taken + self._start(size - len(taken))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> None:
        """Remove exactly these free slots."""
        for slot in slots:
            place = self._place[node_of(slot)]
            self._free[place].remove(slot)
            self._put_back(place)

    def _start(self, size: int) -> list[SlotId]:
        if self._mode == "spread":
            return self._spread(size)
        taken: list[SlotId] = []
        while len(taken) < size:
            need = size - len(taken)
            found = None
            if self._mode != "emptiest" and (not taken or self._mode != "roomiest"):
                found = self._tightest(need)
            taken += self._take(self._roomiest() if found is None else found, need)
        return taken

    def _tightest(self, need: int) -> int | None:
        """Return the node with the least sufficient room; nodes in use are preferred."""
        for heaps in reversed(self._heaps):
            for room in range(need, len(heaps)):
                place = self._first(heaps[room], room)
                if place is not None:
                    return place
        return None

    def _roomiest(self) -> int:
        for room in range(len(self._heaps[0]) - 1, 0, -1):
            for heaps in reversed(self._heaps):
                place = self._first(heaps[room], room)
                if place is not None:
                    return place
        raise AssertionError("more slots are requested than free")

    def _first(self, heap: list[int], room: int) -> int | None:
        while heap and len(self._free[heap[0]]) != room:
            heappop(heap)
        return heap[0] if heap else None

    def _take(self, place: int, many: int) -> list[SlotId]:
        slots = self._free[place]
        taken = slots[:many]
        if taken:
            del slots[:many]
            self._put_back(place)
        return taken

    def _put_back(self, place: int) -> None:
        if self._mode == "tetris":
            self._begun[place] = True
        heappush(self._heaps[self._begun[place]][len(self._free[place])], place)

    def _spread(self, size: int) -> list[SlotId]:
        """Take one slot from each node, and repeat until there are `size` slots."""
        taken: list[SlotId] = []
        while len(taken) < size:
            used: list[int] = []
            for _ in range(min(size - len(taken), sum(1 for slots in self._free if slots))):
                place = self._roomiest()
                taken.append(self._free[place].pop(0))  # until put back: no valid heap entry
                used.append(place)
            for place in used:
                self._put_back(place)
        return by_node(taken)


def by_node(slots: Sequence[SlotId]) -> list[SlotId]:
    """Return the slots grouped by node; nodes keep the order of their first slots."""
    nodes: dict[NodeId, list[SlotId]] = {}
    for slot in slots:
        nodes.setdefault(node_of(slot), []).append(slot)
    return [slot for here in nodes.values() for slot in here]


Moves = Literal["elastic", "restart"]


class Placer:
    """Placer that assigns slots by node and moves as few jobs as possible.

    A job that keeps its size keeps its slots. Another job grows around its slots or shrinks
    within them (`elastic`), or gives all of them up and is placed again (`restart`). Slots that
    were assigned to a job but are not free yet are reserved, so that the next plan assigns them
    again.

    Args:
        mode: nodes that are used first.
            consolidate: as few nodes as possible, the last one with the least sufficient room.
            roomiest: like consolidate, but a job that fits on no node fills the nodes with most
                room one after the other.
            tetris: like consolidate, but nodes in use are filled first.
            spread: one slot of each node, those with most room first.
            emptiest: always the node with most room, filled as far as needed, as the published
                simulator of Pollux (OSDI '21) places the jobs of Tiresias and Optimus.
    """

    def __init__(self, mode: Mode = "consolidate", moves: Moves = "elastic") -> None:
        self.mode = mode
        self.moves = moves
        self._reserved: dict[JobId, list[SlotId]] = {}

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Ignore the event; a subclass may learn from it."""

    def plan(
        self,
        partition: Partition,
        sizes: Mapping[JobId, int],
        why: Why,
        wake_at: Seconds | None = None,
    ) -> Plan:
        """Return the plan that places jobs of these `sizes` with their users' batches."""
        placed = self.place(partition, sizes)
        batches, restart = with_user_batches(partition, placed), self.restarts(partition, placed)
        return compose_plan(partition, batches, why, restart=restart, wake_at=wake_at)

    def place(
        self, partition: Partition, sizes: Mapping[JobId, int], packed: Collection[JobId] = ()
    ) -> dict[JobId, list[SlotId]]:
        """Return the slots of each job, in order of rank, node by node.

        Args:
            sizes: slots of `running` and `waiting` jobs, at most `room` in total; a missing job
                has 0. Jobs that do not keep their slots are placed in this order.
            packed: running jobs that move to fewer nodes as a whole, or else keep their slots.
        """
        placed = self._stay(partition, sizes, packed)
        jobs = partition.view.jobs
        elastic = self.moves == "elastic"
        todo = [(jobs[name], size) for name, size in sizes.items() if size and name not in placed]
        if elastic:  # new jobs first, because only they need slots that are free now
            todo.sort(key=lambda entry: bool(entry[0].running_on))
        free_slots = self.free_slots(partition, placed)
        placed |= self._keep_promises(partition, todo, free_slots, packed)
        for job, size in todo:
            if job.job not in placed:
                own = list(job.running_on) if elastic else []
                take = free_slots.pack if job.job in packed else free_slots.grow
                placed[job.job] = take(job, own, size)
        self._reserved = {job.job: placed[job.job] for job, _ in todo}
        return placed

    def free_slots(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> FreeSlots:
        """Return the free slots with a rule for choosing nodes; jobs keep their `placed` slots."""
        return NodeFreeSlots(partition, self.mode)

    def restarts(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> tuple[JobId, ...]:
        """Return the jobs that must stop before they can get the slots that `place` assigned."""
        if self.moves == "elastic":
            return ()
        return tuple(
            job.job
            for job in partition.running
            if job.job in placed and len(placed[job.job]) != len(job.running_on)
        )

    def _stay(
        self, partition: Partition, sizes: Mapping[JobId, int], packed: Collection[JobId]
    ) -> dict[JobId, list[SlotId]]:
        """Return the slots that jobs keep; release all other slots of running jobs."""
        placed: dict[JobId, list[SlotId]] = {}
        for job in partition.running:
            size, have = sizes.get(job.job, 0), len(job.running_on)
            if size == have and job.job not in packed:
                placed[job.job] = list(job.running_on)
            elif not size or job.job in packed or self.moves == "restart":
                partition.release(list(job.running_on))
            elif size < have:
                stays = _tightest(list(job.running_on), size)
                partition.release([slot for slot in job.running_on if slot not in stays])
                placed[job.job] = stays
        return placed

    def _keep_promises(
        self,
        partition: Partition,
        todo: Iterable[tuple[JobView, int]],
        free_slots: FreeSlots,
        packed: Collection[JobId],
    ) -> dict[JobId, list[SlotId]]:
        kept: dict[JobId, list[SlotId]] = {}
        for job, size in todo:
            reserved = self._reserved.get(job.job, [])
            stays = self.moves == "elastic" and job.job not in packed
            own = job.running_on if stays else {}
            new = [slot for slot in reserved if slot not in own]
            free = all(slot in partition.free.get(node_of(slot), ()) for slot in new)
            if free and len(reserved) == size == len(own) + len(new):
                free_slots.claim(job, new)
                kept[job.job] = reserved
        return kept


def with_user_batches(
    partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
) -> dict[JobId, dict[SlotId, int]]:
    """Return local batches that keep each job's user batch.

    A job that keeps its slots keeps its present local batches.
    """
    jobs = partition.view.jobs
    return {
        name: dict(jobs[name].running_on)
        if jobs[name].running_on.keys() == set(slots)
        else split(jobs[name].batch_size, slots)
        for name, slots in placed.items()
    }


def _tightest(slots: Sequence[SlotId], size: int) -> list[SlotId]:
    """Return `size` of the slots in their order, dropping slots of the least used nodes first."""
    many = Counter(map(node_of, slots))
    rank = {node: place for place, (node, _) in enumerate(many.most_common())}
    stay = set(sorted(slots, key=lambda slot: rank[node_of(slot)])[:size])
    return [slot for slot in slots if slot in stay]
