"""Stored output is read back as it was written, after repetitions, gaps, crashes and damage."""

from __future__ import annotations

import os
import resource
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.service.relay import log_store
from controlplane.service.relay.log_store import ENTRY_BYTES, INDEX_BYTES, LogStore, WorkerKey
from schemas.ids import JobId, Rank
from schemas.wire.feed import LOG, SAMPLES
from tests.support.builders import A, B
from tests.support.sizes import examples

R0, R1, V2 = (1, 0), (1, 1), (2, 0)  # (version, rank)
MUCH = 1 << 30
NOON = 43_200.0
Row = tuple[WorkerKey, int, bytes]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> LogStore:
    return LogStore(tmp_path, MUCH, clock)


@pytest.fixture
def reopened(tmp_path: Path, clock: Clock) -> LogStore:
    """The store after a restart: it opens its files when it is used first."""
    return LogStore(tmp_path, MUCH, clock)


def page(
    store: LogStore, cursor: int = 0, most: int = MUCH, rank: int | None = None, since: float = 0.0
) -> tuple[list[Row], int]:
    """Return workers, offsets and bytes of a page, and the next cursor."""
    chosen = None if rank is None else Rank(rank)
    pieces, after = store.read(A, LOG, chosen, cursor, most, since=since)
    return [((one.version, one.rank), one.offset, one.data) for one in pieces], after


def rows(store: LogStore, rank: int | None = None) -> list[Row]:
    return page(store, rank=rank)[0]


def data_file(folder: Path, who: WorkerKey = R0) -> Path:
    return folder / f"{A}.{LOG}" / f"{who[0]}.{who[1]}"


def index_file(folder: Path, who: WorkerKey = R0) -> Path:
    return folder / f"{A}.{LOG}" / f"{who[0]}.{who[1]}.index"


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """A disk that is full as soon as a file would grow beyond `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- chunks


def test_each_worker_has_its_output_in_order_and_workers_alternate(
    store: LogStore, clock: Clock
) -> None:
    store.append(A, LOG, R0, 0, b"one\n")
    store.append(A, LOG, R1, 0, b"other\n")
    clock.now += 1
    store.append(A, LOG, R0, 4, b"two\n")
    store.append(A, LOG, V2, 0, b"again\n")

    assert rows(store) == [(R0, 0, b"one\ntwo\n"), (R1, 0, b"other\n"), (V2, 0, b"again\n")]


def test_streams_of_jobs_are_separate(store: LogStore) -> None:
    for job, stream in ((A, LOG), (A, SAMPLES), (B, LOG)):
        store.append(job, stream, R0, 0, f"{stream} of {job}".encode())

    for job, stream in ((A, LOG), (A, SAMPLES), (B, LOG)):
        (piece,), _ = store.read(job, stream, None, 0, MUCH)
        assert piece.data == f"{stream} of {job}".encode()


def test_only_new_bytes_without_a_gap_are_stored(store: LogStore) -> None:
    assert store.append(A, LOG, R0, 3, b"def") == 0  # a gap
    assert store.append(A, LOG, R0, 0, b"abcd") == 4
    assert store.append(A, LOG, R0, 0, b"abcd") == 4  # a repetition
    assert store.append(A, LOG, R0, 2, b"cdef") == 6  # an overlap
    assert store.append(A, LOG, R0, 6, b"") == 6

    assert store.stored(A, LOG, R0) == (6, False)
    assert store.stored(A, LOG, R1) == (0, False)
    assert rows(store) == [(R0, 0, b"abcdef")]


def test_a_restart_continues_every_worker(store: LogStore, reopened: LogStore) -> None:
    store.append(A, LOG, R0, 0, b"abc")
    store.end(A, LOG, R0, 3)
    store.append(A, LOG, R1, 0, b"de")

    assert reopened.stored(A, LOG, R0) == (3, True)
    assert reopened.append(A, LOG, R1, 2, b"f") == 3
    assert rows(reopened) == [(R0, 0, b"abc"), (R1, 0, b"def")]


def test_the_index_has_an_entry_per_time_or_size_and_not_per_line(
    store: LogStore, tmp_path: Path, clock: Clock
) -> None:
    for number in range(1000):
        store.append(A, LOG, R0, 5 * number, b"line\n")
        clock.now += 0.02  # 20 s of output

    assert index_file(tmp_path).stat().st_size <= 40 * ENTRY_BYTES
    store.append(A, LOG, R1, 0, b"x" * 3 * INDEX_BYTES)
    assert index_file(tmp_path, R1).stat().st_size == 3 * ENTRY_BYTES


# --- ends


def test_an_end_is_accepted_once_all_bytes_before_it_are_stored(
    store: LogStore, reopened: LogStore
) -> None:
    store.append(A, LOG, R0, 0, b"abc")
    assert store.end(A, LOG, R0, 5) is False
    assert store.stored(A, LOG, R0) == (3, False)
    store.append(A, LOG, R0, 3, b"de")

    assert (store.end(A, LOG, R0, 5), store.end(A, LOG, R0, 5)) == (True, True)
    assert store.end(A, LOG, R1, 0) is True  # a worker without output
    assert rows(store) == [(R0, 0, b"abcde")]
    assert (reopened.stored(A, LOG, R0), reopened.stored(A, LOG, R1)) == ((5, True), (0, True))


# --- damage


@pytest.mark.parametrize("lost", range(1, ENTRY_BYTES))
def test_a_torn_entry_is_removed_and_the_output_kept(
    store: LogStore, reopened: LogStore, tmp_path: Path, lost: int
) -> None:
    store.append(A, LOG, R0, 0, b"first")
    store.end(A, LOG, R0, 5)
    os.truncate(index_file(tmp_path), ENTRY_BYTES - lost)

    assert reopened.stored(A, LOG, R0) == (5, False)
    assert reopened.end(A, LOG, R0, 5) is True
    assert rows(reopened) == [(R0, 0, b"first")]


def written_at_three_times(store: LogStore, clock: Clock) -> bytes:
    """Three entries of one worker, and other output between them."""
    for number in range(3):
        store.append(A, LOG, R0, 10 * number, b"%d of first" % number)
        store.append(A, LOG, R1, 10 * number, b"%d of other" % number)
        page(store)
        clock.now += 1
    return b"0 of first1 of first2 of first"


@pytest.mark.parametrize("place", range(0, 3 * ENTRY_BYTES, 3))
def test_a_damaged_entry_loses_no_byte(
    store: LogStore, reopened: LogStore, tmp_path: Path, clock: Clock, place: int
) -> None:
    output = written_at_three_times(store, clock)
    data = bytearray(index_file(tmp_path).read_bytes())
    data[place] ^= 0xC1
    index_file(tmp_path).write_bytes(data)

    found, cursor = page(reopened, most=1)
    while (more := page(reopened, cursor, most=1))[0]:
        found, cursor = found + more[0], more[1]

    assert b"".join(part for who, _, part in found if who == R0) == output
    assert [offset for who, offset, _ in found if who == R1] == [0, 10, 20]


def test_a_missing_index_costs_order_and_times_only(
    store: LogStore, reopened: LogStore, tmp_path: Path, clock: Clock
) -> None:
    output = written_at_three_times(store, clock)
    index_file(tmp_path).unlink()

    assert rows(reopened, rank=0) == [(R0, 0, output)]


def test_lost_bytes_are_requested_again_from_their_worker(
    store: LogStore, reopened: LogStore, tmp_path: Path, clock: Clock
) -> None:
    output = written_at_three_times(store, clock)
    os.truncate(data_file(tmp_path), 15)

    assert reopened.stored(A, LOG, R0) == (15, False)
    assert reopened.append(A, LOG, R0, 15, output[15:]) == 30
    assert b"".join(part for _, _, part in rows(reopened, rank=0)) == output


def test_bytes_lost_while_the_controller_runs_are_noted(
    store: LogStore, tmp_path: Path, clock: Clock
) -> None:
    written_at_three_times(store, clock)
    os.truncate(data_file(tmp_path), 15)

    found = [part for _, _, part in rows(store, rank=0)]

    lost = b"[ones: %d bytes of stored output cannot be read]\n"
    assert found == [b"0 of first", lost % 5 + b"1 of ", lost % 10]


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_full_disk_stores_nothing_and_a_repetition_stores_all(
    store: LogStore, reopened: LogStore, tmp_path: Path, size: int
) -> None:
    store.append(A, LOG, R0, 0, b"before")
    with no_file_beyond(6 + size // 2), pytest.raises(OSError, match="too large"):
        store.append(A, LOG, R0, 6, b"x" * size)

    assert data_file(tmp_path).read_bytes() == b"before"
    assert store.append(A, LOG, R0, 6, b"x" * size) == 6 + size
    assert rows(store) == rows(reopened) == [(R0, 0, b"before" + b"x" * size)]


def test_output_is_read_while_the_index_cannot_be_written(store: LogStore) -> None:
    store.append(A, LOG, R0, 0, b"before")
    first = page(store)
    store.append(A, LOG, R0, 6, b"later")

    with no_file_beyond(ENTRY_BYTES):
        assert page(store) == first
    assert page(store, first[1])[0] == [(R0, 6, b"later")]


# --- the bound


def test_output_beyond_the_bound_is_accepted_dropped_and_noted(tmp_path: Path) -> None:
    bounded = LogStore(tmp_path, 10, Clock())
    bounded.append(A, LOG, R0, 0, b"12345678")
    bounded.append(A, LOG, R0, 8, b"90ab")

    assert bounded.append(A, LOG, R0, 12, b"never seen") == 22
    assert bounded.append(A, LOG, R1, 0, b"never seen either") == 17
    assert bounded.append(B, LOG, R0, 0, b"of another") == 10
    assert bounded.end(A, LOG, R0, 22) is True

    note = b"\n[ones: output beyond 10 bytes of a job is not kept]\n"
    assert rows(bounded) == [(R0, 0, b"1234567890ab"), ((0, 0), 0, note)]
    assert bounded.stored(A, LOG, R0) == (22, True)
    assert bounded.full(A, LOG)
    again = LogStore(tmp_path, 10, Clock())
    again.append(A, LOG, R1, 0, b"more")
    assert rows(again) == rows(bounded)


# --- pages


def test_pages_follow_each_other(store: LogStore, clock: Clock) -> None:
    assert page(store) == page(store, -1) == page(store, 99) == ([], 0)
    written_at_three_times(store, clock)
    whole, end = page(store)

    found, cursor = page(store, most=25)
    assert [len(part) for _, _, part in found] == [10, 10]
    while (more := page(store, cursor, most=1))[0]:
        assert len(more[0]) == 1
        found, cursor = found + more[0], more[1]

    assert (found, cursor) == (whole, end)
    assert page(store, 1 << 63) == ([], end)
    store.append(A, LOG, R0, 30, b"later")
    assert page(store, end)[0] == [(R0, 30, b"later")]


def test_a_page_of_many_workers_reads_little_of_each(
    store: LogStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [(1, rank) for rank in range(50)]
    lines = [b"%03d\n" % number for number in range(100)]
    for line in lines:
        for who in workers:
            store.append(A, LOG, who, 4 * lines.index(line), line)
        clock.now += 60.0
    page(store)
    read = log_store._read
    sizes: list[int] = []
    data = {data_file(store.folder, who) for who in workers}

    def watched(path: Path, at: int, size: int) -> bytes:
        sizes.extend([size] * (path in data))
        return read(path, at, size)

    monkeypatch.setattr(log_store, "_read", watched)
    found, _ = page(store, most=1000)

    said: dict[WorkerKey, bytes] = defaultdict(bytes)
    for who, _, piece in found:
        said[who] += piece
    assert said == dict.fromkeys(workers, b"".join(lines)[:20])
    assert sizes == [1000 // 50] * 50


def test_a_page_of_one_rank_has_no_other(store: LogStore, clock: Clock) -> None:
    written_at_three_times(store, clock)

    first, cursor = page(store, most=20, rank=1)
    second, end = page(store, cursor, most=20, rank=1)

    assert [offset for _, offset, _ in first + second] == [0, 10, 20]
    assert page(store, end, rank=1) == ([], end)


def test_a_page_begins_at_a_time(store: LogStore, reopened: LogStore, clock: Clock) -> None:
    written_at_three_times(store, clock)

    found, _ = page(reopened, since=NOON + 1)

    assert [part[:1] for _, _, part in found] == [b"1", b"1", b"2", b"2"]
    pieces, _ = store.read(A, LOG, Rank(0), 0, MUCH)
    assert [piece.time for piece in pieces] == [NOON, NOON + 1, NOON + 2]


def test_a_clock_that_steps_back_keeps_the_order(
    store: LogStore, reopened: LogStore, clock: Clock
) -> None:
    written_at_three_times(store, clock)
    _, cursor = page(store)
    clock.now = 1.0

    reopened.append(A, LOG, R1, 30, b"later")

    assert page(reopened, cursor)[0] == [(R1, 30, b"later")]


# --- many streams


def test_streams_out_of_memory_are_opened_again(tmp_path: Path) -> None:
    store = LogStore(tmp_path, MUCH, Clock(), known=2)
    jobs = [JobId(f"a-{number}") for number in range(5)]
    for offset, data in ((0, b"one\n"), (4, b"two\n")):
        for job in jobs:
            assert store.append(job, LOG, R0, offset, data) == offset + 4

    assert len(store._streams) == 2
    for job in jobs:
        pieces, _ = store.read(job, LOG, None, 0, MUCH)
        assert b"".join(piece.data for piece in pieces) == b"one\ntwo\n"


def test_a_deleted_stream_starts_anew(store: LogStore, tmp_path: Path) -> None:
    store.append(A, LOG, R0, 0, b"old")
    (used,) = store.usage()
    assert (used.name, used.size >= 3, used.at > NOON) == (f"{A}.{LOG}", True, True)

    store.forget(used.name)
    store.forget(used.name)

    assert (store.usage(), list(tmp_path.iterdir())) == ([], [])
    assert store.append(A, LOG, R0, 0, b"new") == 3
    assert rows(store) == [(R0, 0, b"new")]


# --- any order of chunks


@st.composite
def deliveries(
    draw: st.DrawFn,
) -> tuple[dict[WorkerKey, bytes], list[tuple[WorkerKey, int, bytes]], list[int]]:
    """Output of a few workers, cut into chunks of which some are repeated, and restarts."""
    written = draw(
        st.dictionaries(st.sampled_from([R0, R1, V2]), st.binary(max_size=60), min_size=1)
    )
    sent = dict.fromkeys(written, 0)
    chunks = []
    for _ in range(draw(st.integers(0, 25))):
        who = draw(st.sampled_from(sorted(written)))
        start = draw(st.integers(0, sent[who]))  # never after the stored bytes
        end = draw(st.integers(start, len(written[who])))
        chunks.append((who, start, written[who][start:end]))
        sent[who] = max(sent[who], end)
    for who, data in written.items():
        chunks.append((who, sent[who], data[sent[who] :]))
    return written, chunks, draw(st.lists(st.integers(0, len(chunks) - 1), max_size=3))


@settings(max_examples=examples(100), deadline=None)
@given(delivery=deliveries(), most=st.integers(1, 40))
def test_any_chunks_with_repetitions_and_restarts_are_followed_without_loss(
    tmp_path_factory: pytest.TempPathFactory,
    delivery: tuple[dict[WorkerKey, bytes], list[tuple[WorkerKey, int, bytes]], list[int]],
    most: int,
) -> None:
    written, chunks, restarts = delivery
    folder, clock = tmp_path_factory.mktemp("logs"), Clock()
    store, cursor = LogStore(folder, MUCH, clock), 0
    read: defaultdict[WorkerKey, bytes] = defaultdict(bytes)

    def follow() -> bool:
        nonlocal cursor
        found, cursor = page(store, cursor, most)
        for who, offset, data in found:
            assert offset == len(read[who])
            read[who] += data
        return bool(found)

    for place, (who, offset, data) in enumerate(chunks):
        if place in restarts:
            store = LogStore(folder, MUCH, clock)
            follow()
        clock.now += 0.2
        store.append(A, LOG, who, offset, data)
    while follow():
        pass

    assert {who: read[who] for who in written} == written
    assert all(store.end(A, LOG, who, len(data)) for who, data in written.items())
