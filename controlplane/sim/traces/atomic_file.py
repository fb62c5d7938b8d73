"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from controlplane.sim.simulator_errors import TraceError


def write_whole(path: Path, text: str) -> None:
    """Write a file whole: another one beside it takes its place when it is on the disk.

    Args:
        path: of the file.
        text: all that it will have.

    Raises:
        TraceError: if the disk does not take it.
    """
    beside = ""
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except (OSError, ValueError) as error:
        if beside:
            with contextlib.suppress(OSError):
                Path(beside).unlink()
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: {said}", "choose another file") from None
