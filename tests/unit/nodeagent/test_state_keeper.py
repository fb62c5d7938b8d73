"""States of sweeps on a node's disk: fetched, dropped, served, and found again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.folders import NodeFolders
from nodeagent.job_folders import answer
from nodeagent.states import StateKeeper, compare, serve_states
from schemas.host.state_files import StateFile, find_state, map_state, read_frames, write_state
from schemas.ids import JobId, NodeId, Term, WorkerId
from schemas.transport.state_transfer import MemoryTarget, StateUnavailableError, fetch_state
from schemas.wire.files import AskFiles, AskPiece, AskState, FileList, FilePiece
from schemas.wire.sweeps import (
    StateCopied,
    StateNotCopied,
    StateRef,
    StateSource,
    SweepDelta,
    UnitOrder,
    WantedState,
)
from tests.support.sizes import examples

JOB = JobId("search-1")
FRAMES = [b"header", b"x" * 100_000]
KEY = "a key of the sweep"
DIGEST = hashlib.sha256(b"".join(FRAMES)).hexdigest()


def order(attempt: int, trial: int = 0, version: int = 1) -> UnitOrder:
    return UnitOrder(
        attempt=attempt, worker=WorkerId("w"), trial=trial, values={}, state=None, sources=(),
        result=StateRef(trial=trial, version=version), epoch=1, partition=0, evaluate=False,
    )  # fmt: skip


def want(trial: int, version: int, *sources: str, digest: str = DIGEST) -> WantedState:
    return WantedState(
        state=StateRef(trial=trial, version=version, digest=digest),
        sources=tuple(StateSource(node=NodeId("n"), address=one) for one in sources),
    )


def delta(
    *wanted: WantedState, attempts: int = 9, revision: int = 1, units: Iterable[UnitOrder] = ()
) -> SweepDelta:
    return SweepDelta(
        job=JOB, term=Term(1), revision=revision, attempts=attempts, units=tuple(units),
        wanted=wanted, states_key=KEY,
    )  # fmt: skip


# --- which stay


def test_files_are_kept_if_they_are_wanted_in_progress_or_newer() -> None:
    files = [StateFile(0, 1, 3), StateFile(0, 2, 4), StateFile(1, 1, 5), StateFile(1, 2, 10)]
    ordered = delta(want(0, 2), units=[order(5)])

    found = compare(ordered, files, dict.fromkeys(files, DIGEST))
    assert (found.doomed, found.present, found.missing) == ((files[0],), (want(0, 2),), ())

    other = compare(delta(want(0, 2)), files[1:2], {files[1]: "00"})  # another digest
    assert (other.doomed, other.missing) == ((files[1],), (want(0, 2),))
    unfinished = [StateFile(0, 1, 0), StateFile(0, 2, 0), StateFile(0, 2, 4)]
    assert compare(delta(want(0, 2)), unfinished, {}).doomed == (unfinished[0], unfinished[2])


small = st.integers(0, 3)
state_files = st.builds(StateFile, small, small, st.integers(0, 6))


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(state_files), st.sets(state_files), st.sets(st.integers(1, 6)), st.integers(0, 6))
def test_no_state_that_may_be_needed_is_deleted(
    files: set[StateFile], kept: set[StateFile], under_way: set[int], attempts: int
) -> None:
    wanted = [want(file.trial, file.version) for file in kept]
    ordered = delta(*wanted, attempts=attempts, units=[order(one) for one in under_way])

    found = compare(ordered, files, dict.fromkeys(files, DIGEST))

    names = {(file.trial, file.version) for file in kept}
    for file in files - set(found.doomed):
        safe = (file.trial, file.version) in names or file.attempt in under_way
        assert safe or file.attempt > attempts
    for file in found.doomed:
        assert (file.trial, file.version) not in names
        assert file.attempt not in under_way


# --- on a disk


class Node:
    """A keeper, and what it publishes."""

    def __init__(self, home: Path) -> None:
        self.folders = NodeFolders(home / "run", home / "work", home / "checkpoints")
        self.folder = self.folders.states(JOB)
        self.heard: asyncio.Queue[StateCopied | StateNotCopied] = asyncio.Queue()
        self.keeper = StateKeeper(self.folders, self.heard.put_nowait)
        self.server = serve_states(self.folders, self.keeper.key, "127.0.0.1", 0)

    @property
    def address(self) -> str:
        assert self.server is not None
        return self.server.address

    def has(self, trial: int, version: int, attempt: int = 1) -> Path:
        """A state that was trained here."""
        write_state(self.folder, StateFile(trial, version, attempt), FRAMES, DIGEST)
        return self.folder / StateFile(trial, version, attempt).name

    async def hears(self) -> StateCopied | StateNotCopied:
        return await asyncio.wait_for(self.heard.get(), 60.0)

    async def settled(self, *wanted: WantedState, **words: int) -> list[str]:
        """The names that stay, once a state that is certainly missing was said to be."""
        self.keeper.keep(delta(*wanted, want(99, 1), **words))
        while (await self.hears()).trial != 99:
            pass
        return sorted(path.name for path in self.folder.iterdir())

    def close(self) -> None:
        self.keeper.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    found = Node(tmp_path / "a"), Node(tmp_path / "b")
    yield found
    for node in found:
        node.close()


Nodes = tuple[Node, Node]


def copied(trial: int, version: int) -> StateCopied:
    return StateCopied(job=JOB, trial=trial, version=version)


async def test_a_wanted_state_is_fetched_once_and_reported_for_each_delta(nodes: Nodes) -> None:
    here, there = nodes
    os.truncate(here.has(5, 2), 1000)
    here.keeper.keep(delta(want(5, 2)))
    gone = "the state is not on this node's disk any more"
    assert await here.hears() == StateNotCopied(job=JOB, trial=5, version=2, reason=gone)

    here.keeper.keep(delta(want(3, 2, there.address)))
    missed = await here.hears()
    assert isinstance(missed, StateNotCopied)
    assert missed.reason == (
        f"state 2 of trial 3 is not available: {there.address}: not available here; it will be trained again"
    )
    there.has(3, 2)
    there.keeper.keep(delta(want(3, 2)))

    for revision in (2, 3):
        here.keeper.keep(delta(want(3, 2, there.address), revision=revision))
        assert await here.hears() == copied(3, 2)

    path = find_state(here.folder, 3, 2, DIGEST)
    assert path == here.folder / "3-2-0.state"
    assert [bytes(frame) for frame in read_frames(map_state(path), DIGEST)] == FRAMES


async def test_states_that_are_not_wanted_are_deleted_finished_or_not(nodes: Nodes) -> None:
    here, _ = nodes
    here.has(0, 1, 1)
    here.has(0, 2, 2)
    here.has(5, 1, 12)
    (here.folder / "0-3-3.state.new").write_bytes(b"torn")
    (here.folder / "data").mkdir()

    assert await here.settled(want(0, 2)) == ["0-2-2.state", "5-1-12.state", "data"]


async def test_the_fetch_of_a_state_that_is_not_wanted_any_more_ends(nodes: Nodes) -> None:
    here, _ = nodes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.keeper.keep(delta(want(3, 2, f"127.0.0.1:{silent.getsockname()[1]}")))
        while not (here.folder / "3-2-0.state.new").exists():
            await asyncio.sleep(0)

        assert await here.settled(revision=2) == []
    assert here.heard.empty()


async def test_a_full_disk_is_reported_and_leaves_no_file(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = nodes
    there.has(3, 2)
    there.keeper.keep(delta(want(3, 2)))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    here.keeper.keep(delta(want(3, 2, there.address)))

    missed = await here.hears()
    assert isinstance(missed, StateNotCopied)
    assert "No space left on device" in missed.reason
    assert list(here.folder.iterdir()) == []


async def test_data_of_a_forgotten_job_are_deleted_and_its_states_kept(nodes: Nodes) -> None:
    here, _ = nodes
    path = here.has(0, 2, 2)
    (here.folder / "data").mkdir()

    here.keeper.forget(JOB)
    while (here.folder / "data").exists():
        await asyncio.sleep(0)

    assert path.exists()


async def test_a_state_is_served_only_for_its_digest_and_with_a_key(nodes: Nodes) -> None:
    here, _ = nodes
    here.has(3, 2)

    def got(job: str = JOB, digest: str = DIGEST) -> str:
        one = AskState(job=JobId(job), trial=3, version=2, digest=digest, offset=0)
        return fetch_state([here.address], one, KEY, MemoryTarget(), lambda: None)

    with pytest.raises(StateUnavailableError, match="not available here"):
        await asyncio.to_thread(got)  # the agent has no key of the sweep yet
    here.keeper.keep(delta(want(3, 2)))
    assert await asyncio.to_thread(got) == here.address
    for job, digest in (("../states/search-1", DIGEST), ("other-1", DIGEST), (JOB, "00" * 32)):
        with pytest.raises(StateUnavailableError, match="not available here"):
            await asyncio.to_thread(got, job, digest)


def test_a_taken_port_does_not_stop_the_agent(tmp_path: Path) -> None:
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    first = serve_states(folders, str, "127.0.0.1", 0)
    assert first is not None

    assert serve_states(folders, str, "127.0.0.1", first.port) is None
    first.close()


async def test_states_are_listed_and_read_as_files_of_a_job(nodes: Nodes) -> None:
    here, _ = nodes
    path = here.has(3, 2)
    (here.folder / "data").mkdir()
    (here.folder / "data" / "partition-0.data").write_bytes(b"staged")

    listed = answer(AskFiles(request="1", job=JOB), here.folders)
    assert isinstance(listed, FileList)
    assert [(info.area, info.path) for info in listed.files] == [("states", "3-2-1.state")]
    asked = AskPiece(request="2", job=JOB, area="states", path="3-2-1.state", offset=0)
    piece = answer(asked, here.folders)
    assert isinstance(piece, FilePiece)
    assert piece.data == path.read_bytes()
