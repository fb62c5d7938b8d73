"""What the manager does with a real process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from nodeagent import worker_manager as manager_module
from nodeagent.log_shipper import LogShipper
from nodeagent.process_identity import start_ticks
from nodeagent.reconciler_actions import StartWorker, Terminate
from nodeagent.reconciler_events import Ended, Event, Started
from nodeagent.snapshot_fetcher import SnapshotFetcher
from nodeagent.worker_folders import NodeFolders
from nodeagent.worker_manager import WorkerManager
from nodeagent.zygote_pool import ZygotePool
from schemas.ids import WorkerId
from schemas.messages.worker import Forked
from tests.support.builders import N1, A, node_spec, run

FIRST = WorkerId(f"{A}.v1.r0")


class Forking:
    """A zygote that starts a process which waits for a signal."""

    def __init__(self) -> None:
        code = "import signal; print(flush=True); signal.pause()"
        self.child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.child.stdout is not None
        self.child.stdout.readline()

    async def fork(self, _: str, folder: Path) -> Forked:
        ticks = start_ticks(self.child.pid)
        assert ticks is not None
        return Forked(folder=str(folder), pid=self.child.pid, started_ticks=ticks)

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()


async def test_a_worker_that_is_stopped_as_soon_as_it_started_gets_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "EXIT_FILE_LIMIT_S", 0.0)
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    folders.make()
    heard: asyncio.Queue[Event] = asyncio.Queue()
    zygote = Forking()

    def on_event(event: Event) -> None:
        heard.put_nowait(event)
        if isinstance(event, Started):
            manager.perform(Terminate(event.worker))

    manager = WorkerManager(
        node=N1,
        address="127.0.0.1",
        folders=folders,
        slots=node_spec().slots,
        python=sys.executable,
        grace_s=60.0,
        zygotes=cast(ZygotePool, zygote),
        shipper=LogShipper(N1, lambda _: None),
        fetcher=SnapshotFetcher(),
        on_event=on_event,
        may_read=lambda: True,
    )
    try:
        manager.perform(StartWorker(FIRST, 0, run(A)))
        events = [await asyncio.wait_for(heard.get(), 1.0) for _ in range(2)]
        assert [type(event) for event in events] == [Started, Ended]
    finally:
        manager.close()
