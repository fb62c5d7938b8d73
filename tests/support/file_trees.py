"""Working directories: as somebody has them, and laid out from their archives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from controlplane.client.archive import digest_of
from nodeagent.job_folders import lay_out

PROJECT = {
    "train.py": "print(1)", "lib/model.py": "x = 1", "lib/__init__.py": "", "app/main.py": "",
    "data/small.txt": "7", "empty.txt": "",
}  # fmt: skip


def tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """`folder` with these files in it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def laid_out(archive: bytes, base: Path) -> Path:
    (base / "archive").write_bytes(archive)
    lay_out(base / "archive", base / "work" / "job", digest_of(archive))
    return base / "work" / "job"


def let_pass(folder: Path) -> None:
    """Let other users through the temporary folders above, to what lies in `folder`."""
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)


INTERPRETER: Final = (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__))


def opened(lids: Path) -> list[str]:
    """Begin a command that sees closed folders on the way to this interpreter as passable.

    It needs root, and a folder for the overlays.
    """
    script = (
        'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/over,workdir=$2/by" "$1"; shift 2'
    )
    command = ["unshare", "--mount", "--propagation", "private"]
    ways = {parent for path in INTERPRETER for parent in path.parents}
    closed = sorted(path for path in ways if not path.stat().st_mode & 0o001)
    for number, path in enumerate(closed):
        lid = lids / str(number)
        for part in ("over", "by"):
            (lid / part).mkdir(parents=True)
        (lid / "over").chmod(path.stat().st_mode | 0o001)
        command += ["sh", "-ec", f'{script}; exec "$@"', "sh", str(path), str(lid)]
    return command
