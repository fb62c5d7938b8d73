"""Whether a journal means what it says: its inputs are handled again, and all of it is compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from controlplane.core.commands import Announce
from controlplane.journal.reader import Reader
from controlplane.journal.record import JournalError
from controlplane.journal.replay import earliest
from controlplane.journal.state_image import FORMAT, gives_back, image_of
from schemas.messages.feed import FeedEvent

MOST: Final = 10  # differences that are named


def differences(reader: Reader) -> Iterator[str]:
    """Where a replay from the earliest state that is kept comes to something else than is written.

    Raises:
        JournalError: if the journal is damaged.
        CoreError: if its inputs are none that this release could have taken.
    """
    reactor, first = earliest(reader)
    snapshots = {one.input: one for one in reader.snapshots() if one.input > first}
    events = _Events(reader, reactor.state.feed_seq)
    for number, at, event in reader.numbered_inputs(first):
        commands = reactor.handle(event, at)
        for told in (one.event for one in commands if isinstance(one, Announce)):
            yield from events.differ(number, told)
        snapshot = snapshots.get(number)
        if snapshot is not None and snapshot.format == FORMAT:
            image = zlib.decompress(reader.body_of(snapshot))
            if not (image == image_of(reactor) or gives_back(image, reactor)):
                yield f"snapshot {number} is another state than the inputs before it lead to"
    if events.last != reactor.state.feed_seq:
        yield f"the feed ends with event {events.last}, the inputs with {reactor.state.feed_seq}"


class _Events:
    """The events that are written, beside those that a replay announces."""

    def __init__(self, reader: Reader, last: int) -> None:
        self._reader = reader
        self._first = reader.first_event()
        self._page: dict[int, FeedEvent] = {}
        self._named = 0
        self.last = last

    def differ(self, number: int, told: FeedEvent) -> Iterator[str]:
        """What is wrong with the event that input `number` leads to."""
        if told.seq < self._first:
            self.last = told.seq
            return
        if told.seq not in self._page:
            page = self._reader.feed(told.seq, 5000)
            self._page = {event.seq: event for event in page}
        written = self._page.get(told.seq)
        if written is not None:
            self.last = told.seq
        if written != told and self._named < MOST:
            self._named += 1
            what = "is not there" if written is None else f"says {written.event} of {written.job}"
            yield f"event {told.seq} of input {number}, {told.event} of {told.job}, {what}"


def problems(reader: Reader) -> Iterator[str]:
    """Everything that is wrong with a journal; whether it can be replayed is part of that."""
    found = False
    try:
        for problem in reader.problems_of_state():
            found = True
            yield problem
        yield from reader.problems_of_past()
        if not found:
            yield from differences(reader)
    except JournalError as error:
        yield error.message
    except Exception as error:  # noqa: BLE001 - whatever a handler makes of it
        yield f"its inputs lead nowhere in this release: {error!r}"
