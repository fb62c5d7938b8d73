"""The relay process beside its controller, with real pipes, sockets and a real journal."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.journal.snapshots import image_of
from controlplane.service.api import fair_queue
from controlplane.service.pipes import encode_frame
from controlplane.service.relay import child
from controlplane.service.relay.process import RelayProcess
from controlplane.service.relay.state_follower import StateFollower
from schemas.errors import AddressInUseError, UnavailableError, UnknownJobError
from schemas.ids import JobId
from schemas.transport import listeners
from schemas.transport.keys import Identity
from schemas.wire.client import Failed
from schemas.wire.feed import LogPage, ReadLog
from schemas.wire.files import ListFiles
from tests.support import builders
from tests.support.builders import N1, A
from tests.support.schemas_links import connected
from tests.support.service import DENIED, House, LiveService, Person, RelayHere, heard_by, until

NOTHING = LogPage(job=A, pieces=(), cursor=0, ended=False)


async def test_the_relay_follows_the_state_up_to_what_is_acknowledged(
    service: LiveService,
) -> None:
    changed = list[JobId]()
    core = service.loop
    early = StateFollower(core.path, 3, changed.append)
    follower = StateFollower(core.path, core.acknowledged, changed.append)
    assert (early.last, follower.last, changed) == (3, core.acknowledged, [])
    assert image_of(follower._reactor) == image_of(core.committed)

    service.finish()
    await core.caught_up()
    follower.follow(core.acknowledged)

    assert image_of(follower._reactor) == image_of(core.committed)
    assert set(changed) == {A}
    assert follower.job(A).ended
    with pytest.raises(UnknownJobError):
        follower.job(JobId("a-99"))
    for one in (early, follower):
        one.close()


async def test_an_unreadable_journal_ends_the_relay(service: LiveService) -> None:
    follower = StateFollower(service.loop.path, service.loop.acknowledged - 1, lambda _: None)
    follower.close()

    for _ in range(2):
        with pytest.raises(UnavailableError, match="the log relay cannot read the journal"):
            follower.follow(service.loop.acknowledged)

    assert "closed database" in str(await follower.failure())


async def test_a_job_is_known_to_the_relay_before_its_submission_is_acknowledged(
    house: House,
) -> None:
    relay, found = house.relay.relay, list[JobId]()

    def look() -> None:
        relay._catch_up()
        found.append(relay._follower.job(A).job)

    core = house.controller._commit_loop
    core.handle(builders.submission("a"), after_effects=lambda _: look())
    await core.caught_up()

    assert found == [A]


async def test_a_revoked_key_is_unknown_to_the_relay_at_once(house: House) -> None:
    relay, key = house.relay.relay, house.keys["bob"].public
    relay._catch_up()
    assert key in relay._known

    house.controller._keys.revoke("bob", "root")
    relay._catch_up()

    assert key not in relay._known


async def test_a_key_with_another_owner_loses_what_it_has_open(
    house: House, people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "MAX_WAIT_S", 3600.0)
    _, bob = people
    job = await heard_by(house, bob)
    follows = asyncio.create_task(bob.read_log(ReadLog(job=job, wait_s=3600.0)))
    await until(lambda: house.relay.relay._log_relay.waiting._tasks)

    keys = house.controller._keys
    keys.reload({**keys._listed, house.keys["bob"].public: Identity("viewer", "eve")})

    assert await follows == DENIED


async def test_output_is_served_again_after_the_end_of_the_relay(
    house: House, people: tuple[Person, Person]
) -> None:
    ann, _ = people
    job = await heard_by(house, ann)
    first = house.relay.relay

    house.relay.kill()
    await until(lambda: house.controller._relay.restarts == 1 and house.controller._relay.is_up)

    assert house.relay.relay is not first
    await connected(ann.pages)
    assert await ann.read_log(ReadLog(job=job)) == msgspec.structs.replace(NOTHING, job=job)


async def test_a_file_of_a_node_without_a_session_is_refused(
    house: House, people: tuple[Person, Person]
) -> None:
    ann, _ = people
    job = await heard_by(house, ann)
    house.controller._commit_loop.handle(builders.greeting(N1))
    await house.controller._commit_loop.caught_up()

    reply: Any = await ann.read_log(ListFiles(job=job, node=N1))  # type: ignore[arg-type]

    assert reply == Failed(
        code="unavailable", message="node n1 is not connected",
        hint="try again when it is connected", field="",
    )  # fmt: skip


async def test_a_relay_that_hangs_is_started_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.relay.relay._pipe._loop.remove_reader(house.relay.relay._pipe._source)
    monkeypatch.setattr(child, "HANG_S", -1.0)
    monkeypatch.setattr(child, "STOP_S", 0.0)

    await until(lambda: house.controller._relay.restarts > 0)
    monkeypatch.setattr(child, "HANG_S", 3600.0)

    await until(lambda: house.controller._relay.is_up)


async def test_a_relay_ends_when_its_controller_is_silent(house: House) -> None:
    start = house.controller._start_of_relay()
    (source, told), (asked, sink) = os.pipe(), os.pipe()
    silent = RelayProcess(source, sink)

    os.write(told, encode_frame(msgspec.structs.replace(start, silence_s=0.0)))
    await silent.run()

    os.close(told)
    os.close(asked)


async def test_a_controller_ends_if_its_relay_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "RESTART_DELAYS_S", (0.0,))
    house = House(tmp_path)

    async def fails(*_: object) -> RelayHere:
        raise OSError(12, "out of memory")

    house.controller._launch_relay = fails  # type: ignore[method-assign]
    await house.controller.open()
    with pytest.raises(UnavailableError, match="the log relay does not start"):
        await house.controller.serve(asyncio.Event())
    house.controller.close()


async def test_a_used_port_of_the_relay_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "WAIT_S", 0.0)
    house = House(tmp_path)
    port = house.ports["followers"]

    with listeners.listen("127.0.0.1", port), pytest.raises(AddressInUseError, match=str(port)):
        await house.controller.open()
    house.controller.close()
