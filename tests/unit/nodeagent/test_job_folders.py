"""Working directories of jobs: unpacked from archives, listed and read."""

from __future__ import annotations

import gzip
import hashlib
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
from nodeagent import job_folders
from nodeagent.errors import WorkspaceError
from nodeagent.folders import NodeFolders
from nodeagent.job_folders import MARK, PIECE, answer, is_laid_out, lay_out
from schemas.errors import TooLargeError
from schemas.host.archives import UNREADABLE, ArchiveBounds, inspect
from schemas.ids import JobId
from schemas.wire.files import Area, AskFiles, AskPiece, FileList, FilePiece, FilesRefused
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


HARMFUL = {
    **{
        f"file {name}": member(name) for name in ("../escaped", "lib/../../escaped", "./../escaped")
    },
    **{
        f"link of type {kind!r} to {target}": member("link", type=kind, linkname=target)
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)
        for target in ("/etc/passwd", "../../outside", "inside")
    },
    **{
        f"device of type {kind!r}": member("device", type=kind)
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    },
}


@pytest.mark.parametrize("harmful", HARMFUL.values(), ids=HARMFUL)
def test_a_member_that_leads_outside_or_is_special_is_refused_everywhere(
    tmp_path: Path, harmful: tarfile.TarInfo
) -> None:
    (tmp_path / "outside").write_text("here")
    archive = tarball(harmful)

    refuses(archive, tmp_path, "outside of the folder|is a link or a device")
    assert not list(tmp_path.rglob("escaped"))
    with pytest.raises(UNREADABLE):  # at the submission
        inspect(io.BytesIO(archive), ArchiveBounds())


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


def plain(*parts: bytes | tarfile.TarInfo) -> bytes:
    """An archive of headers and what follows each, with nothing to check what they say."""
    heads = (p if isinstance(p, bytes) else p.tobuf(tarfile.USTAR_FORMAT) for p in parts)
    return b"".join(heads) + bytes(1024)


def deceiving(target: str) -> bytes:
    """Links through names so long that Python no longer resolves them (CVE-2025-4517)."""
    steps, long, members, path = "abcdefghijklmnop", "d" * 247, list[tarfile.TarInfo](), ""
    for step in steps:
        members += [
            member(f"{path}{long}", type=tarfile.DIRTYPE, mode=0o755),
            member(f"{path}{step}", type=tarfile.SYMTYPE, linkname=long),
        ]
        path += f"{long}/"
    through = "/".join([*steps, "l" * 254])
    return tarball(
        *members,
        member(through, type=tarfile.SYMTYPE, linkname="../" * len(steps)),
        member("escape", type=tarfile.SYMTYPE, linkname=f"{through}/../{target}"),
        member("file", type=tarfile.LNKTYPE, linkname="escape"),
        member("file", size=5),
    )


def test_a_chain_of_links_writes_nothing_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("here")

    refuses(deceiving("outside"), tmp_path, "is a link or a device")

    assert outside.read_text() == "here"


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


# --- files of a job


JOB = JobId("digits-1")


@pytest.fixture
def node(tmp_path: Path) -> NodeFolders:
    """A node on which a job was laid out from PROJECT."""
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    archive = pack(tree(tmp_path / "in", PROJECT))
    (tmp_path / "archive").write_bytes(archive)
    lay_out(tmp_path / "archive", folders.job(JOB), digest_of(archive))
    return folders


def listed(node: NodeFolders) -> FileList:
    found = answer(AskFiles(request="r", job=JOB), node)
    assert isinstance(found, FileList), found
    return found


def sizes(found: FileList) -> dict[tuple[str, str], int]:
    return {(file.area, file.path): file.size for file in found.files}


def piece(node: NodeFolders, path: str, area: Area = "work", offset: int = 0) -> FilePiece:
    found = answer(AskPiece(request="r", job=JOB, area=area, path=path, offset=offset), node)
    assert isinstance(found, FilePiece), found
    return found


def refused(node: NodeFolders, path: str, job: str = JOB) -> str:
    asked = AskPiece(request="r", job=JobId(job), area="work", path=path, offset=0)
    found = answer(asked, node)
    assert isinstance(found, FilesRefused), found
    assert (found.request, found.code) == ("r", "bad_field")
    return found.message


def test_a_job_that_made_nothing_has_nothing(node: NodeFolders) -> None:
    assert listed(node) == FileList(request="r", files=())
    assert answer(AskFiles(request="r", job=JobId("other-1")), node) == FileList(
        request="r", files=()
    )


def test_new_and_changed_files_and_checkpoints_are_listed_and_nothing_else(
    node: NodeFolders,
) -> None:
    work = node.job(JOB)
    tree(work, {"out/plot.png": b"png", "data/small.txt": "8", "__pycache__/x.pyc": "1"})
    tree(work, {"lib/model.py": PROJECT["lib/model.py"] + "y"})
    tree(node.checkpoints / JOB, {"epoch-000001.v1.pt": "12", "epoch-000002.v1.new": "1"})

    assert sizes(listed(node)) == {
        ("work", "data/small.txt"): 1,  # of the same size
        ("work", "lib/model.py"): 6,
        ("work", "out/plot.png"): 3,
        ("checkpoints", "epoch-000001.v1.pt"): 2,
    }


def test_a_job_that_damages_its_own_notes_has_all_files_listed(node: NodeFolders) -> None:
    (node.job(JOB) / ".ones-snapshot").write_text("x\n{[")

    assert len(listed(node).files) == len(PROJECT)


def test_links_are_followed_inside_of_the_folder_and_named_where_they_lead_out(
    node: NodeFolders, tmp_path: Path
) -> None:
    work = node.job(JOB)
    tree(tmp_path / "elsewhere", {"secret": "s"})
    tree(work, {"out/a.txt": "12345"})
    (work / "latest").symlink_to("out/a.txt")
    (work / "away").symlink_to(tmp_path / "elsewhere" / "secret")
    (work / "folder").symlink_to(tmp_path / "elsewhere")
    (work / "gone").symlink_to("nowhere")
    os.mkfifo(work / "pipe")

    found = listed(node)

    assert sizes(found) == {("work", "latest"): 5, ("work", "out/a.txt"): 5}
    assert found.refused == (
        "away: a link that leads out of the job's folder",
        "folder: a link that leads out of the job's folder",
        "gone: broken link",
        "pipe: not a regular file",
    )
    assert piece(node, "latest").data == b"12345"


def test_a_list_is_bounded_and_counts_what_it_leaves_out(
    node: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folders, "MAX_FILES", 2)
    tree(node.job(JOB), {f"new-{n}": "" for n in range(5)})

    found = listed(node)

    assert ([file.path for file in found.files], found.left_out) == (["new-0", "new-1"], 3)


def test_a_file_is_read_in_pieces_each_with_its_digest(node: NodeFolders) -> None:
    content = os.urandom(PIECE + 3)
    tree(node.checkpoints / JOB, {"epoch-000001.v1.pt": content})

    first = piece(node, "epoch-000001.v1.pt", "checkpoints")
    rest = piece(node, "epoch-000001.v1.pt", "checkpoints", PIECE)

    assert (first.data + rest.data, first.size, rest.offset) == (content, PIECE + 3, PIECE)
    assert first.stamp == rest.stamp == listed(node).files[0].stamp
    assert rest.digest == hashlib.sha256(content[PIECE:]).hexdigest()
    assert piece(node, "epoch-000001.v1.pt", "checkpoints", 2 * PIECE).data == b""


def test_a_file_that_changed_has_another_stamp(node: NodeFolders) -> None:
    path = node.job(JOB) / "train.py"
    before = piece(node, "train.py").stamp

    os.utime(path, ns=(1, 1))

    assert piece(node, "train.py").stamp != before


OUTSIDE = (
    "../../secret", "/etc/passwd", "lib/../../../secret", "away", "folder/secret", "", ".", "lib/..",
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "job", "why"),
    [
        *((path, JOB, f"{path} leads out of the job's folder") for path in OUTSIDE),
        ("none.txt", JOB, "none.txt is not on this node any more"),
        ("train.py/x", JOB, "train.py/x is not on this node any more"),
        ("lib", JOB, "lib is not a regular file"),
        ("pipe", JOB, "pipe is not a regular file"),
        ("a\0b", JOB, "invalid path: embedded null byte"),
        ("circle", JOB, "invalid path: "),
        *(("train.py", job, f"{job!r} is not a job") for job in ("", "..", ".", "a/b", "../work", ".digits-1.new")),
    ],
)  # fmt: skip
def test_a_path_outside_the_jobs_folder_or_to_no_file_is_refused(
    node: NodeFolders, tmp_path: Path, path: str, job: str, why: str
) -> None:
    work = node.job(JOB)
    (tmp_path / "secret").write_text("s")
    (work / "away").symlink_to(tmp_path / "secret")
    (work / "folder").symlink_to(tmp_path)
    (work / "circle").symlink_to("circle")
    os.mkfifo(work / "pipe")

    assert refused(node, path, job).startswith(why)


def test_a_link_that_is_put_in_between_the_look_and_the_opening_is_not_followed(
    node: NodeFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path / "elsewhere", {"x.txt": "secret"})
    tree(node.job(JOB), {"out/x.txt": "mine"})
    opened = os.open

    def swapping(path: str, flags: int, **options: int) -> int:
        if path == "out":
            (node.job(JOB) / "out").rename(tmp_path / "aside")
            (node.job(JOB) / "out").symlink_to(tmp_path / "elsewhere")
        return opened(path, flags, **options)

    monkeypatch.setattr(os, "open", swapping)

    assert refused(node, "out/x.txt") == "out/x.txt is not on this node any more"
