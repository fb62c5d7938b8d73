"""What a command's exit code says, and which error ends it with which."""

from __future__ import annotations

import enum
from typing import Final

from schemas.errors import OnesError


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    DENIED = 5
    TIMEOUT = 6


BY_CODE: Final = {
    "other_cluster": Exit.JOB_FAILED,
    "unknown_job": Exit.NOT_FOUND,
    "unknown_node": Exit.NOT_FOUND,
    "unreachable": Exit.UNREACHABLE,
    "unavailable": Exit.UNREACHABLE,
    "denied": Exit.DENIED,
    "timeout": Exit.TIMEOUT,
}


def exit_code(error: OnesError) -> Exit:
    """The exit code that an error ends a command with."""
    return BY_CODE.get(error.code, Exit.USAGE)
