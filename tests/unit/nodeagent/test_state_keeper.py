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
from schemas.transport import MemoryTarget, StateUnavailableError, fetch_state
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
        wanted=wanted,
    )  # fmt: skip


# --- which stay


def test_what_is_not_wanted_goes_unless_its_attempt_is_under_way_or_newer() -> None:
    files = [StateFile(0, 1, 3), StateFile(0, 2, 4), StateFile(1, 1, 5), StateFile(1, 2, 10)]
    digests = dict.fromkeys(files, DIGEST)

    found = compare(delta(want(0, 2), units=[order(5)]), files, digests)

    assert found.doomed == (StateFile(0, 1, 3),)
    assert found.present == (want(0, 2),)
    assert found.missing == ()


def test_a_file_with_another_digest_is_not_the_state_that_is_wanted() -> None:
    file = StateFile(0, 2, 4)

    found = compare(delta(want(0, 2)), [file], {file: "00"})

    assert (found.doomed, found.missing) == ((file,), (want(0, 2),))


def test_a_part_of_a_file_goes_unless_it_is_coming() -> None:
    unfinished = [StateFile(0, 1, 0), StateFile(0, 2, 0), StateFile(0, 2, 4)]

    found = compare(delta(want(0, 2)), unfinished, {})

    assert found.doomed == (StateFile(0, 1, 0), StateFile(0, 2, 4))


small = st.integers(0, 3)
state_files = st.builds(StateFile, small, small, st.integers(0, 6))


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(state_files), st.sets(state_files), st.sets(st.integers(1, 6)), st.integers(0, 6))
def test_nothing_that_may_be_needed_is_ever_dropped(
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
        self.server = serve_states(self.folders, "127.0.0.1", 0)

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


async def test_a_wanted_state_comes_from_another_nodes_disk(nodes: Nodes) -> None:
    here, there = nodes
    there.has(3, 2)

    here.keeper.keep(delta(want(3, 2, there.address)))

    assert await here.hears() == copied(3, 2)
    path = find_state(here.folder, 3, 2, DIGEST)
    assert path == here.folder / "3-2-0.state"
    assert [bytes(frame) for frame in read_frames(map_state(path), DIGEST)] == FRAMES


async def test_a_state_that_is_there_is_said_to_be_again_in_case_that_was_lost(
    nodes: Nodes,
) -> None:
    here, there = nodes
    here.has(3, 2)

    here.keeper.keep(delta(want(3, 2, there.address)))
    assert await here.hears() == copied(3, 2)
    here.keeper.keep(delta(want(3, 2, there.address), revision=2))
    assert await here.hears() == copied(3, 2)


async def test_what_nobody_gives_is_told_and_tried_again_with_the_next_order(nodes: Nodes) -> None:
    here, there = nodes
    here.keeper.keep(delta(want(3, 2, there.address)))
    missed = await here.hears()
    assert isinstance(missed, StateNotCopied)
    assert missed.reason == (
        f"state 2 of trial 3 is not available: {there.address}: not available here; it will be trained again"
    )

    there.has(3, 2)
    here.keeper.keep(delta(want(3, 2, there.address), revision=2))

    assert await here.hears() == copied(3, 2)


async def test_a_state_that_should_be_here_and_is_gone_is_told(nodes: Nodes) -> None:
    here, _ = nodes
    os.truncate(here.has(3, 2), 1000)

    here.keeper.keep(delta(want(3, 2)))

    assert await here.hears() == StateNotCopied(
        job=JOB, trial=3, version=2, reason="the state is not on this node's disk any more"
    )


async def test_states_that_are_not_wanted_are_dropped_with_what_is_not_finished(
    nodes: Nodes,
) -> None:
    here, _ = nodes
    here.has(0, 1, 1)
    here.has(0, 2, 2)
    here.has(5, 1, 12)
    (here.folder / "0-3-3.state.new").write_bytes(b"torn")
    (here.folder / "data").mkdir()

    assert await here.settled(want(0, 2)) == ["0-2-2.state", "5-1-12.state", "data"]


async def test_a_state_that_is_not_wanted_any_more_is_not_waited_for(nodes: Nodes) -> None:
    here, _ = nodes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.keeper.keep(delta(want(3, 2, f"127.0.0.1:{silent.getsockname()[1]}")))
        while not (here.folder / "3-2-0.state.new").exists():
            await asyncio.sleep(0)

        assert await here.settled(revision=2) == []
    assert here.heard.empty()


async def test_a_full_disk_is_told_and_leaves_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = nodes
    there.has(3, 2)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    here.keeper.keep(delta(want(3, 2, there.address)))

    missed = await here.hears()
    assert isinstance(missed, StateNotCopied)
    assert "No space left on device" in missed.reason
    assert list(here.folder.iterdir()) == []


async def test_a_forgotten_jobs_data_go_and_its_last_states_stay(nodes: Nodes) -> None:
    here, _ = nodes
    path = here.has(0, 2, 2)
    (here.folder / "data").mkdir()

    here.keeper.forget(JOB)
    while (here.folder / "data").exists():
        await asyncio.sleep(0)

    assert path.exists()


async def test_only_who_names_the_digest_gets_a_state_and_only_a_state(nodes: Nodes) -> None:
    here, _ = nodes
    here.has(3, 2)
    asked = AskState(job=JOB, trial=3, version=2, digest=DIGEST, offset=0)

    def got(job: str = JOB, digest: str = DIGEST) -> str:
        one = AskState(job=JobId(job), trial=3, version=2, digest=digest, offset=0)
        return fetch_state([here.address], one, MemoryTarget(), lambda: None)

    assert asked.digest == DIGEST
    assert await asyncio.to_thread(got) == here.address
    for job, digest in (("../states/search-1", DIGEST), ("other-1", DIGEST), (JOB, "00" * 32)):
        with pytest.raises(StateUnavailableError, match="not available here"):
            await asyncio.to_thread(got, job, digest)


def test_a_port_that_is_taken_is_no_reason_to_stop(tmp_path: Path) -> None:
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    first = serve_states(folders, "127.0.0.1", 0)
    assert first is not None

    assert serve_states(folders, "127.0.0.1", first.port) is None
    first.close()


async def test_states_are_among_the_files_that_a_job_made(nodes: Nodes) -> None:
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
