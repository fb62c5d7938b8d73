"""Backup of everything that a controller needs on another host, in one tar file.

The file contains the settings folder with its keys, other keys and the model that the settings
name, the keys that were added online, the journal at one moment, the code of the releases that
wrote it, and the working directories of jobs that have not ended. Output and checkpoints of jobs
are not included.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from controlplane.journal.backup import back_up, restore
from controlplane.journal.reader import Reader
from controlplane.journal.releases import FOLDER as RELEASES
from controlplane.journal.releases import own_release
from controlplane.journal.replay import recover
from controlplane.service import keys
from controlplane.service.settings import ControllerSettings, load
from schemas.errors import SettingsError
from schemas.host.archives import unpack
from schemas.host.state_files import sync_folder

MANIFEST: Final = "backup.json"
JOURNAL: Final = "journal.sqlite"
ARCHIVES: Final = "snapshots"
KEYS: Final = "keys"
PATTERN: Final = "ones-????????T??????Z.tar"
NO_BACKUP: Final = "name a file that `ones admin backup --all` wrote"


class Manifest(msgspec.Struct, kw_only=True):
    """Description of a backup."""

    settings: str  # file name of the controller's settings
    release: str  # release that made the backup
    at: float  # seconds since the epoch


def back_up_all(config: Path, target: Path, *, keep: int = 0, force: bool = False) -> Path:
    """Back up a controller, which may be running, and return the path of the tar file.

    Args:
        config: settings of the controller.
        target: new file, or a folder in which the file gets the name `ones-TIME.tar`.
        keep: number of backups that stay in that folder, the newest ones; 0: all.
        force: True to replace an existing file.

    Raises:
        SettingsError: if the settings or keys cannot be read, or the file exists.
        JournalError: if the journal cannot be copied, or there is no room.
    """
    settings = load(config)
    folder = target if target.is_dir() else None
    if folder is not None:
        target = folder / f"ones-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar"
    if target.exists() and not force:
        raise SettingsError(f"{target} already exists", "name another file or use --force", "file")
    part = target.with_name(f".{target.name}.part")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-") as copies:
            _write(part, config, settings, Path(copies))
        part.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        name = error.filename or target
        raise SettingsError(f"{name}: {error.strerror}", "check the file and the disk") from None
    finally:
        part.unlink(missing_ok=True)
    if folder is not None and keep:
        others = sorted(set(folder.glob(PATTERN)) - {target}, reverse=True)
        for old in others[keep - 1 :]:
            old.unlink()
    return target


def _write(part: Path, config: Path, settings: ControllerSettings, copies: Path) -> None:
    state = config.parent / settings.state
    manifest = Manifest(settings=config.name, release=own_release(), at=time.time())
    (copies / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    if (state / RELEASES).is_dir():
        shutil.copytree(state / RELEASES, copies / RELEASES)
    back_up(state / JOURNAL, copies / JOURNAL)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
            for path in sorted(copies.rglob("*")):
                tar.add(path, str(path.relative_to(copies)), recursive=False)
            for name, path in _settings_files(config, settings):
                tar.add(path, name, recursive=False)
            if (state / keys.FILE).exists():
                tar.add(state / keys.FILE, keys.FILE)
            for digest in _needed_archives(copies / JOURNAL):
                with contextlib.suppress(FileNotFoundError):  # of a job that has just ended
                    tar.add(state / ARCHIVES / digest, f"{ARCHIVES}/{digest}")
        file.flush()
        os.fsync(file.fileno())


def _settings_files(config: Path, settings: ControllerSettings) -> Iterator[tuple[str, Path]]:
    """Yield the files of the settings folder and of its keys, and named files elsewhere."""
    home = config.parent
    files = [config, *home.glob("*.toml"), *(home / KEYS).rglob("*")]
    readable = (path for path in files if path.is_file() and os.access(path, os.R_OK))
    found = {path: f"settings/{path.relative_to(home)}" for path in readable}
    for field, path in _named_files(home, settings).items():
        found.setdefault(path, f"{KEYS}/{field}")
    for path, name in found.items():
        yield name, path


def _named_files(home: Path, settings: ControllerSettings) -> dict[str, Path]:
    """Return the keys and the policy's model that the settings name."""
    found = {
        "server": home / settings.keys.server,
        "authorised": home / settings.keys.authorised,
        **{f"webhook-{hook.name}": home / hook.key for hook in settings.webhooks if hook.key},
    }
    if isinstance(model := settings.policy.options.get("model"), str):
        found["model"] = Path(model).absolute()
    return found


def _needed_archives(journal: Path) -> list[str]:
    """Return the digests of the working directories of jobs that have not ended."""
    with contextlib.closing(Reader(journal)) as reader:
        state = recover(reader).reactor.state
    return sorted({state.jobs[name].snapshot for name in state.active} - {""})


def is_full_backup(file: Path) -> bool:
    """True if a file is a tar file, not a journal."""
    return file.is_file() and tarfile.is_tarfile(file)


def restore_all(file: Path, home: Path) -> Path:
    """Write the files of a backup to a new host, and return the path of the settings.

    Files go to the places that the settings name. Paths that are relative in the settings start at
    `home`. No existing file is replaced. A failure leaves no file behind.

    Raises:
        SettingsError: if the file is not a backup, or a file of the controller exists already.
        JournalError: if the journal is damaged, or there is no room.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=home, prefix=".restore-") as folder:
            copies = Path(folder)
            with tarfile.open(file) as tar:
                for member in tar:
                    unpack(tar, member, copies)
            return _place(copies, home)
    except (tarfile.TarError, msgspec.MsgspecError, KeyError) as error:
        raise SettingsError(f"{file}: {error}", NO_BACKUP, "file") from None
    except OSError as error:
        name = error.filename or file
        raise SettingsError(f"{name}: {error.strerror}", "check the file and the disk") from None


def _place(copies: Path, home: Path) -> Path:
    manifest = msgspec.json.decode((copies / MANIFEST).read_bytes(), type=Manifest)
    near = copies / "settings"
    settings = load(near / manifest.settings)
    state = home / settings.state
    moves = {path: home / path.relative_to(near) for path in _below(near)}
    elsewhere = _named_files(home, settings)
    moves |= {path: elsewhere[path.name] for path in _below(copies / KEYS)}
    for name in (RELEASES, ARCHIVES):
        moves |= {path: state / path.relative_to(copies) for path in _below(copies / name)}
    if (copies / keys.FILE).exists():
        moves[copies / keys.FILE] = state / keys.FILE
    moves = {
        source: target
        for source, target in moves.items()
        if not (target.is_file() and filecmp.cmp(source, target, shallow=False))
    }
    for path in (*moves.values(), state / JOURNAL):
        if path.exists():
            raise SettingsError(
                f"{path} already exists",
                "restore FILE.tar into an empty folder (--of), or remove it",
                "file",
            )
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        for source, target in moves.items():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(source, target)
        restore(copies / JOURNAL, state / JOURNAL)
    except BaseException:
        for target in moves.values():
            target.unlink(missing_ok=True)
        raise
    return home / manifest.settings


def _below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
