"""Archives of working directories, as the controller keeps them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from controlplane.service import workdir_snapshots
from controlplane.service.workdir_snapshots import SnapshotStore
from schemas.errors import BadFieldError, TooLargeError, UnavailableError
from tests.support.file_trees import names

DATA = bytes(range(256)) * 4
DIGEST = hashlib.sha256(DATA).hexdigest()
WHO, OTHER = "user ann", "user bob"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", max_bytes=4096)


async def test_an_archive_arrives_in_pieces_and_is_there_when_it_is_whole(
    store: SnapshotStore,
) -> None:
    assert await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA)) == 500
    assert not store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (b"", -1)

    assert await store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)

    assert store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


async def test_a_stored_archive_is_not_asked_for_again(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert await store.put(OTHER, DIGEST, 0, DATA[:1], len(DATA)) == len(DATA)


async def test_a_piece_that_does_not_continue_says_where_to_go_on(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA))

    assert await store.put(WHO, DIGEST, 400, DATA[400:], len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 600, DATA[600:], len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 500, DATA[500:] + b"more", len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)


async def test_an_upload_can_begin_anew(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, b"wrong" * 10, len(DATA))

    assert await store.put(WHO, DIGEST, 0, DATA, len(DATA)) == len(DATA)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


async def test_two_uploads_of_one_archive_do_not_disturb_each_other(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA))
    await store.put(OTHER, DIGEST, 0, b"x" * 700, len(DATA))

    assert await store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


async def test_an_archive_with_the_wrong_digest_is_refused_and_dropped(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with pytest.raises(BadFieldError) as refused:
        await store.put(WHO, DIGEST, 0, DATA[::-1], len(DATA))

    assert (refused.value.field, refused.value.hint) == ("digest", "send it again")
    assert names(tmp_path / "snapshots") == set()
    assert await store.put(WHO, DIGEST, 0, DATA, len(DATA)) == len(DATA)


@pytest.mark.parametrize("digest", ["", "x" * 64, DIGEST[:-1], "../" + DIGEST, DIGEST.upper()])
async def test_only_a_sha256_is_a_digest(store: SnapshotStore, digest: str) -> None:
    with pytest.raises(BadFieldError, match="digest is no sha256"):
        await store.put(WHO, digest, 0, DATA, len(DATA))
    assert not store.has(digest)
    assert store.piece(digest, 0) == (b"", -1)


async def test_an_archive_that_is_too_large_is_refused_before_a_byte_is_stored(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with pytest.raises(TooLargeError, match=r"packs to 5000 bytes, the bound is 4096; leave data"):
        await store.put(WHO, DIGEST, 0, DATA, 5000)
    assert names(tmp_path / "snapshots") == set()


async def test_a_full_disk_refuses_the_piece(store: SnapshotStore, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "snapshots")

    with pytest.raises(UnavailableError, match="free space, try again"):
        await store.put(WHO, DIGEST, 0, DATA, len(DATA))


async def test_a_new_controller_drops_uploads_that_were_not_finished(tmp_path: Path) -> None:
    before = SnapshotStore(tmp_path, max_bytes=4096)
    await before.put(WHO, DIGEST, 0, DATA, len(DATA))
    await before.put(WHO, "0" * 64, 0, DATA[:10], len(DATA))

    after = SnapshotStore(tmp_path, max_bytes=4096)

    assert names(tmp_path) == {DIGEST}
    assert after.has(DIGEST)


async def test_an_archive_is_handed_out_in_pieces(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_snapshots, "PIECE_BYTES", 1000)
    await store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert store.piece(DIGEST, 0) == (DATA[:1000], len(DATA))
    assert store.piece(DIGEST, 1000) == (DATA[1000:], len(DATA))
    assert store.piece(DIGEST, len(DATA)) == (b"", len(DATA))
    assert store.piece(DIGEST, -1) == (b"", -1)


async def test_an_archive_is_hashed_beside_the_loop_and_a_repeated_last_piece_waits_for_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slowly(file: BinaryIO, _: str) -> object:
        go_on.wait()
        return hashlib.sha256(file.read())

    monkeypatch.setattr(hashlib, "file_digest", slowly)

    sent = [asyncio.create_task(store.put(WHO, DIGEST, 0, DATA, len(DATA))) for _ in range(2)]
    await asyncio.sleep(0)
    assert not store.has(DIGEST)
    go_on.set()

    assert await asyncio.gather(*sent) == [len(DATA), len(DATA)]
    assert store.has(DIGEST)
