"""What a journal holds and how it is written down."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.core.inputs import Input
from schemas.errors import OnesError
from schemas.ids import Seconds
from schemas.messages.feed import FeedEvent

SCHEMA_VERSION: Final = 2  # inputs of other versions mean something else: they are refused

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inputs (id INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS feed (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One input with its time, and the feed events that handling it produced."""

    at: Seconds
    input: Input
    feed: tuple[FeedEvent, ...] = ()


class JournalError(OnesError):
    """The journal cannot be used as it stands."""

    code = "journal"


_inputs: Final = msgspec.msgpack.Decoder(Input)
_feed: Final = msgspec.msgpack.Decoder(FeedEvent)


def input_from(body: bytes) -> Input:
    """The input that was written as `body`.

    Args:
        body: MessagePack, from the table `inputs`.

    Raises:
        ValueError: if it is none of this release.
    """
    decoded: Input = _inputs.decode(body)
    return decoded


def feed_from(body: bytes) -> FeedEvent:
    """The feed event that was written as `body`.

    Args:
        body: MessagePack, from the table `feed`.

    Raises:
        ValueError: if it is none of this release.
    """
    return _feed.decode(body)
