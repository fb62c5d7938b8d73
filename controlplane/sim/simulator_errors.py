"""Errors of the simulator's input."""

from __future__ import annotations

from typing import ClassVar

from schemas.errors import OnesError


class TraceError(OnesError):
    """A trace, profile or scenario that cannot be simulated; says where and what to do."""

    code: ClassVar[str] = "bad_trace"
