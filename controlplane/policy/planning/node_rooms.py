"""Free slots by node, and which of them a job is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol

from controlplane.policy.api import JobView
from controlplane.policy.planning.slot_partition import Partition
from schemas.ids import NodeId, SlotId, node_of

Mode = Literal["roomiest", "consolidate", "spread", "tetris", "emptiest"]


class Rooms(Protocol):
    """What is free while one plan is made; every call takes what it returns."""

    def start(self, job: JobView, size: int) -> list[SlotId]:
        """Slots for a job that has none, node by node.

        Args:
            size: how many; not more than are free.
        """
        ...

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """`own` and further ones, node by node.

        Args:
            own: slots that it keeps, which are not free.
        """
        ...

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Other slots, or its own where others are no better.

        Args:
            own: slots that it has, which are free.
        """
        ...

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> bool:
        """Take exactly these; False, and nothing is taken, if some are not free."""
        ...


class NodeRooms:
    """Nodes by how many of their slots are free; the first in the view among equals.

    A heap of nodes for each number of free slots; as these only fall, an entry whose number is
    not right any more is dropped when it comes up.
    """

    def __init__(self, partition: Partition, mode: Mode) -> None:
        self._mode = mode
        self._free = list(partition.free.values())
        self._place = {node: place for place, node in enumerate(partition.free)}
        self._begun = self._in_use(partition) if mode == "tetris" else [False] * len(self._free)
        top = 1 + max(map(len, self._free), default=0)
        self._heaps: tuple[list[list[int]], ...] = tuple([[] for _ in range(top)] for _ in "ab")
        for place, slots in enumerate(self._free):
            self._heaps[self._begun[place]][len(slots)].append(place)  # ascending: it is a heap

    def start(self, job: JobView, size: int) -> list[SlotId]:
        """As the mode says."""
        return self._start(size)

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """`own` and others close to them."""
        taken = list(own)
        if self._mode != "spread":
            for node, _ in Counter(map(node_of, own)).most_common():
                taken += self._take(self._place[node], size - len(taken))
        taken += self._start(size - len(taken))
        return by_node(taken)

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """As few nodes as possible; those of `own`, which are free, where others are no better."""
        taken: list[SlotId] = []
        mine = Counter(map(node_of, own))
        for node in mine:
            self._free[self._place[node]].sort(key=lambda slot: slot not in own)  # its own first
        for node, _ in mine.most_common():
            place, need = self._place[node], size - len(taken)
            room = len(self._free[place])
            if room and need and (room >= need or room >= len(self._free[self._roomiest()])):
                taken += self._take(place, need)
        return taken + self._start(size - len(taken))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> bool:
        """Take exactly these, or nothing."""
        places = [self._place.get(node_of(slot)) for slot in slots]
        for place, slot in zip(places, slots, strict=True):
            if place is None or slot not in self._free[place]:
                return False
        for place, slot in zip(places, slots, strict=True):
            if place is not None:
                self._free[place].remove(slot)
                self._put_back(place)
        return True

    def _start(self, size: int) -> list[SlotId]:
        if self._mode == "spread":
            return self._spread(size)
        taken: list[SlotId] = []
        while len(taken) < size:
            need = size - len(taken)
            taken += self._take(self._next(need, first=not taken), need)
        return taken

    def _next(self, need: int, *, first: bool) -> int:
        """The node to take from next."""
        found = None
        if self._mode != "emptiest" and (first or self._mode != "roomiest"):
            found = self._tightest(need)
        return self._roomiest() if found is None else found

    def _tightest(self, need: int) -> int | None:
        """The node with the least room that is enough; one in use before one that is not."""
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
        raise AssertionError("more slots are given out than there are")

    def _first(self, heap: list[int], room: int) -> int | None:
        while heap and len(self._free[heap[0]]) != room:
            heappop(heap)
        return heap[0] if heap else None

    def _take(self, place: int, many: int) -> list[SlotId]:
        """Up to `many` slots of a node."""
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
        """One slot of each node, and again one of each while that is not enough."""
        taken: list[SlotId] = []
        while len(taken) < size:
            used: list[int] = []
            for _ in range(min(size - len(taken), sum(1 for slots in self._free if slots))):
                place = self._roomiest()
                taken.append(self._free[place].pop(0))  # not found again in this round
                used.append(place)
            for place in used:
                self._put_back(place)
        return by_node(taken)

    def _in_use(self, partition: Partition) -> list[bool]:
        sizes = Counter(slot.node for slot in partition.view.slots)
        return [len(slots) < sizes[node] for node, slots in partition.free.items()]


def by_node(slots: Sequence[SlotId]) -> list[SlotId]:
    """The same, node by node in the order in which they come up."""
    nodes: dict[NodeId, list[SlotId]] = {}
    for slot in slots:
        nodes.setdefault(node_of(slot), []).append(slot)
    return [slot for here in nodes.values() for slot in here]
