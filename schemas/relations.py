"""Relations of a job to other jobs and to time, and its labels, as texts of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from schemas.errors import BadFieldError
from schemas.ids import JobId, Seconds

OK: Final = "ok"
WAITS_TO: Final = {  # condition on the end of a parent -> what its job waits for
    OK: "to succeed",
    "any": "to end",
    "failed": "to fail",
}
MAX_PARENTS: Final = 100
_PARENT: Final = re.compile(rf"(?:({'|'.join(WAITS_TO)}):)?([A-Za-z0-9][A-Za-z0-9_-]{{0,79}})")


class Parent(NamedTuple):
    """Job that another job waits for, and how it has to end."""

    condition: str  # key of `WAITS_TO`
    job: JobId  # in a job file also the name of a job that is submitted together

    def __str__(self) -> str:
        """Return the entry of `after`."""
        return f"{self.condition}:{self.job}"


def parents_in(after: Sequence[str]) -> tuple[Parent, ...]:
    """Return the parsed entries of `after`.

    Raises:
        BadFieldError: if an entry cannot be read, or a job is named twice.
    """
    if len(after) > MAX_PARENTS:
        what = f"after: {len(after)} jobs, at most {MAX_PARENTS}"
        raise BadFieldError(what, "wait for an array, or for a job that waits for them", "after")
    found: dict[JobId, Parent] = {}
    for text in after:
        entry = _PARENT.fullmatch(text)
        if entry is None:
            what = f"after: {text[:60]!r} names no job"
            raise BadFieldError(what, "write ok:JOB, any:JOB or failed:JOB", "after")
        parent = Parent(entry[1] or OK, JobId(entry[2]))
        if parent.job in found:
            what = f"after: {parent.job} is named twice"
            raise BadFieldError(what, "keep one of the conditions", "after")
        found[parent.job] = parent
    return tuple(found.values())


MAX_ELEMENTS: Final = 10_000
_RANGE: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?:%([0-9]{1,9}))?")


class ArrayRange(NamedTuple):
    """Indices of an array, inclusive."""

    first: int
    last: int
    most: int = 0  # elements that may live at the same time; 0: no limit


class ArrayElement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place of a job in an array."""

    array: JobId
    index: int

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the element's processes."""
        index = str(self.index)
        return {
            "ONES_ARRAY_JOB": self.array,
            "ONES_ARRAY_INDEX": index,
            "SLURM_ARRAY_JOB_ID": self.array.rpartition("-")[2],
            "SLURM_ARRAY_TASK_ID": index,
        }


def range_of(text: str) -> ArrayRange:
    """Return the indices of an array.

    Raises:
        BadFieldError: if the text is not a range, or the range has too many elements.
    """
    found = _RANGE.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]) or int(found[3] or 1) == 0:
        what = f"array: {text[:40]!r} is not a range"
        raise BadFieldError(what, "write 0-9, or 0-9%3 for at most 3 elements at a time", "array")
    first, last, most = (int(number or 0) for number in found.groups())
    if (size := last - first + 1) > MAX_ELEMENTS:
        what = f"array: {size} elements, at most {MAX_ELEMENTS}"
        remedy = "let each element do several parts, or submit several arrays"
        raise BadFieldError(what, remedy, "array")
    return ArrayRange(first, last, most)


MAX_LABELS: Final = 32
MAX_LABEL: Final = 100  # characters of a value
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}")


def check_labels(labels: Mapping[str, str], field: str = "labels") -> None:
    """Check the labels in a field of a job or of settings.

    Raises:
        BadFieldError: if there are too many, or one is invalid.
    """
    if len(labels) > MAX_LABELS:
        what = f"{field}: {len(labels)} labels, at most {MAX_LABELS}"
        raise BadFieldError(what, "leave some out", field)
    for name, value in labels.items():
        if _LABEL.fullmatch(name) is None:
            what = f"{field}: {name[:60]!r} is not a name"
            remedy = "use 1 to 63 letters, digits, - _ . or /, starting with a letter or digit"
            raise BadFieldError(what, remedy, field)
        if len(value) > MAX_LABEL or not value.isprintable():
            what = f"{field}: the value of {name} is too long or has control characters"
            raise BadFieldError(what, f"use at most {MAX_LABEL} printable characters", field)


def is_met(condition: str, outcome: str) -> bool:
    """True if a parent that ended in this state meets a condition.

    A job that was cancelled or rejected counts as failed.
    """
    return condition == "any" or (condition == OK) is (outcome == "succeeded")


_DELAY: Final = re.compile(r"\+([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TIME_FORM: Final = "write 2026-12-01T08:00Z or +2h (s, m, h or d after the submission)"


def time_text(at: Seconds) -> str:
    """Return a time as `stated_time` reads it."""
    return datetime.fromtimestamp(at, UTC).isoformat()


def stated_time(text: str, now: Seconds, field: str = "not_before") -> Seconds:
    """Return the time that a field states, as itself or as a delay after `now`.

    Raises:
        BadFieldError: if the text is neither a time with its zone nor a delay.
    """
    if delay := _DELAY.fullmatch(text):
        return Seconds(now + float(delay[1]) * _UNITS[delay[2]])
    try:
        stated = datetime.fromisoformat(text)
    except ValueError:
        what = f"{field}: {text[:40]!r} is not a time"
        raise BadFieldError(what, TIME_FORM, field) from None
    if stated.tzinfo is None:
        what = f"{field}: {text[:40]!r} has no time zone"
        raise BadFieldError(what, "append Z for UTC, or an offset such as +02:00", field)
    try:
        return Seconds(stated.timestamp())
    except (OverflowError, ValueError):
        what = f"{field}: {text[:40]!r} is out of range"
        raise BadFieldError(what, TIME_FORM, field) from None
