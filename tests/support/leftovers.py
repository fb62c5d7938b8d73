"""Check that a test run leaves no file, process, shared memory or control group behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nodeagent.job_cgroups import PREFIX, JobGroups

GOES_WITHIN_S: Final = 20.0  # a process that was told to end
LOOK_S: Final = 0.05
SHARED: Final = ("torch_", "psm_", "sem.")
MAX_DEPTH: Final = 12  # of a run folder below the folder of a run of the tests
OWN: Final = "t"  # pytest's temporary folders, inside ours


@dataclass(frozen=True)
class Surroundings:
    """The temporary folder of one test run, and the shared memory that existed when it began."""

    folder: Path
    memory: frozenset[Path]  # shared
    before: str | None  # TMPDIR

    @property
    def pytest_folder(self) -> Path:
        """Where `tmp_path` lies; its short name leaves room for the names of Unix sockets."""
        return self.folder / OWN

    def left(self) -> list[str]:
        """Return what the run left behind, a line each."""
        deadline = time.monotonic() + GOES_WITHIN_S
        while (processes := _processes(self.folder)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        files = [path for path in self.folder.iterdir() if path.name != OWN]
        memory = [path for path in _shared_memory() - self.memory if not _mapped(path)]
        return [*processes, *map(str, sorted([*files, *memory, *self._control_groups()]))]

    def _control_groups(self) -> list[Path]:
        """Groups of agents whose run folders are in ours."""
        groups = {path.name: path for path in Path("/sys/fs/cgroup").rglob(f"{PREFIX}*")}
        return [
            groups[name]
            for run in _folders(self.folder)
            if (name := JobGroups(run=run).name) in groups
        ]

    def end(self, *, keep: bool) -> None:
        """Return to the temporary folder from before, and delete the run's own unless kept."""
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if self.before is not None:
            os.environ["TMPDIR"] = self.before
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _folders(top: Path) -> Iterator[Path]:
    """All folders below one, but not those of trees that are deeper than a run folder."""
    for depth in range(1, MAX_DEPTH):
        yield from (path for path in top.glob("/".join("*" * depth)) if path.is_dir())


def surround() -> Surroundings:
    """Make a temporary folder, and the default one of this process and all that it starts."""
    before = os.environ.get("TMPDIR")
    folder = Path(tempfile.mkdtemp(prefix="ones-"))
    folder.chmod(0o711)  # jobs that run as users of their own pass through it
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / OWN / "inductor")
    return Surroundings(folder, frozenset(_shared_memory()), before)


def _processes(folder: Path) -> list[str]:
    """Other processes whose arguments, title, environment, cwd or open files name the folder."""
    found, name = [], os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
            links = [os.fsencode(path.readlink()) for path in (entry / "fd").iterdir()]
            cwd = os.fsencode((entry / "cwd").readlink())
        except OSError:  # it ended, or is another user's
            continue
        if any(name in text for text in (command, environment, cwd, *links)):
            words = command.replace(b"\0", b" ").decode(errors="replace")
            found.append(f"process {entry.name}: {words}")
    return found


def _shared_memory() -> set[Path]:
    """Shared memory of this user with names that torch or Python give."""
    found = set()
    for path in Path("/dev/shm").iterdir():  # noqa: S108
        with contextlib.suppress(OSError):
            if path.name.startswith(SHARED) and path.lstat().st_uid == os.getuid():
                found.add(path)
    return found


def _mapped(path: Path) -> bool:
    """True if a living process has the file mapped: it is another program's."""
    name = os.fsencode(path)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_bytes():
                return True
        except OSError:
            continue
    return False
