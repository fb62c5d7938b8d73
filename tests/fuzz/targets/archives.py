"""Archives of working directories, where a controller looks into them and a node unpacks them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from typing import Final

from nodeagent.errors import WorkspaceError
from nodeagent.job_folders import lay_out, read_manifest
from schemas.errors import TooLargeError
from schemas.host.archives import UNREADABLE, ArchiveBounds, inspect
from tests.fuzz.choices import Choices
from tests.fuzz.targets.folders import folder

BOUNDS: Final = ArchiveBounds(size=1 << 16, files=40, depth=6)
TYPES: Final = (
    tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE,
    tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE,
    tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.REGTYPE, b"Z",
)  # fmt: skip
NAMES: Final = (
    "train.py", "a/b", "../out", "/abs", "a/../../out", "a", "a/a", "link", "link/out", ".", "", "..",
    "a\0b", "x" * 300, "d/" * 9 + "f", "\udcff", ".ones-snapshot", ".ones-snapshot/x", "é", "a//b", "./a",
)  # fmt: skip
LONGEST: Final = 2000  # characters of a name, which the writing of archives splits in square time
SIZES: Final = (0, 1, 511, 512, 513, 4096, 1 << 16, 1 << 40, -1)


def archives(data: bytes) -> None:
    """What a controller accepts of an archive is unpacked inside its folder, and nothing else."""
    choices = Choices(data)
    packed = choices.rest() if choices.below(8) == 7 else _archive(choices)
    with folder() as here:
        secret = here / "secret"
        secret.write_text("nobody's")
        file, work = here / "archive", here / "work" / "job"
        file.write_bytes(packed)
        work.parent.mkdir()
        accepted = True
        try:
            with file.open("rb") as source:
                inspect(source, BOUNDS)
        except (*UNREADABLE, TooLargeError):
            accepted = False
        unpacked = True
        try:
            lay_out(file, work, hashlib.sha256(packed).hexdigest(), BOUNDS)
        except WorkspaceError:
            unpacked = False
            assert list(work.parent.iterdir()) == []
        assert sorted(os.listdir(here)) == ["archive", "secret", "work"]
        assert secret.read_text() == "nobody's"
        if unpacked:
            assert accepted, "a node unpacks what a controller refuses"
            read_manifest(work)
            _all_inside(str(work))


def _all_inside(work: str) -> None:
    size = many = 0
    for root, folders, names in os.walk(work):
        for name in (*folders, *names):
            path = os.path.join(root, name)
            real = os.path.realpath(path)
            assert real == work or real.startswith(work + os.sep), f"{path} leads to {real}"
            many += 1
            if os.path.isfile(path) and name != ".ones-snapshot":
                size += os.path.getsize(path)
    assert many <= BOUNDS.files * (BOUNDS.depth + 1) + 1, many
    assert size <= BOUNDS.size, size


def _archive(choices: Choices) -> bytes:
    plain = io.BytesIO()
    for _ in range(1 + choices.below(8)):
        _member(choices, plain)
    if choices.often():
        plain.write(bytes(1024))
    packed = bytearray(plain.getvalue())
    for _ in range(choices.below(4) if packed and not choices.often() else 0):
        packed[choices.below(len(packed))] = choices.below(256)
    if choices.often():
        return bytes(packed)
    squeezed = bytearray(gzip.compress(packed, 1, mtime=0))
    if not choices.often():
        squeezed[choices.below(len(squeezed))] = choices.below(256)
    return bytes(squeezed)


def _member(choices: Choices, plain: io.BytesIO) -> None:
    name = choices.pick(NAMES) if choices.often() else choices.text()
    info = tarfile.TarInfo(name[:LONGEST])
    info.type = choices.pick(TYPES)
    info.mode = choices.pick((0o644, 0o755, 0o4755, 0, 0o777, 0o200))
    info.uid = info.gid = choices.pick((0, 1000, 1 << 30))
    info.linkname = choices.pick(NAMES)
    info.mtime = choices.pick((0, 1, 1 << 33, -1))
    content = choices.blob() if choices.often() else bytes(choices.pick((512, 5000, 70_000)))
    if info.type in {tarfile.XHDTYPE, tarfile.XGLTYPE}:
        content = _pax(choices)
    info.size = len(content) if choices.often() else choices.pick(SIZES)
    form = choices.pick((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    try:
        plain.write(info.tobuf(form, "utf-8", "surrogateescape"))
    except (ValueError, OverflowError, UnicodeError):
        return
    plain.write(content)
    plain.write(bytes(-len(content) % 512))


def _pax(choices: Choices) -> bytes:
    """Records of an extended header, whose lengths need not be theirs."""
    found = b""
    for _ in range(1 + choices.below(3)):
        key = choices.pick(
            ("path", "linkpath", "size", "mtime", "uid", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.size",
             "GNU.sparse.realsize", "GNU.sparse.name", "hdrcharset", "comment")
        )  # fmt: skip
        value = choices.pick(NAMES) if choices.flag() else choices.text()
        body = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        size = len(body) + len(str(len(body) + 2)) if choices.often() else choices.whole()
        found += str(size).encode() + body
    return found
