"""Lease that one of several controllers holds, and the rules for claiming it.

The lease is one record outside of the controllers. Every change replaces the version that was read
(compare and swap), and lets the lease last for some seconds by the clock of its store. So the
clocks of the controllers do not matter.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from schemas.errors import UnavailableError
from schemas.ids import Term


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the lease."""

    holder: str = ""  # host of the active controller; "": none
    term: Term = Term(0)  # of the holder; every claim raises it
    complete: tuple[str, ...] = ()  # hosts that have every acknowledged input; (): a new cluster
    successor: str = ""  # host that should claim the lease once the holder has stopped


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Record as read from its store."""

    record: Record = Record()
    version: int = 0  # of the record in the store; 0: there is none
    expired: bool = True  # True if another controller may claim the lease


class LeaseError(UnavailableError):
    """Raised when the store of the lease does not reply, or refuses a request."""


class LeaseStore(Protocol):
    """Store of one record. The methods raise `LeaseError` if the store does not reply."""

    async def read(self) -> Held:
        """Return the record."""

    async def replace(self, version: int, record: Record, lease_s: float) -> int | None:
        """Replace a version of the record, and let the lease expire `lease_s` seconds later.

        Return the new version, or None if another record is stored. After a `LeaseError`, the
        record may be stored or not.
        """

    async def close(self) -> None:
        """Close the connection."""


def claim(held: Held, host: str, *, has_inputs: bool, is_first: bool) -> Record | str:
    """Return the record with which `host` claims the lease, or the reason why it must not.

    The caller has locked its journal, so no other process of `host` holds the lease.

    Args:
        has_inputs: True if the journal of `host` has inputs.
        is_first: True if `host` may begin a new cluster.
    """
    record = held.record
    if not held.expired and record.holder not in {"", host}:
        return f"{record.holder} holds the lease"
    if not held.expired and record.successor not in {"", host}:
        return f"{record.successor} takes over"
    if record.complete and host not in record.complete:
        return f"only {' and '.join(record.complete)} has all acknowledged inputs"
    if not has_inputs and set(record.complete) - {host}:
        return "the journal is empty, although the lease says that it has all inputs"
    if not record.complete and not has_inputs and not is_first:
        return "the first of standby.hosts begins a new cluster"
    return Record(holder=host, term=Term(record.term + 1), complete=(host,))
