"""The agent's own sockets."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nodeagent.app import Agent
from nodeagent.devices import inventory
from nodeagent.job_folders import MARK
from nodeagent.reconciler import LogsStored, StartWorker
from nodeagent.settings import AgentSettings, python_of
from schemas.codec import encode
from schemas.errors import SettingsError
from schemas.ids import BootId, Seconds, Term, WorkerId
from schemas.session import Apply
from schemas.transport.keys import write_keys
from schemas.transport.sockets import Incoming, ThreadDealer
from schemas.wire.agent import HelloRequest, NodeHealth, Welcome
from schemas.wire.sweeps import SweepDelta
from tests.support.builders import A, B, run, stop
from tests.support.reconciler_events import FIRST


def welcome(log_port: int, event_port: int) -> Welcome:
    return Welcome(
        session="s", boot=BootId("b"), term=Term(1), committed=0,
        log_port=log_port, event_port=event_port,
    )  # fmt: skip


def agent_in(home: Path) -> Agent:
    for name in ("server", "n1"):
        write_keys(home / "keys", name)
    return Agent(AgentSettings(node="n1", devices="cpu", disk_reserve_bytes=0), home)


async def hears_a_worker(agent: Agent) -> bool:
    """Whether what a new worker sends arrives."""
    worker = ThreadDealer(agent._folders.socket)
    worker.poll(5.0)
    assert worker.send(b"greeting")
    incoming = await asyncio.wait_for(agent._workers.socket.receive(), 60.0)
    worker.close()
    return incoming.frames[-1] == b"greeting"


@asynccontextmanager
async def keeping(agent: Agent) -> AsyncIterator[None]:
    """Files of ended jobs are deleted meanwhile."""
    keepers = [asyncio.create_task(keeper()) for keeper in agent._ended_jobs.tasks()]
    async with asyncio.timeout(60.0):
        yield
    for keeper in keepers:
        keeper.cancel()


def end(agent: Agent) -> None:
    agent._manager.close()
    agent._link.close()
    agent._locks.close()
    agent._workers.close()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    made = agent_in(tmp_path)
    yield made
    end(made)


async def test_sockets_to_the_ports_of_a_former_controller_are_closed(agent: Agent) -> None:
    agent._welcomed(welcome(1, 2))
    former = (agent._bulk.socket, agent._ports.events)
    agent._welcomed(welcome(3, 4))
    present = (agent._bulk.socket, agent._ports.events)
    closed = [socket._socket.closed for socket in (*former, *present)]
    agent._bulk.close()

    assert closed == [True, True, False, False]


async def test_events_are_sent_on_the_connection_that_the_controller_names(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, orders, published = agent._ports, list[bytes](), list[tuple[bytes, ...]]()
    monkeypatch.setattr(ports.orders, "send", orders.append)
    agent._welcomed(welcome(1, 2))
    monkeypatch.setattr(ports.events, "send", lambda *data: published.append(data))
    ports.publish(b"to an older controller")

    agent._welcomed(replace(welcome(1, 2), events_here=True))
    ports.publish(b"to this one")
    agent._bulk.close()

    assert (published, orders) == ([(b"n1", b"to an older controller")], [b"to this one"])
    assert ports.events is None


async def test_workers_connect_again_when_the_socket_and_its_folder_were_deleted(
    agent: Agent, tmp_path: Path
) -> None:
    for path in (tmp_path / "run", agent._folders.sockets):
        shutil.rmtree(path, ignore_errors=True)

    await agent._health.look()

    assert await hears_a_worker(agent)
    assert agent._hello().problems == ()


async def test_a_sweep_with_the_name_of_another_journals_sweep_deletes_no_state(
    agent: Agent,
) -> None:
    agent._ended_jobs.claim(A, "ann", "cafe")
    for journal, kept in (("beef", 0), ("cafe", 1)):
        delta = SweepDelta(
            job=A, term=Term(1), revision=1, attempts=0, units=(), wanted=(), journal=journal
        )
        agent._apply([Apply(delta)])
        assert len(agent._states._newest) == kept


async def test_a_node_that_cannot_start_workers_reports_it(agent: Agent, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "work")
    (tmp_path / "work").touch()

    await agent._health.look()

    problem = f"work {tmp_path}/work: File exists; check its file system"
    assert agent._hello().problems == (problem,)
    assert agent._session.spool[-1].event == NodeHealth(problems=(problem,))


@pytest.mark.parametrize(
    ("fence_s", "alone_s", "fenced"), [(0.0, 1e6, 0), (5.0, 4.9, 0), (5.0, 5.1, 1)]
)
async def test_workers_are_ended_when_the_controller_did_not_answer_for_the_stated_time(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, fence_s: float, alone_s: float, fenced: int
) -> None:
    agent._settings = AgentSettings(node="n1", fence_s=fence_s)
    now = agent._now()
    agent._session.tick(now)
    monkeypatch.setattr(agent, "_now", lambda: Seconds(now + alone_s))
    ended: list[None] = []
    monkeypatch.setattr(agent._manager, "fence", lambda: ended.append(None))

    keeping = asyncio.create_task(agent._keep_session())
    await asyncio.sleep(0)
    keeping.cancel()

    assert len(ended) == fenced


def test_a_node_states_when_its_workers_are_ended_and_refuses_a_short_fence() -> None:
    def fenced_s(fence_s: float) -> float:
        return inventory(AgentSettings(node="n1", devices="cpu", fence_s=fence_s)).fenced_s

    assert [fenced_s(each) for each in (0.0, 3.0, 600.0)] == [0.0, 15.0, 612.0]
    with pytest.raises(SettingsError, match=r"^fence_s: 2 s is too short") as refused:
        fenced_s(2.0)
    assert refused.value.field == "fence_s"


async def test_an_action_that_fails_holds_up_no_other(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def perform(action: object) -> None:
        if action == "b":
            raise KeyError(action)
        done.append(action)

    asking = SimpleNamespace(handle=lambda _: ["a", "b", "c"])
    monkeypatch.setattr(agent, "_reconciler", asking)
    monkeypatch.setattr(agent, "_perform", perform)

    agent._handle(LogsStored(WorkerId("a-1.v1.r0")))

    assert done == ["a", "c"]


async def two_messages() -> AsyncIterator[Incoming]:
    for _ in range(2):
        yield Incoming((encode(HelloRequest(term=Term(1))),), None)


async def test_a_message_that_cannot_be_followed_ends_no_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def receive(message: object, _: float) -> list[object]:
        taken.append(message)
        if len(taken) == 1:
            raise ValueError(message)
        return []

    monkeypatch.setattr(agent, "_session", SimpleNamespace(receive=receive))
    monkeypatch.setattr(agent._ports, "orders", two_messages())
    await agent._receive_from_controller()

    assert taken == [HelloRequest(term=Term(1))] * 2


async def test_a_second_agent_on_the_same_folders_is_refused_before_it_takes_the_workers_socket(
    agent: Agent, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="is in use by another agent"):
        agent_in(tmp_path)

    assert await hears_a_worker(agent)


async def test_a_job_that_is_to_be_forgotten_leaves_nothing_where_nothing_is_kept(
    agent: Agent, tmp_path: Path
) -> None:
    kept = {"keep_work_s": 0.0, "keep_checkpoints_s": 0.0}
    agent._settings = AgentSettings(node="n1", devices="cpu", **kept)
    folders = [tmp_path / area / job for area in ("work", "checkpoints") for job in (A, B)]
    for folder in folders:
        folder.mkdir(mode=0o700)
    async with keeping(agent):
        agent._apply([Apply(stop(B, 1)), Apply(stop(A, 1, forget=True))])
        while any(folder.exists() for folder in folders if folder.name == A):
            await asyncio.sleep(0)

    assert [folder.name for folder in folders if folder.exists()] == [B, B]


async def test_a_hello_names_jobs_without_a_reported_end(agent: Agent, tmp_path: Path) -> None:
    for job in (A, B):
        folder = tmp_path / "work" / job
        folder.mkdir()
        (folder / MARK).touch()
    await agent._ended_jobs.find()

    agent._apply([Apply(stop(A, 1, forget=True))])

    assert agent._hello().jobs == (B,)


async def test_a_job_that_begins_has_not_ended_whatever_its_folder_says(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "checkpoints" / ".ended" / A
    mark.parent.mkdir()
    mark.touch()
    monkeypatch.setattr(agent, "_manager", SimpleNamespace(perform=lambda _: None, close=int))
    async with keeping(agent):
        agent._perform(StartWorker(FIRST, 0, run(A)))
        while mark.exists():
            await asyncio.sleep(0)


async def test_settings_that_may_change_hold_at_once(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        'node = "n1"\ndevices = "cpu"\nkill_grace_s = 3.0\npython = "other"\n'
        "disk_reserve_bytes = 5\nkeep_work_s = 7.0\nkeep_work_bytes = 8\n"
        "keep_checkpoints_s = 9.0\nkeep_checkpoints_bytes = 10\nslots = 2\nlog_bytes = 11\n"
    )
    reload = agent.settings_of(file)

    reload.reload()

    now = agent._manager._settings()
    assert (now.kill_grace_s, python_of(now)) == (3.0, "other")
    assert (now.keep_work_s, now.keep_work_bytes) == (7.0, 8)
    assert (now.keep_checkpoints_s, now.keep_checkpoints_bytes) == (9.0, 10)
    assert agent._shipper.max_bytes == 11
    limits = {look.place.setting: look.place.reserve_bytes for look in agent._health._checks[1:]}
    assert limits == {"run": 0, "work": 5, "checkpoints": 5}
    assert (agent._settings.slots, len(agent._spec.slots)) == (4, 4)
