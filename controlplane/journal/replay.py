"""Recovery of the core's state from the newest intact snapshot and a replay of later inputs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from controlplane.core.commands import Announce, Command
from controlplane.core.history import Record
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal.database import JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.releases import code_of, own_release, snapshot_by
from controlplane.journal.snapshots import FORMAT, Snapshot, reactor_from
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent

LOST: Final = (
    "restore a backup (`ones admin restore`), or start the release that wrote the snapshots: "
    "it reads them"
)


class Replayed(NamedTuple):
    """Result of a recovery."""

    reactor: Reactor
    last: int  # number of the last handled input; 0: none
    at: Seconds  # time of the last input
    snapshot: int = 0  # number of the last input in the used snapshot; 0: none
    release: str = ""  # release that wrote the snapshot
    took_s: float = 0.0  # duration of the replay after the snapshot


def replay(
    inputs: Iterable[tuple[Seconds, Input]],
    on_records: Callable[[Sequence[Record]], None] = lambda _: None,
) -> Reactor:
    """Return the reactor after all `inputs` of a journal. The commands are discarded.

    Args:
        on_records: called after each input with the records that the input produced.

    Raises:
        CoreError: if this release cannot handle the inputs.
    """
    reactor = Reactor()
    for at, event in inputs:
        reactor.handle(event, at)
        on_records(reactor.records)
    return reactor


def recover(
    reader: Reader,
    warn: Callable[[str], None] = lambda _: None,
    most: int | None = None,
) -> Replayed:
    """Return the reactor after the last input of a journal. Read only inputs after a snapshot.

    Inputs that another release handled are replayed by that release, which writes a snapshot. If
    its code is not stored, this release replays them and compares the events with the stored ones.

    Args:
        warn: called with a message for each snapshot that cannot be used.
        most: number of the last input to handle. None handles all inputs.

    Raises:
        JournalError: if the journal is damaged so far that the state cannot be recovered, or this
            release handles inputs of another release differently.
        CoreError: if this release cannot handle the inputs.
    """
    _, end = reader.first_and_last()
    newest = [one for one in reader.snapshots() if most is None or one.input <= most]
    found = _first_good(reader, newest, warn) or _empty(reader)
    began, own = time.perf_counter(), {own_release(), ""}  # "": no controller has started
    for release, last in _runs(reader, found, end if most is None else most):
        code = None if release in own else code_of(reader.path, release)
        if code is not None:
            snapshot_by(code, release, reader.path, last)
            found = _snapshot_at(reader, last)
            continue
        check = None if release in own else EventCheck(reader, found.reactor.state.feed_seq)
        for number, when, event in reader.numbered_inputs(found.last, last):
            commands = found.reactor.handle(event, when)
            if check is not None:
                for difference in check.differences(number, commands):
                    raise _handled_otherwise(reader, release, difference)
            found = found._replace(last=number, at=when)
    if most is None and (events := reader.last_event()) not in {0, found.reactor.state.feed_seq}:
        ends = f"the inputs lead to event {found.reactor.state.feed_seq}, the last is {events}"
        raise _handled_otherwise(reader, "", ends)
    return found._replace(took_s=time.perf_counter() - began)


def _runs(reader: Reader, found: Replayed, end: int) -> list[tuple[str, int]]:
    """Return the releases that handled the inputs after `found`, each with its last input."""
    runs, release = [], found.release
    for number, starting in reader.controller_starts(found.last):
        if number > end:
            break
        if number > found.last + 1 and starting != release:
            runs.append((release, number - 1))
        release = starting
    return [*runs, (release, end)] if end > found.last else runs


def _handled_otherwise(reader: Reader, release: str, difference: str) -> JournalError:
    other = f"release {release or 'that wrote it'}"
    return JournalError(
        f"{reader.path}: this release does not reproduce the inputs of {other}: {difference}",
        f"start {other} once and stop it, which writes a snapshot; or restore a backup",
    )


def earliest(reader: Reader, *, own_inputs: bool = False) -> Replayed:
    """Return the earliest state that can be restored.

    With `own_inputs`, only inputs of this release follow the state, unless there is no such state.

    Raises:
        JournalError: if the journal is damaged so far that the state cannot be recovered.
    """
    first, end = reader.first_and_last()
    states = (_first_good(reader, (one,), lambda _: None) for one in reversed(reader.snapshots()))
    found = [state for state in states if state is not None]
    if first <= 1 or not found:
        found.insert(0, _empty(reader))
    own = {own_release(), ""}
    fit = (one for one in found if not own_inputs or own.issuperset(dict(_runs(reader, one, end))))
    return next(fit, found[0])


def _first_good(
    reader: Reader, snapshots: Iterable[Snapshot], warn: Callable[[str], None]
) -> Replayed | None:
    for one in snapshots:
        try:
            return Replayed(_restored(reader, one), one.input, one.at, one.input, one.release)
        except JournalError as error:
            warn(error.message)
    return None


def _snapshot_at(reader: Reader, last: int) -> Replayed:
    written = [one for one in reader.snapshots() if one.input == last]
    found = _first_good(reader, written, lambda _: None)
    if found is None:
        raise JournalError(f"{reader.path}: there is no good snapshot of input {last}", LOST)
    return found


def _empty(reader: Reader) -> Replayed:
    first, _ = reader.first_and_last()
    if first > 1:
        raise JournalError(
            f"inputs 1 to {first - 1} are not kept, and no good snapshot covers them",
            LOST,
        )
    return Replayed(Reactor(), 0, Seconds(0.0))


def _restored(reader: Reader, snapshot: Snapshot) -> Reactor:
    if snapshot.format != FORMAT:
        raise JournalError(
            f"snapshot {snapshot.input} of release {snapshot.release} has format "
            f"{snapshot.format}, this release reads {FORMAT}",
            LOST,
        )
    body = reader.body_of(snapshot)
    try:
        return reactor_from(zlib.decompress(body))
    except (ValueError, zlib.error) as error:  # msgspec's errors are ValueErrors
        raise JournalError(
            f"snapshot {snapshot.input} of release {snapshot.release}: {error}", LOST
        ) from None


MAX_DIFFERENCES: Final = 10  # differences between events that are reported


class EventCheck:
    """Comparison of stored events with the events of a replay that begins after event `last`."""

    def __init__(self, reader: Reader, last: int) -> None:
        self._reader = reader
        self._first = reader.first_event()
        self._page: dict[int, FeedEvent] = {}
        self._named = 0
        self.last = last

    def differences(self, number: int, commands: Iterable[Command]) -> Iterator[str]:
        """Yield how the stored events differ from the announcements that input `number` caused."""
        for command in commands:
            if isinstance(command, Announce):
                yield from self._difference(number, command.event)

    def _difference(self, number: int, announced: FeedEvent) -> Iterator[str]:
        if announced.seq < self._first:
            self.last = announced.seq
            return
        if announced.seq not in self._page:
            page = self._reader.feed(announced.seq, 5000)
            self._page = {event.seq: event for event in page}
        written = self._page.get(announced.seq)
        if written is not None:
            self.last = announced.seq
        if written != announced and self._named < MAX_DIFFERENCES:
            self._named += 1
            what = (
                "is missing"
                if written is None
                else f"is stored as {written.event} of {written.job}"
            )
            event = f"{announced.event} of {announced.job}"
            yield f"event {announced.seq} of input {number}, {event}, {what}"
