"""What controller and search process say to each other, over two pipes.

What changed from one view to the next: the search process hears of nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, PolicyEvent, SearchStats, SlotView
from schemas.ids import JobId, Seconds, SlotId

HEAD: Final = struct.Struct("!I")
MAX_FRAME: Final = 1 << 30


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Which policy it is, how it is set, and what was learnt before."""

    policy: str
    options: dict[str, Any]
    seed: int
    history: list[tuple[Seconds, PolicyEvent]]


class WholeView(msgspec.Struct, frozen=True, kw_only=True, tag="whole_view"):
    """The whole view."""

    view: ClusterView


class ViewDelta(msgspec.Struct, frozen=True, kw_only=True, tag="view_delta"):
    """What is different from the view before."""

    version: int
    slots: dict[SlotId, SlotView]
    jobs: dict[JobId, JobView]
    removed: list[JobId]


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag="observed"):
    """Something happened."""

    event: PolicyEvent
    at: Seconds


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """What should run now?"""

    number: int
    now: Seconds


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process knows all that was learnt before."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A plan; number 0 was not asked for: thinking on found something better."""

    number: int
    plan: Plan
    stats: SearchStats


class Batches(msgspec.Struct, frozen=True, kw_only=True, tag="batches"):
    """Other batches on the slots that jobs have; nobody asked. Jobs that it leaves out go on."""

    plan: Plan


class Converged(msgspec.Struct, frozen=True, kw_only=True, tag="converged"):
    """The search rests."""

    stats: SearchStats


ToSearch = Begin | WholeView | ViewDelta | Observed | Ask
FromSearch = Ready | Answer | Batches | Converged
TO_SEARCH: Final[msgspec.msgpack.Decoder[ToSearch]] = msgspec.msgpack.Decoder(ToSearch)
FROM_SEARCH: Final[msgspec.msgpack.Decoder[FromSearch]] = msgspec.msgpack.Decoder(FromSearch)


def frame(message: ToSearch | FromSearch) -> bytes:
    """One message with its length before it.

    Args:
        message: to or from the search process.

    Returns:
        The length of the body in bytes (4 bytes, big-endian), and the body as MessagePack.
    """
    body = msgspec.msgpack.encode(message)
    return HEAD.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into message bodies."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every body that is complete with `data`.

        Args:
            data: the next bytes of the stream, cut anywhere.

        Raises:
            ValueError: if a length makes no sense.
        """
        self._rest += data
        while len(self._rest) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._rest)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._rest) < HEAD.size + size:
                return
            body = bytes(self._rest[HEAD.size : HEAD.size + size])
            del self._rest[: HEAD.size + size]
            yield body


def view_delta(before: ClusterView, after: ClusterView) -> ViewDelta | None:
    """What changed from one view to the next.

    Returns:
        None where only the whole view will do: other slots, or a job that came back in the middle.
    """
    if len(before.slots) != len(after.slots):
        return None
    slots = {}
    for old, new in zip(before.slots, after.slots, strict=True):
        if old.slot != new.slot:
            return None
        if old != new:
            slots[new.slot] = new
    jobs = {name: job for name, job in after.jobs.items() if before.jobs.get(name) != job}
    removed = [name for name in before.jobs if name not in after.jobs]
    order = [name for name in before.jobs if name in after.jobs]
    order += [name for name in after.jobs if name not in before.jobs]
    if order != list(after.jobs):  # one came back in the middle
        return None
    return ViewDelta(version=after.version, slots=slots, jobs=jobs, removed=removed)


def apply_delta(view: ClusterView, delta: ViewDelta) -> ClusterView:
    """The view after `delta`; jobs keep the order in which they arrived.

    Args:
        view: the one that `delta` was made from.

    Returns:
        A view that shares with `view` whatever did not change.
    """
    slots = view.slots
    if delta.slots:
        slots = tuple(delta.slots.get(slot.slot, slot) for slot in slots)
    jobs: Mapping[JobId, JobView] = view.jobs
    if delta.jobs or delta.removed:
        removed = set(delta.removed)
        jobs = {n: delta.jobs.get(n, job) for n, job in view.jobs.items() if n not in removed}
        jobs |= {n: job for n, job in delta.jobs.items() if n not in jobs}
    return ClusterView(version=delta.version, slots=slots, jobs=jobs)
