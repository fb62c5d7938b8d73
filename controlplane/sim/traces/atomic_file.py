"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from schemas.errors import OnesError


def write_whole(path: Path, content: str | bytes, refusal: type[OnesError]) -> None:
    """Write a file whole: another one beside it takes its place when it is on the disk.

    Args:
        content: all that it will have; text is written as UTF-8.

    Raises:
        OnesError: of class `refusal`, if the disk does not take it.
    """
    beside = ""
    try:
        data = content.encode() if isinstance(content, str) else content
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except (OSError, ValueError) as error:
        if beside:
            with contextlib.suppress(OSError):
                Path(beside).unlink()
        said = getattr(error, "strerror", None) or error
        raise refusal(f"{path}: {said}", "choose another file") from None
