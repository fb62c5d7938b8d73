"""What is left of a sweep: models, partitions, and the slots that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Partitions = int  # a set of them: bit p stands for partition p


class Visit(NamedTuple):
    """A unit: a model trains once over a partition, on a slot that holds it."""

    model: int
    partition: int
    slot: int


@dataclass(frozen=True, slots=True)
class Model:
    """One configuration with the state that hops."""

    unit_s: float  # of a partition of size 1 on a slot of slowness 1, seconds, above 0
    todo: Partitions  # of its present epoch, with one that it visits now; empty: it waits
    epochs_left: int = 0  # that are granted after the present one
    at: int | None = None  # slot where its state is; None: nowhere yet


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker, with the partitions that its node holds."""

    primary: Partitions  # its own; every partition has one slot that it is primary at
    replicas: Partitions = 0  # that it may also train from
    slowness: float = 1.0  # factor on the seconds of a unit, above 0


class Unit(NamedTuple):
    """A visit that goes on now."""

    visit: Visit
    ends_in_s: float  # as expected


@dataclass(frozen=True, slots=True)
class HopProblem:
    """Models that hop between partitions (Cerebro section 3: S, D and p; section 5.5: replicas).

    A model visits every partition once in an epoch, in any order; no two units of a model
    and no two units of a slot overlap; a unit is not interrupted.
    """

    models: Sequence[Model]
    slots: Sequence[Slot]
    sizes: Sequence[float]  # of the partitions, 1 on average
    running: Sequence[Unit] = ()

    @property
    def everything(self) -> Partitions:
        """The set of all partitions."""
        return (1 << len(self.sizes)) - 1

    def seconds(self, visit: Visit) -> float:
        """What the unit takes as far as known."""
        cost = self.models[visit.model].unit_s * self.sizes[visit.partition]
        return cost * self.slots[visit.slot].slowness


def members(some: Partitions) -> Iterator[int]:
    """The partitions of a set, ascending.

    Args:
        some: bit p stands for partition p.
    """
    while some:
        lowest = some & -some
        yield lowest.bit_length() - 1
        some ^= lowest


def partitions(some: Sequence[int]) -> Partitions:
    """The set of these partitions."""
    found = 0
    for partition in some:
        found |= 1 << partition
    return found
