"""Jobs between the two halves of a migration: on the old and the new slots at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.ids import SlotId


@dataclass(frozen=True, slots=True)
class HalfMove:
    """A job that gets new slots and gives up others grows to all of them first.

    That is no growth: nobody asked for the size in between, and what the job makes of it says
    nothing about how fast it will be.
    """

    through: frozenset[SlotId]  # all of them
    to: frozenset[SlotId]  # those that it shall have


def half_move(have: Iterable[SlotId], to: Iterable[SlotId]) -> HalfMove | None:
    """What lies between two places; None if the job only grows, shrinks, starts or stops."""
    before, after = frozenset(have), frozenset(to)
    if before <= after or after <= before:
        return None
    return HalfMove(before | after, after)
