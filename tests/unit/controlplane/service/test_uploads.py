"""Archives of working directories, as the controller keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from controlplane.client.archive import digest_of, pack
from controlplane.service import uploads
from controlplane.service.file_keeper import files_in
from controlplane.service.uploads import SnapshotStore
from schemas.errors import BadFieldError, TooLargeError, UnavailableError
from schemas.host.archives import ArchiveBounds
from tests.support.file_trees import PROJECT, names, tree

DATA = bytes(range(256)) * 4
DIGEST = hashlib.sha256(DATA).hexdigest()
WHO, OTHER = "user ann", "user bob"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", max_bytes=4096)


async def test_an_archive_is_stored_when_all_pieces_arrived(
    store: SnapshotStore,
) -> None:
    assert await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA)) == 500
    assert not store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (b"", -1)

    assert await store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)

    assert store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))
    assert await store.put(WHO, DIGEST, 0, DATA[:1], len(DATA)) == len(DATA)


async def test_naming_a_stored_archive_gives_no_access_to_it(
    store: SnapshotStore,
) -> None:
    await store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert await store.put(OTHER, DIGEST, 0, DATA[:1], len(DATA)) == 1
    assert (store.is_of(WHO, DIGEST), store.is_of(OTHER, DIGEST)) == (True, False)

    assert await store.put(OTHER, DIGEST, 1, DATA[1:], len(DATA)) == len(DATA)
    assert store.is_of(OTHER, DIGEST)
    store.forget(DIGEST)
    assert not any(store.is_of(who, DIGEST) for who in (WHO, OTHER))


async def test_a_misplaced_piece_gets_the_stored_size(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA))

    assert await store.put(WHO, DIGEST, 400, DATA[400:], len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 600, DATA[600:], len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 500, DATA[500:] + b"more", len(DATA)) == 500
    assert await store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)


async def test_an_upload_can_restart_and_another_user_does_not_disturb_it(
    store: SnapshotStore,
) -> None:
    await store.put(WHO, DIGEST, 0, b"wrong" * 10, len(DATA))
    assert await store.put(WHO, DIGEST, 0, DATA[:500], len(DATA)) == 500
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
    with pytest.raises(BadFieldError, match="digest is not a SHA-256"):
        await store.put(WHO, digest, 0, DATA, len(DATA))
    assert not store.has(digest)
    assert store.piece(digest, 0) == (b"", -1)


async def test_an_archive_that_is_too_large_is_refused_before_a_byte_is_stored(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with pytest.raises(
        TooLargeError, match=r"directory has 5000 bytes, the limit is 4096; exclude data"
    ):
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


async def test_an_archive_is_read_in_pieces(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 1000)
    await store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert store.piece(DIGEST, 0) == (DATA[:1000], len(DATA))
    assert store.piece(DIGEST, 1000) == (DATA[1000:], len(DATA))
    assert store.piece(DIGEST, len(DATA)) == (b"", len(DATA))
    assert store.piece(DIGEST, -1) == (b"", -1)


async def test_an_archive_is_hashed_in_a_thread(
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


# --- bounds


def other(number: int) -> tuple[bytes, str]:
    data = bytes([number]) * 1000
    return data, hashlib.sha256(data).hexdigest()


async def upload(
    store: SnapshotStore, who: str, number: int, begin: int = 0, end: int = 1000
) -> int:
    """Send a piece of an archive of 1000 bytes; return how many bytes are stored."""
    data, digest = other(number)
    return await store.put(who, digest, begin, data[begin:end], 1000)


async def test_unfinished_uploads_of_a_user_are_bounded(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=4096, upload_bytes=2500)
    for number in (0, 1):
        assert await upload(store, WHO, number, end=900) == 900

    with pytest.raises(TooLargeError) as refused:
        await upload(store, WHO, 2, end=900)

    assert (refused.value.message, refused.value.hint) == (
        "your unfinished uploads have 1800 bytes, with this one more than 2500",
        "finish the others, or wait a minute",
    )
    assert await upload(store, OTHER, 2) == 1000
    assert await upload(store, WHO, 0, begin=900) == 1000


async def test_an_abandoned_upload_is_deleted_for_the_next(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=4096, upload_bytes=2500)
    for number in (0, 1):
        await upload(store, WHO, number, end=900)
    (name,) = [name for name in names(tmp_path) if name.startswith(other(0)[1])]
    os.utime(tmp_path / name, (1, 1))

    assert await upload(store, WHO, 2, end=900) == 900

    assert name not in names(tmp_path)
    assert len(names(tmp_path)) == 2


async def test_uploads_that_grow_together_stay_within_the_bound(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=4096, upload_bytes=2500)
    for number in range(10):
        await upload(store, WHO, number, end=100)

    accepted = 1000
    for number in range(10):
        with contextlib.suppress(TooLargeError):
            accepted += await upload(store, WHO, number, begin=100, end=900) - 100

    assert accepted <= 2500
    assert sum(file.size for file in files_in(tmp_path)) <= 2500


async def sent(store: SnapshotStore, who: str, number: int, *, at: float = 0.0) -> str:
    """Return the digest of an archive of 1000 bytes that a user sent, last used at `at`."""
    assert await upload(store, who, number) == 1000
    digest = other(number)[1]
    os.utime(store.folder / digest, (at, at))
    return digest


def there(store: SnapshotStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


@pytest.fixture
def quota(tmp_path: Path) -> SnapshotStore:
    """A store that has room for two archives of each user."""
    return SnapshotStore(tmp_path / "snapshots", max_bytes=4096, user_bytes=2500)


async def test_the_oldest_unneeded_archives_of_a_user_are_deleted_first(
    quota: SnapshotStore,
) -> None:
    needed = await sent(quota, WHO, 0, at=1.0)
    quota.needed = lambda: {needed}
    await sent(quota, WHO, 1, at=2.0)
    theirs = [await sent(quota, OTHER, number, at=0.0) for number in (4, 5)]

    latest = await sent(quota, WHO, 2, at=3.0)

    assert there(quota) == {needed, latest, *theirs}


async def test_a_user_with_needed_archives_up_to_the_quota_is_refused(
    quota: SnapshotStore,
) -> None:
    needed = [await sent(quota, WHO, number) for number in range(2)]
    quota.needed = lambda: needed

    with pytest.raises(TooLargeError) as refused:
        await sent(quota, WHO, 2)

    assert (refused.value.message, refused.value.hint, refused.value.field) == (
        (
            "your working directories of live jobs and of the last minute have 2000 bytes; "
            "with this one they would exceed 2500"
        ),
        "wait until jobs end, exclude data (.onesignore), or have limits.archive_bytes raised",
        "limits.archive_bytes",
    )
    theirs = await sent(quota, OTHER, 3)
    assert there(quota) == {*needed, theirs}


async def test_archives_of_the_last_minute_are_kept(quota: SnapshotStore) -> None:
    young = [await sent(quota, WHO, number, at=time.time()) for number in range(2)]

    with pytest.raises(TooLargeError):
        await sent(quota, WHO, 2)

    assert there(quota) == set(young)


async def test_an_archive_of_two_users_is_kept_for_the_other_user(quota: SnapshotStore) -> None:
    await sent(quota, WHO, 0)
    shared = await sent(quota, OTHER, 0)

    for number in (1, 2):
        await sent(quota, WHO, number, at=float(number))

    assert (quota.is_of(WHO, shared), quota.is_of(OTHER, shared)) == (False, True)


async def test_archives_completed_together_stay_within_the_quota(quota: SnapshotStore) -> None:
    for number in range(5):
        await upload(quota, WHO, number, end=900)
    ends = [upload(quota, WHO, number, begin=900) for number in range(5)]

    ended = await asyncio.gather(*ends, return_exceptions=True)

    assert [one for one in ended if one == 1000] == [1000, 1000]
    assert len(there(quota)) == 2


async def test_an_archive_bomb_is_refused_and_a_good_archive_is_inspected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path / "s", max_bytes=1 << 20, bounds=ArchiveBounds(size=1000))
    good, bomb = pack(tree(tmp_path / "a", PROJECT)), pack(tree(tmp_path / "b", {"z": bytes(1001)}))
    for archive in (good, bomb):
        await store.put(WHO, digest_of(archive), 0, archive, len(archive))
    looked = list[Path]()
    real = uploads._inspect
    monkeypatch.setattr(
        uploads, "_inspect", lambda path, *rest: (looked.append(path), real(path, *rest))
    )

    for _ in range(2):
        await store.inspect(digest_of(good))
        with pytest.raises(TooLargeError, match="unpacks to more than 1000 bytes, at 'z'"):
            await store.inspect(digest_of(bomb))

    assert [path.name for path in looked].count(digest_of(good)) == 1


async def test_an_invalid_archive_is_refused_at_submission(store: SnapshotStore) -> None:
    await store.put(WHO, DIGEST, 0, DATA, len(DATA))

    with pytest.raises(BadFieldError, match="its archive cannot be unpacked") as refused:
        await store.inspect(DIGEST)

    assert refused.value.field == "snapshot"
