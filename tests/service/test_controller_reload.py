"""What a controller takes over when its settings file is read again: bounds, and who may connect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import zmq

from controlplane.core.inputs import SharingChanged
from controlplane.service.app import MAX_REQUEST
from controlplane.service.settings import Store
from schemas.codec import TO_AGENT, encode
from schemas.host.archives import ArchiveBounds
from schemas.ids import JobId
from schemas.jobs import MAX_SPEC_BYTES, JobSpec
from schemas.sharing import Sharing
from schemas.transport.sockets import ENVELOPE
from schemas.wire import Message
from schemas.wire.agent import Hello, Refused, Welcome
from schemas.wire.client import CheckJob, Cluster, EventsPage, GetCluster, ReadEvents
from schemas.wire.feed import ReadLog
from schemas.wire.files import AskFiles
from tests.support import builders
from tests.support.builders import N1
from tests.support.schemas_links import HeldLink, connected, events_of, soon
from tests.support.service import DENIED, House, Person, heard_by, until


async def test_a_reload_applies_all_retention_settings(house: House) -> None:
    kept = [name for name in Store.__struct_fields__ if name != "workdir"]
    lines = "".join(f"{name} = 7\n" for name in kept)
    lines += "workdir = { size = 7, files = 7, depth = 7 }\n"
    bounds = ArchiveBounds(size=7, files=7, depth=7)
    lines += "[limits]\narchive_bytes = 8\n"
    house.file.write_text(f'{house.settings}[policy]\nname = "fifo"\n[store]\n{lines}')

    house.reload()

    changed = Store(workdir=bounds, **dict.fromkeys(kept, 7))
    snapshots, relay = house.controller._snapshots, house.relay.relay
    await until(lambda: relay._keeper.settings == changed)
    assert house.controller._archive_keeper.settings == changed
    assert (relay._logs.max_bytes, relay._log_relay.bytes_per_s) == (7, 7)
    assert (snapshots.max_bytes, snapshots.bounds, snapshots.upload_bytes) == (7, bounds, 7)
    assert snapshots.user_bytes == 8


async def test_rules_of_sharing_are_inputs_at_the_start_and_at_a_reload(house: House) -> None:
    core = house.controller._commit_loop
    assert core.reactor.state.sharing == Sharing(revision=1)

    house.file.write_text(f"{house.settings}[sharing]\nturn_s = 60.0\n")
    for _ in range(2):
        house.reload()

    assert core.reactor.state.sharing == Sharing(revision=2, turn_s=60.0)
    await core.caught_up()
    inputs = [event for _, event in core.reader.inputs()]
    assert [one.sharing.revision for one in inputs if isinstance(one, SharingChanged)] == [1, 2]


def remove(house: House) -> None:
    house.authorise("ann")


def revoke(house: House) -> None:
    house.controller._keys.revoke("bob", "root")


@pytest.mark.parametrize("end", [remove, revoke])
async def test_a_removed_or_revoked_key_is_refused_on_open_connections(
    house: House, people: tuple[Person, Person], end: Callable[[House], None]
) -> None:
    ann, bob = people
    job = await heard_by(house, ann, bob)
    assert isinstance(await bob.ask(GetCluster()), Cluster)
    far = house.controller._state().feed_seq + 1
    poll = bob.begin(ReadEvents(from_seq=far, wait_s=30.0))
    while house.controller._feed._waiter is None:
        await asyncio.sleep(0)

    end(house)
    if end is revoke:
        assert await bob.ask(GetCluster()) == DENIED
    house.reload()

    assert await bob.ask(GetCluster()) == DENIED
    assert await bob.read_log(ReadLog(job=job)) == DENIED
    await heard_by(house, ann)
    assert await bob.answer(poll) == DENIED
    assert not await bob.feed._socket.poll(0)
    assert isinstance(await ann.ask(GetCluster()), Cluster)


async def test_the_feed_sends_each_project_only_its_own_jobs(
    house: House, people: tuple[Person, Person]
) -> None:
    """`shared-2` begins as `shared` does, and is another project."""
    ann, bob = people
    await heard_by(house, ann, bob)
    house.controller._commit_loop.handle(builders.submission("a", user="eve", project="shared-2"))

    last = await heard_by(house, ann, bob)

    for person in people:
        topics = {topic.decode() for topic, _ in person.heard}
        assert {topic.rpartition("/job/")[0] for topic in topics} <= {"project/shared", ""}
        assert f"project/shared/job/{last}" in topics
        missed = 1 + max(seq for _, seq in person.heard) - len({seq for _, seq in person.heard})
        assert missed > 0


async def test_a_node_with_a_removed_key_is_refused(house: House) -> None:
    link = HeldLink(house.keys["n1"])
    address = f"tcp://127.0.0.1:{house.ports['agents']}"
    agent = await connected(link.connect("DEALER", address, house.keys["server"].public))
    greeting = builders.greeting(N1)
    hello = Hello(node=N1, boot=greeting.boot, spec=greeting.spec, workers=(), events_sent=0)
    agent.send(encode(hello))
    assert isinstance(TO_AGENT.decode((await soon(agent.receive())).frames[-1]), Welcome)

    house.authorise("ann", "bob")
    house.reload()

    told = TO_AGENT.decode((await soon(agent.receive())).frames[-1])
    assert told == Refused(code=DENIED.code, message=DENIED.message, hint=DENIED.hint)
    assert not house.controller._node_sessions.ask(N1, AskFiles(request="1", job=JobId("a-1")))
    link.close()


async def test_a_restored_key_works_on_open_connections(
    house: House, people: tuple[Person, Person]
) -> None:
    ann, bob = people
    house.authorise("ann")
    house.reload()
    assert await bob.ask(GetCluster()) == DENIED

    house.authorise("ann", "bob")
    house.reload()

    assert isinstance(await bob.ask(ReadEvents()), EventsPage)
    await heard_by(house, ann)


async def test_a_reload_without_removed_keys_disconnects_no_client(
    house: House, people: tuple[Person, Person]
) -> None:
    feed = house.controller._feed._socket
    house.authorise("root", "ann", "bob", "n1")

    house.reload()

    assert house.controller._feed._socket is feed
    await heard_by(house, *people)


async def test_an_oversized_request_disconnects_only_its_sender(
    people: tuple[Person, Person],
) -> None:
    ann, bob = people
    assert isinstance(await bob.ask(CheckJob(spec=job_of(MAX_SPEC_BYTES - 1000))), Message)
    lost = events_of(bob.requests, zmq.Event.DISCONNECTED)

    bob.begin(CheckJob(spec=job_of(MAX_REQUEST + ENVELOPE)))
    await soon(lost)

    assert isinstance(await ann.ask(GetCluster()), Cluster)


def job_of(size: int) -> JobSpec:
    return msgspec.structs.replace(builders.job_spec("a"), args=("x" * size,))
