"""A state that is written down goes on like the one that was not; a damaged one is passed over."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.core.commands import Command
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal import take_snapshot as snapshot_process
from controlplane.journal.database import (
    JournalError,
    input_from,
)
from controlplane.journal.reader import Reader
from controlplane.journal.replay import Replayed, recover, replay
from controlplane.journal.snapshots import (
    PART_BYTES,
    copy_of,
    image_of,
    reactor_from,
    round_trips,
    write_snapshot,
)
from controlplane.journal.take_snapshot import save_state, take_snapshot
from controlplane.journal.writer import Writer
from schemas.ids import Seconds
from tests.support import builders
from tests.support.builders import N1, S0, S1, A
from tests.support.controller import Controller, cluster_of, running, training
from tests.support.recorded_history import of_jobs, of_sweeps, snapshot_at, write
from tests.support.sizes import examples
from tests.support.sweep_world import sweep_job

SEED: Final = 3
MAKERS: Final = {"jobs": of_jobs, "sweeps": of_sweeps}


# --- state and bytes


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=examples(40), deadline=None)
@example(seed=27, share=0.95)
@example(seed=136, share=0.0)  # a node clears a job of which it had named a process
@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0))
def test_a_restored_state_continues_like_the_original(kind: str, seed: int, share: float) -> None:
    history = MAKERS[kind](seed, 120).history
    half = int(share * len(history))
    first = replay((at, input_from(body)) for at, body in history[:half])
    second = copy_of(first)

    for at, body in history[half:]:
        assert second.handle(input_from(body), at) == first.handle(input_from(body), at)

    assert second.state == first.state
    assert second.totals == first.totals
    assert second.state.slot_index.order() == first.state.slot_index.order()


def test_a_sweep_over_100_partitions_is_encoded() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **sweep_job((1, 1), partitions=100))

    assert copy_of(controller.reactor).state == controller.state


def test_a_nan_reads_back_as_nan() -> None:
    controller = running(epochs=1)
    (job,) = controller.state.jobs.values()
    job.progress.train_loss = float("nan")

    image = image_of(controller.reactor)

    assert reactor_from(image).state != controller.state
    assert round_trips(image, controller.reactor)


def test_invalid_images_and_images_of_other_states_are_refused() -> None:
    assert not round_trips(image_of(Reactor()), running().reactor)
    for body in (b"", b"\x80", b"\xc1", b"\x81\xa5state\x93"):
        with pytest.raises(ValueError, match=r"."):
            reactor_from(body)


def test_an_inconsistent_image_is_refused() -> None:
    controller = training(cluster_of(n1=2), S0, S1)
    controller.tell(N1, builders.exited(A, rank=1, signal=9))
    whole = msgspec.msgpack.decode(image_of(controller.reactor))
    (job,) = whole["state"]["jobs"].values()
    job["workers"] = {}

    with pytest.raises(ValueError, match="its parts are inconsistent"):
        reactor_from(msgspec.msgpack.encode(whole))


# --- in a journal


@pytest.fixture(scope="module")
def told() -> Controller:
    return of_jobs(SEED, 150)


@pytest.fixture
def path(tmp_path: Path, told: Controller) -> Path:
    """A journal without snapshots."""
    write(tmp_path / "journal.sqlite", told.history)
    return tmp_path / "journal.sqlite"


def recovered(path: Path, warnings: list[str] | None = None) -> Replayed:
    with contextlib.closing(Reader(path)) as reader:
        return recover(reader, (warnings if warnings is not None else []).append)


def change(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def kept(path: Path) -> list[int]:
    with contextlib.closing(Reader(path)) as reader:
        return [snapshot.input for snapshot in reader.snapshots()]


def test_a_restart_reads_the_last_snapshot_and_later_inputs(path: Path, told: Controller) -> None:
    many = len(told.history)
    snapshot_at(path, 100)
    change(path, "DELETE FROM inputs WHERE id <= 100")

    found = recovered(path)

    assert (found.last, found.snapshot, found.at) == (many, 100, told.history[-1][0])
    assert found.reactor.state == told.state
    assert found.reactor.totals == told.reactor.totals


def test_the_two_latest_complete_snapshots_are_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.journal.snapshots.PART_BYTES", 100)
    change(path, "INSERT INTO snapshot_parts (input, body) VALUES (60, x'00')")  # incomplete
    assert kept(path) == []

    for number in (50, 100, 150, 150):
        snapshot_at(path, number)

    assert kept(path) == [150, 100]
    with contextlib.closing(sqlite3.connect(path)) as database:
        parts = database.execute("SELECT DISTINCT input FROM snapshot_parts ORDER BY 1").fetchall()
    assert parts == [(100,), (150,)]
    assert recovered(path).snapshot == 150


DAMAGES: Final = {
    "content": "UPDATE snapshot_parts SET body = CAST(body || 'x' AS BLOB) WHERE input = 100",
    "missing": "DELETE FROM snapshot_parts WHERE input = 100",
    "checksum": "UPDATE snapshots SET crc = crc + 1 WHERE input = 100",
    "format": "UPDATE snapshots SET format = 99 WHERE input = 100",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_snapshot_is_reported_and_the_earlier_one_used(
    damage: str, path: Path, told: Controller
) -> None:
    for number in (50, 100):
        snapshot_at(path, number)
    change(path, "DELETE FROM inputs WHERE id <= 50", DAMAGES[damage])
    warnings: list[str] = []

    found = recovered(path, warnings)

    assert (found.snapshot, found.reactor.state) == (50, told.state)
    (warning,) = warnings
    assert "snapshot 100" in warning


def test_without_a_good_snapshot_all_inputs_are_read_or_the_start_is_refused(
    path: Path, told: Controller
) -> None:
    snapshot_at(path, 100)
    change(path, DAMAGES["content"])

    found = recovered(path)
    assert (found.snapshot, found.reactor.state) == (0, told.state)

    change(path, "DELETE FROM inputs WHERE id <= 100")
    with pytest.raises(JournalError, match=r"^inputs 1 to 100 are not kept, .* restore a backup"):
        recovered(path)


@pytest.mark.parametrize("lost", [101, 120])
def test_a_missing_input_after_a_snapshot_is_named(path: Path, lost: int) -> None:
    snapshot_at(path, 100)
    change(path, f"DELETE FROM inputs WHERE id = {lost:d}")  # noqa: S608 - a number

    with pytest.raises(JournalError, match=rf"input {lost}: it is missing; restore a backup"):
        recovered(path)


def test_a_full_disk_leaves_existing_snapshots(path: Path) -> None:
    snapshot_at(path, 100)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            write_snapshot(database, 150, Seconds(0.0), b"x" * 10 * PART_BYTES)

    assert kept(path) == [100]
    assert recovered(path).snapshot == 100


def test_a_state_that_does_not_round_trip_is_not_written(
    path: Path, told: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_process, "round_trips", lambda *_: False)

    with pytest.raises(JournalError, match="the state does not read back as written"):
        save_state(path, told.reactor, len(told.history), Seconds(0.0))

    assert kept(path) == []


def test_inputs_are_numbered_after_the_last_snapshot(path: Path) -> None:
    last = take_snapshot(path)
    change(path, "DELETE FROM inputs")

    writer = Writer(path, lambda _: None)
    writer.close()

    assert writer.base == last > 0


# --- by another process, beside a writer


def test_a_snapshot_is_taken_beside_the_writer(path: Path, told: Controller) -> None:
    snapshot_at(path, 100)
    change(path, "DELETE FROM inputs WHERE id <= 100")
    with contextlib.closing(Writer(path, lambda _: None)):
        assert take_snapshot(path) == len(told.history)

    assert kept(path) == [len(told.history), 100]
    assert recovered(path).reactor.state == told.state
    with snapshot_process._exclusive(path) as alone:
        assert alone
        assert take_snapshot(path) == 0, "two snapshots are not taken at once"


def test_inputs_that_arrive_during_the_replay_are_left_to_the_next_snapshot(
    path: Path, told: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, last = Reactor.handle, len(told.history)

    def arriving(reactor: Reactor, event: Input, now: Seconds) -> list[Command]:
        change(path, f"INSERT OR IGNORE INTO inputs VALUES ({last + 1}, 1.0, x'80', 0)")  # noqa: S608
        change(path, "INSERT OR IGNORE INTO feed SELECT max(seq) + 1, body, crc FROM feed")
        return handle(reactor, event, now)

    monkeypatch.setattr(Reactor, "handle", arriving)

    assert take_snapshot(path) == last
    assert kept(path) == [last]
