"""Reproducible archives of working directories. The same files always produce the same bytes."""

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
from schemas.host.archives import DEFAULT_BOUNDS

MAX_BYTES: Final = 512 << 20  # limit for an archive
LIMITS: Final = DEFAULT_BOUNDS  # a cluster with other limits sends its own refusal
NAMED_FILES: Final = 3  # number of largest files and folders that an error names
IGNORE_FILE: Final = ".onesignore"
FETCHED_MARK: Final = ".ones-fetched"  # marks a folder that `fetch` created
IGNORED_PATTERNS: Final = (
    ".git", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules",
    ".ipynb_checkpoints", "*.egg-info", "*.key_secret",
)  # fmt: skip


def pack(folder: Path, without: Path | None = None) -> bytes:
    """Return a gzipped tar of `folder`. The same files produce the same bytes.

    The archive has no version control, caches, virtual environments, folders made by `fetch`, or
    cluster folders with their keys. It also omits matches of the patterns in `.onesignore` (one per
    line, for names or relative paths).

    Args:
        folder: links to files inside are followed; links to folders and to anything outside are
            refused.
        without: a file that is left out, under each of its names.

    Raises:
        BadFieldError: if `folder` is not a folder or a file cannot be read.
        TooLargeError: if the files or the archive exceed the limits of a cluster.
    """
    files = survey(folder, without)
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
    """File that is uploaded with a job."""

    path: str  # relative to the working directory
    size: int  # bytes


def survey(folder: Path, without: Path | None = None) -> tuple[PackedFile, ...]:
    """Return the files that `pack` would include, in archive order; raise the same errors."""
    if not folder.is_dir():
        raise BadFieldError(f"workdir {folder} is not a folder", "correct the path", "workdir")
    found = []
    for path in _limited_files(folder):
        with _errors_named(path):
            size = path.stat().st_size  # links are followed
            if path.is_file() and not (without is not None and path.samefile(without)):
                found.append(PackedFile(str(path.relative_to(folder)), size))
    total = sum(file.size for file in found)
    if total > LIMITS.size:
        what = f"has {total >> 20} MiB of files, more than {LIMITS.size >> 20} MiB"
        raise _too_large(folder, found, what)
    return tuple(found)


def _too_large(folder: Path, files: Sequence[PackedFile], what: str) -> TooLargeError:
    sizes: Counter[str] = Counter()
    for file in files:
        first, slash, _ = file.path.partition("/")
        sizes[f"{first}{slash}"] += file.size
    large = ", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.most_common(NAMED_FILES))
    hint = f"list large data in {folder / IGNORE_FILE} and read it from its original place"
    return TooLargeError(f"workdir {folder} {what} (largest: {large})", hint, "workdir")


def digest_of(archive: bytes) -> str:
    """Return the SHA-256 of an archive, which is also its name: 64 hexadecimal digits."""
    return hashlib.sha256(archive).hexdigest()


def _patterns(folder: Path) -> tuple[str, ...]:
    path = folder / IGNORE_FILE
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    own = (line.strip().rstrip("/") for line in text.splitlines())
    return (*IGNORED_PATTERNS, *(line for line in own if line and not line.startswith("#")))


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(
            name
            for name in folders
            if not _ignored(here / name, folder, patterns) and not _is_excluded(here / name)
        )
        for name in folders:
            if (here / name).is_symlink():
                what = f"workdir: {here / name} is a link to a folder"
                raise BadFieldError(what, f"list it in {IGNORE_FILE}, or copy it", "workdir")
        for name in sorted(files):
            if not _ignored(here / name, folder, patterns):
                yield here / name


def _limited_files(folder: Path) -> Iterator[Path]:
    for count, path in enumerate(_files(folder, _patterns(folder)), 1):
        relative, hint = path.relative_to(folder), f"list data in {folder / IGNORE_FILE}"
        if count > LIMITS.files:
            what = f"workdir {folder} has more than {LIMITS.files} files"
            raise TooLargeError(what, hint, "workdir")
        if len(relative.parts) > LIMITS.depth + 1:
            what = f"workdir: {relative} lies more than {LIMITS.depth} folders deep"
            raise TooLargeError(what, hint, "workdir")
        # The target of a link to the outside might be private, for example a key.
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            what = f"workdir: {path} is a link to {path.resolve()}, outside of it"
            raise BadFieldError(what, f"copy it, or list it in {IGNORE_FILE}", "workdir")
        yield path


def _ignored(path: Path, folder: Path, patterns: tuple[str, ...]) -> bool:
    relative = str(path.relative_to(folder))
    return any(fnmatch.fnmatch(name, one) for one in patterns for name in (path.name, relative))


def _is_excluded(folder: Path) -> bool:
    """True for virtual environments, fetched results, and cluster folders, which contain keys."""
    marks = ("pyvenv.cfg", FETCHED_MARK, "controller.toml", "client.toml")
    return any((folder / mark).exists() for mark in marks)


def _add(tar: tarfile.TarFile, folder: Path, path: Path) -> None:
    with _errors_named(path):
        status = path.stat()  # links are followed
        entry = tarfile.TarInfo(str(path.relative_to(folder)))
        entry.size = status.st_size
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            tar.addfile(entry, file)


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn OSError into an error that names the field `workdir` and the file."""
    try:
        yield
    except OSError as error:
        hint = f"correct it, or list it in {IGNORE_FILE}"
        why = error.strerror or error  # errors of tarfile have no errno
        raise BadFieldError(f"workdir: {path}: {why}", hint, "workdir") from None
