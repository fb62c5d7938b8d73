"""Recovery of the core's state from the newest intact snapshot and a replay of later inputs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from controlplane.core.history import Record
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal.database import JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.snapshots import FORMAT, Snapshot, reactor_from
from schemas.ids import Seconds

LOST: Final = (
    "restore a backup (`ones admin restore`), or start the release that wrote the snapshots: "
    "it reads them"
)


class Replayed(NamedTuple):
    """Result of a recovery."""

    reactor: Reactor
    last: int  # number of the last handled input; 0: none
    at: Seconds  # time of the last input
    snapshot: int  # number of the last input in the used snapshot; 0: none
    took_s: float  # duration of the replay after the snapshot


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

    Args:
        warn: called with a message for each snapshot that cannot be used.
        most: number of the last input to handle. None handles all inputs.

    Raises:
        JournalError: if the journal is damaged so far that the state cannot be recovered.
        CoreError: if this release cannot handle the inputs.
    """
    newest = [one for one in reader.snapshots() if most is None or one.input <= most]
    reactor, snapshot, at = _first_good(reader, newest, warn) or _empty(reader)
    last, began = snapshot, time.perf_counter()
    for number, when, event in reader.numbered_inputs(snapshot, most):
        reactor.handle(event, when)
        last, at = number, when
    return Replayed(reactor, last, at, snapshot, time.perf_counter() - began)


def earliest(reader: Reader) -> tuple[Reactor, int]:
    """Return the earliest state that can be restored, and the number of the last input in it.

    Raises:
        JournalError: if the journal is damaged so far that the state cannot be recovered.
    """
    if reader.first_and_last()[0] > 1:
        found = _first_good(reader, reversed(reader.snapshots()), lambda _: None)
        if found is not None:
            return found[0], found[1]
    return _empty(reader)[0], 0


def _first_good(
    reader: Reader, snapshots: Iterable[Snapshot], warn: Callable[[str], None]
) -> tuple[Reactor, int, Seconds] | None:
    for snapshot in snapshots:
        try:
            return _restored(reader, snapshot), snapshot.input, snapshot.at
        except JournalError as error:
            warn(error.message)
    return None


def _empty(reader: Reader) -> tuple[Reactor, int, Seconds]:
    first, _ = reader.first_and_last()
    if first > 1:
        raise JournalError(
            f"inputs 1 to {first - 1} are not kept, and no good snapshot covers them",
            LOST,
        )
    return Reactor(), 0, Seconds(0.0)


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
