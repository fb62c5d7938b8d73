"""Errors of the simulator: of what it reads, of its results, and of trainings in it."""

from __future__ import annotations

from typing import ClassVar

from schemas.errors import OnesError


class TraceError(OnesError):
    """A trace, profile or scenario that cannot be simulated; says where and what to do."""

    code: ClassVar[str] = "bad_trace"


class ResultsError(OnesError):
    """Results that cannot be read, written, compared or drawn; says what to do."""

    code: ClassVar[str] = "bad_results"


class TrainingError(OnesError):
    """A training that cannot begin, go on or be kept; says what to do."""

    code: ClassVar[str] = "bad_training"
