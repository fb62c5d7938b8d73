"""The bounds that docs/wire.md tells a writer of a client are those in force."""

from __future__ import annotations

import re
from typing import Final

from controlplane.client import archive
from controlplane.service import app, event_feed, job_files, log_relay, uploads
from controlplane.service.api import changes, fair_queue, reads, sweep_replies, views
from nodeagent import job_folders as files_on_nodes
from schemas import codec
from schemas.host import archives
from schemas.host.archives import DEFAULT_BOUNDS
from schemas.transport import connection_limits, flood_guard, sockets, state_transfer
from tests.support.wire_page import PAGE

TEXT: Final = PAGE.read_text(encoding="utf-8")
ROW: Final = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)


def mib(size: int) -> str:
    assert size % (1 << 20) == 0
    return f"{size >> 20} MiB"


def kib(size: int) -> str:
    assert size % (1 << 10) == 0
    return f"{size >> 10} KiB"


def test_each_row_of_the_table_equals_its_constant() -> None:
    section = TEXT.split("\n## Bounds\n")[1].split("\nThose of a job file")[0]
    events, units = reads.MAX_EVENTS, sweep_replies.MAX_PAGE
    shares, backoff = fair_queue, flood_guard
    assert uploads.PIECE_BYTES == files_on_nodes.PIECE

    assert ROW.findall(section)[1:] == [
        (
            "a message",
            (
                f"{mib(codec.MAX_BYTES)}; to 7702 {mib(app.MAX_REQUEST)} and "
                f"{kib(sockets.ENVELOPE)} for what is around it, to 7705 {kib(app.MAX_QUESTION)}, to 7703 "
                f"{event_feed.MAX_TOPIC + sockets.TOPIC_ENVELOPE} bytes. Who sends more "
                "is disconnected, and so is one of which "
                f"{mib(flood_guard.MAX_UNREAD_BYTES)} wait to be taken"
            ),
        ),
        (
            "connections of one key to one port",
            (
                f"{connection_limits.MAX_CONNECTIONS_PER_KEY}. Who has so many gets no handshake until one of them is "
                "closed"
            ),
        ),
        (
            "times that connections of one key to one port are cut off like this",
            (
                f"{backoff.FREE_CUTS}, until {backoff.FORGET_AFTER_S:g} s passed without one. After each "
                f"further one it gets no handshake there: {backoff.FIRST_DELAY_S:g} s, then twice as long "
                f"each time, {backoff.MAX_DELAY_S:g} s at most. Who is refused hears nothing: libzmq "
                "tries again when its own time for a handshake is over, 30 s by default"
            ),
        ),
        ("a page of a list", f"{mib(views.PAGE_BYTES)}, or a single larger row"),
        ("events of a page", f"{events}: `limit` is brought into 1 to {events}"),
        ("trials or units of a page", f"{units}: `limit` is brought into 1 to {units}"),
        (
            "output of a page",
            (
                f"{mib(log_relay.MAX_PAGE)}: `max_bytes` is brought into 1 to "
                f"{mib(log_relay.MAX_PAGE)}; a single piece may be larger"
            ),
        ),
        ("a piece of a file or an archive that you get", mib(files_on_nodes.PIECE)),
        (
            "requests of one user under way",
            (
                f"{shares.UNDER_WAY} on each of 7702 and 7705; {shares.QUEUED} more, or "
                f"{mib(shares.QUEUED_BYTES)}, wait behind them"
            ),
        ),
        ("requests of one user that wait for something to happen", f"{shares.POLLS} on each"),
        ("questions about files under way, of one user", f"{job_files.MAX_UNDER_WAY}"),
        ("`name` of `client.list_jobs.1`", f"{reads.MAX_PATTERN} characters"),
        ("each text of a refusal", f"{fair_queue.MAX_SAID} characters"),
        ("a topic of the feed", f"{event_feed.MAX_TOPIC} bytes"),
        (
            (
                "subscriptions of one key, over all of its connections to 7703 that are open, with what "
                "was unsubscribed"
            ),
            f"{kib(event_feed.MAX_SAID)}; whose goes beyond is disconnected",
        ),
    ]


def test_bounds_in_sentences_equal_their_constants() -> None:
    size, depth = DEFAULT_BOUNDS.size >> 30, DEFAULT_BOUNDS.depth
    said = [
        f"`wait_s` (seconds, at most {fair_queue.MAX_WAIT_S:g};",
        f"with the same `key` (at most {changes.MAX_KEY} characters)",
        (
            f"({size} GiB, {DEFAULT_BOUNDS.files:,} and {depth} by default; the archive itself "
            f"{mib(archive.MAX_BYTES)}); headers of more than "
            f"{kib(archives.MAX_HEADERS)} before one file"
        ),
        f"raw bytes in further frames, at most {mib(state_transfer.PIECE)}",
    ]

    assert [sentence for sentence in said if sentence not in " ".join(TEXT.split())] == []
