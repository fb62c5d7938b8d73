"""A node's key speaks for the workers of its node only, whatever it sends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.history import Process
from controlplane.service.node_sessions import NodeSessions
from controlplane.service.relay.log_relay import LogRelay
from controlplane.service.relay.log_store import LogStore
from controlplane.service.rights import speaks_for
from schemas.codec import encode
from schemas.errors import DeniedError
from schemas.ids import JobId, NodeId, Rank, Version, slot_id, worker_id
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire.agent import (
    MAX_PLACE,
    AgentEvent,
    StallTelemetry,
    StepsReported,
    Telemetry,
    WorkerSeen,
    WorkerStalled,
)
from schemas.wire.feed import LOG, SAMPLES, LogChunk, LogEnded, LogHello
from tests.support import builders
from tests.support.builders import N1, N2, A
from tests.support.controller import Controller, cluster_of, running
from tests.support.schemas_examples import EXAMPLES
from tests.support.sizes import examples

KINDS: tuple[type[AgentEvent], ...] = get_args(AgentEvent)
NUMBERS = st.sampled_from((0, 1, 2, 3, 7, 10**6, 2**53))
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    float: st.sampled_from((0.0, 1.0, 666.0, 1e308)),
    str: st.sampled_from(("", "no room", A, "\x1b[2J")),
    bool: st.booleans(),
}


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    parts = [part for part in get_args(hint) if not isinstance(part, msgspec.Meta)]
    if hint in VALUES:
        return VALUES[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{n: any_of(h) for n, h in get_type_hints(hint).items()})
    origin = getattr(hint, "__origin__", None)
    if origin is dict:
        return st.just({})
    if origin is tuple:
        return st.just(())
    return any_of(parts[0])


@st.composite
def events(draw: st.DrawFn) -> AgentEvent:
    kind = draw(st.sampled_from(KINDS))
    fields = {name: draw(any_of(hint)) for name, hint in get_type_hints(kind).items()}
    if "job" in fields:
        fields |= {"job": A, "version": Version(draw(st.integers(0, 3)))}
    if "rank" in fields:
        fields["rank"] = Rank(draw(st.integers(0, 1)))
    names = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in names})


SEEN = st.builds(
    WorkerSeen, job=st.just(A), version=st.integers(0, 10**6), rank=st.integers(0, 1),
    slot=st.integers(0, 1), pid=st.sampled_from((None, 1)), started_ticks=st.just(1),
    ended=st.booleans(),
)  # fmt: skip


def victim() -> Controller:
    """Job A, which trains on node n1, and node n2 without any job."""
    controller = cluster_of(n1=1, n2=1)
    return running(controller)


@given(st.lists(st.one_of(events(), st.lists(SEEN, min_size=1, max_size=3)), max_size=8))
@settings(max_examples=examples(300), deadline=None)
def test_no_message_of_a_node_changes_a_job_without_workers_there(
    messages: list[AgentEvent | list[WorkerSeen]],
) -> None:
    controller = victim()
    before = msgspec.msgpack.encode(controller.job(A))

    for message in messages:
        if isinstance(message, list):
            boot = controller.state.nodes[N2].boot
            controller.take(builders.greeting(N2, *message, boot=boot))
        else:
            controller.tell(N2, message)

    assert msgspec.msgpack.encode(controller.job(A)) == before


# --- output and telemetry, which agents send outside their sessions

THIS, OTHER = Identity("node", N1), Identity("node", N2)


@pytest.mark.parametrize(
    ("who", "version", "rank", "speaks"),
    [
        (THIS, 1, 0, True),
        (OTHER, 1, 0, False),
        (THIS, 1, 1, False),  # no such worker
        (THIS, 2, 0, False),  # no such group
        (THIS, 10**6, 0, False),
        (Identity("admin", N1), 1, 0, False),
        (None, 1, 0, False),
    ],
)
def test_a_node_speaks_for_the_workers_that_it_runs(
    who: Identity | None, version: int, rank: int, *, speaks: bool
) -> None:
    assert speaks_for(who, victim().job(A), version, rank) is speaks


def test_a_node_speaks_for_the_workers_that_it_ran() -> None:
    controller = victim()
    former = {worker_id(A, Version(0), Rank(0)): Process(N1)}

    assert [
        speaks_for(who, controller.job(A), 0, 0, processes=lambda _: former)
        for who in (THIS, OTHER)
    ] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("lost", "hello_names_it", "speaks"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_after_a_loss_of_the_journal_a_node_speaks_for_workers_of_its_hello(
    *, lost: bool, hello_names_it: bool, speaks: bool
) -> None:
    controller = victim()
    controller.state.loss_accepted = lost
    unknown = worker_id(A, Version(5), Rank(0))
    if hello_names_it:
        controller.state.nodes[N2].foreign_workers = {slot_id(N2, 0): unknown}

    assert speaks_for(OTHER, controller.job(A), 5, 0, state=controller.state) is speaks


@pytest.mark.parametrize("beyond", [{"version": Version(2)}, {"group": Version(2)}], ids=str)
def test_a_late_epoch_of_a_group_that_was_never_ordered_changes_nothing(
    beyond: dict[str, Version],
) -> None:
    controller = victim()
    before = msgspec.msgpack.encode(controller.job(A))
    late = msgspec.structs.replace(
        builders.epoch_end(A, 1, rank=Rank(3)), **beyond
    )  # of a worker that is not known

    controller.tell(N1, late)

    assert msgspec.msgpack.encode(controller.job(A)) == before


class Lines:
    """Audit lines."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def refused(self, what: str, why: str, **_: str) -> None:
        self.found.append(f"{what}: {why}")


def incoming(who: Identity, message: msgspec.Struct) -> Incoming:
    return Incoming((b"route", encode(message)), who, known={})


@pytest.mark.parametrize("stream", [LOG, SAMPLES])
@pytest.mark.parametrize("of", [{"version": 1}, {"version": 50}, {"rank": 3}], ids=str)
def test_a_node_stores_no_output_for_workers_of_other_nodes(
    stream: str, of: dict[str, int], tmp_path: Path
) -> None:
    controller = victim()
    store = LogStore(tmp_path, 1 << 20)
    who: Any = None
    relay = LogRelay(
        shippers=who, followers=who, store=store, snapshots=who, files=who, streams=who,
        state=lambda: controller.state, job=controller.job, records=Records(controller),
        catch_up=lambda: None, now=lambda: controller.now, audit=Lines(), bytes_per_s=1e9,
    )  # type: ignore[arg-type] # fmt: skip
    named: dict[str, Any] = {
        "job": A, "version": 1, "rank": 0, "stream": stream, "journal": controller.job(A).journal,
        **of,
    }  # fmt: skip
    for message in (
        LogHello(**named, node=N2),
        LogChunk(**named, offset=0, data=b"forged\n"),
        LogEnded(**named, size=0),
    ):
        with pytest.raises(DeniedError, match=r"^a-1.v\d+.r\d never ran on n2"):
            relay._shipped(incoming(OTHER, message))

    assert store.stored(A, stream, (named["version"], named["rank"])) == (0, False)


class Records:
    """Processes of former groups."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def processes(self, job: JobId) -> dict[Any, Process]:
        return self._controller.history_of(job).processes


def telemetry(
    node: NodeId, tag: str, *, group: int = 1, rank: int = 0, journal: str = "", **fields: Any
) -> Telemetry | StallTelemetry:
    named = {"job": A, "version": 1, "rank": rank, "group": group, "journal": journal, **fields}
    report: Any = msgspec.structs.replace(EXAMPLES[tag], **named)  # type: ignore[type-var]
    if tag == STALL:
        return StallTelemetry(node=node, stall=report)
    return Telemetry(node=node, steps=report)


def told_by(
    who: Identity, message: Telemetry | StallTelemetry
) -> tuple[list[StepsReported | WorkerStalled], list[str]]:
    """What is accepted, and the lines of the audit."""
    told: list[StepsReported | WorkerStalled] = []
    sessions, lines = NodeSessions.__new__(NodeSessions), Lines()
    sessions.commit_loop = type("Loop", (), {"reactor": victim().reactor})()
    sessions.audit = lines  # type: ignore[assignment]
    sessions.on_steps = sessions.on_stall = told.append
    sessions._receive_message(incoming(who, message))
    return told, lines.found


STALL: Final = "worker.stalled.1"


@pytest.mark.parametrize("tag", ["worker.steps.3", STALL])
@pytest.mark.parametrize(
    ("who", "node", "fields", "audit"),
    [
        (THIS, N1, {}, []),
        (OTHER, N2, {}, ["telemetry: a-1.v1.r0 of group 1 is not on this node"]),
        (OTHER, N1, {}, ["message: key of node:n2 used for node 'n1'"]),
        (THIS, N1, {"rank": 1}, ["telemetry: a-1.v1.r1 of group 1 is not on this node"]),
        (
            THIS,
            N1,
            {"journal": "cafe"},
            ["telemetry: a-1.v1.r0 belongs to an earlier job of this name"],
        ),
        (THIS, N1, {"group": 10**6}, ["telemetry: a-1.v1.r0 of group 1000000 is not on this node"]),
    ],
)
def test_telemetry_counts_only_from_the_node_of_its_worker(
    who: Identity, node: NodeId, fields: dict[str, Any], audit: list[str], tag: str
) -> None:
    message = telemetry(node, tag, **fields)
    sent = message.steps if isinstance(message, Telemetry) else message.stall

    assert told_by(who, message) == ([] if audit else [sent], audit)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"at": "x" * 10_000}, {"at": "x" * MAX_PLACE}),
        ({"at": "train.py\x1b[2J:1"}, {"at": "train.py [2J:1"}),
        ({"idle_s": math.nan, "waits_s": -math.inf}, {"idle_s": 0.0, "waits_s": -1e15}),
    ],
)
def test_hostile_values_of_a_stall_are_bounded(
    fields: dict[str, Any], kept: dict[str, Any]
) -> None:
    (report,), _ = told_by(THIS, telemetry(N1, STALL, **fields))

    assert {name: getattr(report, name) for name in kept} == kept
