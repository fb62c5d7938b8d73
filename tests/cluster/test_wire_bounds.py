"""The bounds that docs/wire/ tells a writer of a client are those in force."""

from __future__ import annotations

import re
from typing import Final

from controlplane.client import archive
from controlplane.service import app, event_feed, uploads
from controlplane.service.api import changes, fair_queue, reads, sweep_replies, views
from controlplane.service.relay import job_files, log_relay, process
from nodeagent import job_folders as files_on_nodes
from schemas import codec
from schemas.host import archives
from schemas.host.archives import DEFAULT_BOUNDS
from schemas.transport import connection_limits, flood_guard, sockets, state_transfer
from tests.support.wire_page import FOLDER

PAGES: Final = {path.stem: path.read_text("utf-8") for path in FOLDER.parent.glob("*.md")}
ROW: Final = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)


def mib(size: int) -> str:
    assert size % (1 << 20) == 0
    return f"{size >> 20} MiB"


def kib(size: int) -> str:
    assert size % (1 << 10) == 0
    return f"{size >> 10} KiB"


def test_each_row_of_the_table_states_its_constants() -> None:
    section = PAGES["bounds"]
    shares, cuts, piece = fair_queue, connection_limits, files_on_nodes.PIECE
    assert piece == uploads.PIECE_BYTES
    stated: dict[str, list[str]] = {
        "a message": [
            mib(codec.MAX_BYTES),
            f"7702 {mib(app.MAX_REQUEST)} and {kib(sockets.ENVELOPE)}",
            f"7705 {kib(process.MAX_QUESTION)}",
            f"7703 {event_feed.MAX_TOPIC + sockets.TOPIC_ENVELOPE} bytes",
            f"{mib(flood_guard.MAX_UNREAD_BYTES)} of unread",
        ],
        "connections of one key to one port": [f"{connection_limits.MAX_CONNECTIONS_PER_KEY};"],
        "forced disconnections of one key from one port": [
            f"{cuts.FREE_CUTS},",
            f"{cuts.FORGET_AFTER_S:g} s without",
            f"for {cuts.FIRST_DELAY_S:g} s,",
            f"up to {cuts.MAX_DELAY_S:g} s",
        ],
        "a page of a list": [mib(views.PAGE_BYTES)],
        "events of a page": [f"{reads.MAX_EVENTS}: ", f"1 to {reads.MAX_EVENTS}"],
        "trials or units of a page": [f"clamped to 1 to {sweep_replies.MAX_PAGE}"],
        "output of a page": [f"{mib(log_relay.MAX_PAGE)}: ", f"1 to {mib(log_relay.MAX_PAGE)}"],
        "a piece of a file or an archive in a reply": [mib(piece)],
        "requests of one user in progress": [
            f"{shares.UNDER_WAY} on each",
            f"{shares.QUEUED} more",
            mib(shares.QUEUED_BYTES),
        ],
        "requests of one user with a pending `wait_s`": [f"{shares.POLLS} on each"],
        "requests of one user about files in progress": [f"{job_files.MAX_UNDER_WAY}"],
        "`name` of `client.list_jobs.1`": [f"{reads.MAX_PATTERN} characters"],
        "each text of a refusal": [f"{fair_queue.MAX_TEXT_CHARACTERS} characters"],
        "a topic of the feed": [f"{event_feed.MAX_TOPIC} bytes"],
        "subscriptions of one key, over all its open connections to 7703, including cancelled ones": [
            kib(event_feed.MAX_SUBSCRIPTION_BYTES)
        ],
    }

    rows = dict(ROW.findall(section)[1:])
    assert list(rows) == list(stated)
    missing = [
        (row, text) for row, texts in stated.items() for text in texts if text not in rows[row]
    ]
    assert missing == []


def test_bounds_in_sentences_equal_their_constants() -> None:
    size, depth = DEFAULT_BOUNDS.size >> 30, DEFAULT_BOUNDS.depth
    said = [
        f"`wait_s` (seconds, at most {fair_queue.MAX_WAIT_S:g};",
        f"with the same `key` (at most {changes.MAX_KEY} characters)",
        (
            f"(by default {size} GiB, {DEFAULT_BOUNDS.files:,} and {depth}; the archive itself "
            f"{mib(archive.MAX_BYTES)})"
        ),
        f"headers of more than {kib(archives.MAX_HEADERS)} before one file",
        f"raw bytes in further frames, at most {mib(state_transfer.PIECE)}",
    ]

    text = " ".join(" ".join(PAGES.values()).split())
    assert [sentence for sentence in said if sentence not in text] == []
