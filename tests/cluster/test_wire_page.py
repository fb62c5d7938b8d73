"""`docs/wire.md`: what it says is what is spoken, and is enough to write a client from."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import sqlite3
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
import zmq

from controlplane.core.model.job_phases import NEXT
from controlplane.journal.database import feed_from
from schemas.codec import LOG_REPLY, READ_LOG, REPLY, REQUEST
from schemas.errors import BY_CODE
from schemas.wire.feed import FeedEvent
from tests.support.cluster import TOY, Cluster
from tests.support.recorded_history import GOLDEN
from tests.support.wire_page import PAGE, Row, name_of, rows_of, structs, tables_on_page

CORE: Final = Path(__file__).parents[2] / "controlplane" / "core"
EVENT: Final = re.compile(r"(job|node|worker|sweep|policy|controller|key)\.[a-z_]+")
OWN_SIDE: Final = {"unreachable", "timeout"}  # codes that a client of ours gives itself
QUOTED: Final = re.compile(r"`([^`]+)`")
LIMIT_S: Final = 60.0


def text() -> str:
    return PAGE.read_text("utf-8")


# --- fields


def test_the_page_has_exactly_the_messages_and_fields() -> None:
    spoken = {name_of(kind): rows_of(kind) for kind in structs()}

    assert tables_on_page() == spoken, "python -m tests.support.wire_page writes them again"


def test_messages_built_from_the_tables_decode() -> None:
    page = tables_on_page()
    for kind in structs():
        name = name_of(kind)
        least = built(page, name, least=True)
        most = built(page, name, least=False)
        for message in (least, most):
            packed = msgpack.packb(message)
            msgspec.msgpack.decode(packed, type=kind)
        assert set(most) - {"type"} == {row.name for row in page[name]}


def built(page: dict[str, list[Row]], name: str, *, least: bool, depth: int = 6) -> dict[str, Any]:
    """A message of that name, with all its fields or with those that it must have."""
    rows = [row for row in page[name] if row.default == "required" or not least]
    fields = {row.name: value(page, row.kind, least=least, depth=depth) for row in rows}
    tag = re.search(rf"^\*\*{name}\*\*:.* Its `type` is `(\w+)`\.$", text(), re.MULTILINE)
    return ({"type": name} if "." in name else {"type": tag[1]} if tag else {}) | fields


def value(page: dict[str, list[Row]], kind: str, *, least: bool, depth: int) -> Any:
    """What the column of types says."""
    if kind.startswith("list of "):
        inner = value(page, kind.removeprefix("list of "), least=least, depth=depth)
        return [inner] if depth else []
    if kind.startswith("map of "):
        return {"a": value(page, kind.removeprefix("map of "), least=least, depth=depth)}
    if kind.startswith("["):
        parts = re.split(r", (?![^\[]*\])", kind[1 : kind.rindex("]")])
        return [value(page, part, least=least, depth=depth) for part in parts]
    first = kind.partition(" or ")[0]
    plain = {"int": 1, "float": 1.5, "text": "a", "bytes": b"a", "bool": True, "nil": None}
    if (long := re.fullmatch(r"text of (\d+)", first)) is not None:
        return "a" * int(long[1])
    if (word := first.split(" ")[0]) in plain:
        return plain[word]
    if (literal := QUOTED.fullmatch(first)) is not None:
        return literal[1]
    return built(page, first, least=least or not depth, depth=depth - 1)


# --- requests, errors, events


def test_every_request_and_every_reply_is_in_the_table_of_requests() -> None:
    _, _, table = text().partition("| request | reply |")
    named = set(QUOTED.findall(table.partition("\n\n")[0]))
    spoken = {*REQUEST.tags, *READ_LOG.tags, *REPLY.tags, *LOG_REPLY.tags}

    assert spoken <= named
    assert {word for word in named if re.fullmatch(r"\w+\.\w+\.\d", word)} == spoken


def test_every_code_of_an_error_is_on_the_page() -> None:
    _, _, table = text().partition("| code | when |")
    named = set(QUOTED.findall("".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)[:12])))

    assert set(BY_CODE) - OWN_SIDE | {"unknown_job"} <= named


def events_on_page() -> dict[str, set[str]]:
    """Each event with the names in its detail."""
    _, _, table = text().partition("| event | about | detail | says |")
    found = {}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        _, names, _, detail, *_ = line.split("|")
        for name in QUOTED.findall(names):
            found[name] = set(QUOTED.findall(detail))
    return found


def test_the_page_has_exactly_the_events_of_the_code() -> None:
    nodes = (node for path in CORE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    words = (node.value for node in nodes if isinstance(node, ast.Constant))
    emitted = {word for word in words if isinstance(word, str) and EVENT.fullmatch(word)}

    assert set(events_on_page()) == emitted | {f"job.{phase.value}" for phase in NEXT.values()}


def recorded() -> Iterator[FeedEvent]:
    for path in sorted(GOLDEN.glob("*.sqlite")):
        database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
        for (body,) in database.execute("SELECT body FROM feed"):
            yield feed_from(body)
        database.close()


def test_details_of_recorded_events_are_on_the_page() -> None:
    known, unknown = events_on_page(), set()
    for event in recorded():
        free = event.event in METRICS  # which have the names that a script gave them
        unknown |= (
            set()
            if free
            else {(event.event, x) for x in event.detail}
            - {(event.event, name) for name in known[event.event]}
        )

    assert unknown == set()


METRICS: Final = frozenset({"job.epoch", "sweep.trial_scored", "job.succeeded", "job.rejected"})


# --- a client that knows nothing but the page


class PlainClient:
    """Has pyzmq, msgpack, and a cluster's folder."""

    def __init__(self, home: Path) -> None:
        self._context = zmq.Context()
        self._asked = 0
        settings = dict(
            re.findall(r'^(\w+) = "(.*)"$', (home / "client.toml").read_text(), re.MULTILINE)
        )
        self._endpoint = settings["endpoint"]
        (self._server,) = self._keys(home / settings.get("server_key", "keys/server.key"))
        self._pair = self._keys(home / settings.get("key", "keys/admin.key_secret"))
        self.requests = self.connected(zmq.DEALER, int(self._endpoint.rpartition(":")[2]))

    @staticmethod
    def _keys(path: Path) -> list[bytes]:
        return [key.encode() for key in re.findall(r'-key = "(.{40})"', path.read_text())]

    def connected(self, kind: int, port: int) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = int(LIMIT_S * 1000)
        socket.curve_serverkey = self._server
        socket.curve_publickey, socket.curve_secretkey = self._pair
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(f"{self._endpoint.rpartition(':')[0]}:{port}")
        return socket

    def ask(self, kind: str, on: Any = None, **fields: Any) -> dict[str, Any]:
        self._asked += 1
        number, socket = str(self._asked).encode(), on or self.requests
        socket.send_multipart([number, msgpack.packb({"type": kind, **fields})])
        answered, reply = socket.recv_multipart()
        assert answered == number
        message: dict[str, Any] = msgpack.unpackb(reply)
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


def archive(**files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    return packed.getvalue()


@pytest.mark.slow
def test_a_client_written_from_the_page_submits_waits_reads_and_cancels(
    cluster: Cluster,
) -> None:
    client = PlainClient(cluster.home)
    here = client.ask("client.get_cluster.1")
    feed = client.connected(zmq.SUB, here["feed_port"])
    logs = client.connected(zmq.DEALER, here["log_port"])
    packed = archive(train_py=TOY)
    digest, sent = hashlib.sha256(packed).hexdigest(), 0
    while sent < len(packed):
        piece = {"digest": digest, "offset": sent, "total": len(packed)}
        data = packed[sent : sent + 1000]
        sent = client.ask("client.put_snapshot.1", **piece, data=data)["size"]
    spec = {
        "name": "plain",
        "script": "train.py",
        "batch_size": 20,
        "env": {"OMP_NUM_THREADS": "1"},
    }

    refused = client.ask("client.check_job.1", spec={**spec, "batch_size": 0})
    accepted = client.ask("client.submit_job.1", spec=spec, snapshot=digest, key="once")
    again = client.ask("client.submit_job.1", spec=spec, snapshot=digest, key="once")
    job = accepted["job"]
    state = ""
    while state not in {"succeeded", "failed", "cancelled", "rejected"}:
        state = client.ask("client.wait_job.1", job=job, wait_s=30.0)["state"]
    output, page = b"", {"cursor": 0, "ended": False}
    while not page["ended"]:
        page = client.ask("logs.read.1", logs, job=job, cursor=page["cursor"], wait_s=5.0)
        output += b"".join(piece["data"] for piece in page["pieces"])
    other = client.ask("client.submit_job.1", spec=spec, snapshot=digest)["job"]
    ended = client.ask("client.cancel_job.1", job=other)["summary"]["state"]
    missing = client.ask("client.get_job.1", job="nobody-99")
    heard = list(until(feed, other, "job.cancelled"))
    told, first = [], here["last_seq"] + 1
    while not told or told[-1]["seq"] < heard[-1]["seq"]:
        events = client.ask("client.read_events.1", from_seq=first)
        told, first = [*told, *events["events"]], events["next_seq"]
    client.close()

    assert (here["type"], here["role"]) == ("client.cluster.1", "admin")
    assert (refused["type"], refused["code"], refused["field"]) == (
        "client.failed.1", "bad_field", "batch_size",
    )  # fmt: skip
    assert (accepted["type"], again["job"]) == ("client.job_accepted.1", job)
    assert (state, output.splitlines()[-1]) == ("succeeded", b"done")
    assert (ended, missing["code"]) == ("cancelled", "unknown_job")
    assert [one for one in told if one["job"] in {job, other}][: len(heard)] == heard
    names = events_on_page()
    assert [one["event"] for one in told if one["event"] not in names] == []
    assert [one for one in told if one["event"] not in METRICS and not set(one["detail"]) <= names[one["event"]]] == []  # fmt: skip


def until(feed: Any, job: str, event: str) -> Iterator[dict[str, Any]]:
    """What was heard of the jobs of this client, up to that."""
    mine = job.rpartition("-")[0] + "-"
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        topic, body = feed.recv_multipart()
        message = msgpack.unpackb(body)
        if topic.startswith(f"job/{mine}".encode()):
            assert topic.decode() == f"job/{message['job']}"
            yield message
            if (message["job"], message["event"]) == (job, event):
                return
    raise AssertionError(f"no {event} of {job}")
