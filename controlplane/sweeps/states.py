"""Where a trial's training is: its visits, and the states that they led to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.sweeps.hopping import Partitions
from controlplane.sweeps.orders import DropState, StateName
from schemas.ids import NodeId


@dataclass(frozen=True, slots=True)
class VisitDone:
    """A unit that counts."""

    trial: int  # whose values trained it: its own, or a parent's
    partition: int
    digest: str = ""  # of the state that it left


@dataclass(slots=True)
class ModelState:
    """The training of one trial.

    `visits` are what was finished, in order, a parent's before its own; version v is the state
    after the first v of them. What is finished stays finished: if no node has the last state any
    more, the visits since the newest one that a node has are done again, in their order, which
    gives the same state again.
    """

    trial: int
    partitions: int  # of the data
    visits: list[VisitDone] = field(default_factory=list)
    # States that it and its parents began with, the first parent's first; their visits come first.
    parents: tuple[StateName, ...] = ()
    at: int = 0  # visits of the state that training goes on from; fewer than finished: some again
    metrics: list[tuple[dict[str, float], int]] = field(default_factory=list)  # of this epoch

    @property
    def everything(self) -> Partitions:
        """All partitions."""
        return (1 << self.partitions) - 1

    @property
    def again(self) -> bool:
        """Whether finished visits have to be done again first."""
        return self.at < len(self.visits)

    @property
    def epoch(self) -> int:
        """That its next visit is of, 1-based."""
        return 1 + self.at // self.partitions

    @property
    def whole_epochs(self) -> int:
        """That are finished, its parent's too."""
        return len(self.visits) // self.partitions

    def names(self, version: int) -> tuple[StateName, ...]:
        """Names under which a node may have its state after so many visits; none: it is built.

        Args:
            version: from 0.
        """
        if not version:
            return ()
        theirs = [StateName(one.trial, version) for one in self.parents if version <= one.version]
        return (StateName(self.trial, version), *reversed(theirs))

    def todo(self, granted: int) -> Partitions:
        """Partitions that the next visit may be of; none: it waits for the searcher.

        Args:
            granted: epochs that it may train to.
        """
        if self.again:
            return 1 << self.visits[self.at].partition
        done = len(self.visits) % self.partitions
        if not done:
            return self.everything if self.whole_epochs < granted else 0
        left = self.everything
        for visit in self.visits[-done:]:
            left &= ~(1 << visit.partition)
        return left

    def digest(self, version: int) -> str:
        """Of its state after so many visits, as it was last reported.

        Args:
            version: from 1.
        """
        return self.visits[version - 1].digest

    def visited(self, partition: int, digest: str = "") -> bool:
        """A visit is done.

        Args:
            digest: of the state that it left; of a visit that was done again the last one counts.

        Returns:
            Whether it was done for the first time.
        """
        first = not self.again
        if first:
            self.visits.append(VisitDone(self.trial, partition, digest))
        else:
            self.visits[self.at] = VisitDone(self.visits[self.at].trial, partition, digest)
        self.at += 1
        return first


@dataclass(slots=True)
class StoredStates:
    """Which nodes have which states."""

    _nodes: dict[StateName, list[NodeId]] = field(default_factory=dict)
    _versions: dict[int, set[int]] = field(default_factory=dict)  # of each trial

    def versions(self, trial: int) -> set[int]:
        """Visits of the states of a trial that a node has."""
        return self._versions.get(trial, set())

    def on(self, node: NodeId) -> list[StateName]:
        """What a node has.

        Args:
            node: may have none.
        """
        return [name for name, nodes in self._nodes.items() if node in nodes]

    def all_nodes(self) -> list[NodeId]:
        """Those that have anything."""
        return list(dict.fromkeys(node for nodes in self._nodes.values() for node in nodes))

    def nodes(self, names: Iterable[StateName]) -> list[tuple[NodeId, StateName]]:
        """Who has the state, under which of its names.

        Args:
            names: that it may have.
        """
        return [(node, name) for name in names for node in self._nodes.get(name, ())]

    def add(self, name: StateName, node: NodeId) -> None:
        """The node has it."""
        nodes = self._nodes.setdefault(name, [])
        self._versions.setdefault(name.trial, set()).add(name.version)
        if node not in nodes:
            nodes.append(node)

    def lose(self, node: NodeId, name: StateName | None = None) -> None:
        """The node has it no more.

        Args:
            node: that is lost, or whose copy cannot be read.
            name: of the state; None: all of them.
        """
        for one in list(self._nodes) if name is None else [name]:
            left = [at for at in self._nodes.get(one, ()) if at != node]
            if left:
                self._nodes[one] = left
            else:
                self._forget(one)

    def _forget(self, name: StateName) -> None:
        self._nodes.pop(name, None)
        versions = self._versions.get(name.trial, set())
        versions.discard(name.version)
        if not versions:
            self._versions.pop(name.trial, None)

    def drop_all_but(self, needed: set[StateName]) -> list[DropState]:
        """Forget what nobody needs, and have it deleted."""
        found = [
            DropState(name, node)
            for name, nodes in self._nodes.items()
            if name not in needed
            for node in nodes
        ]
        for one in found:
            self._forget(one.state)
        return found
