"""Packs a working directory: the same files give the same bytes, whoever packs them when."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from schemas.errors import BadFieldError, TooLargeError
from schemas.host.archives import USUAL

MAX_BYTES: Final = 512 << 20  # of the archive
BOUNDS: Final = USUAL  # a cluster may have others, and says so
NAMED: Final = 3  # of the largest files and folders
IGNORE_FILE: Final = ".onesignore"
FETCHED: Final = ".ones-fetched"  # in a folder that `fetch` made
IGNORED: Final = (
    ".git", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules",
    ".ipynb_checkpoints", "*.egg-info", "*.key_secret",
)  # fmt: skip


def pack(folder: Path) -> bytes:
    """A gzipped tar of `folder`, without what never belongs into a job.

    Left out: version control, caches, virtual environments, folders that `fetch` made, cluster
    folders with their keys, and what the patterns of `.onesignore` match (one a line, against name
    or relative path).

    Args:
        folder: the working directory; links to files in it are followed, links to folders and to
            what is outside refused.

    Returns:
        The archive's bytes, the same for the same files.

    Raises:
        BadFieldError: if `folder` is none or a file cannot be read.
        TooLargeError: if it packs to more than a cluster takes, or its files are too large.
    """
    files = survey(folder)
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in files:
            _add(tar, folder, folder / file.path)
            if packed.tell() > MAX_BYTES:
                raise _too_large(folder, files, f"packs to more than {MAX_BYTES >> 20} MiB")
    return packed.getvalue()


class PackedFile(NamedTuple):
    """A file that travels with a job."""

    path: str  # relative to the working directory
    size: int  # bytes


def survey(folder: Path) -> tuple[PackedFile, ...]:
    """The files that `pack` takes, without reading them.

    Returns:
        In the order of the archive.

    Raises:
        BadFieldError: if `folder` is none or a file is not there.
        TooLargeError: if the files are too many or too large.
    """
    if not folder.is_dir():
        raise BadFieldError(f"workdir {folder} is no folder", "correct the path", "workdir")
    found = []
    for path in _bounded(folder):
        with _named(path):
            size = path.stat().st_size  # links are followed
            if path.is_file():
                found.append(PackedFile(str(path.relative_to(folder)), size))
    total = sum(file.size for file in found)
    if total > BOUNDS.size:
        what = f"has {total >> 20} MiB of files, more than {BOUNDS.size >> 20} MiB"
        raise _too_large(folder, found, what)
    return tuple(found)


def _too_large(folder: Path, files: Sequence[PackedFile], what: str) -> TooLargeError:
    sizes: Counter[str] = Counter()
    for file in files:
        first, slash, _ = file.path.partition("/")
        sizes[f"{first}{slash}"] += file.size
    large = ", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.most_common(NAMED))
    hint = f"name large data in {folder / IGNORE_FILE} and read it from its own place"
    return TooLargeError(f"workdir {folder} {what} (largest: {large})", hint, "workdir")


def digest_of(archive: bytes) -> str:
    """The name of an archive: its sha256.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(archive).hexdigest()


def _patterns(folder: Path) -> tuple[str, ...]:
    path = folder / IGNORE_FILE
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    lines = text.splitlines()
    own = (line.strip().rstrip("/") for line in lines)
    return (*IGNORED, *(line for line in own if line and not line.startswith("#")))


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(
            name
            for name in folders
            if not _ignored(here / name, folder, patterns) and not _foreign(here / name)
        )
        for name in folders:
            if (here / name).is_symlink():
                what = f"workdir: {here / name} is a link to a folder"
                raise BadFieldError(what, f"name it in {IGNORE_FILE}, or copy it", "workdir")
        for name in sorted(files):
            if not _ignored(here / name, folder, patterns):
                yield here / name


def _bounded(folder: Path) -> Iterator[Path]:
    """The files that travel, as many and as deep as may be."""
    for many, path in enumerate(_files(folder, _patterns(folder)), 1):
        relative = path.relative_to(folder)
        if many > BOUNDS.files:
            what = f"workdir {folder} has more than {BOUNDS.files} files"
        elif len(relative.parts) > BOUNDS.depth + 1:
            what = f"workdir: {relative} lies more than {BOUNDS.depth} folders deep"
        else:
            _refuse_outside(path, folder)
            yield path
            continue
        raise TooLargeError(what, f"name what is data in {folder / IGNORE_FILE}", "workdir")


def _refuse_outside(path: Path, folder: Path) -> None:
    """What a link names outside of the folder is nobody's to send, perhaps a key."""
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        what = f"workdir: {path} is a link to {path.resolve()}, outside of it"
        raise BadFieldError(what, f"copy it, or name it in {IGNORE_FILE}", "workdir")


def _ignored(path: Path, folder: Path, patterns: tuple[str, ...]) -> bool:
    relative = str(path.relative_to(folder))
    return any(
        fnmatch.fnmatch(path.name, pattern) or fnmatch.fnmatch(relative, pattern)
        for pattern in patterns
    )


def _foreign(folder: Path) -> bool:
    """Virtual environments, fetched results, and cluster folders, whose keys must not travel."""
    marks = ("pyvenv.cfg", FETCHED, "controller.toml", "client.toml")
    return any((folder / mark).exists() for mark in marks)


def _add(tar: tarfile.TarFile, folder: Path, path: Path) -> None:
    with _named(path):
        status = path.stat()  # links are followed
        entry = tarfile.TarInfo(str(path.relative_to(folder)))
        entry.size = status.st_size
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            tar.addfile(entry, file)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the file system as one of the job's, which names the file."""
    try:
        yield
    except OSError as error:
        hint = f"correct it or name it in {IGNORE_FILE}"
        why = error.strerror or error  # tarfile's own have no number
        raise BadFieldError(f"workdir: {path}: {why}", hint, "workdir") from None
