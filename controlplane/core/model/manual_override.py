"""What an operator ordered for a job: the policy leaves it alone meanwhile."""

from __future__ import annotations

import msgspec


class ManualOverride(msgspec.Struct, frozen=True, kw_only=True):
    """The size that somebody asked for; None where it stays as it is."""

    user: str
    slots: int | None = None  # None: whatever it had
    batch: int | None = None  # global, samples per step; None: as it is
    on: tuple[str, ...] = ()  # exactly these slots
    paused: bool = False
