"""Worker manager with real processes, and with zygotes that fail."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from nodeagent import workers as manager_module
from nodeagent.connections import SnapshotFetcher
from nodeagent.errors import NodeStartError, StartError
from nodeagent.folders import FRAME, NodeFolders
from nodeagent.logs import LogShipper
from nodeagent.process_identity import start_ticks
from nodeagent.reconciler import (
    Adopted,
    Ended,
    Event,
    ReportedAgain,
    ReportRead,
    Started,
    StartFailed,
    StartWorker,
    Terminate,
)
from nodeagent.settings import AgentSettings
from nodeagent.workers import WorkerManager
from nodeagent.zygotes import ZygotePool
from schemas.codec import FROM_SHIPPER, encode
from schemas.ids import WorkerId
from schemas.nodes import SlotSpec
from schemas.transport.sockets import Socket
from schemas.wire.agent import GroupDelta
from schemas.wire.feed import GetSnapshot, SnapshotPiece
from schemas.wire.worker import ExitStatus, Forked, ProcessMark
from tests.support.builders import N1, A, assignment, epoch_end, node_spec, run

FIRST = WorkerId(f"{A}.v1.r0")


class Zygote:
    """A zygote that fails; its folder is written before."""

    forget = None

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or StartError("no")

    async def get(self, *_: object) -> bool:
        return True

    async def fork(self, _: str, __: Path, *___: object) -> Forked:
        raise self.error

    def close(self) -> None:
        pass


class Forking(Zygote):
    """A zygote that starts a process which waits for a signal."""

    def __init__(self, first: str = "") -> None:
        code = f"import signal; {first} print(flush=True)\nwhile True: signal.pause()"
        self.child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        self.child.stdout.readline()

    async def fork(self, _: str, folder: Path, *__: object) -> Forked:
        ticks = start_ticks(self.child.pid)
        assert ticks is not None
        return Forked(folder=str(folder), pid=self.child.pid, started_ticks=ticks)

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()


class Node:
    """A worker manager with one zygote, and its events; checks of the node are events, too."""

    def __init__(self, base: Path) -> None:
        self.folders = NodeFolders(base / "run", base / "work", base / "checkpoints")
        self.folders.make()
        self.folders.job(A).mkdir()
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self.manager: WorkerManager

    def begin(
        self,
        zygote: Zygote,
        *slots: SlotSpec,
        grace_s: float = 60.0,
        delta: GroupDelta | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        start: bool = True,
    ) -> None:
        """Start the first worker of a job."""

        async def check() -> None:
            self.events.put_nowait("checked")

        def note(event: Event) -> None:
            self.events.put_nowait(event)
            on_event(event)

        self.manager = WorkerManager(
            settings=lambda: AgentSettings(node=N1, kill_grace_s=grace_s),
            folders=self.folders,
            slots=slots or node_spec().slots,
            zygotes=cast(ZygotePool, zygote),
            shipper=LogShipper(N1, lambda _: None),
            fetcher=SnapshotFetcher(),
            on_event=note,
            may_read=lambda: True,
            check_node=check,
        )
        if start:
            self.manager.perform(StartWorker(FIRST, 0, delta or run(A)))

    def report(self, *epochs: int) -> None:
        """Append reports to the file of the first worker."""
        with (self.folders.worker(FIRST).own / "reports").open("ab") as file:
            for epoch in epochs:
                data = encode(epoch_end(A, epoch))
                file.write(FRAME.pack(len(data)) + data)

    async def next(self) -> object:
        return await asyncio.wait_for(self.events.get(), 60.0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(manager_module, "EXIT_FILE_TIMEOUT_S", 0.0)
    made = Node(tmp_path)
    yield made
    made.manager.close()


@pytest.mark.slow
async def test_a_worker_that_is_terminated_right_after_its_start_gets_the_signal(
    node: Node,
) -> None:
    def terminate(event: Event) -> None:
        if isinstance(event, Started):
            node.manager.perform(Terminate(event.worker))

    node.begin(Forking(), on_event=terminate)

    assert [type(await node.next()) for _ in range(2)] == [Started, Ended]


async def test_variables_of_the_cluster_override_those_of_a_job(node: Node) -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "x", "NVIDIA_VISIBLE_DEVICES": "all",
        "ONES_WORKER": "/run/workers/another", "ONES_JOB": "another", "OMP_NUM_THREADS": "3", "MINE": "1",
    }  # fmt: skip
    delta = run(A)
    spec = msgspec.structs.replace(delta.spec, env=env)
    slot = SlotSpec(index=0, kind="gpu", uuid="GPU-aa11")

    node.begin(Zygote(), slot, delta=msgspec.structs.replace(delta, spec=spec))
    await node.next()

    given = node.folders.worker(FIRST).assignment()
    assert given.env == {
        "CUDA_VISIBLE_DEVICES": "GPU-aa11", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "3", "MINE": "1",
    }  # fmt: skip


async def test_a_worker_on_a_slot_that_is_not_offered_any_more_fails_to_start(node: Node) -> None:
    node.begin(Zygote(), SlotSpec(index=1, kind="gpu", uuid="GPU-aa22"))

    hint = "check devices and CUDA_VISIBLE_DEVICES of its agent"
    assert await node.next() == StartFailed(FIRST, "slot n1/0 is not offered any more", hint)
    assert node.folders.worker(FIRST).assignment() is None


@pytest.mark.parametrize(
    ("error", "failed"),
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
async def test_a_failed_start_is_attributed_to_node_or_job(
    node: Node, error: Exception, failed: StartFailed
) -> None:
    node.begin(Zygote(error))

    expected = ["checked", failed] if failed.node_fault else [failed]
    assert [await node.next() for _ in expected] == expected


@pytest.mark.slow
async def test_a_fenced_worker_is_terminated_and_killed_once(node: Node) -> None:
    zygote = Forking("signal.signal(signal.SIGTERM, lambda *_: print(flush=True));")
    node.begin(zygote, grace_s=0.2)
    assert isinstance(await node.next(), Started)

    for _ in range(3):
        node.manager.fence()

    assert isinstance(await node.next(), Ended)
    assert (zygote.child.stdout.read(), zygote.child.wait()) == (b"\n", -signal.SIGKILL)
    assert node.folders.worker(FIRST).stopped


@pytest.mark.slow
async def test_a_process_is_killed_if_its_zygote_did_not_reply_in_time(node: Node) -> None:
    class Silent(Forking):
        async def fork(self, _: str, folder: Path, *__: object) -> Forked:
            forked = await super().fork(_, folder)
            mark = ProcessMark(pid=forked.pid, started_ticks=forked.started_ticks)
            (folder / "process").write_bytes(encode(mark))
            raise NodeStartError("the zygote did not fork")

    zygote = Silent()
    node.begin(zygote)

    failed = StartFailed(FIRST, "the zygote did not fork", node_fault=True)
    assert [await node.next(), await node.next()] == ["checked", failed]
    assert zygote.child.wait(5.0) == -signal.SIGKILL


async def test_a_start_that_its_agent_did_not_survive_is_a_loss_of_the_job(node: Node) -> None:
    begun = assignment(run(A))
    node.folders.worker(FIRST).write_assignment(begun)
    node.begin(Zygote(), start=False)

    node.manager.adopt()

    assert [await node.next(), await node.next()] == [
        Adopted(FIRST, begun, None, None), Ended(FIRST, None, None, unseen=True),
    ]  # fmt: skip
    assert not node.folders.worker(FIRST).path.exists()


async def test_a_deleted_working_directory_is_fetched_before_the_next_start(node: Node) -> None:
    node.folders.job(A).rmdir()
    sent: asyncio.Queue[bytes] = asyncio.Queue()
    node.begin(Zygote())
    node.manager._fetcher.use(cast(Socket, SimpleNamespace(send=sent.put_nowait)))

    wanted = FROM_SHIPPER.decode(await asyncio.wait_for(sent.get(), 60.0))
    assert isinstance(wanted, GetSnapshot)
    node.manager._fetcher.receive(SnapshotPiece(digest=wanted.digest, offset=0, data=b"", total=-1))

    why = f"the controller has no snapshot {wanted.digest[:12]}"
    assert await node.next() == StartFailed(FIRST, why)


@pytest.mark.slow
async def test_a_worker_whose_folder_is_deleted_is_killed(node: Node) -> None:
    zygote = Forking()
    node.begin(zygote)
    assert isinstance(await node.next(), Started)
    node.manager.kill_unreportable()
    assert zygote.child.poll() is None
    shutil.rmtree(node.folders.run)

    node.manager.kill_unreportable()

    assert await node.next() == Ended(FIRST, code=None, signal=None, unseen=True)
    assert zygote.child.wait() == -signal.SIGKILL


# --- rate of reports


def read(*epochs: int) -> list[Event]:
    return [ReportRead(FIRST, epoch_end(A, epoch)) for epoch in epochs]


@pytest.mark.slow
async def test_reports_beyond_the_rate_of_a_worker_are_read_later_and_few_after_its_exit(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "REPORTS_AT_ONCE", 3)
    monkeypatch.setattr(manager_module, "REPORTS_PER_S", 0.0)
    zygote = Forking()
    node.begin(zygote)
    assert isinstance(await node.next(), Started)

    node.report(1, 2, 3, 4, 5)
    for _ in range(3):
        node.manager.read_all_reports()
    assert [await node.next() for _ in range(node.events.qsize())] == read(1, 2, 3)

    monkeypatch.setattr(manager_module, "REPORTS_PER_S", 1e9)
    node.manager.read_reports(FIRST)
    node.manager.read_reports(FIRST)  # finds none
    monkeypatch.setattr(manager_module, "REPORTS_PER_S", 0.0)
    assert [await node.next() for _ in range(node.events.qsize())] == read(4, 5)

    node.report(6, 7, 8, 9, 10)
    zygote.child.kill()

    ended = Ended(FIRST, code=None, signal=None, unseen=True)
    assert [await node.next() for _ in range(4)] == [*read(6, 7, 8), ended]
    node.manager.read_all_reports()
    assert node.events.empty()
    node.manager.report_again()
    again = [*read(*range(1, 9)), ReportedAgain(FIRST)]
    assert [await node.next() for _ in again] == again
    assert node.events.empty()


async def test_reports_that_a_worker_wrote_at_its_rate_without_an_agent_are_all_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "REPORTS_AT_ONCE", 3)
    monkeypatch.setattr(manager_module, "REPORTS_PER_S", 1.0)
    begun, folder = assignment(run(A)), node.folders.worker(FIRST)
    folder.write_assignment(begun)
    os.utime(folder.path / "assignment", (0.0, 0.0))
    status = ExitStatus(code=0, signal=None, at=1.0, max_rss_bytes=2, cpu_s=3.0)
    (folder.own / "exit").write_bytes(encode(status))
    node.report(*range(1, 9))
    node.begin(Zygote(), start=False)

    node.manager.adopt()

    expected = [
        Adopted(FIRST, begun, None, None),
        *read(*range(1, 9)),
        Ended(FIRST, 0, None, unseen=False),
    ]
    assert [await node.next() for _ in expected] == expected
