"""What the manager does with a real process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from nodeagent import workers as manager_module
from nodeagent.connections import SnapshotFetcher
from nodeagent.errors import NodeStartError, StartError
from nodeagent.folders import NodeFolders
from nodeagent.logs import LogShipper
from nodeagent.process_identity import start_ticks
from nodeagent.reconciler import Ended, Event, Started, StartFailed, StartWorker, Terminate
from nodeagent.settings import AgentSettings
from nodeagent.workers import WorkerManager
from nodeagent.zygotes import ZygotePool
from schemas.codec import FROM_SHIPPER, encode
from schemas.ids import WorkerId
from schemas.nodes import SlotSpec
from schemas.transport.sockets import Socket
from schemas.wire.feed import GetSnapshot, SnapshotPiece
from schemas.wire.worker import Forked, ProcessMark
from tests.support.builders import N1, A, node_spec, run

FIRST = WorkerId(f"{A}.v1.r0")


class Forking:
    """A zygote that starts a process which waits for a signal."""

    forget = None

    def __init__(self, first: str = "") -> None:
        code = f"import signal; {first} print(flush=True)\nwhile True: signal.pause()"
        self.child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.child.stdout is not None
        self.child.stdout.readline()

    async def knows_tokens(self, *_: object) -> bool:
        return True

    async def fork(self, _: str, folder: Path, *__: object) -> Forked:
        ticks = start_ticks(self.child.pid)
        assert ticks is not None
        return Forked(folder=str(folder), pid=self.child.pid, started_ticks=ticks)

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()


async def looked_at() -> None:
    pass


def manager_of(
    folders: NodeFolders,
    slots: tuple[SlotSpec, ...],
    zygote: object,
    on_event: Callable[[Event], None],
    check_node: Callable[[], Awaitable[None]] | None = None,
) -> WorkerManager:
    return WorkerManager(
        settings=lambda: AgentSettings(node=N1, kill_grace_s=60.0),
        folders=folders,
        slots=slots,
        zygotes=cast(ZygotePool, zygote),
        shipper=LogShipper(N1, lambda _: None),
        fetcher=SnapshotFetcher(),
        on_event=on_event,
        may_read=lambda: True,
        check_node=check_node or looked_at,
    )


@pytest.mark.slow
async def test_a_worker_that_is_stopped_as_soon_as_it_started_gets_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "EXIT_FILE_TIMEOUT_S", 0.0)
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    folders.make()
    folders.job(A).mkdir()
    heard: asyncio.Queue[Event] = asyncio.Queue()
    zygote = Forking()

    def on_event(event: Event) -> None:
        heard.put_nowait(event)
        if isinstance(event, Started):
            manager.perform(Terminate(event.worker))

    manager = manager_of(folders, node_spec().slots, zygote, on_event)
    try:
        manager.perform(StartWorker(FIRST, 0, run(A)))
        events = [await asyncio.wait_for(heard.get(), 60.0) for _ in range(2)]
        assert [type(event) for event in events] == [Started, Ended]
    finally:
        manager.close()


class NotForking:
    """A zygote that fails, behind a folder that is written."""

    forget = None

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or StartError("no")

    async def knows_tokens(self, *_: object) -> bool:
        return True

    async def fork(self, _: str, __: Path, *___: object) -> Forked:
        raise self.error

    def close(self) -> None:
        pass


async def started_on(
    slot: SlotSpec, folders: NodeFolders, **env: str
) -> tuple[Event, dict[str, str] | None]:
    heard: asyncio.Queue[Event] = asyncio.Queue()
    manager = manager_of(folders, (slot,), NotForking(), heard.put_nowait)
    delta = run(A)
    assert delta.spec is not None
    delta = msgspec.structs.replace(delta, spec=msgspec.structs.replace(delta.spec, env=env))
    manager.perform(StartWorker(FIRST, 0, delta))
    event = await asyncio.wait_for(heard.get(), 60.0)
    manager.close()
    given = folders.worker(FIRST).assignment()
    return event, None if given is None else given.env


@pytest.fixture
def folders(tmp_path: Path) -> NodeFolders:
    made = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    made.make()
    made.job(A).mkdir()
    return made


async def test_what_the_cluster_sets_wins_over_what_a_job_of_an_older_journal_brings(
    folders: NodeFolders,
) -> None:
    slot = SlotSpec(index=0, kind="gpu", uuid="GPU-aa11")

    _, given = await started_on(
        slot,
        folders,
        CUDA_VISIBLE_DEVICES="7",
        CUDA_DEVICE_ORDER="x",
        NVIDIA_VISIBLE_DEVICES="all",
        ONES_WORKER="/run/workers/another",
        ONES_JOB="another",
        OMP_NUM_THREADS="3",
        MINE="1",
    )

    assert given == {
        "CUDA_VISIBLE_DEVICES": "GPU-aa11",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "3",
        "MINE": "1",
    }


async def test_a_worker_on_a_slot_that_is_not_offered_any_more_fails_to_start(
    folders: NodeFolders,
) -> None:
    event, given = await started_on(SlotSpec(index=1, kind="gpu", uuid="GPU-aa22"), folders)

    hint = "check devices and CUDA_VISIBLE_DEVICES of its agent"
    assert event == StartFailed(FIRST, "slot n1/0 is not offered any more", hint)
    assert given is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NodeStartError("cannot fork", "wait"), StartFailed(FIRST, "cannot fork", "wait", node_fault=True)),
        (
            OSError(28, "No space left on device", "assignment"),
            StartFailed(FIRST, "cannot write assignment: No space left on device", "", node_fault=True),
        ),
        (KeyError("x"), StartFailed(FIRST, "the agent failed: KeyError('x')", "", node_fault=True)),
        (StartError("no such python", "name another"), StartFailed(FIRST, "no such python", "name another")),
    ],
)  # fmt: skip
async def test_whose_fault_it_is_that_a_worker_cannot_start(
    folders: NodeFolders, error: Exception, said: StartFailed
) -> None:
    happened: asyncio.Queue[object] = asyncio.Queue()

    async def look() -> None:
        happened.put_nowait("looked at the node")

    zygote = NotForking(error)
    manager = manager_of(folders, node_spec().slots, zygote, happened.put_nowait, look)
    manager.perform(StartWorker(FIRST, 0, run(A)))
    expected = ["looked at the node", said] if said.node_fault else [said]
    heard = [await asyncio.wait_for(happened.get(), 60.0) for _ in expected]
    manager.close()

    assert heard == expected


@pytest.mark.slow
async def test_a_fenced_worker_is_asked_to_end_and_then_made_to_once(
    folders: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "EXIT_FILE_TIMEOUT_S", 0.0)
    heard: asyncio.Queue[Event] = asyncio.Queue()
    zygote = Forking("signal.signal(signal.SIGTERM, lambda *_: print(flush=True));")
    manager = manager_of(folders, node_spec().slots, zygote, heard.put_nowait)
    manager._settings = lambda: AgentSettings(node=N1, kill_grace_s=0.2)
    try:
        manager.perform(StartWorker(FIRST, 0, run(A)))
        assert isinstance(await asyncio.wait_for(heard.get(), 60.0), Started)
        for _ in range(3):
            manager.fence()

        assert isinstance(await asyncio.wait_for(heard.get(), 60.0), Ended)
        assert zygote.child.stdout is not None
        assert (zygote.child.stdout.read(), zygote.child.wait()) == (b"\n", -signal.SIGKILL)
        assert folders.worker(FIRST).stopped
    finally:
        manager.close()


@pytest.mark.slow
async def test_a_process_whose_zygote_said_nothing_in_time_does_not_live_on(
    folders: NodeFolders,
) -> None:
    heard: asyncio.Queue[Event] = asyncio.Queue()
    forking = Forking()

    class Silent(NotForking):
        async def fork(self, _: str, folder: Path, *__: object) -> Forked:
            forked = await forking.fork(_, folder)
            mark = ProcessMark(pid=forked.pid, started_ticks=forked.started_ticks)
            (folder / "process").write_bytes(encode(mark))
            raise NodeStartError("the zygote did not fork")

    manager = manager_of(folders, node_spec().slots, Silent(), heard.put_nowait)
    try:
        manager.perform(StartWorker(FIRST, 0, run(A)))
        failed = StartFailed(FIRST, "the zygote did not fork", node_fault=True)
        assert await asyncio.wait_for(heard.get(), 60.0) == failed
        assert forking.child.wait(5.0) == -signal.SIGKILL
    finally:
        forking.close()
        manager.close()


async def test_a_folder_that_is_gone_is_fetched_again_before_its_next_worker_starts(
    folders: NodeFolders,
) -> None:
    folders.job(A).rmdir()
    heard: asyncio.Queue[Event] = asyncio.Queue()
    manager = manager_of(folders, node_spec().slots, NotForking(), heard.put_nowait)
    asked = Asked()
    manager._fetcher.use(cast(Socket, asked))
    manager.perform(StartWorker(FIRST, 0, run(A)))
    wanted = FROM_SHIPPER.decode(await asyncio.wait_for(asked.sent.get(), 60.0))
    assert isinstance(wanted, GetSnapshot)
    manager._fetcher.receive(SnapshotPiece(digest=wanted.digest, offset=0, data=b"", total=-1))

    why = f"the controller has no snapshot {wanted.digest[:12]}"
    assert await asyncio.wait_for(heard.get(), 60.0) == StartFailed(FIRST, why)
    manager.close()


class Asked:
    """A socket that only shows what is sent."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, data: bytes) -> bool:
        self.sent.put_nowait(data)
        return True


@pytest.mark.slow
async def test_a_worker_whose_folder_is_deleted_is_ended(
    folders: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "EXIT_FILE_TIMEOUT_S", 0.0)
    heard: asyncio.Queue[Event] = asyncio.Queue()
    zygote = Forking()
    manager = manager_of(folders, node_spec().slots, zygote, heard.put_nowait)
    try:
        manager.perform(StartWorker(FIRST, 0, run(A)))
        assert isinstance(await asyncio.wait_for(heard.get(), 60.0), Started)
        manager.kill_unreportable()
        assert zygote.child.poll() is None
        shutil.rmtree(folders.run)

        manager.kill_unreportable()

        ended = await asyncio.wait_for(heard.get(), 60.0)
        assert ended == Ended(FIRST, code=None, signal=None, unseen=True)
        assert zygote.child.wait() == -signal.SIGKILL
    finally:
        manager.close()
