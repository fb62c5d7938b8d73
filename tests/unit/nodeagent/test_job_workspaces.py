"""A working directory on a node: laid out from its archive."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.client.archive import digest_of, pack
from controlplane.service.uploads import SnapshotStore
from nodeagent.errors import WorkspaceError
from nodeagent.job_folders import MARK, is_laid_out, lay_out
from schemas.errors import TooLargeError
from schemas.host.archives import UNREADABLE, ArchiveBounds, inspect
from tests.support.file_trees import PROJECT, laid_out, names, tree

NO_DIGEST = "0" * 64


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


def test_a_folder_is_unpacked_as_it_was_packed(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))

    folder = laid_out(archive, tmp_path)

    files = {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.*") if p.is_file()
    }
    digest, manifest, _ = files.pop(MARK).split("\n")
    assert (files, digest) == (PROJECT, digest_of(archive))
    assert json.loads(manifest) == {name: [len(text), 0] for name, text in PROJECT.items()}
    assert is_laid_out(folder, digest_of(archive))
    assert not is_laid_out(folder, "0" * 64)
    assert not is_laid_out(tmp_path, digest_of(archive))


def test_unpacking_replaces_the_folder(tmp_path: Path) -> None:
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


def test_a_damaged_or_missing_archive_is_refused(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))
    (tmp_path / "archive").write_bytes(bytes([*archive[:-1], archive[-1] ^ 1]))

    for name, digest, why in (
        ("archive", digest_of(archive), "was damaged in transit"), ("none", NO_DIGEST, "No such file"),
    ):  # fmt: skip
        with pytest.raises(WorkspaceError, match=why):
            lay_out(tmp_path / name, tmp_path / "job", digest)
    assert not (tmp_path / "job").exists()


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


def test_an_absolute_name_stays_inside(tmp_path: Path) -> None:
    folder = laid_out(tarball(member("/etc/ones-test")), tmp_path)

    assert (folder / "etc" / "ones-test").is_file()


async def test_the_digest_of_a_job_is_the_name_of_its_archive(tmp_path: Path) -> None:
    archive = pack(tree(tmp_path / "in", PROJECT))
    store = SnapshotStore(tmp_path / "store", max_bytes=1 << 20)
    await store.put("user ann", digest_of(archive), 0, archive, len(archive))

    data, size = store.piece(digest_of(archive), 0)

    assert (data, size) == (archive, len(archive))
    assert names(laid_out(data, tmp_path)) >= {"train.py", "lib", "data"}


# --- bounds

SMALL = ArchiveBounds(size=100_000, files=20, depth=3)


def zeros(size: int) -> bytes:
    """A file of zeros that says its size, so small that it fits a mail."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        tar.addfile(member("zeros", size=size), io.BytesIO(bytes(size)))
    return made.getvalue()


def long_name(size: int) -> bytes:
    """A header that says that a name follows, as long as this."""
    head = member("././@LongLink", size=size, type=tarfile.GNUTYPE_LONGNAME)
    head.mode = 0
    return gzip.compress(head.tobuf(tarfile.GNU_FORMAT) + bytes(size), mtime=0)


def sparse(size: int) -> bytes:
    """A file of holes only."""
    return tarball(member("s", pax_headers={
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0",
        "GNU.sparse.size": str(size), "GNU.sparse.realsize": str(size),
    }))  # fmt: skip


BOMBS: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "zeros": (lambda: zeros(100_001), "more than 100000 bytes"),
    "many files together": (
        lambda: tarball(*(member(f"f{n}", size=9000) for n in range(12))), "more than 100000 bytes",
    ),
    "a size that is only said": (
        lambda: gzip.compress(member("a", size=1 << 40).tobuf() + bytes(1024), mtime=0),
        "more than 100000 bytes",
    ),
    "a name without end": (lambda: long_name(50 << 20), "more than 100000 bytes"),
    "holes": (lambda: sparse(1 << 40), "more than 100000 bytes"),
    "headers before one file": (lambda: long_name(70_000), "headers of more than 65536 bytes"),
    "headers of all files": (
        lambda: tarball(*(member(f"f{n}", pax_headers={"comment": "x" * 12_000}) for n in range(19))),
        "more than 100000 bytes, including headers",
    ),
    "files": (lambda: tarball(*(member(f"f{n}") for n in range(21))), "more than 20 files"),
    "folders": (
        lambda: tarball(*(member(f"d{n}", type=tarfile.DIRTYPE) for n in range(21))),
        "more than 20 files",
    ),
    "depth": (lambda: tarball(member("a/b/c/d/e")), "folders more than 3 deep"),
}  # fmt: skip


@pytest.mark.parametrize(("bomb", "what"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_with_its_limit_and_leaves_nothing(
    tmp_path: Path, bomb: Callable[[], bytes], what: str
) -> None:
    archive = bomb()
    (tmp_path / "archive").write_bytes(archive)

    with pytest.raises(WorkspaceError, match=what):
        lay_out(tmp_path / "archive", tmp_path / "work" / "job", digest_of(archive), SMALL)

    assert names(tmp_path / "work") == set()
    with (tmp_path / "archive").open("rb") as file, pytest.raises(TooLargeError, match=what):
        inspect(file, SMALL)


@pytest.mark.parametrize(
    "harmful",
    [
        member("../escaped"),
        member("link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("link", type=tarfile.LNKTYPE, linkname="../outside"),
        member("device", type=tarfile.CHRTYPE),
    ],
    ids=["traversal", "absolute link", "hard link", "device"],
)
def test_an_archive_that_no_node_unpacks_is_refused_at_submission(harmful: tarfile.TarInfo) -> None:
    with pytest.raises(UNREADABLE):
        inspect(io.BytesIO(tarball(harmful)), SMALL)


def plain(*parts: bytes | tarfile.TarInfo) -> bytes:
    """An archive of headers and what follows each, with nothing to check what they say."""
    heads = (p if isinstance(p, bytes) else p.tobuf(tarfile.USTAR_FORMAT) for p in parts)
    return b"".join(heads) + bytes(1024)


def extended(body: bytes) -> tuple[tarfile.TarInfo, bytes]:
    """A header whose records are these, whatever they say of their length."""
    return member("h", type=tarfile.XHDTYPE, size=len(body)), body + bytes(-len(body) % 512)


UNPACK = "cannot unpack the working directory"
DAMAGED: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (bytes, UNPACK),
    "no archive": (lambda: b"no archive", UNPACK),
    "no archive, packed": (lambda: gzip.compress(b"no archive" * 100, mtime=0), UNPACK),
    "cut short": (lambda: tarball(member("a", size=50_000))[:30_000], UNPACK),
    "a NUL in a name": (lambda: tarball(member("a", pax_headers={"path": "a\0b"})), UNPACK),
    "a time beyond time": (lambda: tarball(member("a", mtime=1e30)), UNPACK),
    **{
        f"a device of type {kind!r}": (lambda kind=kind: tarball(member("device", type=kind)), "special file")
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    },
    "a hard link to nothing": (
        lambda: plain(member("a", type=tarfile.LNKTYPE, linkname="b")), "'b' not found",
    ),
    "headers of headers": (
        lambda: plain(*[member("g", type=tarfile.XGLTYPE)] * 1000), "headers of more than|recursion",
    ),
    "a number that takes minutes to look at": (
        lambda: plain(*extended(b"1" * 60_000), member("a")), "a number of more than 100 digits",
    ),
    "a list of holes": (lambda: sparse(4), "is a sparse file: pack it without holes"),
    **{
        kind: (lambda kind=kind: tarball(member("a"), kind=kind), "unsupported compression: use gzip or none")
        for kind in ("bz2", "xz")
    },
}  # fmt: skip


@pytest.mark.parametrize(("damaged", "what"), DAMAGED.values(), ids=DAMAGED)
def test_an_archive_that_cannot_be_unpacked_is_refused_with_the_reason(
    tmp_path: Path, damaged: Callable[[], bytes], what: str
) -> None:
    refuses(damaged(), tmp_path, what)


@pytest.mark.parametrize("kind", ["", "gz"])
def test_an_archive_within_its_limits_is_unpacked(tmp_path: Path, kind: str) -> None:
    archive = tarball(member("a/b/c/d", size=90_000), member("e"), kind=kind)
    (tmp_path / "archive").write_bytes(archive)

    lay_out(tmp_path / "archive", tmp_path / "job", digest_of(archive), SMALL)
    inspect(io.BytesIO(archive), SMALL)

    assert (tmp_path / "job" / "a/b/c/d").stat().st_size == 90_000


def test_a_folder_with_an_overwritten_mark_is_unpacked_again(tmp_path: Path) -> None:
    (tmp_path / MARK).write_bytes(b"\xff\xfe")

    assert not is_laid_out(tmp_path, NO_DIGEST)
