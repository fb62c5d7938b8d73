"""Training progress of a trial: finished visits, and the nodes that store the resulting states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.sweeps.hopping import Partitions
from controlplane.sweeps.orders import DropState, StateName
from schemas.ids import NodeId


@dataclass(frozen=True, slots=True)
class FinishedUnit:
    """Finished unit in the training of a trial."""

    trial: int  # trial that provided the values: this one or a parent
    partition: int
    digest: str = ""  # digest of the resulting state


@dataclass(slots=True)
class ModelState:
    """Training progress of one trial.

    `finished_units` lists the finished visits in order, beginning with visits of parents. Version v
    is the state after the first v visits. If no node has the last state any more, the visits after
    the newest stored state are repeated in the same order, which produces the same state.
    """

    trial: int
    partitions: int  # number of partitions of the data
    finished_units: list[FinishedUnit] = field(default_factory=list)
    # Initial states of the trial and its parents, first parent first.
    parents: tuple[StateName, ...] = ()
    at: int = 0  # version from which training continues, up to len(finished_units)
    metrics: list[tuple[dict[str, float], int]] = field(default_factory=list)  # this epoch's

    @property
    def everything(self) -> Partitions:
        """Set of all partitions."""
        return (1 << self.partitions) - 1

    @property
    def again(self) -> bool:
        """True if finished visits have to be repeated first."""
        return self.at < len(self.finished_units)

    @property
    def epoch(self) -> int:
        """Epoch of the next visit, 1-based."""
        return 1 + self.at // self.partitions

    @property
    def whole_epochs(self) -> int:
        """Number of finished epochs, including those of the trial's parent."""
        return len(self.finished_units) // self.partitions

    def names(self, version: int) -> tuple[StateName, ...]:
        """Return the names under which nodes may store a version's state; version 0 has none."""
        if not version:
            return ()
        theirs = [StateName(one.trial, version) for one in self.parents if version <= one.version]
        return (StateName(self.trial, version), *reversed(theirs))

    def todo(self, granted: int) -> Partitions:
        """Return the partitions that may be visited next; none if `granted` epochs are trained."""
        if self.again:
            return 1 << self.finished_units[self.at].partition
        done = len(self.finished_units) % self.partitions
        if not done:
            return self.everything if self.whole_epochs < granted else 0
        left = self.everything
        for visit in self.finished_units[-done:]:
            left &= ~(1 << visit.partition)
        return left

    def digest(self, version: int) -> str:
        """Return the last reported digest of the state after `version` visits (at least one)."""
        return self.finished_units[version - 1].digest

    def finish_unit(self, partition: int, digest: str = "") -> bool:
        """Record a visit and return True if it is new; a repetition only replaces the digest."""
        first = not self.again
        trial = self.trial if first else self.finished_units[self.at].trial
        self.finished_units[self.at : self.at + 1] = [FinishedUnit(trial, partition, digest)]
        self.at += 1
        return first


@dataclass(slots=True)
class StoredStates:
    """A record of the nodes that store each state."""

    _nodes: dict[StateName, list[NodeId]] = field(default_factory=dict)
    _versions: dict[int, set[int]] = field(default_factory=dict)  # by trial

    def versions(self, trial: int) -> set[int]:
        """Return the stored versions of a trial."""
        return self._versions.get(trial, set())

    def on(self, node: NodeId) -> list[StateName]:
        """Return the states on a node."""
        return [name for name, nodes in self._nodes.items() if node in nodes]

    def nodes(self, names: Iterable[StateName]) -> list[tuple[NodeId, StateName]]:
        """Return the nodes that have a state under any of `names`, each with that name."""
        return [(node, name) for name in names for node in self._nodes.get(name, ())]

    def add(self, name: StateName, node: NodeId) -> None:
        """Record that a node has a state."""
        nodes = self._nodes.setdefault(name, [])
        self._versions.setdefault(name.trial, set()).add(name.version)
        if node not in nodes:
            nodes.append(node)

    def lose(self, node: NodeId, name: StateName | None = None) -> None:
        """Record that a node lost the state `name`, or all of its states if `name` is None."""
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
        """Forget all states that are not in `needed`, and return orders to delete them."""
        found = [
            DropState(name, node)
            for name, nodes in self._nodes.items()
            if name not in needed
            for node in nodes
        ]
        for one in found:
            self._forget(one.state)
        return found
