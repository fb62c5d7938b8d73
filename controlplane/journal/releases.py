"""Code of the releases that wrote a journal, as zip files in the folder `releases` beside it.

A state follows from its inputs only by the code that handled them. So inputs after the last
snapshot are replayed by the release that wrote them, in a child process. The controller's other
children use the same copy of its code, whatever was installed since the controller started.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from controlplane.journal.database import JournalError
from schemas import __version__
from schemas.host.state_files import sync_folder

PACKAGES: Final = ("controlplane", "schemas")
SNAPSHOT_MODULE: Final = "controlplane.journal.take_snapshot"
FOLDER: Final = "releases"
KEPT: Final = 3  # number of releases, the newest ones
BUSY_LIMIT_S: Final = 60.0  # wait for another process that takes a snapshot
BUSY_PAUSE_S: Final = 0.5
SKIPPED: Final = (".md", ".pyc", "py.typed")


@functools.cache
def own_release() -> str:
    """Return the version of this code with a digest of its files, such as `0.2.0+5f2e81c40a97`."""
    return _name_of(_files())


def _name_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{__version__}+{digest.hexdigest()[:12]}"


def _files() -> dict[str, bytes]:
    """Return the source and data files of `PACKAGES`, by their path in a zip file."""
    found = (pair for name in PACKAGES for pair in _below(resources.files(name), name))
    return dict(sorted(found))


def _below(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _below(entry, path)
        elif not entry.name.endswith(SKIPPED):
            yield path, entry.read_bytes()


@functools.cache
def _own_archive() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in _files().items():
            archive.writestr(name, content)
    return packed.getvalue()


def keep_own_code(journal: Path) -> Path:
    """Store the code of this release beside `journal` and return the path."""
    folder = journal.parent / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / f"{own_release()}.zip"
    if _is_intact(own):
        os.utime(own)
    else:
        part = own.with_suffix(".part")
        with part.open("wb") as file:
            file.write(_own_archive())
            file.flush()
            os.fsync(file.fileno())
        part.replace(own)
        sync_folder(folder)
    return own


def delete_old_code(journal: Path) -> None:
    """Delete the code of all but the newest releases, once no input needs it for a replay."""
    stored = (journal.parent / FOLDER).glob("*.zip")
    for old in sorted(stored, key=lambda one: one.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)


def code_of(journal: Path, release: str) -> Path | None:
    """Return the stored code of `release`, or None if it is missing or damaged."""
    path = journal.parent / FOLDER / f"{release}.zip"
    return path if _is_intact(path) else None


def _is_intact(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # noqa: BLE001 - zipfile and zlib raise many kinds for damaged files
        return False


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` as a child process."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(code: Path | None) -> dict[str, str]:
    """Return the environment of a child process that runs `code`, or the installed code if None.

    Other modules are imported from where the parent imports them, such as those of a policy.
    """
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if code is not None:
        paths = (str(code.absolute()), found.get("PYTHONPATH", ""))
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


def snapshot_by(code: Path, release: str, journal: Path, last: int) -> None:
    """Let another release replay its inputs up to number `last`, and write a snapshot.

    Raises:
        JournalError: if that release fails.
    """
    deadline = time.monotonic() + BUSY_LIMIT_S
    while True:
        child = subprocess.run(  # noqa: S603 - code that the controller itself stored
            child_command(SNAPSHOT_MODULE, str(journal), str(last)),
            env=child_environment(code),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        busy = not child.returncode and child.stdout.strip() == "0"
        if not busy or time.monotonic() > deadline:
            break
        time.sleep(BUSY_PAUSE_S)
    if child.returncode or busy:
        why = "another process takes a snapshot" if busy else child.stderr.strip()[-2000:]
        raise JournalError(
            f"{journal}: release {release} does not replay its inputs up to {last}: {why}",
            "install that release again, or restore a backup (`ones admin restore`)",
        )
