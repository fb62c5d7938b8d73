"""A working directory on its way: packed by a client, stored here, laid out on a node."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.client import workdir_archive
from controlplane.client.workdir_archive import digest_of, pack
from controlplane.service import workdir_snapshots
from controlplane.service.workdir_snapshots import SnapshotStore
from nodeagent.agent_errors import WorkspaceError
from nodeagent.job_workspaces import MARK, is_laid_out, lay_out, sweep
from schemas.errors import BadFieldError, TooLargeError, UnavailableError

DATA = bytes(range(256)) * 4
DIGEST = hashlib.sha256(DATA).hexdigest()
WHO, OTHER = "user ann", "user bob"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", max_bytes=4096)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """`folder` with these files in it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def packed(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


# --- stored in pieces


def test_an_archive_arrives_in_pieces_and_is_there_when_it_is_whole(store: SnapshotStore) -> None:
    assert store.put(WHO, DIGEST, 0, DATA[:500], len(DATA)) == 500
    assert not store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (b"", -1)

    assert store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)

    assert store.has(DIGEST)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


def test_a_stored_archive_is_not_asked_for_again(store: SnapshotStore) -> None:
    store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert store.put(OTHER, DIGEST, 0, DATA[:1], len(DATA)) == len(DATA)


def test_a_piece_that_does_not_continue_says_where_to_go_on(store: SnapshotStore) -> None:
    store.put(WHO, DIGEST, 0, DATA[:500], len(DATA))

    assert store.put(WHO, DIGEST, 400, DATA[400:], len(DATA)) == 500
    assert store.put(WHO, DIGEST, 600, DATA[600:], len(DATA)) == 500
    assert store.put(WHO, DIGEST, 500, DATA[500:] + b"more", len(DATA)) == 500
    assert store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)


def test_an_upload_can_begin_anew(store: SnapshotStore) -> None:
    store.put(WHO, DIGEST, 0, b"wrong" * 10, len(DATA))

    assert store.put(WHO, DIGEST, 0, DATA, len(DATA)) == len(DATA)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


def test_two_uploads_of_one_archive_do_not_disturb_each_other(store: SnapshotStore) -> None:
    store.put(WHO, DIGEST, 0, DATA[:500], len(DATA))
    store.put(OTHER, DIGEST, 0, b"x" * 700, len(DATA))

    assert store.put(WHO, DIGEST, 500, DATA[500:], len(DATA)) == len(DATA)
    assert store.piece(DIGEST, 0) == (DATA, len(DATA))


def test_an_archive_with_the_wrong_digest_is_refused_and_dropped(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with pytest.raises(BadFieldError) as refused:
        store.put(WHO, DIGEST, 0, DATA[::-1], len(DATA))

    assert (refused.value.field, refused.value.hint) == ("digest", "send it again")
    assert names(tmp_path / "snapshots") == set()
    assert store.put(WHO, DIGEST, 0, DATA, len(DATA)) == len(DATA)


@pytest.mark.parametrize("digest", ["", "x" * 64, DIGEST[:-1], "../" + DIGEST, DIGEST.upper()])
def test_only_a_sha256_is_a_digest(store: SnapshotStore, digest: str) -> None:
    with pytest.raises(BadFieldError, match="digest is no sha256"):
        store.put(WHO, digest, 0, DATA, len(DATA))
    assert not store.has(digest)
    assert store.piece(digest, 0) == (b"", -1)


def test_an_archive_that_is_too_large_is_refused_before_a_byte_is_stored(
    store: SnapshotStore, tmp_path: Path
) -> None:
    with pytest.raises(TooLargeError, match=r"packs to 5000 bytes, the bound is 4096; leave data"):
        store.put(WHO, DIGEST, 0, DATA, 5000)
    assert names(tmp_path / "snapshots") == set()


def test_a_full_disk_refuses_the_piece(store: SnapshotStore, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "snapshots")

    with pytest.raises(UnavailableError, match="free space, try again"):
        store.put(WHO, DIGEST, 0, DATA, len(DATA))


def test_a_new_controller_drops_uploads_that_were_not_finished(tmp_path: Path) -> None:
    before = SnapshotStore(tmp_path, max_bytes=4096)
    before.put(WHO, DIGEST, 0, DATA, len(DATA))
    before.put(WHO, "0" * 64, 0, DATA[:10], len(DATA))

    after = SnapshotStore(tmp_path, max_bytes=4096)

    assert names(tmp_path) == {DIGEST}
    assert after.has(DIGEST)


def test_an_archive_is_handed_out_in_pieces(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_snapshots, "PIECE_BYTES", 1000)
    store.put(WHO, DIGEST, 0, DATA, len(DATA))

    assert store.piece(DIGEST, 0) == (DATA[:1000], len(DATA))
    assert store.piece(DIGEST, 1000) == (DATA[1000:], len(DATA))
    assert store.piece(DIGEST, len(DATA)) == (b"", len(DATA))
    assert store.piece(DIGEST, -1) == (b"", -1)


# --- packed


PROJECT = {
    "train.py": "print(1)",
    "lib/model.py": "x = 1",
    "lib/__init__.py": "",
    "app/main.py": "",
    "data/small.txt": "7",
    "empty.txt": "",
}


def test_the_same_files_give_the_same_bytes_whenever_and_wherever_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tree(tmp_path / "one", PROJECT)
    other = tree(tmp_path / "other", dict(reversed(PROJECT.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    (other / "train.py").chmod(0o600)
    first = pack(one)
    walk = os.walk

    def backwards(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for root, folders, files in walk(folder):
            folders.sort(reverse=True)
            files.sort(reverse=True)
            yield root, folders, files

    monkeypatch.setattr(os, "walk", backwards)
    monkeypatch.setattr(time, "time", lambda: 2e9)

    assert pack(other) == first
    assert packed(first) == {name: text.encode() for name, text in PROJECT.items()}


def test_another_content_or_name_gives_another_digest(tmp_path: Path) -> None:
    folder = tree(tmp_path, PROJECT)
    first = digest_of(pack(folder))
    (folder / "train.py").write_text("print(2)")
    second = digest_of(pack(folder))
    (folder / "train.py").rename(folder / "main.py")

    assert len({first, second, digest_of(pack(folder))}) == 3


def test_an_executable_stays_executable(tmp_path: Path) -> None:
    folder = tree(tmp_path / "in", {"run.sh": "", "train.py": ""})
    (folder / "run.sh").chmod(0o750)
    unpacked = laid_out(pack(folder), tmp_path)

    assert os.access(unpacked / "run.sh", os.X_OK)
    assert not (unpacked / "train.py").stat().st_mode & 0o111


def test_what_never_belongs_into_a_job_is_left_out(tmp_path: Path) -> None:
    folder = tree(
        tmp_path,
        {
            "train.py": "",
            ".git/config": "",
            "lib/.git/config": "",
            "__pycache__/train.cpython-311.pyc": "",
            "old.pyc": "",
            "node_modules/x.js": "",
            "pkg.egg-info/PKG-INFO": "",
            "venv/pyvenv.cfg": "",
            "venv/lib/torch.py": "",
            "tools/other-env/pyvenv.cfg": "",
            ".ones/controller.toml": "",
            ".ones/keys/admin.key_secret": "secret",
        },
    )

    assert packed(pack(folder)) == {"train.py": b""}


@pytest.mark.parametrize(
    "key", ["keys/admin.key_secret", "home/keys/ann.key_secret"], ids=["itself", "a client's"]
)
def test_keys_never_travel(tmp_path: Path, key: str) -> None:
    files = {"train.py": "", "controller.toml": "", "home/client.toml": "", key: "secret"}

    assert key not in packed(pack(tree(tmp_path, files)))


def test_patterns_of_the_ignore_file_match_names_and_paths(tmp_path: Path) -> None:
    folder = tree(
        tmp_path,
        {
            ".onesignore": "# data\n*.bin\n\ncorpus/\nlib/secret.py\nruns/*/log\n",
            "train.py": "",
            "weights.bin": "",
            "lib/more.bin": "",
            "corpus/a.txt": "",
            "lib/corpus/b.txt": "",
            "lib/secret.py": "",
            "secret.py": "",
            "runs/1/log": "",
            "runs/1/result": "",
        },
    )

    assert set(packed(pack(folder))) == {".onesignore", "train.py", "secret.py", "runs/1/result"}


def test_links_are_followed_to_files(tmp_path: Path) -> None:
    folder = tree(tmp_path / "in", {"train.py": ""})
    (tmp_path / "elsewhere.txt").write_text("content")
    (folder / "linked.txt").symlink_to(tmp_path / "elsewhere.txt")
    os.mkfifo(folder / "pipe")

    assert packed(pack(folder)) == {"linked.txt": b"content", "train.py": b""}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tree(tmp_path, {"train.py": ""})
    (folder / "dangling").symlink_to("nowhere")

    with pytest.raises(BadFieldError, match=r"dangling: No such file .*name it in .onesignore"):
        pack(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFieldError, match="is no folder; correct the path"):
        pack(tmp_path / "nowhere")


def test_a_folder_that_is_too_large_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_archive, "MAX_BYTES", 1000)
    folder = tree(tmp_path, {"train.py": "", "data.txt": b"0" * 5000})

    with pytest.raises(TooLargeError, match=r"name large data in .*\.onesignore"):
        pack(folder)


# --- laid out


def laid_out(archive: bytes, base: Path) -> Path:
    (base / "archive").write_bytes(archive)
    lay_out(base / "archive", base / "work" / "job", digest_of(archive))
    return base / "work" / "job"


def tarball(*members: tarfile.TarInfo, kind: str = "gz") -> bytes:
    """An archive that no client of ours would make."""
    made = io.BytesIO()
    mode: Any = f"w:{kind}"
    with tarfile.open(fileobj=made, mode=mode, format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            content = os.urandom(member.size)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def test_a_folder_is_laid_out_as_it_was_packed(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))

    folder = laid_out(archive, tmp_path)

    files = {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.*") if p.is_file()
    }
    assert files == {**PROJECT, MARK: digest_of(archive)}
    assert is_laid_out(folder, digest_of(archive))
    assert not is_laid_out(folder, "0" * 64)
    assert not is_laid_out(tmp_path, digest_of(archive))


def test_laying_out_replaces_what_was_there(tmp_path: Path) -> None:
    laid_out(pack(tree(tmp_path / "one", {"old.py": "", "both.py": "old"})), tmp_path)

    folder = laid_out(pack(tree(tmp_path / "two", {"both.py": "new"})), tmp_path)

    assert names(folder) == {"both.py", MARK}
    assert (folder / "both.py").read_text() == "new"
    assert names(tmp_path / "work") == {"job"}


def refuses(archive: bytes, base: Path, match: str) -> None:
    """The archive is refused and nothing of it stays, but the folder that was there does."""
    first = laid_out(pack(tree(base / "in", {"train.py": "x"})), base)
    with pytest.raises(WorkspaceError, match=match):
        laid_out(archive, base)
    assert names(base / "work") == {"job"}
    assert names(first) == {"train.py", MARK}


def test_an_archive_that_was_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))
    (tmp_path / "archive").write_bytes(bytes([*archive[:-1], archive[-1] ^ 1]))

    with pytest.raises(WorkspaceError, match="was damaged on its way"):
        lay_out(tmp_path / "archive", tmp_path / "job", digest_of(archive))
    assert not (tmp_path / "job").exists()


def test_an_archive_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="No such file"):
        lay_out(tmp_path / "archive", tmp_path / "job", DIGEST)


@pytest.mark.parametrize("name", ["../escaped", "lib/../../escaped", "./../escaped"])
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    refuses(tarball(member(name)), tmp_path, "outside the destination")
    assert not (tmp_path / "work" / "escaped").exists()
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_that_leads_outside_is_refused(tmp_path: Path, kind: bytes, target: str) -> None:
    (tmp_path / "outside").write_text("here")

    refuses(tarball(member("link", type=kind, linkname=target)), tmp_path, "cannot unpack")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_a_device_is_refused(tmp_path: Path, kind: bytes) -> None:
    refuses(tarball(member("device", type=kind)), tmp_path, "special file")


def test_an_absolute_name_stays_inside(tmp_path: Path) -> None:
    folder = laid_out(tarball(member("/etc/ones-test")), tmp_path)

    assert (folder / "etc" / "ones-test").is_file()


@pytest.mark.parametrize(
    "archive", [b"", b"no archive", gzip.compress(b"no archive" * 100, mtime=0)]
)
def test_what_is_no_archive_is_refused(tmp_path: Path, archive: bytes) -> None:
    refuses(archive, tmp_path, "cannot unpack the working directory")


BROKEN: Mapping[str, Callable[[], bytes]] = {
    "cut short": lambda: tarball(member("a", size=50_000))[:30_000],
    "xz cut short": lambda: tarball(member("a", size=50_000), kind="xz")[:30_000],
    "xz damaged": lambda: damaged(tarball(member("a", size=50_000), kind="xz")),
    "a NUL in a name": lambda: tarball(member("a", pax_headers={"path": "a\0b"})),
    "a time beyond time": lambda: tarball(member("a", mtime=1e30)),
}


def damaged(archive: bytes) -> bytes:
    middle = len(archive) // 2
    return archive[:middle] + bytes(100) + archive[middle + 100 :]


@pytest.mark.parametrize("archive", BROKEN.values(), ids=BROKEN)
def test_an_archive_that_cannot_be_unpacked_is_refused(
    tmp_path: Path, archive: Callable[[], bytes]
) -> None:
    refuses(archive(), tmp_path, "cannot unpack the working directory")


# --- swept away


def test_old_folders_of_ended_jobs_are_swept_away_and_nothing_else(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("old", "busy", "young", "foreign"):
        tree(work / name, {"train.py": "", MARK: DIGEST} if name != "foreign" else {"x": ""})
        if name != "young":
            os.utime(work / name, (1, 1))

    sweep(work, 60.0, {"busy"})

    assert names(work) == {"busy", "young", "foreign"}


def test_the_digest_of_a_job_is_the_name_of_its_archive(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))
    store = SnapshotStore(tmp_path / "store", max_bytes=1 << 20)
    store.put(WHO, digest_of(archive), 0, archive, len(archive))

    data, size = store.piece(digest_of(archive), 0)

    assert (data, size) == (archive, len(archive))
    assert names(laid_out(data, tmp_path)) >= {"train.py", "lib", "data"}
