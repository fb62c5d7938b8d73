"""Output comes back as it was written, whatever arrived twice, too early or not at all."""

from __future__ import annotations

import resource
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.service.log_store import LENGTH, LogStore, WorkerKey
from schemas.errors import BadFieldError
from schemas.ids import JobId, Rank, Version
from schemas.wire.feed import LOG, SAMPLES, LogPiece
from tests.support.builders import A, B
from tests.support.sizes import examples

R0, R1, V2 = (1, 0), (1, 1), (2, 0)  # (version, rank)
MUCH = 1 << 30


def midday() -> float:
    return 12.0


def piece(data: bytes, offset: int = 0, who: WorkerKey = R0, time: float = 12.0) -> LogPiece:
    version, rank = who
    return LogPiece(version=Version(version), rank=Rank(rank), offset=offset, data=data, time=time)


def all_of(store: LogStore, rank: int | None = None) -> list[LogPiece]:
    pieces, _ = store.read(A, LOG, None if rank is None else Rank(rank), 0, MUCH)
    return pieces


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore(tmp_path / "logs", MUCH, midday)


@pytest.fixture
def reopened(tmp_path: Path) -> LogStore:
    """The same folder, opened when the test asks for it first."""
    return LogStore(tmp_path / "logs", MUCH, midday)


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


# --- what is stored


def test_pieces_are_read_in_order_of_arrival(store: LogStore) -> None:
    store.append(A, LOG, R0, 0, b"one\n")
    store.append(A, LOG, R1, 0, b"other\n")
    store.append(A, LOG, R0, 4, b"two\n")
    store.append(A, LOG, V2, 0, b"again\n")

    assert all_of(store) == [
        piece(b"one\n"),
        piece(b"other\n", who=R1),
        piece(b"two\n", offset=4),
        piece(b"again\n", who=V2),
    ]


def test_output_stored_before_a_time_is_skipped(tmp_path: Path) -> None:
    clock = iter((100.0, 200.0, 300.0))
    store = LogStore(tmp_path, MUCH, lambda: next(clock))
    store.append(A, LOG, R0, 0, b"early\n")
    store.append(A, LOG, R1, 0, b"then\n")
    store.append(A, LOG, R0, 6, b"late\n")

    pieces, cursor = LogStore(tmp_path, MUCH, midday).read(A, LOG, None, 0, MUCH, since=200.0)

    assert pieces == [piece(b"then\n", who=R1, time=200.0), piece(b"late\n", offset=6, time=300.0)]
    assert store.read(A, LOG, None, cursor, MUCH) == ([], cursor)


def test_records_without_a_time_count_as_old(tmp_path: Path) -> None:
    header = msgspec.msgpack.encode((*R0, 0, 4, False))
    (tmp_path / f"{A}.{LOG}").write_bytes(LENGTH.pack(len(header)) + header + b"old\n")
    store = LogStore(tmp_path, MUCH, midday)

    store.append(A, LOG, R0, 4, b"new\n")

    assert all_of(store) == [piece(b"old\n", time=0.0), piece(b"new\n", offset=4)]
    pieces, _ = store.read(A, LOG, None, 0, MUCH, since=1.0)
    assert pieces == [piece(b"new\n", offset=4)]


def test_jobs_streams_and_workers_do_not_mix(store: LogStore) -> None:
    written = {(A, LOG): b"log of a", (A, SAMPLES): b"samples of a", (B, LOG): b"log of b"}
    for (job, stream), data in written.items():
        assert store.append(job, stream, R0, 0, data) == len(data)

    assert {key: store.read(*key, None, 0, MUCH)[0] for key in written} == {
        key: [piece(data)] for key, data in written.items()
    }
    assert (store.stored(A, LOG, R0), store.stored(A, LOG, R1)) == ((8, False), (0, False))


def test_a_gap_is_refused_until_it_is_filled(store: LogStore) -> None:
    assert store.append(A, LOG, R0, 3, b"def") == 0
    assert all_of(store) == []

    assert store.append(A, LOG, R0, 0, b"abc") == 3
    assert store.append(A, LOG, R0, 3, b"def") == 6


def test_a_reopened_store_continues(store: LogStore, reopened: LogStore) -> None:
    store.append(A, LOG, R0, 0, b"abc")
    store.end(A, LOG, R0, 3)
    store.append(A, LOG, R1, 0, b"de")

    assert reopened.stored(A, LOG, R0) == (3, True)
    assert reopened.append(A, LOG, R1, 2, b"f") == 3
    assert all_of(reopened) == [piece(b"abc"), piece(b"de", who=R1), piece(b"f", 2, R1)]


# --- ends


def test_an_end_is_recorded_once_when_all_output_before_it_is_stored(
    store: LogStore, reopened: LogStore
) -> None:
    store.append(A, LOG, R0, 0, b"abc")

    assert store.end(A, LOG, R0, 5) is False
    assert store.stored(A, LOG, R0) == (3, False)
    store.append(A, LOG, R0, 3, b"de")
    assert store.end(A, LOG, R0, 5) is True
    size = inside(store)
    assert store.end(A, LOG, R0, 5) is True
    assert store.end(A, LOG, R1, 0) is True

    assert inside(store) > size, "only the end of the other worker was written"
    assert all_of(store) == [piece(b"abc"), piece(b"de", offset=3)]
    assert [reopened.stored(A, LOG, who) for who in (R0, R1)] == [(5, True), (0, True)]


# --- damage


@pytest.mark.parametrize("lost", range(1, 12))
@pytest.mark.parametrize("data", [b"torn", b""], ids=["output", "end"])
def test_a_torn_last_record_is_cut_off_and_accepted_again(
    store: LogStore, reopened: LogStore, tmp_path: Path, lost: int, data: bytes
) -> None:
    def write_last(into: LogStore) -> bool:
        done = into.append(A, LOG, R0, 5, data) if data else into.end(A, LOG, R0, 5)
        return bool(done)

    store.append(A, LOG, R0, 0, b"first")
    write_last(store)
    path = tmp_path / "logs" / f"{A}.{LOG}"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - lost)

    assert reopened.stored(A, LOG, R0) == (5, False)
    assert write_last(reopened)
    assert all_of(reopened) == [piece(b"first"), *[piece(data, offset=5)] * bool(data)]
    assert reopened.stored(A, LOG, R0) == (5 + len(data), not data)


def flipped(folder: Path, place: int, bit: int = 0xC1) -> bytes:
    """One byte of the only file is another one."""
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)
    return bytes(data)


def damage(start: int, end: int) -> LogPiece:
    note = f"[ones: {end - start} bytes of stored output cannot be read]\n"
    return piece(note.encode(), start, (0, 0), time=0.0)


@pytest.mark.parametrize("place", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("first", [True, False], ids=["of the first record", "of another"])
def test_a_bad_byte_hides_only_its_record(
    store: LogStore, reopened: LogStore, tmp_path: Path, place: int, *, first: bool
) -> None:
    begins = 0
    if not first:
        store.append(A, LOG, V2, 0, b"first\n")
        begins = inside(store)
    store.append(A, LOG, R0, 0, b"second\n")
    ends = inside(store)
    store.append(A, LOG, R1, 0, b"third\n")
    store.append(A, LOG, R1, 6, b"fourth\n")
    data = flipped(tmp_path / "logs", begins + place)

    before = [] if first else [piece(b"first\n", who=V2)]
    behind = [piece(b"third\n", who=R1), piece(b"fourth\n", 6, R1)]
    assert all_of(reopened) == [*before, damage(begins, ends), *behind]
    assert next((tmp_path / "logs").iterdir()).read_bytes() == data
    assert reopened.stored(A, LOG, R0) == (0, False)
    assert reopened.append(A, LOG, R0, 0, b"second\n") == 7
    again = LogStore(tmp_path / "logs", MUCH, midday)
    assert all_of(again) == [*before, damage(begins, ends), *behind, piece(b"second\n")]
    assert again.read(A, LOG, None, begins, 1) == ([damage(begins, ends)], ends)
    assert again.read(A, LOG, Rank(1), ends, 1)[0] == [behind[0]]
    with pytest.raises(BadFieldError):
        again.read(A, LOG, None, begins + 2, MUCH)


def test_a_seemingly_torn_record_before_others_is_damage(
    store: LogStore, reopened: LogStore, tmp_path: Path
) -> None:
    store.append(A, LOG, R0, 0, b"x" * 300)
    ends = inside(store)
    store.append(A, LOG, R1, 0, b"third\n")
    header = LENGTH.size + 4
    assert (tmp_path / "logs" / f"{A}.{LOG}").read_bytes()[header : header + 3] == b"\xcd\x01\x2c"
    flipped(tmp_path / "logs", header + 1, 0xF0)  # 61 kB instead of 300 bytes

    assert all_of(reopened) == [damage(0, ends), piece(b"third\n", who=R1)]
    reopened.append(A, LOG, R1, 6, bytes(100_000))
    assert all_of(reopened)[:2] == [damage(0, ends), piece(b"third\n", who=R1)]


def test_damage_at_the_end_stays_and_output_continues(
    store: LogStore, reopened: LogStore, tmp_path: Path
) -> None:
    store.append(A, LOG, R0, 0, b"first\n")
    begins = inside(store)
    store.append(A, LOG, R0, 6, b"second\n")
    ends = inside(store)
    flipped(tmp_path / "logs", begins)

    assert all_of(reopened) == [piece(b"first\n"), damage(begins, ends)]
    reopened.append(A, LOG, R0, 6, b"again\n")
    expected = [piece(b"first\n"), damage(begins, ends), piece(b"again\n", offset=6)]
    assert all_of(reopened) == expected
    assert all_of(LogStore(tmp_path / "logs", MUCH, midday)) == expected


@settings(max_examples=examples(150), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(1, 255),
)
def test_a_bad_byte_anywhere_hides_at_most_two_records(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], place: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    store, offset = LogStore(folder, MUCH, midday), 0
    for number, size in enumerate(sizes):
        store.append(A, LOG, R0, offset, bytes([97 + number]) * size)
        offset += size
    whole = all_of(store)
    flipped(folder, int(inside(store) * place), bit)

    found = all_of(LogStore(folder, MUCH, midday))

    assert len([one for one in whole if one not in found]) <= 2


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_full_disk_stores_no_partial_record(
    store: LogStore, reopened: LogStore, tmp_path: Path, size: int
) -> None:
    store.append(A, LOG, R0, 0, b"before")
    path = tmp_path / "logs" / f"{A}.{LOG}"
    whole = path.stat().st_size
    with no_file_beyond(whole + size // 2), pytest.raises(OSError, match="too large"):
        store.append(A, LOG, R0, 6, b"x" * size)

    assert path.stat().st_size == whole
    assert store.append(A, LOG, R0, 6, b"x" * size) == 6 + size
    assert store.append(A, LOG, R0, 6 + size, b"after") == 11 + size
    expected = [piece(b"before"), piece(b"x" * size, offset=6), piece(b"after", offset=6 + size)]
    assert all_of(store) == expected
    assert all_of(reopened) == expected


# --- the bound


def test_output_beyond_the_bound_of_a_stream_is_dropped_with_a_note(tmp_path: Path) -> None:
    bounded = LogStore(tmp_path / "logs", 10, midday)
    bounded.append(A, LOG, R0, 0, b"12345678")
    bounded.append(A, LOG, R0, 8, b"90ab")

    assert bounded.append(A, LOG, R0, 12, b"never seen") == 22
    assert bounded.append(A, LOG, R1, 0, b"never seen either") == 17
    assert bounded.end(A, LOG, R0, 22) is True
    again = LogStore(tmp_path / "logs", 10, midday)
    again.append(A, LOG, R1, 17, b"more")
    again.append(B, LOG, R0, 0, b"gh")

    kept = b"".join(found.data for found in all_of(again))
    assert kept == b"1234567890ab\n[ones: output beyond 10 bytes of a job is not kept]\n"
    assert bounded.stored(A, LOG, R0) == (22, True)
    assert again.read(B, LOG, None, 0, MUCH)[0] == [piece(b"gh")]


# --- pages


def test_pages_end_before_a_piece_that_does_not_fit_and_cursors_read_later_output(
    store: LogStore,
) -> None:
    def read(cursor: int) -> tuple[list[int], int]:
        pieces, following = store.read(A, LOG, None, cursor, 25)
        return [found.offset for found in pieces], following

    assert [read(cursor) for cursor in (0, 99, -1)] == [([], 0)] * 3
    for number in range(4):
        store.append(A, LOG, R0, 10 * number, b"x" * 10)
    first, cursor = read(0)
    second, end = read(cursor)

    assert (first, second) == ([0, 10], [20, 30])
    assert read(end) == read(10**9) == ([], end)
    store.append(A, LOG, R0, 40, b"later")
    assert read(end) == ([40], inside(store))


def test_a_page_of_a_rank_skips_other_ranks(store: LogStore) -> None:
    for number in range(3):
        store.append(A, LOG, R0, 2 * number, b"zz")
        store.append(A, LOG, R1, 2 * number, b"oo")

    first, cursor = store.read(A, LOG, Rank(1), 0, 4)
    second, end = store.read(A, LOG, Rank(1), cursor, 4)

    assert first == [piece(b"oo", 0, R1), piece(b"oo", 2, R1)]
    assert second == [piece(b"oo", 4, R1)]
    assert store.read(A, LOG, Rank(1), end, 4) == ([], end)


def test_unused_streams_are_closed_and_continue_when_reopened(tmp_path: Path) -> None:
    store = LogStore(tmp_path, MUCH, midday, known=2)
    jobs = [JobId(f"a-{number}") for number in range(5)]
    for offset, data in ((0, b"one\n"), (4, b"two\n")):
        for job in jobs:
            assert store.append(job, LOG, R0, offset, data) == offset + 4

    assert len(store._streams) == 2
    assert [store.stored(job, LOG, R0) for job in jobs] == [(8, False)] * 5
    pages = [store.read(job, LOG, None, 0, MUCH)[0] for job in jobs]
    assert pages == [[piece(b"one\n"), piece(b"two\n", offset=4)]] * 5


@pytest.mark.parametrize("cursor", [-5, 1, 3, 7, 19])
def test_an_invalid_cursor_is_refused(store: LogStore, cursor: int) -> None:
    store.append(A, LOG, R0, 0, b"\xff" * 40)

    with pytest.raises(BadFieldError, match=f"{cursor} is not the position of a page") as refused:
        store.read(A, LOG, None, cursor, MUCH)

    assert refused.value.field == "cursor"


def test_output_that_looks_like_a_record_is_data(store: LogStore) -> None:
    header = msgspec.msgpack.encode((1, 0, 0, 1_000_000_000, False))
    forged = LENGTH.pack(len(header)) + header
    store.append(A, LOG, R0, 0, forged + bytes(1000))
    (found,) = all_of(store)

    with pytest.raises(BadFieldError):
        store.read(A, LOG, None, inside(store) - len(found.data), MUCH)


def test_each_page_starts_at_the_end_of_the_last(store: LogStore, reopened: LogStore) -> None:
    data = b"some line\n" * 2000
    for number in range(10):
        store.append(A, LOG, R0, number * len(data), data)

    for kept in (store, reopened):
        cursor, pages = 0, []
        while (page := kept.read(A, LOG, None, cursor, 1))[0]:
            pages += page[0]
            cursor = page[1]
        assert b"".join(one.data for one in pages) == data * 10
        assert len(pages) == 10


def inside(store: LogStore) -> int:
    """The position behind the last byte of the last piece."""
    return store.read(A, LOG, None, 0, MUCH)[1]


# --- whatever arrives


@st.composite
def deliveries(
    draw: st.DrawFn,
) -> tuple[dict[WorkerKey, bytes], list[tuple[WorkerKey, int, bytes]], list[int]]:
    """Output of a few workers, cut into chunks of which some come again, and reopenings."""
    written = draw(
        st.dictionaries(st.sampled_from([R0, R1, V2]), st.binary(max_size=60), min_size=1)
    )
    sent = dict.fromkeys(written, 0)
    chunks = []
    for _ in range(draw(st.integers(0, 25))):
        who = draw(st.sampled_from(sorted(written)))
        start = draw(st.integers(0, sent[who]))  # never ahead of what was taken
        end = draw(st.integers(start, len(written[who])))
        chunks.append((who, start, written[who][start:end]))
        sent[who] = max(sent[who], end)
    for who, data in written.items():
        chunks.append((who, sent[who], data[sent[who] :]))
    return written, chunks, draw(st.lists(st.integers(0, len(chunks) - 1), max_size=3))


@settings(max_examples=examples(100), deadline=None)
@given(delivery=deliveries(), page=st.integers(1, 40))
def test_any_split_into_chunks_with_repetitions_reads_back_identical(
    tmp_path_factory: pytest.TempPathFactory,
    delivery: tuple[dict[WorkerKey, bytes], list[tuple[WorkerKey, int, bytes]], list[int]],
    page: int,
) -> None:
    written, chunks, reopened_at = delivery
    folder = tmp_path_factory.mktemp("logs")
    store = LogStore(folder, MUCH, midday)
    for place, (who, offset, data) in enumerate(chunks):
        if place in reopened_at:
            store = LogStore(folder, MUCH, midday)
        store.append(A, LOG, who, offset, data)

    read: defaultdict[WorkerKey, bytes] = defaultdict(bytes)
    cursor = 0
    while True:
        pieces, cursor = store.read(A, LOG, None, cursor, page)
        if not pieces:
            break
        for found in pieces:
            who = (found.version, found.rank)
            assert found.offset == len(read[who])
            read[who] += found.data
    assert {who: read[who] for who in written} == written
    assert all(store.end(A, LOG, who, len(data)) for who, data in written.items())
