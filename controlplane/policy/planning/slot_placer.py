"""From sizes to slots: the placer that all policies share that decide only how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from controlplane.policy.api import JobView, PolicyEvent
from controlplane.policy.planning.node_rooms import Mode, NodeRooms, Rooms
from controlplane.policy.planning.packing import split
from controlplane.policy.planning.slot_partition import Partition
from schemas.ids import JobId, Seconds, SlotId, node_of

Moves = Literal["elastic", "restart"]


class Placer:
    """Gives slots to jobs by node, and moves as few as it can.

    A job whose size stays keeps its slots. One whose size changes grows around or shrinks within
    its own (`elastic`), or gives them all up and is placed anew (`restart`). What is reserved for
    a job whose slots were not free yet is kept for it, so that the plan that follows when they
    are gives the same slots.

    Modes:
        consolidate: as few nodes as possible; the node with the least room that is enough.
        roomiest: the same, but a job that fits on no node takes the nodes with most room in turn,
            to its last slot.
        tetris: the same, but nodes in use are filled up before a new one is begun.
        spread: one slot of each node, those with most room first.
        emptiest: again and again all that is needed of the node with most room, as the published
            simulator of Pollux (OSDI '21) places the jobs of Tiresias and Optimus.
    """

    def __init__(self, mode: Mode = "consolidate", moves: Moves = "elastic") -> None:
        """Begin without reservations.

        Args:
            mode: which nodes are taken first; see the class.
            moves: "elastic": a job whose size changes keeps what it can; "restart": it is placed
                anew.
        """
        self.mode = mode
        self.moves = moves
        self._reserved: dict[JobId, list[SlotId]] = {}

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """It learns nothing; a subclass may.

        Args:
            now: seconds on the controller's clock.
        """

    def place(
        self, partition: Partition, sizes: Mapping[JobId, int], packed: Collection[JobId] = ()
    ) -> dict[JobId, list[SlotId]]:
        """Slots of each job, in order of rank, node by node.

        Args:
            sizes: slots of its `running` and `waiting` jobs, in the order in which those are
                placed that do not keep theirs; at most its `room` in all. Absent: none.
            packed: running jobs that give up their slots for others on fewer nodes, or keep them.
        """
        placed = self._stay(partition, sizes, packed)
        jobs = partition.view.jobs
        elastic = self.moves == "elastic"
        todo = [(jobs[name], size) for name, size in sizes.items() if size and name not in placed]
        if elastic:  # a start needs slots that are free by now, a growing job need not
            todo.sort(key=lambda entry: bool(entry[0].running_on))
        rooms = self.rooms(partition, placed)
        kept_promises = self._keep_promises(todo, rooms, packed)
        placed |= kept_promises
        for job, size in todo:
            if job.job not in placed:
                own = list(job.running_on) if elastic else []
                if job.job in packed:
                    placed[job.job] = rooms.pack(job, own, size)
                else:
                    placed[job.job] = rooms.grow(job, own, size) if own else rooms.start(job, size)
        self._reserved = {job.job: placed[job.job] for job, _ in todo}
        return placed

    def rooms(self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]) -> Rooms:
        """What is free, and how nodes are chosen; a subclass may choose otherwise.

        Args:
            partition: with the slots that jobs gave up.
            placed: slots of those `running` jobs that keep some.
        """
        return NodeRooms(partition, self.mode)

    def restarts(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> tuple[JobId, ...]:
        """Jobs that have to stop to get what they were given.

        Args:
            partition: what of the view can be given out.
            placed: slots of each job, as `place` gave them.
        """
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
        """Jobs that keep their slots or some of them; the slots of the others are free."""
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
        self, todo: Iterable[tuple[JobView, int]], rooms: Rooms, packed: Collection[JobId]
    ) -> dict[JobId, list[SlotId]]:
        kept: dict[JobId, list[SlotId]] = {}
        for job, size in todo:
            reserved = self._reserved.get(job.job, [])
            stays = self.moves == "elastic" and job.job not in packed
            own = job.running_on if stays else {}
            new = [slot for slot in reserved if slot not in own]
            if len(reserved) == size == len(own) + len(new) and rooms.claim(job, new):
                kept[job.job] = reserved
        return kept


def with_user_batches(
    partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
) -> dict[JobId, dict[SlotId, int]]:
    """Local batches where every job keeps its user's batch; those of now where slots stay.

    Args:
        partition: what of the view can be given out.

    Returns:
        Samples of each slot in a step, by job.
    """
    jobs = partition.view.jobs
    return {
        name: dict(jobs[name].running_on)
        if jobs[name].running_on.keys() == set(slots)
        else split(jobs[name].batch_size, slots)
        for name, slots in placed.items()
    }


def _tightest(slots: Sequence[SlotId], size: int) -> list[SlotId]:
    """`size` of the slots, without those of the nodes where there are fewest; in their order."""
    many = Counter(map(node_of, slots))
    rank = {node: place for place, (node, _) in enumerate(many.most_common())}
    stay = set(sorted(slots, key=lambda slot: rank[node_of(slot)])[:size])
    return [slot for slot in slots if slot in stay]
